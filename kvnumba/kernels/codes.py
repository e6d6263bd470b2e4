"""Reading codes: scores and weighted sums straight from int8 and int4 codes, with integer dot products.

A float weight w is written as alpha * (256 * high + low) with two bytes, rounded to nearest; sums of bytes times codes
are exact in int32. Codes are centred, value = (lo + h * scale) + (code - h) * scale, and the first part stays float32,
so that the rounding of the weights has no bias. Relative to the largest weight of a group that rounding is 2**-16,
far under the step of a code.

* Keys: weights are q_c * scale_c, a group is one block and query row; signed bytes against unsigned codes.
* Values: weights are p_t * scale_t, a group is one tile and query row; unsigned bytes against signed codes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kvnumba.kernels.ahead import Ahead
from kvnumba.simd import I8, I32, LANES, Emitter, Pointer, Value, Variable, microkernel
from kvnumba.spec import BLOCK

#: Query rows that one micro-kernel call handles at most.
ROWS = 4

#: Largest weight as an integer: signed, so that both bytes are (127 * 256 + 127); unsigned.
SIGNED_LIMIT, UNSIGNED_LIMIT = 32639.0, 65535.0

#: Weights scratch of one group of four: dwords, two for each query row.
GROUP_WORDS = 2 * ROWS

_WORDS = ir.VectorType(I32, LANES)
_BYTES = ir.VectorType(I8, 4 * LANES)


def _inverse(e: Emitter, largest: Value, limit: float) -> Value:
    """limit / largest; 0 where there is nothing to scale, and never so large that a product overflows."""
    bounded = e.minimum(e.same(largest, limit) / largest, e.same(largest, 1e38))
    return e.select(largest.compare(">", 0.0), bounded, e.same(largest, 0.0))


def _store_pairs(e: Emitter, high: list[Value], low: list[Value], work: Pointer, at: Value) -> None:
    """Store bytes of 16 weights for each query row as dwords of four: [4 groups][row][high, low]."""
    rows = len(high)
    words = ir.VectorType(I32, LANES // 4)
    parts = [e.bitcast(e.truncate(part, I8), words) for pair in zip(high, low, strict=True) for part in pair]
    parts += [parts[-1]] * (GROUP_WORDS - len(parts))
    together = e.join(parts)
    for g in range(0, 4, 2):
        order = [4 * p + g + j for j in range(2) for p in range(GROUP_WORDS)]
        e.store(e.shuffle(together, None, order), work, at + g * GROUP_WORDS)
    assert rows <= ROWS


def _weights(e: Emitter, work: Pointer, at: Value, rows: int) -> list[list[Value]]:
    """Bytes of one group of four, in every lane: [row][high, low]."""
    return [
        [e.bitcast(e.splat(e.load(work, at + 2 * r + part, item=I32)), _BYTES) for part in range(2)]
        for r in range(rows)
    ]


def _accumulators(e: Emitter, rows: int) -> list[list[list[Variable]]]:
    """Integer sums of one pass: [row][half of the 32 lanes][high, low]."""
    return [[[e.variable(e.zeros(I32)) for _ in range(2)] for _ in range(2)] for _ in range(rows)]


def _as_float(e: Emitter, sums: list[Variable], shift: float) -> Value:
    """(256 * high + low) * shift as float32."""
    high, low = (e.to_float(s.get()) for s in sums)
    return e.fma(high, e.same(high, 256.0 * shift), low * shift)


def _score(bits: int) -> Any:
    centre = 127.5 if bits == 8 else 7.5
    block_words = 4 * BLOCK * bits // 8  # bytes of one group of four channels

    @microkernel
    def score(e, codes, code_at, code_stride, params, param_at, param_stride, groups, blocks, work, q, q_stride, scores,
              score_stride, weights, queries, far):  # fmt: skip
        """Scores of a few queries against sealed key blocks.

        Parameters
        ----------
        codes : uint8 array
            ``code_at`` is the first block, ``code_stride`` the bytes of a block, ``groups`` its groups of 4 channels.
        params : float32 array
            ``param_at``: lo, and ``param_stride`` / 2 further scale, of the channels of the first block.
        work : float32 array
            Scratch: queries at ``q`` padded with zeros to a multiple of 16; ``scores``; ``weights``.
        queries : int
            Query rows, 1 to 4.
        far : Run
            What to ask for meanwhile.
        """
        half = param_stride // 2
        channels = half  # a multiple of 16
        ahead = Ahead(e, far, bits // 4)
        for n in range(1, ROWS + 1):
            with e.when(queries.compare("==", n)), e.range(0, blocks) as block:
                lo_at = param_at + block * param_stride
                scale_at = lo_at + half
                largest = [e.variable(e.zeros()) for _ in range(n)]
                base = [e.variable(e.zeros()) for _ in range(n)]
                with e.range(0, channels, LANES) as c:
                    scale = e.load(params, scale_at + c, LANES)
                    middle = e.fma(scale, e.full(centre), e.load(params, lo_at + c, LANES))
                    for r in range(n):
                        x = e.load(work, q + q_stride * r + c, LANES)
                        largest[r].set(e.maximum(e.absolute(x * scale), largest[r].get()))
                        base[r].set(e.fma(x, middle, base[r].get()))
                most = [e.reduce_max(v.get()) for v in largest]
                inverse = [e.splat(_inverse(e, m, SIGNED_LIMIT)) for m in most]
                total = [e.variable(e.zeros(I32)) for _ in range(n)]
                with e.range(0, channels, LANES) as c:
                    scale = e.load(params, scale_at + c, LANES)
                    high, low = [], []
                    for r in range(n):
                        w = e.to_integer(e.load(work, q + q_stride * r + c, LANES) * scale * inverse[r])
                        total[r].set(total[r].get() + w)
                        high.append((w + 128).shift_signed(8))
                        low.append(w)
                    _store_pairs(e, high, low, work, weights + c * (GROUP_WORDS // 4))

                sums = _accumulators(e, n)
                code = code_at + block * code_stride
                with e.range(0, groups) as g:
                    ahead.ask()
                    if bits == 4:
                        packed = e.load(codes, code + g * block_words, 64)
                        halves = [packed & 0x0F, packed & 0xF0]  # the second is 16 times its codes
                    else:
                        halves = [e.load(codes, code + g * block_words + 64 * i, 64) for i in range(2)]
                    for r, pair in enumerate(_weights(e, work, weights + g * GROUP_WORDS, n)):
                        for i in range(2):
                            for part in range(2):
                                one = sums[r][i][part]
                                one.set(e.dot_bytes(one.get(), halves[i], pair[part]))
                for r in range(n):
                    alpha = most[r] * (1.0 / SIGNED_LIMIT)
                    offset = e.to_float(e.reduce_add(total[r].get())) * -centre
                    for i in range(2):
                        s = _as_float(e, sums[r][i], 1 / 16 if bits == 4 and i == 1 else 1.0)
                        s = e.fma(s + e.splat(offset), e.splat(alpha), e.splat(e.reduce_add(base[r].get())))
                        e.store(s, work, scores + score_stride * r + block * BLOCK + LANES * i)

    return score


def _split(bits: int) -> Any:
    centre = 128.0 if bits == 8 else 8.0

    @microkernel
    def split(e, params, param_at, param_stride, count, work, p, p_stride, weights, queries, alphas, bases):
        """Turn probabilities into byte weights for value codes.

        Writes the bytes of p_t * scale_t at ``weights``, what one unit of them is worth at ``alphas + r``, and adds
        sum over t of p_t * (lo_t + centre * scale_t) to ``bases + r``.

        Parameters
        ----------
        params : float32 array
            ``param_at``: lo, and ``param_stride`` / 2 further scale, of the 32 tokens of the first block.
        count : int
            Tokens; probabilities are 0 from there to the next multiple of 16.
        """
        for n in range(1, ROWS + 1):
            with e.when(queries.compare("==", n)):
                largest = [e.variable(e.zeros()) for _ in range(n)]
                base = [e.variable(e.zeros()) for _ in range(n)]

                def load(t):
                    at = param_at + (t >> 5) * param_stride + (t & 31)
                    return e.load(params, at, LANES), e.load(params, at + BLOCK, LANES)

                with e.range(0, count, LANES) as t:
                    lo, scale = load(t)
                    middle = e.fma(scale, e.full(centre), lo)
                    for r in range(n):
                        x = e.load(work, p + p_stride * r + t, LANES)
                        largest[r].set(e.maximum(x * scale, largest[r].get()))
                        base[r].set(e.fma(x, middle, base[r].get()))
                inverse = []
                for r in range(n):
                    most = e.reduce_max(largest[r].get())
                    inverse.append(e.splat(_inverse(e, most, UNSIGNED_LIMIT)))
                    e.store(most * (1.0 / UNSIGNED_LIMIT), work, alphas + r)
                    e.store(e.load(work, bases + r) + e.reduce_add(base[r].get()), work, bases + r)
                with e.range(0, count, LANES) as t:
                    _, scale = load(t)
                    high, low = [], []
                    for r in range(n):
                        w = e.to_integer(e.load(work, p + p_stride * r + t, LANES) * scale * inverse[r])
                        high.append(w >> 8)
                        low.append(w)
                    _store_pairs(e, high, low, work, weights + t * (GROUP_WORDS // 4))

    return split


def _accumulate(bits: int) -> Any:
    unit_bytes = 32 * 4 * bits // 8  # 32 channels of four tokens

    @microkernel
    def accumulate(
        e, codes, code_at, group_stride, groups, channels, work, weights, alphas, out, out_stride, queries, far
    ):
        """work[out + r * out_stride + c] += alpha_r * sum over t of weight_t * (code_tc - centre).

        Parameters
        ----------
        codes : uint8 array
            ``code_at`` is the first group of four tokens, ``group_stride`` the bytes of a group.
        groups : int
            Groups of four tokens.
        channels : int
            Channels, a multiple of 32.
        far : Run
            What to ask for meanwhile.
        """
        ahead = Ahead(e, far, bits // 4)
        for n in range(1, ROWS + 1):
            with e.when(queries.compare("==", n)), e.range(0, channels, 32) as c:
                sums = _accumulators(e, n)
                first = code_at + (c >> 5) * unit_bytes
                with e.range(0, groups) as g:
                    ahead.ask()
                    at = first + g * group_stride
                    if bits == 4:
                        packed = e.load(codes, at, 64)
                        halves = [(packed << 4), packed & 0xF0]  # signed nibbles, 16 times their value
                    else:
                        halves = [e.load(codes, at + 64 * i, 64) for i in range(2)]
                    for r, pair in enumerate(_weights(e, work, weights + g * GROUP_WORDS, n)):
                        for i in range(2):
                            for part in range(2):
                                one = sums[r][i][part]
                                one.set(e.dot_bytes(one.get(), pair[part], halves[i]))
                for r in range(n):
                    alpha = e.splat(e.load(work, alphas + r))
                    for i in range(2):
                        at = out + out_stride * r + c + LANES * i
                        s = _as_float(e, sums[r][i], 1 / 16 if bits == 4 else 1.0)
                        e.store(e.fma(s, alpha, e.load(work, at, LANES)), work, at)

    return accumulate


score_int8, score_int4 = _score(8), _score(4)
split_int8, split_int4 = _split(8), _split(4)
accumulate_int8, accumulate_int4 = _accumulate(8), _accumulate(4)

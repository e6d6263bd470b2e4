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
from kvnumba.simd import I8, I32, LANES, MAGIC, MAGIC_BITS, Emitter, Integer, Pointer, Value, Variable, microkernel
from kvnumba.spec import BLOCK

#: Query rows that one micro-kernel call handles at most.
ROWS = 4

#: Query rows that `accumulate_many` handles.
MANY_ROWS = 12

#: Largest weight as an integer: signed, so that both bytes are (127 * 256 + 127); unsigned.
SIGNED_LIMIT, UNSIGNED_LIMIT = 32639.0, 65535.0

#: Weights scratch of one group of four: dwords, two for each query row.
GROUP_WORDS = 2 * ROWS

#: Scratch of one key block beside its weights, a lane for each query row: what a unit of its integer sum is worth, what
#: is added to that, and the inverse of the first while the weights are made.
TERMS = 3 * LANES

_WORDS = ir.VectorType(I32, LANES)
_BYTES = ir.VectorType(I8, 4 * LANES)


def _inverse(e: Emitter, largest: Value, limit: float) -> Value:
    """limit / largest; 0 where there is nothing to scale, and never so large that a product overflows."""
    bounded = e.minimum(e.same(largest, limit) / largest, e.same(largest, 1e38))
    return e.select(largest.compare(">", 0.0), bounded, e.same(largest, 0.0))


def _store_pairs(e: Emitter, weights: list[Value], work: Pointer, at: Value, low_sign: bool) -> None:
    """Store the low 16 bits of 16 weights (int32) for each query row as dwords of four: [4 groups][row][high, low].

    With *low_sign* the top bit of the low bytes is turned over.
    """
    words, octets = weights[0].ir.type, ir.VectorType(I8, 4 * LANES)
    parts = []
    for r in range(0, ROWS, 2):
        even, odd = (weights[min(r + i, len(weights) - 1)] for i in range(2))
        both = e.bitcast((even & 0xFFFF) | (odd << 16), octets)  # [channel][row][low, high]
        order = [
            16 * g + 4 * c + 2 * row + part for g in range(4) for row in (0, 1) for part in (1, 0) for c in range(4)
        ]
        part = e.bitcast(e.shuffle(both, None, order), words)  # [group][row][high, low][channel]
        if low_sign:
            part = part ^ Value(e.builder, ir.Constant(words, [0, 0x80808080 - (1 << 32)] * (LANES // 2)))
        parts.append(part)
    for g in range(0, 4, 2):
        lanes = [LANES * pair + 4 * group + i for group in (g, g + 1) for pair in range(2) for i in range(4)]
        e.store(e.shuffle(parts[0], parts[1], lanes), work, at + g * GROUP_WORDS)


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


@microkernel
def split_keys(e, params, param_at, param_stride, blocks, centre, work, q, q_stride, weights, terms, queries, far):
    """Turn queries into byte weights for the codes of sealed key blocks.

    Parameters
    ----------
    params : float32 array
        ``param_at``: lo, and ``param_stride`` / 2 further scale, of the channels of the first block.
    centre : float
        Code that is taken as 0: half of the largest.
    work : float32 array
        Scratch: queries at ``q``, padded with zeros to a multiple of 16. Written, for each
        block: bytes of q_c * scale_c at ``weights``, TERMS items at ``terms``.
    queries : int
        Query rows, 1 to 4.
    far : Run
        What to ask for meanwhile.
    """
    channels = param_stride // 2  # a multiple of 16
    ahead = Ahead(e, far, 2)
    for n in range(1, ROWS + 1):
        with e.when(queries.compare("==", n)):
            with e.range(0, blocks) as block:
                lo_at = param_at + block * param_stride
                largest = [e.variable(e.zeros()) for _ in range(n)]
                base = [e.variable(e.zeros()) for _ in range(n)]
                with e.range(0, channels, LANES) as c:
                    ahead.ask()
                    scale = e.load(params, lo_at + channels + c, LANES)
                    middle = e.fma(scale, e.splat(centre), e.load(params, lo_at + c, LANES))
                    for r in range(n):
                        x = e.load(work, q + q_stride * r + c, LANES)
                        largest[r].set(e.maximum(e.absolute(x * scale), largest[r].get()))
                        base[r].set(e.fma(x, middle, base[r].get()))
                most = e.fold_each([v.get() for v in largest], e.maximum)
                at = terms + block * TERMS
                e.store(most * (1.0 / SIGNED_LIMIT), work, at)
                e.store(e.sum_each([v.get() for v in base]), work, at + LANES)
                e.store(_inverse(e, most, SIGNED_LIMIT), work, at + 2 * LANES)
            with e.range(0, blocks) as block:
                scale_at = param_at + block * param_stride + channels
                at = terms + block * TERMS
                inverse = [e.splat(e.load(work, at + 2 * LANES + r)) for r in range(n)]
                total = [e.variable(e.zeros(I32)) for _ in range(n)]
                with e.range(0, channels, LANES) as c:
                    scale = e.load(params, scale_at + c, LANES)
                    bits = []
                    for r in range(n):
                        x = e.load(work, q + q_stride * r + c, LANES) * scale * inverse[r]
                        # The low bits are the rounded integer; 128 more carry what the sign of the low byte takes.
                        # Not fused: weights, and so the integer sums, are the same on every host.
                        bits.append(e.bitcast(x + (MAGIC + 128), total[r].get().ir.type))
                        total[r].set(total[r].get() + bits[r])
                    _store_pairs(e, bits, work, weights + (block * channels + c) * (GROUP_WORDS // 4), True)
                surplus = e.splat(e.truncate(channels * (MAGIC_BITS + 128), I32))
                offset = e.to_float(e.sum_each([v.get() for v in total]) - surplus) * (e.splat(centre) * -1.0)
                e.store(e.fma(offset, e.load(work, at, LANES), e.load(work, at + LANES, LANES)), work, at + LANES)


def _score(bits: int) -> Any:
    block_words = 4 * BLOCK * bits // 8  # bytes of one group of four channels

    @microkernel
    def score(e, codes, code_at, code_stride, groups, blocks, channels, work, weights, terms, scores, score_stride,
              queries, far):  # fmt: skip
        """Scores of a few queries against sealed key blocks, from what `split_keys` wrote.

        Parameters
        ----------
        codes : uint8 array
            ``code_at`` is the first block, ``code_stride`` the bytes of a block, ``groups`` its groups of 4 channels.
        channels : int
            Channels of a block, padded to a multiple of 16.
        queries : int
            Query rows, 1 to 4.
        far : Run
            What to ask for meanwhile.
        """
        ahead = Ahead(e, far, bits // 4)
        for n in range(1, ROWS + 1):
            with e.when(queries.compare("==", n)), e.range(0, blocks) as block:
                sums = _accumulators(e, n)
                code, first = code_at + block * code_stride, weights + block * channels * (GROUP_WORDS // 4)
                with e.range(0, groups) as g:
                    ahead.ask()
                    if bits == 4:
                        packed = e.load(codes, code + g * block_words, 64)
                        halves = [packed & 0x0F, packed & 0xF0]  # the second is 16 times its codes
                    else:
                        halves = [e.load(codes, code + g * block_words + 64 * i, 64) for i in range(2)]
                    for r, pair in enumerate(_weights(e, work, first + g * GROUP_WORDS, n)):
                        for i in range(2):
                            for part in range(2):
                                one = sums[r][i][part]
                                one.set(e.dot_bytes(one.get(), halves[i], pair[part]))
                for r in range(n):
                    at = terms + block * TERMS + r
                    alpha, offset = e.splat(e.load(work, at)), e.splat(e.load(work, at + LANES))
                    for i in range(2):
                        s = _as_float(e, sums[r][i], 1 / 16 if bits == 4 and i == 1 else 1.0)
                        e.store(e.fma(s, alpha, offset), work, scores + score_stride * r + block * BLOCK + LANES * i)

    return score


def _split(bits: int) -> Any:
    centre = 128.0 if bits == 8 else 8.0

    @microkernel
    def split(e, params, param_at, param_stride, count, work, p, p_stride, weights, queries, alphas, bases, far):
        """Turn probabilities into byte weights for value codes.

        Writes the bytes of p_t * scale_t at ``weights``, what one unit of them is worth at ``alphas + r``, and adds
        sum over t of p_t * (lo_t + centre * scale_t) to ``bases + r``.

        Parameters
        ----------
        params : float32 array
            ``param_at``: lo, and ``param_stride`` / 2 further scale, of the 32 tokens of the first block.
        count : int
            Tokens; probabilities are 0 from there to the next multiple of 16.
        far : Run
            What to ask for meanwhile.
        """
        ahead = Ahead(e, far, 2)
        for n in range(1, ROWS + 1):
            with e.when(queries.compare("==", n)):
                largest = [e.variable(e.zeros()) for _ in range(n)]
                base = [e.variable(e.zeros()) for _ in range(n)]

                def load(t):
                    at = param_at + (t >> 5) * param_stride + (t & 31)
                    return e.load(params, at, LANES), e.load(params, at + BLOCK, LANES)

                with e.range(0, count, LANES) as t:
                    ahead.ask()
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
                    words = [
                        e.to_integer(e.load(work, p + p_stride * r + t, LANES) * scale * inverse[r]) for r in range(n)
                    ]
                    _store_pairs(e, words, work, weights + t * (GROUP_WORDS // 4), False)

    return split


def _signed_halves(e: Emitter, codes: Pointer, at: Value, bits: int) -> list[Value]:
    """Codes of four tokens and 32 channels, 16 channels in each half; of int4 16 times the codes."""
    if bits == 4:
        packed = e.load(codes, at, 64)
        return [packed << 4, packed & 0xF0]
    return [e.load(codes, at + 64 * i, 64) for i in range(2)]


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
                    halves = _signed_halves(e, codes, first + g * group_stride, bits)
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


def _accumulate_many(bits: int) -> Any:
    shift = 1 / 16 if bits == 4 else 1.0

    @microkernel
    def accumulate_many(e, codes, code_at, group_stride, groups, work, weights, weight_stride, alphas, out, out_stride):
        """As `accumulate`, for MANY_ROWS query rows and 32 channels, of at most 256 tokens.

        High and low bytes are taken one after the other into the same sums: 256 times the sum of the first fits int32.

        Parameters
        ----------
        weights : int
            Three runs of weights of four rows, *weight_stride* items apart, as `split` writes them.
        alphas, out : int
            Of the first row; those of the next are 1 and *out_stride* items on.
        """
        sums = [[e.variable(e.zeros(I32)) for _ in range(2)] for _ in range(MANY_ROWS)]
        for part in range(2):
            with e.range(0, groups) as g:
                halves = _signed_halves(e, codes, code_at + g * group_stride, bits)
                for r in range(MANY_ROWS):
                    at = weights + weight_stride * (r // ROWS) + g * GROUP_WORDS + (2 * (r % ROWS) + part)
                    weight = e.bitcast(e.splat(e.load(work, at, item=I32)), _BYTES)
                    for i in range(2):
                        sums[r][i].set(e.dot_bytes(sums[r][i].get(), weight, halves[i]))
            if part == 0:
                for one in (one for row in sums for one in row):
                    one.set(one.get() << 8)
        for r in range(MANY_ROWS):
            alpha = e.splat(e.load(work, alphas + r)) * shift
            for i in range(2):
                at = out + out_stride * r + LANES * i
                e.store(e.fma(e.to_float(sums[r][i].get()), alpha, e.load(work, at, LANES)), work, at)

    return accumulate_many


score_int8, score_int4 = _score(8), _score(4)
split_int8, split_int4 = _split(8), _split(4)
accumulate_int8, accumulate_int4 = _accumulate(8), _accumulate(4)
accumulate_many_int8, accumulate_many_int4 = _accumulate_many(8), _accumulate_many(4)


@microkernel
def dots_are_fast(e) -> Integer:
    """Whether products of bytes beat those of float32 on this host: twice as many must fit in one instruction."""
    return e.integer(int("avx512vnni" in e.features))

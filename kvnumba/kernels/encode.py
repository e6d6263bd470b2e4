"""Making the memory form: codes of a key block, codes of a value token, rows of 16 bits.

Codes follow the definition of a quantized cache to the bit (``kvnumba.reference``): lo = min, scale = (max - min) / L
or 1 where that is not > 0, code = (x - lo) / scale rounded half away from zero, all in float32 with one rounding for
each operation. A constant group, whose scale is 1 by that definition, is stored with scale 0, which decodes to the same
value: attention on codes rounds its weights relative to the largest scale, and a 1 that stands for nothing would
spoil those of small groups beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from kvnumba.simd import F32, I8, I32, I64, LANES, Emitter, Integer, Pointer, Value, microkernel
from kvnumba.spec import BLOCK

_WORDS = ir.VectorType(I32, LANES)


def _scale(e: Emitter, lo: Value, hi: Value, levels: float) -> tuple[Value, Value]:
    """The scale as it is stored, 0 for a constant group, and as it divides, 1 there."""
    scale = (hi - lo) / levels
    wide = scale.compare(">", 0.0)
    return e.select(wide, scale, e.same(scale, 0.0)), e.select(wide, scale, e.same(scale, 1.0))


def _code(e: Emitter, x: Value, lo: Value, scale: Value, inverse: Value, levels: float) -> Value:
    """Codes as int32; a NaN becomes 0.

    (x - lo) * inverse, rounding included, differs from the quotient by less than 1e-4 (levels * 2**-22 is 6e-5), so
    both round to the same code unless it lies that near to a tie; only then is the vector divided.
    """
    offset = x - lo
    near = offset * inverse
    whole = _truncate(e, e.minimum(e.maximum(near + 0.5, e.zeros()), e.full(levels + 0.5)))
    from_tie = e.absolute(e.absolute(near - e.to_float(whole)) - 0.5)
    result = e.variable(whole)
    # Doubtful also where a tiny scale has an infinite inverse, and where x is NaN.
    doubtful = e.absolute(from_tie - 0.5).compare("<", 0.4999) ^ -1
    with e.when(e.any(doubtful), likely=False):
        quotient = e.minimum(e.maximum(offset / scale, e.zeros()), e.full(levels))
        floor = _truncate(e, quotient)
        half = (quotient - e.to_float(floor)).compare(">=", 0.5)
        result.set(e.select(half, floor + 1, floor))
    return result.get()


def _truncate(e: Emitter, x: Value) -> Value:
    return Value(e.builder, e.builder.fptosi(x.ir, _WORDS))


def _load(e: Emitter, rows: Pointer, at: Value, mask: Value | None) -> Value:
    return e.load(rows, at, LANES) if mask is None else e.load_masked(rows, at, mask)


def _seal(bits: int) -> Any:
    levels = float((1 << bits) - 1)
    group_bytes = 4 * BLOCK * bits // 8

    @microkernel
    def seal(e, rows, start, dim, codes, code_at, params, param_at, padded):
        """Quantize one key block.

        Parameters
        ----------
        rows : float32 array
            ``start`` is the first of 32 rows of *dim* channels.
        codes : uint8 array
            ``code_at``: the block's codes, overwritten.
        params : float32 array
            ``param_at``: lo, and *padded* further scale, overwritten; channels past *dim* get 0 and 0.
        """

        def channels(c, mask):
            lowest, highest = (e.variable(_load(e, rows, start + c, mask)) for _ in range(2))
            with e.range(1, BLOCK) as t:
                x = _load(e, rows, start + t * dim + c, mask)
                lowest.set(e.minimum(x, lowest.get()))
                highest.set(e.maximum(x, highest.get()))
            lo = lowest.get() + 0.0  # no negative zero
            stored, scale = _scale(e, lo, highest.get(), levels)
            e.store(lo, params, param_at + c)
            e.store(stored, params, param_at + padded + c)
            inverse = e.full(1.0) / scale

            def code(t):
                return _code(e, _load(e, rows, start + t * dim + c, mask), lo, scale, inverse, levels)

            quad = ir.VectorType(I32, LANES // 4)
            with e.range(0, BLOCK if bits == 8 else BLOCK // 2, 4) as t:
                words = []
                for i in range(4):
                    both = code(t + i) if bits == 8 else code(t + i) | (code(t + i + BLOCK // 2) << 4)
                    words.append(e.bitcast(e.truncate(both, I8), quad))
                four = e.join(words)  # [token][group of 4 channels]
                for g in range(LANES // 4):
                    group = (c >> 2) + g
                    with e.when((group << 2).compare("<", dim)):
                        word = e.shuffle(four, None, [4 * i + g for i in range(4)])
                        part = e.bitcast(word, ir.VectorType(I8, LANES))
                        e.store(part, codes, code_at + group * group_bytes + t * 4)

        full = dim & -LANES
        with e.range(0, full, LANES) as c:
            channels(c, None)
        with e.when(full.compare("<", dim)):
            channels(full, e.first_lanes(dim - full))

    return seal


def _row_range(e: Emitter, row: Pointer, start: Value, dim: Value) -> tuple[Value, Value]:
    """Smallest and largest of *dim* channels."""
    full = dim & -LANES
    lowest, highest = e.variable(e.full(np.inf)), e.variable(e.full(-np.inf))
    with e.range(0, full, LANES) as c:
        x = e.load(row, start + c, LANES)
        lowest.set(e.minimum(x, lowest.get()))
        highest.set(e.maximum(x, highest.get()))
    with e.when(full.compare("<", dim)):
        tail = e.first_lanes(dim - full)
        x = e.load_masked(row, start + full, tail)
        lowest.set(e.select(tail, e.minimum(x, lowest.get()), lowest.get()))
        highest.set(e.select(tail, e.maximum(x, highest.get()), highest.get()))
    return e.reduce_min(lowest.get()), e.reduce_max(highest.get())


def _put(bits: int, tokens: int) -> Any:
    levels = float((1 << bits) - 1)
    step = LANES if bits == 8 else 2 * LANES  # channels in one vector of bytes

    @microkernel
    def put(e, rows, start, dim, codes, code_at, slot, params, param_at):
        """Quantize the values of one token, or of the four tokens of a group.

        Parameters
        ----------
        rows : float32 array
            ``start``: the *dim* channels of the first token.
        codes : uint8 array
            ``code_at``: the group of four, of which the token is number *slot*; only its bytes change.
        params : float32 array
            ``param_at``: the token's lo, and 32 further its scale; overwritten.
        """
        parts = []
        for j in range(tokens):
            row = start + dim * j
            lowest, highest = _row_range(e, rows, row, dim)
            lo = lowest + 0.0
            stored, scale = _scale(e, lo, highest, levels)
            e.store(lo, params, param_at + j)
            e.store(stored, params, param_at + BLOCK + j)
            parts.append((row, e.splat(lo), e.splat(scale), e.splat(e.same(scale, 1.0) / scale)))

        def code(part, c, mask):
            row, lo, scale, inverse = part
            return _code(e, _load(e, rows, row + c, mask), lo, scale, inverse, levels)

        def byte(part, c, masks):
            if bits == 8:
                return code(part, c, masks[0]) ^ 128
            return (code(part, c, masks[0]) ^ 8) | ((code(part, c + LANES, masks[1]) ^ 8) << 4)

        def store(c, masks):
            at = code_at + c * (4 * bits // 8)
            if tokens == 4:
                words = [byte(part, c, masks) << (8 * j) for j, part in enumerate(parts)]
                e.store(words[0] | words[1] | words[2] | words[3], codes, at)
            else:
                shift = e.splat(e.truncate(slot << 3, I32))
                hole = (e.full(255, I32) << shift) ^ -1
                e.store((e.load(codes, at, LANES, item=I32) & hole) | (byte(parts[0], c, masks) << shift), codes, at)

        whole = dim & -step
        with e.range(0, whole, step) as c:
            store(c, (None, None))
        with e.when(whole.compare("<", dim)):
            # Channels past the last read as 0 through the masks; what their code is does not matter.
            store(whole, (e.first_lanes(dim - whole), e.first_lanes(dim - whole - LANES)))

    return put


def _narrow(convert: Callable[[Emitter, Value], Value]) -> Any:
    @microkernel
    def narrow(e, source, start, count, rows, at):
        """rows[at : at + count] = source[start : start + count] rounded to 16 bits, to nearest even."""
        full = count & -LANES
        with e.range(0, full, LANES) as i:
            e.store(convert(e, e.load(source, start + i, LANES)), rows, at + i)
        with e.when(full.compare("<", count)):
            mask = e.first_lanes(count - full)
            e.store_masked(convert(e, e.load_masked(source, start + full, mask)), rows, at + full, mask)

    return narrow


def _widen(convert: Callable[[Emitter, Value], Value]) -> Any:
    @microkernel
    def widen(e, rows, start, count, out, at):
        """out[at : at + count] = rows[start : start + count] as float32, exactly."""
        full = count & -LANES
        with e.range(0, full, LANES) as i:
            e.store(convert(e, e.load(rows, start + i, LANES)), out, at + i)
        with e.when(full.compare("<", count)):
            mask = e.first_lanes(count - full)
            e.store_masked(convert(e, e.load_masked(rows, start + full, mask)), out, at + full, mask)

    return widen


@microkernel
def copy(e, source, start, count, target, at):
    """target[at : at + count] = source[start : start + count], float32."""
    full = count & -LANES
    with e.range(0, full, LANES) as i:
        e.store(e.load(source, start + i, LANES, item=F32), target, at + i)
    with e.when(full.compare("<", count)):
        mask = e.first_lanes(count - full)
        e.store_masked(e.load_masked(source, start + full, mask), target, at + full, mask)


@microkernel
def all_within(e, x, start, count, bound) -> Integer:
    """1 if |x[i]| <= bound for all of *count* items from *start* on, 0 otherwise; a NaN is not."""
    lanes = e.splat(bound)
    bad = e.variable(e.zeros(I32))

    def part(values):
        good = e.absolute(values).compare("<=", lanes)
        bad.set(bad.get() | e.select(good, e.zeros(I32), e.full(1, I32)))

    # Four runs side by side: memory reads four streams faster than one.
    quarter, full = (count >> 2) & -LANES, count & -LANES
    with e.range(0, quarter, LANES) as i:
        for stream in range(4):
            part(e.load(x, start + quarter * stream + i, LANES))
    with e.range(quarter * 4, full, LANES) as i:
        part(e.load(x, start + i, LANES))
    with e.when(full.compare("<", count)):
        part(e.load_masked(x, start + full, e.first_lanes(count - full)))
    return e.extend(e.reduce_max(bad.get()) ^ 1, I64)


seal_int8, seal_int4 = _seal(8), _seal(4)
put_int8, put_int4 = _put(8, 1), _put(4, 1)
put_four_int8, put_four_int4 = _put(8, 4), _put(4, 4)
narrow_float16, narrow_bfloat16 = _narrow(Emitter.narrow_half), _narrow(Emitter.narrow_bfloat)
widen_float16, widen_bfloat16 = _widen(Emitter.widen_half), _widen(Emitter.widen_bfloat)

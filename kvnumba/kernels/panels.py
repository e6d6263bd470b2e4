"""Many queries: tiles turned into panels once, and a product that stays in registers.

A panel is ``[depth][32]``: 32 columns that one pass of `multiply` computes for 12 rows, 24 vectors of sums in all.
Keys become panels ``[32 tokens at a time][channel][32 tokens]``, values ``[32 channels at a time][token][32
channels]``.
"""

from __future__ import annotations

from typing import Any

from numba.extending import overload

from kvnumba.buffers import BFloat16Rows, Float16Rows, FloatRows, KeyCodes8, ValueCodes8
from kvnumba.kernels.places import recent_row
from kvnumba.kernels.tiles import TILE
from kvnumba.simd import I32, LANES, Emitter, Pointer, Value, microkernel
from kvnumba.spec import BLOCK, SINK

#: Rows and columns of one pass of `multiply`.
PANEL_ROWS, PANEL = 12, 32


def _multiply(add: bool, row_step: int, depth_step: int) -> Any:
    @microkernel
    def multiply(e, work, a, depth, b, c, c_stride):
        """C (+)= A B for 12 rows and 32 columns.

        Parameters
        ----------
        work : float32 array
            A at ``a``, item (r, k) at r * row_step + k * depth_step; B at ``b``, ``[depth][32]``; C at ``c``, 12 rows
            of ``c_stride``.
        """
        # 24 sums, 2 vectors of B and one of A fill 32 registers; hosts with 16 smaller ones take 4 rows by 16 columns.
        rows, vectors = (PANEL_ROWS, 2) if "avx512f" in e.features else (4, 1)
        for r0 in range(0, PANEL_ROWS, rows):
            for v0 in range(0, 2, vectors):
                at = [[c + c_stride * (r0 + r) + LANES * (v0 + v) for v in range(vectors)] for r in range(rows)]
                start = [[e.load(work, x, LANES) if add else e.zeros() for x in row] for row in at]
                sums = [[e.variable(x) for x in row] for row in start]
                with e.range(0, depth) as k:
                    column = [e.load(work, b + k * PANEL + LANES * (v0 + v), LANES) for v in range(vectors)]
                    first = a + k * depth_step
                    for r in range(rows):
                        x = e.splat(e.load(work, first + (r0 + r) * row_step))
                        for v in range(vectors):
                            sums[r][v].set(e.fma(x, column[v], sums[r][v].get()))
                for r in range(rows):
                    for v in range(vectors):
                        e.store(sums[r][v].get(), work, at[r][v])

    return multiply


#: Scores: A is a panel of queries. Weighted sums: A is rows of probabilities.
multiply = _multiply(False, 1, PANEL_ROWS)
multiply_add = _multiply(True, TILE, 1)


def _transpose(e: Emitter, rows: list[Value]) -> list[Value]:
    """16 vectors of 16 lanes, rows and columns exchanged."""
    lanes = range(LANES)
    for s in (8, 4, 2, 1):
        low = [i if not i & s else LANES + i - s for i in lanes]
        high = [i + s if not i & s else LANES + i for i in lanes]
        new = list(rows)
        for i in lanes:
            if not i & s:
                new[i] = e.shuffle(rows[i], rows[i + s], low)
                new[i + s] = e.shuffle(rows[i], rows[i + s], high)
        rows = new
    return rows


@microkernel
def query_panel(e, work, rows, stride, panel):
    """work[panel + c * 12 + r] = work[rows + r * stride + c] for 12 rows of *stride* channels, a multiple of 16.

    Up to 4 items past the panel are overwritten.
    """
    with e.range(0, stride, LANES) as c:
        at = [rows + stride * min(r, PANEL_ROWS - 1) + c for r in range(LANES)]
        columns = _transpose(e, [e.load(work, x, LANES) for x in at])
        for i, column in enumerate(columns):  # in this order: each puts right what the one before wrote too far
            e.store(column, work, panel + (c + i) * PANEL_ROWS)


def _widen(e: Emitter, x: Value, kind: object) -> Value:
    return e.widen_half(x) if kind is Float16Rows else e.widen_bfloat(x) if kind is BFloat16Rows else x


def _load(e: Emitter, rows: Pointer, at: Value, mask: Value | None, kind: object) -> Value:
    return _widen(e, e.load(rows, at, LANES) if mask is None else e.load_masked(rows, at, mask), kind)


def _pack_keys(kind: object) -> Any:
    @microkernel
    def pack(e, rows, start, count, dim, work, panels, depth):
        """Panels of *count* float rows: work[panels + (t // 32 * depth + c) * 32 + t % 32] = rows[start + t * dim + c].

        *depth* is *dim* rounded up to 16; channels from *dim* on are 0, tokens from *count* on repeat the last.
        """
        full = dim & -LANES

        def square(t, c, mask):
            at = [start + e.minimum(t + i, count - 1) * dim + c for i in range(LANES)]
            columns = _transpose(e, [_load(e, rows, a, mask, kind) for a in at])
            to = panels + ((t >> 5) * depth + c) * PANEL + (t & 31)
            for i, column in enumerate(columns):
                e.store(column, work, to + i * PANEL)

        with e.range(0, (count + (PANEL - 1)) & -PANEL, LANES) as t:
            with e.range(0, full, LANES) as c:
                square(t, c, None)
            with e.when(full.compare("<", dim)):
                square(t, full, e.first_lanes(dim - full))

    return pack


def _unpack_keys(bits: int) -> Any:
    group_bytes = 4 * BLOCK * bits // 8

    @microkernel
    def unpack(e, codes, code_at, code_stride, params, param_at, param_stride, groups, blocks, work, panels, depth):
        """Panels of sealed key blocks; channels past the last group are 0."""
        half = param_stride // 2
        with e.range(0, blocks) as block:
            code, param = code_at + block * code_stride, param_at + block * param_stride
            panel = panels + block * depth * PANEL
            with e.range(0, groups) as g:
                if bits == 4:
                    packed = e.load(codes, code + g * group_bytes, LANES, item=I32)
                    halves = [packed & 0x0F0F0F0F, (packed >> 4) & 0x0F0F0F0F]
                else:
                    halves = [e.load(codes, code + g * group_bytes + 64 * i, LANES, item=I32) for i in range(2)]
                for j in range(4):
                    c = (g << 2) + j
                    lo = e.splat(e.load(params, param + c))
                    scale = e.splat(e.load(params, param + half + c))
                    for i, words in enumerate(halves):
                        x = e.fma(e.to_float((words >> (8 * j)) & 255), scale, lo)
                        e.store(x, work, panel + c * PANEL + LANES * i)
            with e.range(groups << 2, depth) as c:
                for i in range(2):
                    e.store(e.zeros(), work, panel + c * PANEL + LANES * i)

    return unpack


def _pack_values(kind: object) -> Any:
    @microkernel
    def pack(e, rows, start, count, dim, work, panels, depth):
        """Panels of *count* float rows: work[panels + (c // 32 * depth + t) * 32 + c % 32] = rows[start + t * dim + c].

        *depth* is the token stride of a panel; channels from *dim* to the next multiple of 32 are 0.
        """
        with e.range(0, count) as t:
            row = start + t * dim
            with e.range(0, (dim + (PANEL - 1)) & -PANEL, LANES) as c:
                to = panels + ((c >> 5) * depth + t) * PANEL + (c & 31)
                e.store(_load(e, rows, row + c, e.first_lanes(dim - c), kind), work, to)

    return pack


def _unpack_values(bits: int) -> Any:
    unit_bytes = 32 * 4 * bits // 8

    @microkernel
    def unpack(e, codes, code_at, group_stride, params, param_at, param_stride, count, channels, work, panels, depth):
        """Panels of coded values; up to 3 tokens past *count* are written too."""
        with e.range(0, count, 4) as t, e.range(0, channels, PANEL) as c:
            at = code_at + (t >> 2) * group_stride + (c >> 5) * unit_bytes
            if bits == 4:
                words = e.load(codes, at, LANES, item=I32)
                halves = [(words & 0x0F0F0F0F) ^ 0x08080808, ((words >> 4) & 0x0F0F0F0F) ^ 0x08080808]
            else:
                halves = [e.load(codes, at + 64 * i, LANES, item=I32) ^ 0x80808080 for i in range(2)]
            for j in range(4):
                param = param_at + ((t + j) >> 5) * param_stride + ((t + j) & 31)
                lo, scale = e.splat(e.load(params, param)), e.splat(e.load(params, param + BLOCK))
                for i, word in enumerate(halves):
                    x = e.fma(e.to_float((word >> (8 * j)) & 255), scale, lo)
                    e.store(x, work, panels + ((c >> 5) * depth + t + j) * PANEL + LANES * i)

    return unpack


_PACK_KEYS = {kind: _pack_keys(kind) for kind in FloatRows}
_PACK_VALUES = {kind: _pack_values(kind) for kind in FloatRows}
_float_keys, _float_values = _PACK_KEYS[FloatRows[0]], _PACK_VALUES[FloatRows[0]]
_unpack_keys8, _unpack_keys4 = _unpack_keys(8), _unpack_keys(4)
_unpack_values8, _unpack_values4 = _unpack_values(8), _unpack_values(4)


def key_panels(store, b, h, token, end, length, dim, work, panels, depth):
    """Panels of the keys of tokens [token, end), a tile."""
    raise NotImplementedError("compiled code only")


@overload(key_panels)
def _key_panels(store, b, h, token, end, length, dim, work, panels, depth):
    kind = store.instance_class
    if kind in FloatRows:
        pack = _PACK_KEYS[kind]

        def rows(store, b, h, token, end, length, dim, work, panels, depth):
            start = ((b * store.rows.shape[1] + h) * store.rows.shape[2] + token) * dim
            pack(store.rows, start, end - token, dim, work, panels, depth)

        return rows
    unpack = _unpack_keys8 if kind is KeyCodes8 else _unpack_keys4

    def codes(store, b, h, token, end, length, dim, work, panels, depth):
        head = b * store.codes.shape[1] + h
        if token < SINK or token >= SINK + (length - SINK) // BLOCK * BLOCK:
            start = (head * store.recent.shape[2] + recent_row(token)) * dim
            _float_keys(store.recent, start, end - token, dim, work, panels, depth)
            return
        block = head * store.codes.shape[2] + (token - SINK) // BLOCK
        code_stride, param_stride = store.codes.shape[3], 2 * store.params.shape[4]
        unpack(store.codes, block * code_stride, code_stride, store.params, block * param_stride, param_stride,
               (dim + 3) // 4, (end - token) // BLOCK, work, panels, depth)  # fmt: skip

    return codes


def value_panels(store, b, h, token, end, dim, work, panels, depth):
    """Panels of the values of tokens [token, end), a tile."""
    raise NotImplementedError("compiled code only")


@overload(value_panels)
def _value_panels(store, b, h, token, end, dim, work, panels, depth):
    kind = store.instance_class
    if kind in FloatRows:
        pack = _PACK_VALUES[kind]

        def rows(store, b, h, token, end, dim, work, panels, depth):
            start = ((b * store.rows.shape[1] + h) * store.rows.shape[2] + token) * dim
            pack(store.rows, start, end - token, dim, work, panels, depth)

        return rows
    eight = kind is ValueCodes8
    unpack = _unpack_values8 if eight else _unpack_values4

    def codes(store, b, h, token, end, dim, work, panels, depth):
        head = b * store.codes.shape[1] + h
        if token < SINK:
            _float_values(store.sinks, (head * SINK + token) * dim, end - token, dim, work, panels, depth)
            return
        block = head * store.codes.shape[2] + (token - SINK) // BLOCK
        group_stride = store.codes.shape[3] // (BLOCK // 4)
        channels = group_stride // 4 if eight else group_stride // 2
        unpack(store.codes, block * store.codes.shape[3], group_stride, store.params, block * 2 * BLOCK, 2 * BLOCK,
               end - token, channels, work, panels, depth)  # fmt: skip

    return codes

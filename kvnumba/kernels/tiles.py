"""One tile of a store: where it may end, its scores, its weighted sum.

What differs per format is chosen by the type of the store when the code is compiled, so every key format pairs with
every value format. A tile lies within the sinks, within the sealed blocks, or within what follows them.
"""

from __future__ import annotations

from numba.extending import overload

from kvnumba._jit import inner
from kvnumba.buffers import KeyCodes8, ValueCodes8
from kvnumba.kernels.ahead import is_float
from kvnumba.kernels.codes import (
    accumulate_int4,
    accumulate_int8,
    score_int4,
    score_int8,
    split_int4,
    split_int8,
    split_keys,
)
from kvnumba.kernels.places import recent_row
from kvnumba.kernels.rows import accumulate_rows, score_rows
from kvnumba.spec import BLOCK, SINK

#: Tokens of one tile; a multiple of BLOCK.
TILE = 128


def tile_end(buffers, token, length):
    """End of the tile that begins at *token*."""
    raise NotImplementedError("compiled code only")


@overload(tile_end)
def _tile_end(buffers, token, length):
    k, v = buffers.types[0], buffers.types[1]
    if is_float(k) and is_float(v):
        return lambda buffers, token, length: min(token + TILE, length)
    if is_float(k):
        return lambda buffers, token, length: min(SINK if token < SINK else token + TILE, length)

    def within_sealed(buffers, token, length):
        if token < SINK:
            return min(SINK, length)
        sealed = SINK + (length - SINK) // BLOCK * BLOCK
        return min(token + TILE, sealed) if token < sealed else length

    return within_sealed


@inner
def tile_start(buffers, token, length):
    """Start of the tile that holds *token*."""
    start = 0
    end = tile_end(buffers, start, length)
    if token < end:
        return start
    start = end + (token - end) // TILE * TILE
    while start < token and tile_end(buffers, start, length) <= token and tile_end(buffers, start, length) > start:
        start = tile_end(buffers, start, length)
    return start


def score_tile(store, b, h, token, end, length, dim, work, q, q_stride, scores, score_stride, weights, terms,
               queries, far, far_params):  # fmt: skip
    """Scores of up to four query rows against tokens [token, end), a tile."""
    raise NotImplementedError("compiled code only")


@overload(score_tile)
def _score_tile(store, b, h, token, end, length, dim, work, q, q_stride, scores, score_stride, weights, terms,
                queries, far, far_params):  # fmt: skip
    if is_float(store):

        def rows(store, b, h, token, end, length, dim, work, q, q_stride, scores, score_stride, weights, terms,
                 queries, far, far_params):  # fmt: skip
            start = ((b * store.rows.shape[1] + h) * store.rows.shape[2] + token) * dim
            score_rows(
                store, store.rows, start, end - token, dim, work, q, q_stride, scores, score_stride, queries, far
            )

        return rows

    eight = store.instance_class is KeyCodes8
    kernel, centre = (score_int8, 127.5) if eight else (score_int4, 7.5)

    def codes(store, b, h, token, end, length, dim, work, q, q_stride, scores, score_stride, weights, terms,
              queries, far, far_params):  # fmt: skip
        head = b * store.codes.shape[1] + h
        if token < SINK or token >= SINK + (length - SINK) // BLOCK * BLOCK:
            start = (head * store.recent.shape[2] + recent_row(token)) * dim
            score_rows(
                store, store.recent, start, end - token, dim, work, q, q_stride, scores, score_stride, queries, far
            )
            return
        block = head * store.codes.shape[2] + (token - SINK) // BLOCK
        code_stride, channels = store.codes.shape[3], store.params.shape[4]
        blocks = (end - token) // BLOCK
        split_keys(
            store.params, block * 2 * channels, 2 * channels, blocks, centre, work, q, q_stride, weights, terms,
            queries, far_params,
        )  # fmt: skip
        kernel(
            store.codes, block * code_stride, code_stride, (dim + 3) // 4, blocks, channels, work, weights, terms,
            scores, score_stride, queries, far,
        )  # fmt: skip

    return codes


def accumulate_tile(store, b, h, token, end, dim, work, p, p_stride, weights, alphas, bases, out, out_stride, queries,
                    far, far_params):  # fmt: skip
    """Add the values of tokens [token, end), a tile, weighted by up to four rows of probabilities."""
    raise NotImplementedError("compiled code only")


@overload(accumulate_tile)
def _accumulate_tile(store, b, h, token, end, dim, work, p, p_stride, weights, alphas, bases, out, out_stride, queries,
                     far, far_params):  # fmt: skip
    if is_float(store):

        def rows(store, b, h, token, end, dim, work, p, p_stride, weights, alphas, bases, out, out_stride, queries,
                 far, far_params):  # fmt: skip
            start = ((b * store.rows.shape[1] + h) * store.rows.shape[2] + token) * dim
            accumulate_rows(
                store, store.rows, start, end - token, dim, work, p, p_stride, out, out_stride, queries, far
            )

        return rows

    eight = store.instance_class is ValueCodes8
    split, kernel = (split_int8, accumulate_int8) if eight else (split_int4, accumulate_int4)

    def codes(store, b, h, token, end, dim, work, p, p_stride, weights, alphas, bases, out, out_stride, queries,
              far, far_params):  # fmt: skip
        head = b * store.codes.shape[1] + h
        if token < SINK:
            start = (head * SINK + token) * dim
            accumulate_rows(
                store, store.sinks, start, end - token, dim, work, p, p_stride, out, out_stride, queries, far
            )
            return
        # Tiles begin at a block or, after the sealed keys, at the first token of a block too.
        block = head * store.codes.shape[2] + (token - SINK) // BLOCK
        code_stride = store.codes.shape[3]
        group_stride = code_stride // (BLOCK // 4)
        split(
            store.params, block * 2 * BLOCK, 2 * BLOCK, end - token, work, p, p_stride, weights, queries, alphas, bases,
            far_params,
        )  # fmt: skip
        channels = group_stride // 4 if eight else group_stride // 2
        kernel(
            store.codes, block * code_stride, group_stride, (end - token + 3) // 4, channels, work, weights, alphas,
            out, out_stride, queries, far,
        )  # fmt: skip

    return codes

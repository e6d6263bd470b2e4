"""Attention of many query rows: each tile of the cache is turned into panels once, then multiplied in registers."""

from __future__ import annotations

import numpy as np
from numba.extending import overload

from kvnumba._jit import inner
from kvnumba.buffers import LENGTH, ValueCodes8
from kvnumba.kernels import softmax
from kvnumba.kernels.ahead import is_float, params_of
from kvnumba.kernels.codes import (
    GROUP_WORDS,
    ROWS,
    accumulate_many_int4,
    accumulate_many_int8,
    dots_are_fast,
    split_int4,
    split_int8,
)
from kvnumba.kernels.panels import PANEL, PANEL_ROWS, key_panels, multiply, multiply_add, query_panel, value_panels
from kvnumba.kernels.states import (
    Plan,
    aligned_start,
    bias_row,
    first_tile,
    init_states,
    is_biased,
    next_tile,
    store_rows,
    visible,
)
from kvnumba.kernels.tiles import TILE, tile_end
from kvnumba.simd import LANES
from kvnumba.spec import BLOCK, SINK


@inner
def plan_panels(start, rows, dim, v_dim):
    """Scratch of a unit of many rows, a multiple of PANEL_ROWS, from item *start* on.

    ``q``, ``weights`` (keys) and ``alphas`` (values) are panels; queries first lie as rows where the keys come later.
    """
    q_stride = (dim + LANES - 1) // LANES * LANES
    acc_stride = (v_dim + PANEL - 1) // PANEL * PANEL
    scores = start + rows * q_stride + LANES
    key_at = scores + PANEL_ROWS * TILE
    value_at = key_at + TILE * q_stride
    m = value_at + TILE * acc_stride
    states = (rows + LANES - 1) // LANES * LANES
    ratios = m + 3 * states
    acc = ratios + LANES
    return Plan(start, q_stride, scores, key_at, value_at, m, m + states, m + 2 * states, ratios,
                acc, acc_stride, acc + rows * acc_stride)  # fmt: skip


@inner
def scratch_panels(rows, dim, v_dim):
    """Scratch for units of up to *rows* rows."""
    padded = (rows + PANEL_ROWS - 1) // PANEL_ROWS * PANEL_ROWS
    return np.empty(plan_panels(0, padded, dim, v_dim).size + LANES, np.float32)


@inner
def load_panels(work, plan, q, b, h, first, group, rows, sm_scale):
    """Copy the queries of one KV head's group from *first* on, scaled, as panels of 12 rows (query, head).

    Rows past the last hold whatever was there: their sums are not used.
    """
    for r in range(rows):
        i, g = first + r // group, r % group
        start = ((b * q.shape[1] + h * group + g) * q.shape[2] + i) * q.shape[3]
        j = r % PANEL_ROWS
        softmax.load_row(q, start, q.shape[3], sm_scale, work, plan.weights + j * plan.q_stride)
        if j == PANEL_ROWS - 1 or r == rows - 1:
            query_panel(work, plan.weights, plan.q_stride, plan.q + (r - j) * plan.q_stride)


@inner
def attend_panels(buffers, q, out, lse, sm_scale, causal, extras, b, h, first, last, work):
    """Queries [first, last) of one KV head's group, many of them; True if the result is finite."""
    dim, v_dim, queries = q.shape[3], out.shape[3], q.shape[2]
    group = q.shape[1] // buffers.k[0].shape[1]
    length = buffers.state[b, LENGTH]
    rows = (last - first) * group
    padded_rows = (rows + PANEL_ROWS - 1) // PANEL_ROWS * PANEL_ROWS
    plan = plan_panels(aligned_start(work), padded_rows, dim, v_dim)
    load_panels(work, plan, q, b, h, first, group, rows, sm_scale)
    init_states(work, plan, padded_rows)

    seen = visible(first, queries, length, causal, extras)[0]
    stop = visible(last - 1, queries, length, causal, extras)[1]
    token = first_tile(buffers, seen, length, extras)
    while token < stop:
        end = tile_end(buffers, token, length)
        key_panels(buffers.k, b, h, token, end, length, dim, work, plan.weights, plan.q_stride)
        if not reads_codes(buffers.v, token):
            value_panels(buffers.v, b, h, token, end, v_dim, work, plan.alphas, TILE)
        for r in range(0, rows, PANEL_ROWS):
            high = visible(first + (min(r + PANEL_ROWS, rows) - 1) // group, queries, length, causal, extras)[1]
            low = visible(first + r // group, queries, length, causal, extras)[0]
            count = min(end, high) - token
            if count > 0 and (low < end or (extras is not None and token < extras.sinks)):
                attend_panel(buffers.v, work, plan, token, count, r, min(PANEL_ROWS, rows - r), b, h, first, group,
                             queries, length, causal, extras)  # fmt: skip
        token = next_tile(buffers, end, seen, length, extras)
    return store_rows(work, plan, out, lse, b, h, first, last, group, extras)


@inner
def attend_panel(store, work, plan, token, count, r, rows, b, h, first, group, queries, length, causal, extras):
    """Take the *count* keys from *token* on, a tile in panels, into the states of rows r to r + PANEL_ROWS.

    Values are those of *store*, in panels unless `reads_codes` says so.
    """
    for t in range(0, count, PANEL):
        multiply(work, plan.q + r * plan.q_stride, plan.q_stride, plan.weights + t * plan.q_stride, plan.scores + t,
                 TILE)  # fmt: skip
    padded = (count + LANES - 1) // LANES * LANES
    for j in range(PANEL_ROWS):
        at = plan.scores + j * TILE
        if j >= rows:
            softmax.fill(work, at, padded, 0.0)
            continue
        i, g = first + (r + j) // group, (r + j) % group
        low, high = visible(i, queries, length, causal, extras)
        seen = min(max(high - token, 0), count)
        if is_biased(token, token + seen, low, high, extras):
            bias_row(work, at, token, token + seen, low, high, b, h * group + g, i, length - queries + i, extras)
        if softmax.update(work, at, TILE, seen, padded, plan.m + r + j, plan.l + r + j, plan.ratios, 1):
            softmax.scale(work, plan.acc + (r + j) * plan.acc_stride, plan.acc_stride, work[plan.ratios])
            work[plan.bases + r + j] *= work[plan.ratios]
    if reads_codes(store, token):
        accumulate_codes(store, work, plan, b, h, token, count, r)
        return
    for c in range(0, plan.acc_stride, PANEL):
        multiply_add(work, plan.scores, count, plan.alphas + c * TILE, plan.acc + r * plan.acc_stride + c,
                     plan.acc_stride)  # fmt: skip


def reads_codes(store, token):
    """Whether the values of the tile at *token* are summed as codes: from sealed ones, where byte products are fast."""
    raise NotImplementedError("compiled code only")


def accumulate_codes(store, work, plan, b, h, token, count, r):
    """Add the values of *count* tokens from *token* on to the sums of rows r to r + PANEL_ROWS, from their codes."""
    raise NotImplementedError("compiled code only")


@overload(reads_codes)
def _reads_codes(store, token):
    if is_float(store):
        return lambda store, token: False
    return lambda store, token: token >= SINK and dots_are_fast() == 1


@overload(accumulate_codes)
def _accumulate_codes(store, work, plan, b, h, token, count, r):
    if is_float(store):
        return lambda store, work, plan, b, h, token, count, r: None
    eight = store.instance_class is ValueCodes8
    split, kernel = (split_int8, accumulate_many_int8) if eight else (split_int4, accumulate_many_int4)
    unit_bytes = 128 if eight else 64

    def codes(store, work, plan, b, h, token, count, r):
        block = (b * store.codes.shape[1] + h) * store.codes.shape[2] + (token - SINK) // BLOCK
        run = TILE // 4 * GROUP_WORDS
        alphas = plan.alphas + PANEL_ROWS // ROWS * run  # where panels would be
        for i in range(0, PANEL_ROWS, ROWS):
            split(store.params, block * 2 * BLOCK, 2 * BLOCK, count, work, plan.scores + i * TILE, TILE,
                  plan.alphas + i // ROWS * run, ROWS, alphas + i, plan.bases + r + i,
                  params_of(store, b, h, token, 0))  # fmt: skip
        code, group_stride = block * store.codes.shape[3], store.codes.shape[3] // (BLOCK // 4)
        for c in range(0, plan.acc_stride, PANEL):
            kernel(store.codes, code + c // PANEL * unit_bytes, group_stride, (count + 3) // 4, work, plan.alphas, run,
                   alphas, plan.acc + r * plan.acc_stride + c, plan.acc_stride)  # fmt: skip

    return codes

"""Attention of a few query rows: the cache is read as it is, codes included, once for every four rows."""

from __future__ import annotations

import numpy as np

from kvnumba._jit import inner
from kvnumba.buffers import LENGTH
from kvnumba.kernels import softmax
from kvnumba.kernels.ahead import params_of, run_of, token_bytes
from kvnumba.kernels.codes import GROUP_WORDS, TERMS
from kvnumba.kernels.rows import ROWS
from kvnumba.kernels.states import (
    Plan,
    aligned_start,
    bias_row,
    first_tile,
    init_states,
    is_biased,
    load_queries,
    next_tile,
    store_rows,
    visible,
)
from kvnumba.kernels.tiles import TILE, accumulate_tile, score_tile, tile_end
from kvnumba.simd import LANES
from kvnumba.spec import BLOCK, SINK

#: Bytes of a cache up to which it is taken to lie in the processor's own caches, where asking ahead only costs.
NEAR_BYTES = 1 << 21


@inner
def plan_rows(start, rows, dim, v_dim):
    """Scratch of a unit of few rows, from item *start* on: queries, a tile of scores, byte weights, states."""
    q_stride = (dim + LANES - 1) // LANES * LANES
    acc_stride = (v_dim + 2 * LANES - 1) // (2 * LANES) * (2 * LANES)
    scores = start + rows * q_stride
    weights = scores + ROWS * TILE
    alphas = weights + max(TILE, TILE // BLOCK * q_stride) // 4 * GROUP_WORDS
    m = alphas + TILE // BLOCK * TERMS
    states = (rows + LANES - 1) // LANES * LANES
    ratios = m + 3 * states
    acc = ratios + LANES
    return Plan(start, q_stride, scores, weights, alphas, m, m + states, m + 2 * states, ratios,
                acc, acc_stride, acc + rows * acc_stride)  # fmt: skip


@inner
def scratch_rows(rows, dim, v_dim):
    """Scratch for units of *rows* rows."""
    return np.empty(plan_rows(0, rows, dim, v_dim).size + LANES, np.float32)


@inner
def runs_after(buffers, b, h, end, length, wanted):
    """What is read after the tile that ends at *end*: keys, their parameters, those of the values.

    After the last sealed tile it is the first one of the next head. Nothing, if not *wanted*.
    """
    head, token = h, end
    if end + BLOCK >= length and h + 1 < buffers.k[0].shape[1]:
        head, token = h + 1, SINK
    count = min(token + TILE, length) - token if wanted else 0
    return (run_of(buffers.k, b, head, token, count), params_of(buffers.k, b, head, token, count),
            params_of(buffers.v, b, head, token, count))  # fmt: skip


@inner
def attend_rows(buffers, q, out, lse, sm_scale, causal, extras, b, h, first, last, work):
    """Queries [first, last) of one KV head's group, few of them; True if the result is finite."""
    dim, v_dim, queries = q.shape[3], out.shape[3], q.shape[2]
    group = q.shape[1] // buffers.k[0].shape[1]
    length = buffers.state[b, LENGTH]
    rows = (last - first) * group
    plan = plan_rows(aligned_start(work), rows, dim, v_dim)
    load_queries(work, plan, q, b, h, first, last, group, sm_scale)
    init_states(work, plan, rows)

    tokens = q.shape[0] * buffers.k[0].shape[1] * length
    far = tokens * (token_bytes(buffers.k) + token_bytes(buffers.v)) > NEAR_BYTES
    seen = visible(first, queries, length, causal, extras)[0]
    stop = visible(last - 1, queries, length, causal, extras)[1]
    token = first_tile(buffers, seen, length, extras)
    while token < stop:
        end = tile_end(buffers, token, length)
        for r in range(0, rows, ROWS):
            n = min(ROWS, rows - r)
            ahead = far and r == 0
            next_values = run_of(buffers.v, b, h, token, end - token if ahead else 0)
            next_keys, next_key_params, next_value_params = runs_after(buffers, b, h, end, length, ahead)
            score_tile(buffers.k, b, h, token, end, length, dim, work, plan.q + r * plan.q_stride, plan.q_stride,
                       plan.scores, TILE, plan.weights, plan.alphas, n, next_values,
                       next_key_params)  # fmt: skip
            for j in range(n):
                i, g = first + (r + j) // group, (r + j) % group
                low, high = visible(i, queries, length, causal, extras)
                if is_biased(token, end, low, high, extras):
                    bias_row(work, plan.scores + j * TILE, token, end, low, high, b, h * group + g, i,
                             length - queries + i, extras)  # fmt: skip
            padded = (end - token + LANES - 1) // LANES * LANES
            if softmax.update(work, plan.scores, TILE, end - token, padded, plan.m + r, plan.l + r, plan.ratios, n):
                for j in range(n):
                    ratio = work[plan.ratios + j]
                    softmax.scale(work, plan.acc + (r + j) * plan.acc_stride, plan.acc_stride, ratio)
                    work[plan.bases + r + j] *= ratio
            accumulate_tile(buffers.v, b, h, token, end, v_dim, work, plan.scores, TILE, plan.weights, plan.alphas,
                            plan.bases + r, plan.acc + r * plan.acc_stride, plan.acc_stride, n,
                            next_keys, next_value_params)  # fmt: skip
        token = next_tile(buffers, end, seen, length, extras)
    return store_rows(work, plan, out, lse, b, h, first, last, group, extras)

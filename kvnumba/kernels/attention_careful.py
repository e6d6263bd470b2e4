"""Attention that never touches a hidden key: for results that came out non-finite.

The fast paths multiply hidden values with a weight of 0, and 0 times NaN is NaN. Where a row is not finite it is
computed again here, leaving out every key of weight 0: what is still not finite then belongs to keys that count.
"""

from __future__ import annotations

import numpy as np

from kvnumba._jit import inner
from kvnumba.buffers import LENGTH
from kvnumba.kernels.ahead import params_of, run_of
from kvnumba.kernels.attention_rows import plan_rows
from kvnumba.kernels.decode import decode_token
from kvnumba.kernels.states import NEG_INF, bias_row, load_queries, visible
from kvnumba.kernels.tiles import TILE, score_tile, tile_end


@inner
def attend_careful(buffers, q, out, lse, sm_scale, causal, extras, b, h, first, last):
    """Those of queries [first, last) of one KV head's group whose result is not finite, one row at a time."""
    queries, group = q.shape[2], q.shape[1] // buffers.k[0].shape[1]
    length, dim, v_dim = buffers.state[b, LENGTH], q.shape[3], out.shape[3]
    plan = plan_rows(0, (last - first) * group, dim, v_dim)
    work = np.empty(plan.size, np.float32)
    load_queries(work, plan, q, b, h, first, last, group, sm_scale)
    scores, value, total = np.empty(length, np.float64), np.empty(v_dim, np.float32), np.empty(v_dim, np.float64)
    for r in range((last - first) * group):
        i, head = first + r // group, h * group + r % group
        if np.isfinite(out[b, head, i]).all():
            continue
        token = 0
        while token < length:
            end = tile_end(buffers, token, length)
            score_tile(buffers.k, b, h, token, end, length, dim, work, plan.q + r * plan.q_stride, plan.q_stride,
                       plan.scores, TILE, plan.weights, plan.alphas, 1, run_of(buffers.k, b, h, token, 0),
                       params_of(buffers.k, b, h, token, 0))  # fmt: skip
            low, high = visible(i, queries, length, causal, extras)
            bias_row(work, plan.scores, token, end, low, high, b, head, i, length - queries + i, extras)
            for t in range(token, end):
                scores[t] = work[plan.scores + t - token]
            token = end
        weighted_sum(buffers, out, lse, extras, b, h, head, i, scores, value, total)


@inner
def weighted_sum(buffers, out, lse, extras, b, h, head, i, scores, value, total):
    """Softmax of one row's *scores* (float64 [length]) and the sum of the values that have weight."""
    length, v_dim = scores.shape[0], out.shape[3]
    m = NEG_INF * 1.0
    if extras is not None and extras.sink_logits.size > 0:
        m = extras.sink_logits[head] * 1.0
    for t in range(length):
        if scores[t] > m:
            m = scores[t]
    anchor = m if m > NEG_INF else 0.0
    l = 0.0
    if extras is not None and extras.sink_logits.size > 0:
        l = np.exp(extras.sink_logits[head] - anchor)
    total[:] = 0.0
    for t in range(length):
        p = np.exp(scores[t] - anchor)
        l += p
        if p != 0.0:
            decode_token(buffers.v, b, h, t, length, value)
            for c in range(v_dim):
                total[c] += p * value[c]
    for c in range(v_dim):
        out[b, head, i, c] = np.float32(total[c] / l) if l != 0.0 else np.float32(0)
    if lse.size > 0:
        lse[b, head, i] = np.float32(anchor + np.log(l)) if l != 0.0 else NEG_INF

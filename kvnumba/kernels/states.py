"""Query rows of one unit of work: what they may see, what is added to their scores, and their states in scratch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvnumba._jit import inner
from kvnumba.kernels import softmax
from kvnumba.kernels.tiles import tile_start
from kvnumba.simd import I64, Integer, Value, microkernel

NEG_INF = np.float32(-np.inf)


class Extras(NamedTuple):
    """What changes scores beyond their scale; None in place of it costs nothing. An empty array stands for none.

    Made inside ``@njit`` it needs all 8 arguments: Numba does not know the defaults of a named tuple.
    """

    mask: Any  #: float32 [B or 1, H_q or 1, S or 1, T or 1], C-contiguous; added to the scores; [0, 0, 0, 0]: none
    softcap: float  #: cap * tanh(score / cap) before the mask; 0: none
    left: int  #: keys before a query's own position that it sees; -1: all
    right: int  #: keys after it; -1: all
    alibi_slopes: Any  #: float32 [H_q]; slope * distance is taken off the score; [0]: none
    sink_logits: Any  #: float32 [H_q]; one further score without a value, -inf for a head without; [0]: none
    sinks: int = 0  #: first keys that *left* does not hide
    dropped: int = 0  #: tokens that are no longer there between the sinks and the rest


class Plan(NamedTuple):
    """Where things lie in the scratch of one unit, in float32 items."""

    q: int
    q_stride: int
    scores: int
    weights: int
    alphas: int
    m: int
    l: int
    bases: int
    ratios: int
    acc: int
    acc_stride: int
    size: int


@inner
def visible(i, queries, length, causal, extras):
    """Keys [first, last) that query i of *queries* may see by its position."""
    position = length - queries + i
    first, last = 0, length
    if causal:
        last = min(last, position + 1)
    if extras is not None:
        if extras.left >= 0:
            first = max(first, position - extras.left)
        if extras.right >= 0:
            last = min(last, position + extras.right + 1)
    return first, max(last, 0)


@inner
def first_tile(buffers, low, length, extras):
    """Start of the first tile that is read where keys from *low* on are seen, and the sinks of a window."""
    return tile_start(buffers, 0 if extras is not None and extras.sinks > 0 else low, length)


@inner
def next_tile(buffers, end, low, length, extras):
    """Start of the tile that is read after one that ends at *end*."""
    if extras is not None and extras.sinks > 0 and end < low:
        return max(end, tile_start(buffers, low, length))
    return end


@inner
def is_biased(token, end, first, last, extras):
    """Whether `bias_row` changes scores of keys [token, end)."""
    if extras is None:
        return last < end
    added = extras.softcap > 0 or extras.alibi_slopes.size > 0 or extras.mask.size > 0
    return added or last < end or token < first


@inner
def bias_row(work, at, token, end, first, last, b, head, i, position, extras):
    """Apply everything but the scale to the scores of one query row for keys [token, end)."""
    count = end - token
    if extras is not None:
        if extras.softcap > 0:
            cap = np.float32(extras.softcap)
            for t in range(count):
                work[at + t] = cap * np.tanh(work[at + t] / cap)
        if extras.alibi_slopes.size > 0:
            slope = extras.alibi_slopes[head]
            for t in range(count):
                further = extras.dropped if token + t < extras.sinks else 0
                work[at + t] -= slope * np.float32(abs(position - (token + t)) + further)
        mask = extras.mask
        if mask.size > 0:
            mb, mh = b if mask.shape[0] > 1 else 0, head if mask.shape[1] > 1 else 0
            mi = i if mask.shape[2] > 1 else 0
            if mask.shape[3] > 1:
                for t in range(count):
                    value = mask[mb, mh, mi, token + t]
                    # Not a sum: a hidden key may hold NaN.
                    work[at + t] = NEG_INF if value == NEG_INF else work[at + t] + value
            else:
                value = mask[mb, mh, mi, 0]
                for t in range(count):
                    work[at + t] = NEG_INF if value == NEG_INF else work[at + t] + value
    for t in range(max(0, last - token), count):
        work[at + t] = NEG_INF
    for t in range(0 if extras is None else max(0, extras.sinks - token), min(first - token, count)):
        work[at + t] = NEG_INF


@microkernel
def aligned_start(e, work) -> Integer:
    """First item of *work*, float32, that lies at a multiple of 64 bytes."""
    address = Value(e.builder, e.builder.ptrtoint(work.address, I64))
    return ((e.integer(0) - address) & 63) >> 2


@inner
def load_queries(work, plan, q, b, h, first, last, group, sm_scale):
    """Copy the queries [first, last) of one KV head's group, scaled and padded with zeros, as rows (query, head)."""
    queries, dim = q.shape[2], q.shape[3]
    for i in range(first, last):
        for g in range(group):
            start = ((b * q.shape[1] + h * group + g) * queries + i) * dim
            softmax.load_row(q, start, dim, sm_scale, work, plan.q + ((i - first) * group + g) * plan.q_stride)


@inner
def init_states(work, plan, rows):
    """States of rows that have seen nothing; each part of the scratch is padded to a multiple of 16."""
    softmax.fill(work, plan.m, rows, -np.inf)
    softmax.fill(work, plan.l, rows, 0.0)
    softmax.fill(work, plan.bases, rows, 0.0)
    softmax.fill(work, plan.acc, rows * plan.acc_stride, 0.0)


@inner
def add_sink_logit(work, plan, r, logit):
    """Let one further score, which has no value, take part in the sum of a row."""
    m, l = work[plan.m + r], work[plan.l + r]
    new = max(m, logit)
    if new > NEG_INF:
        ratio = np.exp(m - new)
        work[plan.l + r] = l * ratio + np.exp(logit - new)
        work[plan.m + r] = new
        work[plan.bases + r] *= ratio
        softmax.scale(work, plan.acc + r * plan.acc_stride, plan.acc_stride, ratio)


@inner
def store_rows(work, plan, out, lse, b, h, first, last, group, extras):
    """Divide and store the rows of a unit; True if each is finite."""
    fine = True
    v_dim = out.shape[3]
    for i in range(first, last):
        for g in range(group):
            r, head = (i - first) * group + g, h * group + g
            if extras is not None and extras.sink_logits.size > 0:
                add_sink_logit(work, plan, r, extras.sink_logits[head])
            l = work[plan.l + r]
            seen = l > np.float32(0) or l != l
            factor = np.float32(1) / l if seen else np.float32(0)
            base = work[plan.bases + r]
            at = ((b * out.shape[1] + head) * out.shape[2] + i) * v_dim
            check = softmax.finish(work, plan.acc + r * plan.acc_stride, v_dim, base, factor, out, at)
            fine &= check == check
            if lse.size > 0:
                lse[b, head, i] = work[plan.m + r] + np.log(l) if seen else NEG_INF
    return fine

"""Attention over a cache: the read path.

One unit of work is one batch row, one KV head and a run of queries; units are independent, so any number of threads
may share them and the result is the same. A unit walks over the tiles of its keys and keeps, for each query row, the
state of the online softmax. Few rows read the cache directly (`attention_rows`); many rows turn each tile into panels
and multiply in registers (`attention_panels`).
"""

from __future__ import annotations

from kvnumba._jit import sums
from kvnumba.kernels.attention_careful import attend_careful
from kvnumba.kernels.attention_panels import attend_panels
from kvnumba.kernels.attention_rows import attend_rows

#: Query rows of one KV head up to which the cache is read directly.
FEW_ROWS = 16
#: Query rows of one unit when there are many: their sums (of 128 channels) fill half a second-level cache.
UNIT_ROWS = 384


@sums
def is_few(buffers, q):
    """Whether the queries *q* (float32 [B, H_q, S, D]) are few enough to read the cache directly."""
    return q.shape[2] * (q.shape[1] // buffers.k[0].shape[1]) <= FEW_ROWS


@sums
def attend_few(buffers, q, out, lse, sm_scale, causal, extras):
    """As `attend` for few query rows; True if the result is finite."""
    finite = True
    for b in range(q.shape[0]):
        for h in range(buffers.k[0].shape[1]):
            finite &= attend_rows(buffers, q, out, lse, sm_scale, causal, extras, b, h, 0, q.shape[2])
    return finite


@sums
def attend_many(buffers, q, out, lse, sm_scale, causal, extras):
    """As `attend` for many query rows; True if the result is finite."""
    heads, queries = buffers.k[0].shape[1], q.shape[2]
    step = max(1, UNIT_ROWS // (q.shape[1] // heads))
    finite = True
    for b in range(q.shape[0]):
        for h in range(heads):
            for first in range(0, queries, step):
                last = min(first + step, queries)
                finite &= attend_panels(buffers, q, out, lse, sm_scale, causal, extras, b, h, first, last)
    return finite


@sums
def attend_again(buffers, q, out, lse, sm_scale, causal, extras):
    """As `attend`, slowly, without touching keys that have no weight: where the result was not finite."""
    for b in range(q.shape[0]):
        for h in range(buffers.k[0].shape[1]):
            attend_careful(buffers, q, out, lse, sm_scale, causal, extras, b, h, 0, q.shape[2])


@sums
def attend(buffers, q, out, lse, sm_scale, causal, extras):
    """Attention of queries over everything in the cache.

    Parameters
    ----------
    buffers : KVBuffers
        Read only.
    q : float32 [B, H_q, S, D], C-contiguous
        The last S positions of the sequence.
    out : float32 [B, H_q, S, Dv], C-contiguous
        Overwritten.
    lse : float32 [B, H_q, S]
        Overwritten: log of the sum of exponentials of each row, -inf where it sees nothing.
    sm_scale : float
        Factor of q.k.
    causal : bool
        Query i sees keys up to length - S + i.
    extras : Extras or None
        Mask, window, softcap, ALiBi, sink logits.
    """
    if is_few(buffers, q):
        finite = attend_few(buffers, q, out, lse, sm_scale, causal, extras)
    else:
        finite = attend_many(buffers, q, out, lse, sm_scale, causal, extras)
    if not finite:
        attend_again(buffers, q, out, lse, sm_scale, causal, extras)

"""Attention over a cache: the read path.

One unit of work is one batch row, one KV head and a run of queries; units are independent, so any number of threads
may share them and the result is the same. A unit walks over the tiles of its keys and keeps, for each query row, the
state of the online softmax. Few rows read the cache directly (`attention_rows`); many rows turn each tile into panels
and multiply in registers (`attention_panels`).
"""

from __future__ import annotations

from kvnumba._jit import inner, sums
from kvnumba.kernels.attention_careful import attend_careful
from kvnumba.kernels.attention_panels import attend_panels, scratch_panels
from kvnumba.kernels.attention_rows import attend_rows, scratch_rows

#: Query rows of one KV head up to which the cache is read directly.
FEW_ROWS = 16
#: Query rows of one unit when there are many: their sums (of 128 channels) fill half a second-level cache.
UNIT_ROWS = 384


@inner
def queries_of_unit(group, queries):
    """Queries of one unit of work, of *queries*; all of them where they are few."""
    return queries if queries * group <= FEW_ROWS else max(1, UNIT_ROWS // group)


@inner
def divide(heads, shape):
    """How a call is divided.

    Parameters
    ----------
    heads : int
        KV heads.
    shape : (int, int, int, int)
        Of the queries, [B, H_q, S, D].

    Returns
    -------
    few : bool
        Whether the queries are few enough to read the cache directly.
    units : int
        Units of work: batch rows x KV heads x runs of queries, the runs innermost.
    """
    group = shape[1] // heads
    if shape[2] * group <= FEW_ROWS:
        return True, shape[0] * heads
    step = queries_of_unit(group, shape[2])
    return False, shape[0] * heads * ((shape[2] + step - 1) // step)


@inner
def few_units(buffers, q, out, lse, sm_scale, causal, extras, first, last):
    """Units [first, last) of `attend` for few query rows; True if the result is finite."""
    heads, finite = buffers.k[0].shape[1], True
    work = scratch_rows(q.shape[2] * (q.shape[1] // heads), q.shape[3], out.shape[3])
    for unit in range(first, last):
        b, h = unit // heads, unit % heads
        finite &= attend_rows(buffers, q, out, lse, sm_scale, causal, extras, b, h, 0, q.shape[2], work)
    return finite


@inner
def many_units(buffers, q, out, lse, sm_scale, causal, extras, first, last):
    """Units [first, last) of `attend` for many query rows; True if the result is finite."""
    heads, finite = buffers.k[0].shape[1], True
    step = queries_of_unit(q.shape[1] // heads, q.shape[2])
    runs = (q.shape[2] + step - 1) // step
    work = scratch_panels(min(step, q.shape[2]) * (q.shape[1] // heads), q.shape[3], out.shape[3])
    for unit in range(first, last):
        b, h, start = unit // (heads * runs), unit // runs % heads, unit % runs * step
        end = min(start + step, q.shape[2])
        finite &= attend_panels(buffers, q, out, lse, sm_scale, causal, extras, b, h, start, end, work)
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
        Overwritten: log of the sum of exponentials of each row, -inf where it sees nothing. [0, 0, 0]: not wanted.
    sm_scale : float
        Factor of q.k.
    causal : bool
        Query i sees keys up to length - S + i.
    extras : Extras or None
        Mask, window, softcap, ALiBi, sink logits.
    """
    few, units = divide(buffers.k[0].shape[1], q.shape)
    if few:
        finite = few_units(buffers, q, out, lse, sm_scale, causal, extras, 0, units)
    else:
        finite = many_units(buffers, q, out, lse, sm_scale, causal, extras, 0, units)
    if not finite:
        attend_again(buffers, q, out, lse, sm_scale, causal, extras)

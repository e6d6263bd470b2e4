"""Attention as a function: over plain arrays, over the buffers of a cache, and the merge of partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvnumba import checks, threads
from kvnumba._jit import COMPILED
from kvnumba.buffers import LENGTH, Float32Rows, KVBuffers
from kvnumba.kernels import attention as kernels
from kvnumba.kernels.entry import Entries, entries_of, map_buffers
from kvnumba.kernels.states import Extras

Array = npt.NDArray[Any]

#: Multiplications from which on a call is shared between threads: about a quarter of a millisecond.
SHARED_WORK = 8_000_000

_NONE = np.empty(0, np.float32)
_NO_MASK = np.empty((0, 0, 0, 0), np.float32)
_NO_LSE = np.empty((0, 0, 0), np.float32)
_FLOAT32 = np.dtype(np.float32)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    mask: Any = None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink_logits: Any = None,
    return_lse: bool = False,
    out: Array | None = None,
) -> Any:
    """Grouped-query attention over plain arrays, computed in float32.

    Parameters
    ----------
    q : array_like [B, H_q, S, D]
        Queries, the last S positions of the sequence. Query head h reads KV head ``h // (H_q // H_kv)``.
    k : array_like [B, H_kv, T, D]
    v : array_like [B, H_kv, T, Dv]
    causal : bool
        Query i sees keys up to position T - S + i. False here; True if nothing is said to `KVCache.attend` and `step`.
    sm_scale : float, optional
        Factor of q.k; 1/sqrt(D) if None.
    mask : array_like, optional
        Broadcastable to [B, H_q, S, T]. bool: True keeps the key; float: added to the scores.
    window : (left, right), optional
        Query at position p sees keys p - left to p + right; -1 for no limit.
    softcap : float
        Scores become softcap * tanh(score / softcap) before mask and bias; 0 for none.
    alibi_slopes : array_like [H_q], optional
        ``slope * |p - j|`` is taken off the score of key j for the query at position p.
    sink_logits : array_like [H_q], optional
        One further score for each head that has no value: it only takes part in the sum.
    return_lse : bool
        Also return the log of the sum of exponentials of each row, for `merge_attention`.
    out : ndarray, optional
        Where to put the result, [B, H_q, S, Dv].

    Returns
    -------
    out : ndarray [B, H_q, S, Dv]
        In the dtype of *q*. A row that sees no key is 0.
    lse : ndarray float32 [B, H_q, S]
        Only with ``return_lse``; -inf for a row that sees no key.
    """
    query = checks.numbers("q", q)
    if query.ndim != 4:
        raise ValueError(f"q must have shape [batch, num_q_heads, S, head_dim], got {list(query.shape)}")
    keys = checks.tokens("k", k, (query.shape[0], None, None, query.shape[3]), "[batch, num_kv_heads, T, head_dim]")
    shape = (keys.shape[0], keys.shape[1], keys.shape[2], None)
    values = checks.tokens("v", v, shape, "[batch, num_kv_heads, T, v_head_dim]")
    if keys.shape[1] == 0 or keys.shape[3] == 0 or values.shape[3] == 0:
        raise ValueError(f"k and v must have heads and channels, got k {list(keys.shape)} and v {list(values.shape)}")
    state = np.zeros((keys.shape[0], 2), np.int64)
    state[:, LENGTH] = keys.shape[2]
    buffers = KVBuffers(Float32Rows(keys), Float32Rows(values), state)
    request = prepare(
        buffers, keys.shape[2], query, causal=causal, sm_scale=sm_scale, mask=mask, window=window, softcap=softcap,
        alibi_slopes=alibi_slopes, sink_logits=sink_logits, return_lse=return_lse, out=out,
    )  # fmt: skip
    if not COMPILED:
        from kvnumba.uncompiled import attend

        return attend(request, keys, values)
    return run(target(buffers), keys.shape[2], request)


class Request(NamedTuple):
    """A checked call of `attention`: what the kernel takes, and what the caller gets."""

    query: npt.NDArray[np.float32]  #: [B, H_q, S, D], C order
    dtype: np.dtype[Any]  #: of the result
    scale: float
    causal: int  #: 0 or 1: a bool would be slow to hand to compiled code
    extras: Extras | None
    return_lse: bool
    out: Array | None


def prepare(
    buffers: KVBuffers,
    length: int,
    q: Any,
    sinks: int = 0,
    dropped: int = 0,
    /,
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    mask: Any = None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink_logits: Any = None,
    return_lse: bool = False,
    out: Array | None = None,
) -> Request:
    """Check the arguments of attention over buffers that (will) hold *length* tokens; options as in `attention`.

    The first *sinks* tokens are seen through any window; *dropped* tokens are missing between them and the rest.
    """
    first = buffers.k[0]
    query, dtype = checks.query(q, first.shape[0], first.shape[1], first.shape[3])
    scale = checks.scale(sm_scale, first.shape[3])
    extras = None
    cap = checks.softcap(softcap)
    if mask is not None or window is not None or alibi_slopes is not None or sink_logits is not None or cap != 0:
        extras = _extras(mask, window, cap, alibi_slopes, sink_logits, query.shape, length)._replace(
            sinks=sinks, dropped=dropped
        )
    if out is not None:
        checks.output("out", out, (*query.shape[:3], buffers.v[0].shape[3]), dtype)
    causal, return_lse = checks.flag("causal", causal), checks.flag("return_lse", return_lse)
    return Request(query, dtype, scale, int(causal), extras, return_lse, out)


class Target(NamedTuple):
    """Buffers as `run` takes them, made once for many calls."""

    buffers: KVBuffers
    map: npt.NDArray[np.int64]
    entries: Entries
    heads: tuple[int, int, int]  #: [B, H_kv, D] of the keys
    v_dim: int
    scale: float  #: the default of sm_scale
    quick_work: int  #: items of the queries times tokens up to which a call is not worth sharing


def target(buffers: KVBuffers) -> Target:
    """Prepare *buffers* for `run`."""
    batch, heads, _, dim = buffers.k[0].shape
    v_dim = buffers.v[0].shape[3]
    entries = entries_of(type(buffers.k), type(buffers.v))
    scale, quick_work = checks.scale(None, dim), SHARED_WORK * dim // (dim + v_dim)
    return Target(buffers, map_buffers(buffers), entries, (batch, heads, dim), v_dim, scale, quick_work)


def run(to: Target, length: int, request: Request) -> Any:
    """Attention over buffers that hold *length* tokens, as prepared."""
    query, out = request.query, request.out
    v_dim = to.v_dim
    if out is not None and out.dtype == np.float32 and out.flags.carray and not _overlaps(out, to.buffers, request):
        result = out
    else:
        result = np.empty((*query.shape[:3], v_dim), np.float32)
    lse = np.empty(query.shape[:3], np.float32) if request.return_lse else _NO_LSE
    call = (query, result, lse, request.scale, request.causal)
    few, units = kernels.divide(to.buffers.k[0].shape[1], query.shape)
    rows = query.shape[0] * query.shape[1] * query.shape[2]
    shared = rows * length * (query.shape[3] + v_dim) > SHARED_WORK
    if request.extras is None and not shared:
        entry = to.entries.few if few else to.entries.many
        finite = entry(to.map, *call, 0, units)
    else:
        finite = threads.run(_work(to, call, request.extras, few), units, shared)
    if not finite:
        kernels.attend_again(to.buffers, *call, request.extras)
    if out is None and request.dtype == np.float32:
        out = result
    elif out is not result:
        with np.errstate(all="ignore"):  # values beyond a narrower type become infinite
            if out is None:
                out = result.astype(request.dtype)
            else:
                out[...] = result
    return (out, lse) if request.return_lse else out


def quick(to: Target, length: int, q: Any, causal: Any) -> Array | None:
    """Attention as `prepare` and `run` would do it, in half the time, of a decoded token; None: it is not that simple.

    Simple is a small call with float32 queries in C order and no option.
    """
    if (
        not COMPILED
        or type(q) is not np.ndarray
        or q.dtype is not _FLOAT32
        or not q.flags.carray
        or type(causal) is not bool
    ):
        return None
    batch, heads, dim = to.heads
    shape = q.shape
    if len(shape) != 4 or shape[0] != batch or shape[3] != dim or shape[1] % heads:
        return None
    if not 0 < shape[1] * shape[2] <= kernels.FEW_ROWS * heads or q.size * length > to.quick_work:
        return None
    out = np.empty((batch, shape[1], shape[2], to.v_dim), _FLOAT32)
    fine = to.entries.few(to.map, q, out, _NO_LSE, to.scale, 1 if causal else 0, 0, batch * heads)
    return out if fine else None


def at_end(request: Request, counts: Sequence[int]) -> Request:
    """*request* with the first counts[b] queries of row b moved to the end, its last positions, and zeros before."""
    extras = request.extras
    if extras is not None and extras.mask.size and extras.mask.shape[2] > 1:
        mask = np.broadcast_to(extras.mask, (len(counts), *extras.mask.shape[1:]))
        extras = extras._replace(mask=_moved(mask, counts, 0.0, to_end=True))
    query = _moved(request.query, counts, 0.0, to_end=True)
    return request._replace(query=query, extras=extras, return_lse=True, out=None)


def from_end(result: tuple[Array, Array], request: Request, counts: Sequence[int]) -> Any:
    """What *request* asks for, from the result of `at_end` of it."""
    out, lse = _moved(result[0], counts, 0.0, to_end=False), _moved(result[1], counts, -np.inf, to_end=False)
    if request.out is not None:
        request.out[...] = out
        out = request.out
    return (out, lse) if request.return_lse else out


def _moved(x: Array, counts: Sequence[int], filler: float, *, to_end: bool) -> Array:
    """The first counts[b] items along axis 2 of each row moved to its end, or the last ones to its start."""
    moved = np.full_like(x, filler, order="C", subok=False)
    for b, n in enumerate(counts):
        end = x.shape[2] - n
        if to_end:
            moved[b, :, end:] = x[b, :, :n]
        else:
            moved[b, :, :n] = x[b, :, end:]
    return moved


def _overlaps(out: Array, buffers: KVBuffers, request: Request) -> bool:
    """Whether writing *out* could change what is still to be read."""
    read = [request.query, buffers.k[0], buffers.v[0]]
    if request.extras is not None:
        read += [request.extras.mask, request.extras.alibi_slopes, request.extras.sink_logits]
    return any(np.may_share_memory(out, array) for array in read)


def _work(to: Target, call: tuple[Any, ...], extras: Extras | None, few: bool) -> threads.Work:
    """The call as a function of a range of its units."""
    if extras is None:
        entry = to.entries.few if few else to.entries.many
        return lambda first, last: entry(to.map, *call, first, last)
    entry = to.entries.few_with if few else to.entries.many_with
    return lambda first, last: entry(to.map, *call, extras, first, last)


def _extras(
    mask: Any,
    window: Any,
    softcap: float,
    alibi_slopes: Any,
    sink_logits: Any,
    shape: tuple[int, ...],
    length: int,
) -> Extras:
    checked = checks.mask(mask, shape[0], shape[1], shape[2], length)
    added = _NO_MASK
    if checked is not None:
        added = checked.array
        if added.dtype == np.uint8:
            added = np.where(added, np.float32(0), np.float32(-np.inf))
    left, right = (-1, -1) if window is None else checks.window(window)
    slopes = _NONE if alibi_slopes is None else checks.per_head("alibi_slopes", alibi_slopes, shape[1], lowest=-1e30)
    logits = _NONE if sink_logits is None else checks.per_head("sink_logits", sink_logits, shape[1])
    return Extras(added, softcap, left, right, slopes, logits)


def merge_attention(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Array, npt.NDArray[np.float32]]:
    """Merge attention over disjoint sets of keys into attention over all of them.

    Parameters
    ----------
    outs : sequence of arrays [B, H_q, S, Dv]
        Results of attention of the same queries over each set.
    lses : sequence of arrays [B, H_q, S]
        Their ``lse``.

    Returns
    -------
    out : ndarray [B, H_q, S, Dv]
        In the dtype of the first of *outs*; float32 for integers and bool. 0 where no part saw a key.
    lse : ndarray float32 [B, H_q, S]
        -inf where no part saw a key.

    Raises
    ------
    TypeError, ValueError
        Parts of different shapes; an lse of +inf beside numbers that are not 0.

    Notes
    -----
    out = sum of exp(lse_i - lse) * out_i with lse = log of the sum of exp(lse_i), in float64, in the order given.
    A part with lse -inf saw no key and has no weight, whatever it holds. FlashAttention 2 says +inf there, and its
    numbers are 0: such a part has no weight either. A NaN in an lse makes its row NaN.
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"outs and lses must be of the same length, at least 1, got {len(outs)} and {len(lses)}")
    parts = [checks.numbers(f"outs[{i}]", x) for i, x in enumerate(outs)]
    sums = [checks.numbers(f"lses[{i}]", x).astype(np.float64) for i, x in enumerate(lses)]
    for i, (part, lse) in enumerate(zip(parts, sums, strict=True)):
        if part.ndim == 0 or part.shape != parts[0].shape:
            raise ValueError(f"outs[{i}] must have shape {list(parts[0].shape)} as outs[0], got {list(part.shape)}")
        if lse.shape != part.shape[:-1]:
            raise ValueError(f"lses[{i}] must have shape {list(part.shape[:-1])}, got {list(lse.shape)}")
        unseen = np.isposinf(lse)
        wrong = (part[unseen] != 0).any(-1)
        if wrong.any():
            place = [int(n) for n in np.argwhere(unseen)[wrong.argmax()]]
            raise ValueError(
                f"lses[{i}] must be below +inf where outs[{i}] is not 0 (+inf says that no key was seen), got +inf at "
                f"{place}"
            )
        lse[unseen] = -np.inf
    with np.errstate(all="ignore"):
        top = np.maximum.reduce(sums)
        anchor = np.where(np.isneginf(top), 0.0, top)
        weights = [np.exp(lse - anchor) for lse in sums]
        total = np.sum(weights, axis=0)
        merged = np.zeros(parts[0].shape, np.float64)
        for part, weight in zip(parts, weights, strict=True):
            merged += np.where(weight[..., None] > 0, part.astype(np.float64), 0.0) * weight[..., None]
        merged /= np.where(total > 0, total, 1.0)[..., None]
        lse = anchor + np.log(total)
        dtype = parts[0].dtype if parts[0].dtype.kind not in "iub" else np.dtype(np.float32)
        return merged.astype(dtype), lse.astype(np.float32)


def _parts(name: str, parts: Any) -> list[Any]:
    """*parts*, a sequence or any other iterable, as a list."""
    try:
        return list(parts)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of arrays, one for each part, got {type(parts).__name__}") from None

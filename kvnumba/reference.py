"""The same in plain NumPy: quantization, packing, attention and the cache, written from the formulas.

Nothing here is fast. Codes and parameters use float32 arithmetic exactly as the definition of the format says, so
kernels are compared with them bit for bit. Attention uses float64. Only ``numpy`` and ``kvnumba.spec`` are imported,
and ``import kvnumba`` does not import this file.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvnumba.spec import BITS, BLOCK, CODE_FORMATS, SINK, CacheSpec, Sized

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

# ---------------------------------------------------------------------------------------------- codes


def quantize_group(x: ArrayLike, bits: int, axis: int) -> tuple[U8, F32, F32]:
    """Quantize *x*, one group for each slice along *axis*.

    Parameters
    ----------
    x : array_like
        Finite numbers; taken as float32.
    bits : int
        4 or 8; the largest code is ``L = 2**bits - 1``.
    axis : int
        The axis whose elements share one ``lo`` and one ``scale``.

    Returns
    -------
    codes : uint8 array, shape of *x*
    lo, scale : float32 arrays, shape of *x* with length 1 along *axis*
        ``lo`` is the smallest element; ``scale = (hi - lo) / L``, or 1 where that is not > 0.
    """
    x = np.asarray(x, np.float32)
    levels = np.float32(2**bits - 1)
    lo = x.min(axis, keepdims=True)
    hi = x.max(axis, keepdims=True)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scale = (hi - lo) / levels
        scale = np.where(scale > 0, scale, np.float32(1))
        quotient = (x - lo) / scale
    # x + 0.5 would be rounded itself (0.49999997 + 0.5 is 1); the fraction of a float32 is exact.
    whole = np.trunc(quotient)
    rounded = whole + (quotient - whole >= np.float32(0.5))
    codes = np.clip(rounded, 0, levels).astype(np.uint8)
    return codes, lo, scale


def dequantize(codes: U8, lo: F32, scale: F32) -> F32:
    """Values of *codes*: ``lo + codes * scale`` in float32, the product rounded before the sum.

    *lo* and *scale* must broadcast to the shape of *codes*.
    """
    product = codes.astype(np.float32) * np.asarray(scale, np.float32)
    return np.asarray(lo, np.float32) + product


def pack_nibbles(codes: ArrayLike) -> U8:
    """Pack codes 0..15, shape [..., n], two to a byte: even index in the low nibble; an odd end is padded with 0."""
    codes = np.asarray(codes, np.uint8)
    n = codes.shape[-1]
    packed = np.zeros((*codes.shape[:-1], (n + 1) // 2), np.uint8)
    packed[...] = codes[..., 0::2]
    packed[..., : n // 2] |= codes[..., 1::2] << 4
    return packed


def unpack_nibbles(packed: ArrayLike, n: int) -> U8:
    """First *n* codes of each packed row: inverse of :func:`pack_nibbles`; result has shape [..., n]."""
    packed = np.asarray(packed, np.uint8)
    codes = np.empty((*packed.shape[:-1], n), np.uint8)
    codes[..., 0::2] = packed[..., : (n + 1) // 2] & 15
    codes[..., 1::2] = packed[..., : n // 2] >> 4
    return codes


def to_bfloat16(x: ArrayLike) -> NDArray[np.uint16]:
    """Upper halves of the float32 numbers *x*, rounded to nearest, ties to even; a NaN stays a NaN."""
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def from_bfloat16(halves: NDArray[np.uint16]) -> F32:
    """float32 numbers whose upper halves are *halves*."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


# ---------------------------------------------------------------------------------------------- attention


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    mask: ArrayLike | None = None,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    window_sinks: int = 0,
    alibi_slopes: ArrayLike | None = None,
    sink_logits: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    return_lse: bool = False,
) -> Any:
    """Softmax attention in float64.

    ``score = softcap(q.k * sm_scale) + bias``; the weights are the softmax of the scores of the keys that are seen.

    Parameters
    ----------
    q : array_like, [B, H_q, S, D]
        The queries: the last S positions of each sequence. Head h reads KV head ``h // (H_q // H_kv)``.
    k, v : array_like, [B, H_kv, T, D] and [B, H_kv, T, Dv]
    causal : bool
        Query i sees keys j <= length - S + i.
    sm_scale : float, optional
        Default 1/sqrt(D).
    mask : array_like, optional
        Broadcastable to [B, H_q, S, T]. Bool: True is seen. Float: added to the score; -inf is not seen.
    softcap : float
        If not 0, scores become ``softcap * tanh(score / softcap)`` before anything is added.
    window : (int, int)
        Query i sees keys from ``length - S + i - left`` to ``length - S + i + right``; a negative side is open.
    window_sinks : int
        The first keys are seen though they lie before the window.
    alibi_slopes : array_like, [H_q], optional
        Adds ``-slope * |length - S + i - j|``.
    sink_logits : array_like, [H_q], optional
        One more logit for each head, which takes part in the denominator (and in lse) and has no value.
    lengths : array_like of int, [B], optional
        Keys in use of each sequence; those from there on are not seen. Default T.
    return_lse : bool
        Also return the logarithm of the denominators.

    Returns
    -------
    out : float64 [B, H_q, S, Dv]
        A row that sees nothing is 0.
    lse : float64 [B, H_q, S]
        Only with *return_lse*; -inf for a row whose denominator is 0.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, num_heads, num_rows, dim = q.shape
    num_keys, group = k.shape[2], num_heads // k.shape[1]
    sm_scale = 1 / np.sqrt(dim) if sm_scale is None else float(sm_scale)
    seen, bias = _seen_and_bias(mask, (batch, num_heads, num_rows, num_keys))
    lengths = np.full(batch, num_keys) if lengths is None else np.asarray(lengths, np.int64)

    out = np.zeros((batch, num_heads, num_rows, v.shape[3]))
    lse = np.full((batch, num_heads, num_rows), -np.inf)
    for b in range(batch):
        distance = lengths[b] - num_rows + np.arange(num_rows)[:, None] - np.arange(num_keys)  # [S, T]
        reach = _reach(distance, causal, window, window_sinks) & (np.arange(num_keys) < lengths[b])
        for h in range(num_heads):
            with np.errstate(invalid="ignore"):  # hidden keys may hold anything
                score = q[b, h] @ k[b, h // group].T * sm_scale
            if softcap:
                score = softcap * np.tanh(score / softcap)
            score = score + bias[b, h]
            if alibi_slopes is not None:
                score = score - np.asarray(alibi_slopes, np.float64)[h] * np.abs(distance)
            sink = -np.inf if sink_logits is None else float(np.asarray(sink_logits)[h])
            for i in range(num_rows):
                picked = np.flatnonzero(reach[i] & seen[b, h, i])
                out[b, h, i], lse[b, h, i] = _row(score[i, picked], v[b, h // group, picked], sink)
    return (out, lse) if return_lse else out


def _seen_and_bias(mask: ArrayLike | None, shape: tuple[int, ...]) -> tuple[NDArray[np.bool_], F64]:
    """What a mask means: which keys are seen, bool, and what is added to their scores, float64; both of *shape*."""
    if mask is None:
        return np.ones(shape, bool), np.zeros(shape)
    mask = np.broadcast_to(np.asarray(mask), shape)
    if mask.dtype == bool:
        return mask, np.zeros(shape)
    bias = mask.astype(np.float64)
    return bias != -np.inf, bias


def _reach(distance: NDArray[np.int64], causal: bool, window: tuple[int, int], sinks: int) -> NDArray[np.bool_]:
    """Whether a key at *distance* [S, T] tokens before the query is within the causal range and the window."""
    left, right = window
    reach = np.ones(distance.shape, bool)
    if causal:
        reach &= distance >= 0
    if left >= 0:
        reach &= (distance <= left) | (np.arange(distance.shape[1]) < sinks)
    if right >= 0:
        reach &= -distance <= right
    return reach


def _row(score: F64, v: F64, sink: float) -> tuple[F64, float]:
    """One row of attention over the keys it sees: score [n], v [n, Dv]."""
    top = max(score.max(initial=-np.inf), sink)
    if top == -np.inf:
        return np.zeros(v.shape[1]), -np.inf
    weights = np.exp(score - top)
    total = weights.sum() + np.exp(sink - top)
    return weights @ v / total, float(top + np.log(total))


def merge_attention(outs: Iterable[ArrayLike], lses: Iterable[ArrayLike]) -> tuple[F64, F64]:
    """Attention over the union of disjoint sets of keys, from the results over each of them.

    Parameters
    ----------
    outs : n arrays [B, H_q, S, Dv]
    lses : n arrays [B, H_q, S]

    Returns
    -------
    out : float64 [B, H_q, S, Dv]
    lse : float64 [B, H_q, S]
    """
    out = np.stack([np.asarray(o, np.float64) for o in outs])  # [n, B, H_q, S, Dv]
    lse = np.stack([np.asarray(x, np.float64) for x in lses])  # [n, B, H_q, S]
    top = lse.max(0)
    finite_top = np.where(top == -np.inf, 0, top)
    weights = np.exp(lse - finite_top)
    total = weights.sum(0)
    part = weights / np.where(total == 0, 1, total)
    # A part that saw nothing has weight 0 and is left out, whatever it holds.
    merged = np.where(part[..., None] == 0, 0, out * part[..., None]).sum(0)
    with np.errstate(divide="ignore"):
        return merged, finite_top + np.log(total)


# ---------------------------------------------------------------------------------------------- stores


class _FloatRows(Sized):
    """Rows of a float format; ``rows`` has the stored dtype (bfloat16: uint16 halves)."""

    def __init__(self, batch: int, heads: int, dim: int, format: str) -> None:
        self.format = format
        self.rows = self.encode(np.zeros((batch, heads, 0, dim), np.float32))

    def encode(self, x: F32) -> NDArray[Any]:
        if self.format == "bfloat16":
            return to_bfloat16(x)
        with np.errstate(over="ignore", under="ignore"):
            return x.astype(self.format)

    def __len__(self) -> int:
        return int(self.rows.shape[2])

    def append(self, x: F32) -> None:
        self.rows = np.concatenate([self.rows, self.encode(x)], 2)

    def truncate(self, n: int) -> None:
        self.rows = self.rows[:, :, :n]

    def decoded(self) -> F32:
        return from_bfloat16(self.rows) if self.format == "bfloat16" else self.rows.astype(np.float32)

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows.copy()}


class _CodeKeys(Sized):
    """Keys as codes: sinks, then sealed blocks with one group per channel, then the residual.

    Attributes
    ----------
    sinks : float32 [B, H, 0..4, D]
    codes : uint8 [B, H, nblocks, 32, D]
    lo, scale : float32 [B, H, nblocks, D]
    residual : float32 [B, H, 0..31, D]
    kept : float32 [B, H, 32, D] or None
        The rows that the last sealed block was made from.
    """

    def __init__(self, batch: int, heads: int, dim: int, bits: int) -> None:
        self.bits = bits
        self.sinks = np.zeros((batch, heads, 0, dim), np.float32)
        self.codes = np.zeros((batch, heads, 0, BLOCK, dim), np.uint8)
        self.lo = np.zeros((batch, heads, 0, dim), np.float32)
        self.scale = np.zeros((batch, heads, 0, dim), np.float32)
        self.residual = np.zeros((batch, heads, 0, dim), np.float32)
        self.kept: F32 | None = None

    def __len__(self) -> int:
        return self.sinks.shape[2] + BLOCK * self.codes.shape[2] + self.residual.shape[2]

    def append(self, x: F32) -> None:
        room = SINK - self.sinks.shape[2]
        self.sinks = np.concatenate([self.sinks, x[:, :, :room]], 2)
        self.residual = np.concatenate([self.residual, x[:, :, room:]], 2)
        while self.residual.shape[2] >= BLOCK:
            self.seal(self.residual[:, :, :BLOCK])
            self.residual = self.residual[:, :, BLOCK:]

    def seal(self, rows: F32) -> None:
        """Quantize a full block: float32 [B, H, 32, D]."""
        codes, lo, scale = quantize_group(rows, self.bits, axis=2)
        self.codes = np.concatenate([self.codes, codes[:, :, None]], 2)
        self.lo = np.concatenate([self.lo, lo], 2)
        self.scale = np.concatenate([self.scale, scale], 2)
        self.kept = rows.copy()

    def truncate(self, n: int) -> None:
        last = self.codes.shape[2] - 1
        sealed, rest = divmod(max(n - SINK, 0), BLOCK)
        self.sinks = self.sinks[:, :, :n]
        if sealed > last:
            self.residual = self.residual[:, :, :rest]
            return
        if sealed == last and self.kept is not None:
            cut = self.kept
        else:
            cut = self.decoded_blocks()[:, :, sealed]
        self.residual, self.kept = cut[:, :, :rest], None
        self.codes = self.codes[:, :, :sealed]
        self.lo = self.lo[:, :, :sealed]
        self.scale = self.scale[:, :, :sealed]

    def decoded_blocks(self) -> F32:
        """Values of the sealed blocks: float32 [B, H, nblocks, 32, D]."""
        return dequantize(self.codes, self.lo[:, :, :, None], self.scale[:, :, :, None])

    def decoded(self) -> F32:
        batch, heads, blocks, _, dim = self.codes.shape
        return np.concatenate(
            [self.sinks, self.decoded_blocks().reshape(batch, heads, blocks * BLOCK, dim), self.residual], 2
        )

    def state(self) -> dict[str, Any]:
        arrays = ("sinks", "codes", "lo", "scale", "residual", "kept")
        return {name: copy.copy(getattr(self, name)) for name in arrays}


class _CodeValues(Sized):
    """Values as codes: sinks, then one group per token.

    Attributes
    ----------
    sinks : float32 [B, H, 0..4, D]
    codes : uint8 [B, H, n, D]
    lo, scale : float32 [B, H, n]
    """

    def __init__(self, batch: int, heads: int, dim: int, bits: int) -> None:
        self.bits = bits
        self.sinks = np.zeros((batch, heads, 0, dim), np.float32)
        self.codes = np.zeros((batch, heads, 0, dim), np.uint8)
        self.lo = np.zeros((batch, heads, 0), np.float32)
        self.scale = np.zeros((batch, heads, 0), np.float32)

    def __len__(self) -> int:
        return self.sinks.shape[2] + self.codes.shape[2]

    def append(self, x: F32) -> None:
        room = SINK - self.sinks.shape[2]
        self.sinks = np.concatenate([self.sinks, x[:, :, :room]], 2)
        codes, lo, scale = quantize_group(x[:, :, room:], self.bits, axis=3)
        self.codes = np.concatenate([self.codes, codes], 2)
        self.lo = np.concatenate([self.lo, lo[..., 0]], 2)
        self.scale = np.concatenate([self.scale, scale[..., 0]], 2)

    def truncate(self, n: int) -> None:
        self.sinks = self.sinks[:, :, :n]
        rest = max(n - SINK, 0)
        self.codes = self.codes[:, :, :rest]
        self.lo = self.lo[:, :, :rest]
        self.scale = self.scale[:, :, :rest]

    def decoded(self) -> F32:
        return np.concatenate([self.sinks, dequantize(self.codes, self.lo[..., None], self.scale[..., None])], 2)

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name).copy() for name in ("sinks", "codes", "lo", "scale")}


# ---------------------------------------------------------------------------------------------- cache


class ReferenceKVCache(Sized):
    """``KVCache`` in plain NumPy, every format, every array of its state in the open.

    Parameters
    ----------
    num_kv_heads, head_dim, k_format, v_format, batch_size, v_head_dim
        As of ``KVCache``.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        k_format: str = "float32",
        v_format: str = "float32",
        batch_size: int = 1,
        capacity: int = 0,
        v_head_dim: int | None = None,
    ) -> None:
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.spec = CacheSpec(num_kv_heads, head_dim, v_head_dim, k_format, v_format, batch_size)
        self.reset()

    def reset(self) -> None:
        """Forget all tokens; the rows remain."""
        # One row of a batch by itself, so that no row can depend on another. A cache without rows has a length too.
        rows = range(max(1, self.spec.batch_size))
        self._k = [self._new_k() for _ in rows]
        self._v = [self._new_v() for _ in rows]

    def _new_k(self) -> _FloatRows | _CodeKeys:
        heads, dim, format = self.spec.num_kv_heads, self.spec.head_dim, self.spec.k_format
        return _CodeKeys(1, heads, dim, BITS[format]) if format in CODE_FORMATS else _FloatRows(1, heads, dim, format)

    def _new_v(self) -> _FloatRows | _CodeValues:
        heads, dim, format = self.spec.num_kv_heads, self.spec.v_head_dim, self.spec.v_format
        return _CodeValues(1, heads, dim, BITS[format]) if format in CODE_FORMATS else _FloatRows(1, heads, dim, format)

    def __len__(self) -> int:
        return max(len(row) for row in self._k)

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return len(self)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in self._k][: self.spec.batch_size]

    def append(self, k: ArrayLike, v: ArrayLike, *, lengths: ArrayLike | None = None) -> None:
        """Add tokens: k [B, H_kv, S, D], v [B, H_kv, S, Dv], taken as float32; of row b only the first lengths[b].

        Raises
        ------
        ValueError
            A number that is not finite, for a side that holds codes. Nothing is stored then.
        """
        k, v = np.asarray(k, np.float32), np.asarray(v, np.float32)
        size = k.shape[2]
        if self.spec.batch_size == 0:
            k, v = (np.zeros((1, *x.shape[1:]), np.float32) for x in (k, v))
        counts = [size] * len(k) if lengths is None or len(np.asarray(lengths)) == 0 else np.asarray(lengths).tolist()
        kept = np.arange(size)[None, None, :, None] < np.reshape(counts, (-1, 1, 1, 1))  # [B, 1, S, 1]
        for name, x, format in (("k", k, self.spec.k_format), ("v", v, self.spec.v_format)):
            bad = ~np.isfinite(x) & kept
            if format in CODE_FORMATS and bad.any():
                where = [int(i) for i in np.argwhere(bad)[0]]
                raise ValueError(f"{name} must be finite for format {format}, got {x[tuple(where)]} at {where}")
        for b, n in enumerate(counts):
            self._k[b].append(k[b : b + 1, :, :n])
            self._v[b].append(v[b : b + 1, :, :n])

    def attend(self, q: ArrayLike, *, causal: bool = True, lengths: ArrayLike | None = None, **options: Any) -> Any:
        """:func:`attention` in float64 over ``keys()`` and ``values()``; *options* as there.

        With *lengths* row b has only lengths[b] queries, the first ones, which are its last positions; the others give
        0 and lse -inf.
        """
        if lengths is None:
            return attention(q, self.keys(), self.values(), causal=causal, lengths=self.lengths, **options)
        q, wanted = np.asarray(q), options.pop("return_lse", False)
        mask = options.pop("mask", None)
        if mask is not None:
            mask = np.broadcast_to(np.asarray(mask), (*q.shape[:3], len(self)))
        out = np.zeros((*q.shape[:3], self.spec.v_head_dim))
        lse = np.full(q.shape[:3], -np.inf)
        for b, n in enumerate(np.asarray(lengths).tolist()):
            own = None if mask is None else mask[b : b + 1, :, :n, : self.lengths[b]]
            out[b, :, :n], lse[b, :, :n] = (x[0] for x in attention(
                q[b : b + 1, :, :n], self._k[b].decoded(), self._v[b].decoded(), causal=causal, return_lse=True,
                mask=own, **options,
            ))  # fmt: skip
        return (out, lse) if wanted else out

    def step(
        self, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, lengths: ArrayLike | None = None, **options: Any
    ) -> Any:
        """``append(k, v, lengths=lengths)``, then ``attend(q, lengths=lengths, **options)``."""
        self.append(k, v, lengths=lengths)
        return self.attend(q, lengths=lengths, **options)

    def truncate(self, n: int | Sequence[int]) -> None:
        """Keep the first *n* tokens, 0 <= n <= length, of every row, or the first n[b] of row b, at most those it has.

        A cut at or after the start of the last sealed key block, while the rows it was made from are kept, leaves
        the keys of a cache never fed the removed tokens. A deeper cut brings the tokens before it in the cut block
        back as residual with their decoded values. Either way no rows are kept for the block before.
        """
        old = [len(row) for row in self._k]
        counts = [n] * len(old) if isinstance(n, (int, np.integer)) else list(n) or old
        highest = [max(old)] * len(old) if isinstance(n, (int, np.integer)) else old
        for count, most in zip(counts, highest, strict=True):
            if not 0 <= count <= most:
                raise ValueError(f"n must be between 0 and the length {most}, got {count}")
        for b, count in enumerate(counts):
            if count < old[b]:
                self._k[b].truncate(count)
                self._v[b].truncate(count)

    def select(self, idx: ArrayLike) -> None:
        """Keep the rows of *idx*, in this order, with repeats or without."""
        rows = np.asarray(idx, np.int64).tolist()
        source = rows or [int(np.argmax([len(row) for row in self._k]))]
        self._k = [copy.deepcopy(self._k[row]) for row in source]
        self._v = [copy.deepcopy(self._v[row]) for row in source]
        self.spec = dataclasses.replace(self.spec, batch_size=len(rows))

    def reorder(self, idx: ArrayLike) -> None:
        """Row i becomes what row idx[i] was."""
        self.select(idx)

    def repeat_interleave(self, n: int) -> None:
        """*n* rows in place of each."""
        self.select(np.repeat(np.arange(self.spec.batch_size), n))

    def keys(self) -> F32:
        """Decoded keys, float32 [B, H_kv, length, D]; zeros past the length of a row."""
        return self._decoded(self._k, self.spec.head_dim)

    def values(self) -> F32:
        """Decoded values, float32 [B, H_kv, length, Dv]; zeros past the length of a row."""
        return self._decoded(self._v, self.spec.v_head_dim)

    def _decoded(self, rows: Sequence[_FloatRows | _CodeKeys | _CodeValues], dim: int) -> F32:
        out = np.zeros((self.spec.batch_size, self.spec.num_kv_heads, len(self), dim), np.float32)
        for b in range(self.spec.batch_size):
            out[b, :, : len(rows[b])] = rows[b].decoded()[0]
        return out

    def k_state(self) -> dict[str, Any]:
        """Copies of the arrays that hold the keys, of rows of one length.

        Codes: ``sinks`` [B, H, 0..4, D], ``codes`` [B, H, nblocks, 32, D], ``lo`` and ``scale`` [B, H, nblocks, D],
        ``residual`` [B, H, 0..31, D], ``kept`` [B, H, 32, D] or None. Float formats: ``rows`` [B, H, length, D].
        """
        return _joined([row.state() for row in self._k])

    def v_state(self) -> dict[str, Any]:
        """Copies of the arrays that hold the values, of rows of one length.

        Codes: ``sinks`` [B, H, 0..4, Dv], ``codes`` [B, H, n, Dv], ``lo`` and ``scale`` [B, H, n]. Float formats:
        ``rows`` [B, H, length, Dv].
        """
        return _joined([row.state() for row in self._v])

    def freeze(self, consume: bool = False) -> ReferenceKVCache:
        """A copy of the state; with *consume* this cache is empty afterwards."""
        snapshot = copy.deepcopy(self)
        if consume:
            self.reset()
        return snapshot

    def unfreeze(self) -> ReferenceKVCache:
        """A cache that goes on from this state."""
        return copy.deepcopy(self)


def _joined(states: list[dict[str, Any]]) -> dict[str, Any]:
    """States of single rows as one of a batch; None where a row has None."""
    parts = {name: [state[name] for state in states] for name in states[0]}
    return {name: None if any(part is None for part in rows) else np.concatenate(rows) for name, rows in parts.items()}

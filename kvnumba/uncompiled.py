"""The caches where Numba is told not to compile (``NUMBA_DISABLE_JIT=1``): the slow float64 reference behind them.

The vector code has no Python form, so a debugger is given the reference instead: the same codes to the bit, the same
checks, attention in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvnumba import cache, checks, reference, window
from kvnumba.buffers import LENGTH, KVBuffers, allocate, allocate_store
from kvnumba.functional import Request

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


def attend(request: Request, k: FloatArray, v: FloatArray, lengths: list[int] | None = None) -> Any:
    """A checked call of attention over float32 keys [B, H, T, D] and values [B, H, T, Dv], by the reference.

    *lengths*: tokens of each row; all of them if None.
    """
    x = request.extras
    options: dict[str, Any] = {}
    if x is not None:
        options = {
            "mask": x.mask if x.mask.size else None,
            "softcap": x.softcap,
            "window": (x.left, x.right),
            "window_sinks": x.sinks,
            "alibi_slopes": x.alibi_slopes if x.alibi_slopes.size else None,
            "sink_logits": x.sink_logits if x.sink_logits.size else None,
        }
    result, lse = reference.attention(
        request.query,
        k,
        v,
        causal=bool(request.causal),
        sm_scale=request.scale,
        lengths=lengths,
        return_lse=True,
        **options,
    )
    out = result.astype(request.dtype)
    if request.out is not None:
        request.out[...] = out
        out = request.out
    return (out, lse.astype(np.float32)) if request.return_lse else out


class KVCache(cache.KVCache):
    """`kvnumba.KVCache` without compiled code."""

    _twin: reference.ReferenceKVCache

    def _restart(self, buffers: KVBuffers) -> None:
        super()._restart(buffers)
        s = self.spec
        self._twin = reference.ReferenceKVCache(
            s.num_kv_heads, s.head_dim, k_format=s.k_format, v_format=s.v_format, batch_size=s.batch_size,
            v_head_dim=s.v_head_dim,
        )  # fmt: skip

    def _write(self, k: FloatArray, v: FloatArray, counts: IntArray | None = None) -> None:
        self._refuse(k, v)
        self._twin.append(k, v, lengths=counts)
        self._count()

    def _run(self, request: Request) -> Any:
        return attend(request, self.keys(), self.values(), self.lengths)

    def _cut(self, lengths: list[int]) -> None:
        self._twin.truncate(lengths)
        self._count()

    def _choose(self, rows: list[int]) -> None:
        super()._choose(rows)
        self._twin.select(rows)

    def _taken(self, rows: Sequence[int], capacity: int) -> KVBuffers:
        spec = replace(self.spec, batch_size=len(rows))
        return allocate(spec, capacity)._replace(state=self._state_of(rows))

    def _count(self) -> None:
        self._buffers.state[:, LENGTH] = self._twin.lengths or len(self._twin)

    def keys(self) -> FloatArray:
        return self._twin.keys()

    def values(self) -> FloatArray:
        return self._twin.values()

    def _clone(self) -> KVCache:
        other = super()._clone()
        assert isinstance(other, KVCache)
        other._twin = copy.deepcopy(self._twin)
        return other

    @property
    def capacity(self) -> int:
        return max(len(self), super().capacity)

    def reserve(self, capacity: int) -> None:
        checks.count("capacity", capacity)


class WindowedKVCache(KVCache, window.WindowedKVCache):
    """`kvnumba.KVCache` with a window, without compiled code; it keeps every token."""

    def _make_room(self, count: int) -> None:
        pass


KVCache._windowed = WindowedKVCache


class QuantizedCache(cache.QuantizedCache):
    """`kvnumba.QuantizedCache` without compiled code: one half of a reference cache."""

    _twin: reference.ReferenceKVCache

    def _new(self, rows: FloatArray) -> Any:
        heads, dim, format = rows.shape[1], rows.shape[3], f"int{self.bits}"
        self._twin = reference.ReferenceKVCache(heads, dim, k_format=format, v_format=format)
        return allocate_store(self._kind, 1, heads, 0, dim)  # says the sizes

    def _write(self, rows: FloatArray) -> None:
        self._twin.append(rows, rows)
        self._state[:, LENGTH] = len(self._twin)

    def _taken(self, capacity: int) -> Any:
        return self._store

    def _decoded(self) -> FloatArray:
        return self._twin.keys() if self.layout == "per_channel" else self._twin.values()

    def _cut(self, n: int) -> None:
        self._twin.truncate(n)
        self._state[:, LENGTH] = n

    def _clone(self) -> QuantizedCache:
        other = super()._clone()
        assert isinstance(other, QuantizedCache)
        if self._store is not None:
            other._twin = copy.deepcopy(self._twin)
        return other

    @property
    def capacity(self) -> int:
        return len(self)

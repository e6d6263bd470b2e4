"""The caches that quantize: `KVCache`, one layer's keys and values, and `QuantizedCache`, one tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvnumba import checks
from kvnumba.buffers import (
    LENGTH,
    FloatRows,
    KeyCodes,
    KeyCodes4,
    KeyCodes8,
    KVBuffers,
    ValueCodes4,
    ValueCodes8,
    allocate,
    allocate_store,
    copy_store,
    grow_store,
    is_coded,
    usable_capacity,
)
from kvnumba.functional import Request, prepare, quick, run, target
from kvnumba.kernels.append import NO_ROOM, NOT_FINITE, advance, append_store, truncate, truncate_store
from kvnumba.kernels.decode import decode_store
from kvnumba.snapshot import Freezable
from kvnumba.spec import BLOCK, SINK, CacheSpec

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]

#: Largest head dimension; sums of byte products stay within int32 far beyond it.
MAX_HEAD_DIM = 1024


class KVCache(Freezable):
    """One layer's keys and values, growing along the sequence, in any of five formats.

    Parameters
    ----------
    num_kv_heads, head_dim : int
        Heads of keys and values; channels of a key, 1 to 1024.
    k_format, v_format : str
        "float32", "float16", "bfloat16", "int8" or "int4", each with each.
    batch_size : int
        Rows that advance together.
    capacity : int
        Tokens to make room for at once; more room is made by doubling.
    v_head_dim : int, optional
        Channels of a value; *head_dim* if None.

    Notes
    -----
    int8 and int4 store codes: the first 4 tokens stay float32; keys are quantized per channel in blocks of 32 tokens,
    once, when a block is full; values per token, as they arrive (KIVI, Liu et al. 2024). `attend` reads the codes.
    The same tokens give the same state however they were split into calls of `append`.

    Large calls are shared between threads (`kvnumba.set_num_threads`); results do not depend on their number.
    One cache may be read (`attend`, `keys`, `values`) by any number of threads at once, but not while it is changed.
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
        self._spec = CacheSpec(
            num_kv_heads=checks.positive_int("num_kv_heads", num_kv_heads),
            head_dim=_head_dim("head_dim", head_dim),
            v_head_dim=_head_dim("v_head_dim", head_dim if v_head_dim is None else v_head_dim),
            k_format=checks.format("k_format", k_format),
            v_format=checks.format("v_format", v_format),
            batch_size=checks.count("batch_size", batch_size),
        )
        self._wanted = checks.count("capacity", capacity)
        self.reset()
        spec = self._spec
        self._k_shape = (spec.batch_size, spec.num_kv_heads, None, spec.head_dim)
        self._v_shape = (spec.batch_size, spec.num_kv_heads, None, spec.v_head_dim)
        self._k_coded, self._v_coded = is_coded(spec.k_format), is_coded(spec.v_format)

    # ---- the main work

    def append(self, k: Any, v: Any) -> None:
        """Append S tokens to every row.

        Parameters
        ----------
        k : array_like [B, H_kv, S, D]
        v : array_like [B, H_kv, S, Dv]
            Any float type, integers or bool, any strides. They are copied.

        Raises
        ------
        ValueError
            Wrong shape; NaN or infinity where the format is a code. Nothing is stored then.
        """
        self._write(*self._checked(k, v))

    def _checked(self, k: Any, v: Any) -> tuple[FloatArray, FloatArray]:
        k = checks.tokens("k", k, self._k_shape, "[batch, num_kv_heads, S, head_dim]")
        v = checks.tokens("v", v, self._v_shape, "[batch, num_kv_heads, S, v_head_dim]")
        checks.same_length("k", k, "v", v)
        return k, v

    def _write(self, k: FloatArray, v: FloatArray) -> None:
        status = self._target.entries.append(self._target.map, k, v)
        if status == NO_ROOM:
            self.reserve(max(len(self) + k.shape[2], 2 * self.capacity))
            status = self._target.entries.append(self._target.map, k, v)
        if status == NOT_FINITE:
            self._refuse(k, v)

    def _refuse(self, k: FloatArray, v: FloatArray) -> None:
        """Raise for the first element that cannot be quantized."""
        if self._k_coded:
            checks.finite("k", k)
        if self._v_coded:
            checks.finite("v", v)

    def attend(self, q: Any, *, causal: bool = True, **options: Any) -> Any:
        """Attention of *q*, the last S positions, over everything stored.

        Parameters
        ----------
        q : array_like [B, H_q, S, D]
            H_q is a multiple of H_kv; query head h reads KV head ``h // (H_q // H_kv)``.
        causal : bool
            Query i sees keys up to position length - S + i.
        sm_scale, mask, window, softcap, alibi_slopes, sink_logits, return_lse, out
            As in `kvnumba.attention`.

        Returns
        -------
        ndarray [B, H_q, S, Dv], or (out, lse) with ``return_lse``
            In the dtype of *q*. A row that sees no key is 0.
        """
        if not options:
            out = quick(self._target, len(self), q, causal)
            if out is not None:
                return out
        return self._run(prepare(self._buffers, len(self), q, causal=causal, **options))

    def step(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """`append` of *k* and *v*, then `attend` of *q*; all are checked before anything is stored."""
        k, v = self._checked(k, v)
        request = prepare(self._buffers, len(self) + k.shape[2], q, **options)
        self._write(k, v)
        return self._run(request)

    def _run(self, request: Request) -> Any:
        return run(self._target, len(self), request)

    # ---- state

    def truncate(self, n: int) -> None:
        """Keep the first *n* tokens; what is removed is erased from memory.

        A cut at or after the start of the last sealed key block leaves the codes, residual and results of a cache that
        was only ever fed the first *n* tokens. A deeper cut, or a second one into the block before, whose float32 rows
        are gone, brings the kept tokens of the cut block back as their decoded values.
        """
        self._cut(checks.length("n", n, len(self)))

    def _cut(self, n: int) -> None:
        truncate(self._buffers, n)

    def reset(self) -> None:
        """Forget all tokens; new buffers of the capacity asked for at the start replace the old ones."""
        self._own(allocate(self._spec, usable_capacity(self._spec, self._wanted)))

    def _own(self, buffers: KVBuffers) -> None:
        self._buffers = buffers
        self._target = target(buffers)

    def keys(self) -> FloatArray:
        """All keys, decoded: a new float32 array [B, H_kv, length, D]."""
        return self._decoded(self._buffers.k, self._spec.head_dim)

    def values(self) -> FloatArray:
        """All values, decoded: a new float32 array [B, H_kv, length, Dv]."""
        return self._decoded(self._buffers.v, self._spec.v_head_dim)

    def _decoded(self, store: Any, dim: int) -> FloatArray:
        out = np.empty((self._spec.batch_size, self._spec.num_kv_heads, len(self), dim), np.float32)
        decode_store(store, self._buffers.state, out)
        return out

    def reserve(self, capacity: int) -> None:
        """Make room for *capacity* tokens in all, at once. New arrays replace `buffers` if there are fewer."""
        wanted = usable_capacity(self._spec, checks.count("capacity", capacity))
        if wanted > self.capacity:
            old = self._buffers
            self._own(KVBuffers(grow_store(old.k, wanted), grow_store(old.v, wanted), old.state))

    def _clone(self) -> KVCache:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        old = self._buffers
        other._own(KVBuffers(copy_store(old.k), copy_store(old.v), old.state.copy()))
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_target"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        old = self._buffers  # arrays may come back read-only, and anywhere in memory
        self._own(KVBuffers(copy_store(old.k), copy_store(old.v), old.state.copy()))

    # ---- what it is

    def __len__(self) -> int:
        return self._buffers.state.item(0)  # LENGTH of the first row; compiled code of the user may have changed it

    @property
    def length(self) -> int:
        """Tokens stored."""
        return len(self)

    @property
    def capacity(self) -> int:
        """Tokens that fit before the next growth."""
        return min(store_capacity(self._buffers.k), store_capacity(self._buffers.v))

    @property
    def spec(self) -> CacheSpec:
        """The fixed numbers of this cache."""
        return self._spec

    @property
    def buffers(self) -> KVBuffers:
        """The arrays, for your own ``@njit`` code (`kvnumba.kernels`). Growing replaces them: `reserve` first."""
        return self._buffers

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens: rows, codes, parameters, sinks and residual; not spare capacity."""
        state = self._buffers.state
        return store_nbytes(self._buffers.k, state) + store_nbytes(self._buffers.v, state)

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of all arrays, spare capacity and the float32 rows kept for `truncate` included."""
        return sum(array.nbytes for store in self._buffers[:2] for array in store)

    def __repr__(self) -> str:
        s = self._spec
        values = f", v_head_dim={s.v_head_dim}" if s.v_head_dim != s.head_dim else ""
        return (
            f"KVCache(num_kv_heads={s.num_kv_heads}, head_dim={s.head_dim}{values}, k_format={s.k_format!r}, "
            f"v_format={s.v_format!r}, batch_size={s.batch_size}, length={len(self)}, capacity={self.capacity})"
        )


class QuantizedCache(Freezable):
    """One tensor [..., S, D] that grows along S and is kept as codes.

    Parameters
    ----------
    layout : str
        "per_channel", as for keys: one group is one channel of a block of 32 tokens, counted after the first 4.
        "per_token", as for values: one group is one token's channels.
    bits : int
        4 or 8.

    Notes
    -----
    The first 4 tokens, and the rows of a per-channel block still filling, are float32. The leading axes and D are those
    of the first `append`.
    """

    def __init__(self, layout: str = "per_channel", bits: int = 8) -> None:
        self._layout, self._bits = checks.layout(layout), checks.bits(bits)
        channel = self._layout == "per_channel"
        self._kind = {(True, 8): KeyCodes8, (True, 4): KeyCodes4, (False, 8): ValueCodes8}.get(
            (channel, self._bits), ValueCodes4
        )
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and the shape, and give the memory back."""
        self._lead: tuple[int, ...] | None = None
        self._dim = 0
        self._store: Any = None
        self._state = np.zeros((1, 2), np.int64)

    def append(self, x: Any) -> None:
        """Append *x*, array_like [..., S, D]: any float type, integers or bool. It is copied.

        Raises
        ------
        ValueError
            Another shape than the stored tokens have; NaN or infinity. Nothing is stored then.
        """
        array = checks.numbers("x", x)
        if array.ndim < 2:
            raise ValueError(f"x must have at least 2 axes [..., S, D], got shape {list(array.shape)}")
        if self._lead is not None and array.shape[:-2] + array.shape[-1:] != (*self._lead, self._dim):
            raise ValueError(
                f"x must have shape {[*self._lead, 'S', self._dim]} as the stored tokens, got {list(array.shape)}"
            )
        dim = _head_dim("the last axis of x", array.shape[-1])
        x = checks.as_float32(array)
        checks.finite("x", x)
        if x.shape[-2] == 0:
            return
        if self._lead is None:
            self._lead, self._dim = array.shape[:-2], dim
        heads = int(np.prod(self._lead, dtype=np.int64))
        self._write(x.reshape(1, heads, x.shape[-2], dim))

    def _write(self, rows: FloatArray) -> None:
        needed = len(self) + rows.shape[2]
        if self._store is None:
            self._store = allocate_store(self._kind, 1, rows.shape[1], needed, rows.shape[3])
        if not append_store(self._store, rows, self._state):
            self._store = grow_store(self._store, max(needed, 2 * self.capacity))
            append_store(self._store, rows, self._state)
        advance(self._state, rows.shape[2])

    def contiguous(self) -> FloatArray:
        """All tokens, decoded: a new float32 array [..., length, D]."""
        if self._lead is None:
            raise ValueError("the cache must hold tokens to have a shape, got an empty one; append first")
        return self._decoded().reshape(*self._lead, len(self), self._dim)

    def _decoded(self) -> FloatArray:
        out = np.empty((1, self._store[0].shape[1], len(self), self._dim), np.float32)
        decode_store(self._store, self._state, out)
        return out

    def truncate(self, n: int) -> None:
        """Keep the first *n* tokens, as `KVCache.truncate`."""
        n = checks.length("n", n, len(self))
        if self._store is not None:
            self._cut(n)

    def _cut(self, n: int) -> None:
        truncate_store(self._store, self._state, n)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._state = self._state.copy()
        if self._store is not None:
            self._store = copy_store(self._store)

    def _clone(self) -> QuantizedCache:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._state = self._state.copy()
        other._store = None if self._store is None else copy_store(self._store)
        return other

    def __len__(self) -> int:
        return int(self._state[0, LENGTH])

    @property
    def length(self) -> int:
        """Tokens stored."""
        return len(self)

    @property
    def capacity(self) -> int:
        """Tokens that fit before the next growth."""
        return 0 if self._store is None else store_capacity(self._store)

    @property
    def layout(self) -> str:
        return self._layout

    @property
    def bits(self) -> int:
        return self._bits

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens: codes, parameters, sinks and residual; not spare capacity."""
        return 0 if self._store is None else store_nbytes(self._store, self._state)

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of all arrays."""
        return 0 if self._store is None else sum(array.nbytes for array in self._store)

    def __repr__(self) -> str:
        shape = "" if self._lead is None else f", shape={[*self._lead, len(self), self._dim]}"
        return f"QuantizedCache(layout={self._layout!r}, bits={self._bits}{shape}, capacity={self.capacity})"


def store_capacity(store: Any) -> int:
    """Tokens that fit into a store."""
    if type(store) in FloatRows:
        return int(store.rows.shape[2])
    blocks = int(store.codes.shape[2])
    return SINK + BLOCK * blocks if blocks else 0


def store_nbytes(store: Any, state: npt.NDArray[np.int64]) -> int:
    """Bytes of the tokens that a store holds."""
    first = store[0]
    heads, dim = first.shape[1], first.shape[3]
    total = 0
    for length in state[:, LENGTH].tolist():
        if type(store) in FloatRows:
            total += heads * length * dim * first.itemsize
            continue
        coded = max(0, length - SINK)
        row = dim * 4
        total += heads * min(length, SINK) * row
        if type(store) in KeyCodes:
            blocks = coded // BLOCK
            total += heads * (blocks * (store.codes.shape[3] + store.params.shape[4] * 8) + coded % BLOCK * row)
        else:
            total += heads * coded * (store.codes.shape[3] // BLOCK + 8)
    return total


def _head_dim(name: str, value: Any) -> int:
    dim = checks.positive_int(name, value)
    if dim > MAX_HEAD_DIM:
        raise ValueError(f"{name} must be at most {MAX_HEAD_DIM}, got {dim}")
    return dim

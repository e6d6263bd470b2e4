"""The caches that quantize: `KVCache`, one layer's keys and values, and `QuantizedCache`, one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvnumba import checks, interchange
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
    is_coded,
    share_store,
    take_store,
    usable_capacity,
)
from kvnumba.functional import Request, Target, at_end, from_end, prepare, quick, run, target
from kvnumba.kernels.append import NO_ROOM, NOT_FINITE, append_store, truncate_rows, truncate_store
from kvnumba.kernels.decode import decode_store
from kvnumba.snapshot import Freezable, SharedBytes
from kvnumba.spec import BLOCK, SINK, CacheSpec

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

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
        Rows. They may hold different numbers of tokens (``lengths``).
    capacity : int
        Tokens to make room for at once; more room is made by doubling.
    v_head_dim : int, optional
        Channels of a value; *head_dim* if None.
    window : int, optional
        Keep the first 4 tokens and the newest only, in constant memory: a query at position p sees them and the keys
        from p - window + 1 on. An integer, not the pair that `attend` takes. See the notes.

    Notes
    -----
    int8 and int4 store codes: the first 4 tokens stay float32; keys are quantized per channel in blocks of 32 tokens,
    once, when a block is full; values per token, as they arrive (KIVI, Liu et al. 2024). `attend` reads the codes.
    The same tokens give the same state however they were split into calls of `append`.

    Large calls are shared between threads (`kvnumba.set_num_threads`); results do not depend on their number.
    One cache may be read (`attend`, `keys`, `values`) by any number of threads at once, but not while it is changed.

    With a window, ``len`` still counts every token; `keys` and `values` are those in memory, at `positions`. These are
    at most ``132 + up(window + 191) + max(256, up(window // 4))`` tokens, where ``up`` rounds up to a multiple of 128:
    644 for a window of 64, 1,668 for 1,024, 5,508 for 4,096. `attend` takes as many queries as still have their whole
    window; `step` takes prompts of any length. At least the newest 64 tokens can be cut. ``window=(left, right)`` of
    `attend`, within the window of the cache, hides the first tokens too. Rows must hold the same number of tokens, and
    there are no `buffers`.
    """

    #: The class of caches with a window.
    _windowed: ClassVar[Any] = None

    # What `_own` sets.
    _spec: CacheSpec
    _k_shape: tuple[int, int, None, int]
    _v_shape: tuple[int, int, None, int]
    _buffers: KVBuffers
    _exposed: bool
    _target: Target

    def __new__(cls, *args: Any, window: int | None = None, **options: Any) -> KVCache:
        if window is None or cls._windowed is None:
            return object.__new__(cls)
        if not issubclass(cls._windowed, cls):
            raise TypeError(f"window must be None for {cls.__name__}; derive the class from {cls._windowed.__name__}")
        return object.__new__(cls._windowed)

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
        window: int | None = None,
    ) -> None:
        self._spec = CacheSpec(
            num_kv_heads=checks.positive_int("num_kv_heads", num_kv_heads),
            head_dim=_head_dim("head_dim", head_dim),
            v_head_dim=_head_dim("v_head_dim", head_dim if v_head_dim is None else v_head_dim),
            k_format=checks.format("k_format", k_format),
            v_format=checks.format("v_format", v_format),
            batch_size=checks.count("batch_size", batch_size),
            window=None if window is None else checks.positive_int("window", window),
        )
        self._wanted = checks.count("capacity", capacity)
        self._k_coded, self._v_coded = is_coded(self._spec.k_format), is_coded(self._spec.v_format)
        self.reset()

    # ---- the main work

    def append(self, k: Any, v: Any, *, lengths: Any = None) -> None:
        """Append S tokens to every row, or lengths[b] of them to row b.

        Parameters
        ----------
        k : array_like [B, H_kv, S, D]
        v : array_like [B, H_kv, S, Dv]
            Any float type, integers or bool, any strides. They are copied.
        lengths : sequence of int [B], optional
            Row b takes its first lengths[b] tokens, 0 to S; the others may be anything, NaN too.

        Raises
        ------
        TypeError, ValueError
            Wrong shape or lengths; NaN or infinity where the format is a code. Nothing is stored then.
        """
        if lengths is None:
            self._write(*self._checked(k, v))
        else:
            self._write(*self._padded(*self._checked(k, v), lengths))

    def _checked(self, k: Any, v: Any) -> tuple[FloatArray, FloatArray]:
        k = checks.tokens("k", k, self._k_shape, "[batch, num_kv_heads, S, head_dim]")
        v = checks.tokens("v", v, self._v_shape, "[batch, num_kv_heads, S, v_head_dim]")
        checks.same_length("k", k, "v", v)
        return k, v

    def _padded(self, k: FloatArray, v: FloatArray, lengths: Any) -> tuple[FloatArray, FloatArray, IntArray | None]:
        """*k* and *v* with zeros past the length of each row, and the tokens that each row takes; None: all."""
        size, batch = k.shape[2], self._spec.batch_size
        counts = checks.per_row("lengths", lengths, [size] * batch, "the tokens given")
        if all(n == size for n in counts):
            return k, v, None
        k, v = k.copy(), v.copy()
        for b, n in enumerate(counts):
            k[b, :, n:] = v[b, :, n:] = 0
        return k, v, np.array(counts, np.int64)

    def _write(self, k: FloatArray, v: FloatArray, counts: IntArray | None = None) -> None:
        if self._sharing is not None and k.shape[2] > 0:
            self._claim(self._after(k, counts))
        to = self._target
        if counts is None:
            status = to.entries.append(to.map, k, v)
        else:
            status = to.entries.append_some(to.map, k, v, counts)
        if status == NO_ROOM:
            self.reserve(self._grown(max(self._after(k, counts))))
            self._write(k, v, counts)
        elif status == NOT_FINITE:
            self._unclaim()
            self._refuse(k, v)

    def _after(self, k: FloatArray, counts: IntArray | None) -> list[int]:
        """`_lengths` when the tokens of *k*, of which row b takes counts[b], are stored."""
        old = self._lengths()
        return [n + more for n, more in zip(old, [k.shape[2]] * len(old) if counts is None else counts.tolist())]

    def _refuse(self, k: FloatArray, v: FloatArray) -> None:
        """Raise for the first element that cannot be quantized."""
        if self._k_coded:
            checks.finite("k", k)
        if self._v_coded:
            checks.finite("v", v)

    def attend(self, q: Any, *, causal: bool = True, lengths: Any = None, **options: Any) -> Any:
        """Attention of *q*, the last S positions of each row, over everything stored.

        Parameters
        ----------
        q : array_like [B, H_q, S, D]
            H_q is a multiple of H_kv; query head h reads KV head ``h // (H_q // H_kv)``.
        causal : bool
            Query i of row b sees keys up to position length of the row - S + i. True here and in `step`, where the
            queries are the newest tokens; `kvnumba.attention` takes False if nothing is said.
        lengths : sequence of int [B], optional
            Row b has only lengths[b] queries, 0 to S, the first ones, and they are its last lengths[b] positions: as
            for tokens appended with these lengths. The others are padding: their result is 0, their lse -inf.
        sm_scale, mask, window, softcap, alibi_slopes, sink_logits, return_lse, out
            As in `kvnumba.attention`; the T of a mask is the length of the longest row. *window* is a pair (left,
            right) and hides keys of this call; that of the class is one integer W and drops tokens: the same keys are
            seen as with (W - 1, 0), and the first 4 too.

        Returns
        -------
        ndarray [B, H_q, S, Dv], or (out, lse) with ``return_lse``
            In the dtype of *q*. A query that sees no key, as in a row without tokens, gives 0 and lse -inf.
        """
        if not options and lengths is None:
            out = quick(self._target, self._stored(), q, causal)
            if out is not None:
                return out
        request = self._prepared(q, len(self), causal=causal, **options)
        return self._run(request) if lengths is None else self._run_some(request, lengths)

    def step(self, q: Any, k: Any, v: Any, *, lengths: Any = None, **options: Any) -> Any:
        """`append` of *k* and *v*, then `attend` of *q*; all are checked before anything is stored.

        With *lengths* row b has only lengths[b] tokens, the first ones: query i of a row is that of its token i.
        """
        k, v = self._checked(k, v)
        if lengths is None:
            request = self._prepared(q, len(self) + k.shape[2], **options)
            self._write(k, v)
            return self._run(request)
        k, v, counts = self._padded(k, v, lengths)
        request = self._prepared(q, max(self._after(k, counts)), **options)
        checks.same_length("q", request.query, "k", k)
        self._write(k, v, counts)
        return self._run(request) if counts is None else self._run_some(request, counts.tolist())

    def _prepared(self, q: Any, length: int, **options: Any) -> Request:
        """A checked call of `attend` for when *length* tokens are stored."""
        return prepare(self._buffers, length, q, **options)

    def _run(self, request: Request) -> Any:
        return run(self._target, self._stored(), request)

    def _run_some(self, request: Request, lengths: Any) -> Any:
        """`_run` of the first lengths[b] queries of each row."""
        size, batch = request.query.shape[2], self._spec.batch_size
        counts = checks.per_row("lengths", lengths, [size] * batch, "the queries given")
        return from_end(self._run(at_end(request, counts)), request, counts)

    # ---- state

    def truncate(self, n: Any) -> None:
        """Keep the first *n* tokens of every row, or the first n[b] of row b.

        A cut at or after the start of the last sealed key block leaves the codes, residual and results of a cache that
        was only ever fed the first *n* tokens. A deeper cut, or a second one into the block before, whose float32 rows
        are gone, brings the kept tokens of the cut block back as their decoded values.

        What is removed is erased from memory, or, where a snapshot still has it, left to that. The time does not depend
        on how many tokens are kept.

        Parameters
        ----------
        n : int or sequence of int [B]
            An int must be from 0 to ``len(cache)``; rows that are shorter stay as they are. Each n[b] must be from 0 to
            the length of row b.
        """
        self._cut(self._cuts(n))

    def _cuts(self, n: Any) -> list[int]:
        """`_lengths` after a cut to *n*, checked."""
        old = self._lengths()
        if isinstance(n, (list, tuple, np.ndarray)):
            return checks.per_row("n", n, self.lengths, "the length of the row") or old
        most = checks.length("n", n, len(self))
        return [min(length, most) for length in old]

    def _cut(self, lengths: list[int]) -> None:
        truncate_rows(self._buffers, np.array(lengths, np.int64), not self._settle())

    def reorder(self, idx: Any) -> None:
        """Let row i become what row idx[i] was, all at once and exactly; for instance after a step of beam search.

        Parameters
        ----------
        idx : sequence of int [B]
            From 0 to B - 1, with repeats or without.
        """
        rows = checks.rows("idx", idx, self._spec.batch_size)
        if len(rows) != self._spec.batch_size:
            raise ValueError(
                f"idx must have one entry for each of the {self._spec.batch_size} rows, got {len(rows)}; "
                "select takes any number"
            )
        self._choose(rows)

    def select(self, idx: Any) -> None:
        """Keep the rows of *idx*, in this order, exactly; ``spec.batch_size`` becomes their number.

        Parameters
        ----------
        idx : sequence of int [n]
            From 0 to B - 1, any number, with repeats or without.
        """
        self._choose(checks.rows("idx", idx, self._spec.batch_size))

    def repeat_interleave(self, n: int) -> None:
        """Put *n* rows in place of each, all the same, next to each other; ``spec.batch_size`` grows *n* times."""
        n = checks.positive_int("n", n)
        replace(self._spec, batch_size=n * self._spec.batch_size)  # refuses more than any cache has
        self._choose([row for row in range(self._spec.batch_size) for _ in range(n)])

    def _choose(self, rows: list[int]) -> None:
        self._own(self._taken(rows, self.capacity), replace(self._spec, batch_size=len(rows)))

    def reset(self) -> None:
        """Forget all tokens; new buffers of the capacity asked for at the start replace the old ones. Rows remain."""
        self._restart(self._empty())

    def _empty(self) -> KVBuffers:
        """Buffers as `reset` makes them."""
        return allocate(self._spec, usable_capacity(self._spec, self._wanted))

    def _restart(self, buffers: KVBuffers) -> None:
        """`reset` to *buffers*, those of `_empty`."""
        self._own(buffers)

    def _own(self, buffers: KVBuffers, spec: CacheSpec | None = None, **more: Any) -> None:
        """Let *buffers*, which nobody else has, replace those of before, and so *spec* and attributes *more*."""
        spec = spec or self._spec
        # At once, and the arrays of others first: an exception between two steps (Ctrl-C) must not mix old and new.
        self.__dict__.update(
            _spec=spec,
            _k_shape=(spec.batch_size, spec.num_kv_heads, None, spec.head_dim),
            _v_shape=(spec.batch_size, spec.num_kv_heads, None, spec.v_head_dim),
            _buffers=buffers,
            _exposed=False,
            _target=target(buffers),
            **more,
        )
        self._leave()

    def keys(self) -> FloatArray:
        """All keys, decoded: a new float32 array [B, H_kv, length, D], with zeros past the length of a row.

        With a window only those at `positions`.
        """
        return self._decoded(self._buffers.k, self._spec.head_dim)

    def values(self) -> FloatArray:
        """All values, decoded: a new float32 array [B, H_kv, length, Dv], with zeros past the length of a row.

        With a window only those at `positions`.
        """
        return self._decoded(self._buffers.v, self._spec.v_head_dim)

    def _decoded(self, store: Any, dim: int) -> FloatArray:
        out = np.zeros((self._spec.batch_size, self._spec.num_kv_heads, self._stored(), dim), np.float32)
        decode_store(store, self._buffers.state, out)
        return out

    def reserve(self, capacity: int) -> None:
        """Make room for *capacity* tokens in all, at once. New arrays replace `buffers` if there are fewer."""
        wanted = usable_capacity(self._spec, checks.count("capacity", capacity))
        if wanted > self.capacity:
            self._own(self._taken(range(self._spec.batch_size), wanted))

    def _part(self, capacity: int = 0) -> None:
        wanted = usable_capacity(self._spec, self._grown(capacity) if capacity > self.capacity else self.capacity)
        self._own(self._taken(range(self._spec.batch_size), wanted))

    def _grown(self, needed: int) -> int:
        """The capacity to go on with where *needed* tokens do not fit."""
        return max(needed, 2 * self.capacity)

    def _taken(self, rows: Sequence[int], capacity: int) -> KVBuffers:
        """Buffers of the tokens of *rows*, and of nothing else."""
        old, state = self._buffers, self._state_of(rows)
        counts = state[: len(rows), LENGTH].tolist()
        return KVBuffers(take_store(old.k, rows, counts, capacity), take_store(old.v, rows, counts, capacity), state)

    def _state_of(self, rows: Sequence[int]) -> IntArray:
        """State of *rows*; of no rows that of the longest, for a cache without rows has a length too."""
        return self._buffers.state[list(rows) or [int(np.argmax(self._lengths()))]]

    def _clone(self) -> KVCache:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        old = self._buffers
        if self._exposed:  # compiled code of the user writes into these arrays, and asks nobody
            other._part()
        else:
            self._share_with(other)
            other._buffers = KVBuffers(share_store(old.k), share_store(old.v), old.state.copy())
            other._target = target(other._buffers)
        return other

    def _take(self) -> KVCache:
        if self._exposed:
            self._part()
        return super()._take()

    def __getstate__(self) -> dict[str, Any]:
        """All but what belongs to this process, and of the buffers the stored tokens only."""
        state = {
            name: value for name, value in self.__dict__.items() if name not in ("_target", "_sharing", "_exposed")
        }
        live = self._taken(range(self._spec.batch_size), usable_capacity(self._spec, self._stored()))
        return {**state, "_buffers": live, "_capacity": self.capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        capacity = state.pop("_capacity")
        self.__dict__.update(state)
        # Arrays may come back read-only, and anywhere in memory.
        self._own(self._taken(range(self._spec.batch_size), capacity))

    def save(self, path: Any) -> None:
        """Write the stored tokens, bit for bit, to a file that `load` reads (docs/file_format.md).

        Parameters
        ----------
        path : str or path
            Taken as it is; what was there is replaced, at once and only when all is written.

        Raises
        ------
        OSError
            The file cannot be written. What was there is untouched.
        """
        interchange.save_layers(path, "KVCache", [self._layer()])

    @classmethod
    def load(cls, path: Any) -> KVCache:
        """A cache that goes on from what `save` wrote. Room to spare is not saved: `reserve` makes it.

        Raises
        ------
        OSError
            There is no such file, or it cannot be read.
        ValueError
            A damaged file, or one of another class or of another version of the format.
        """
        layers = interchange.load_layers(path, "KVCache", cls._restored)
        if len(layers) != 1:
            raise ValueError(f"path must be a file of one layer, got {len(layers)}")
        return layers[0]

    def _layer(self) -> interchange.Layer:
        """What a file holds of this cache."""
        return interchange.Layer(self._spec, self._buffers, 0)

    @classmethod
    def _restored(cls, layer: interchange.Layer) -> KVCache:
        spec = layer.spec
        cache = cls(
            spec.num_kv_heads, spec.head_dim, k_format=spec.k_format, v_format=spec.v_format,
            batch_size=spec.batch_size, v_head_dim=spec.v_head_dim, window=spec.window,
        )  # fmt: skip
        cache._restore(layer)
        return cache

    def _restore(self, layer: interchange.Layer) -> None:
        self._own(layer.buffers)

    # ---- what it is

    def __len__(self) -> int:
        return self._stored()

    def _stored(self) -> int:
        """Tokens in memory of the longest row."""
        state = self._buffers.state  # compiled code of the user may have changed it
        return state.item(0) if len(state) == 1 else max(self._lengths())

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return len(self)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return self._lengths()[: self._spec.batch_size]

    def _lengths(self) -> list[int]:
        """Tokens in memory of each row; of a cache without rows one number all the same."""
        lengths: list[int] = self._buffers.state[:, LENGTH].tolist()
        return lengths

    @property
    def positions(self) -> IntArray:
        """Positions of the tokens that `keys` and `values` return: int64, 0 to length - 1 unless there is a window."""
        return np.arange(self._stored())

    @property
    def capacity(self) -> int:
        """Tokens that fit into memory before it must grow."""
        return min(store_capacity(self._buffers.k), store_capacity(self._buffers.v))

    @property
    def spec(self) -> CacheSpec:
        """The fixed numbers of this cache."""
        return self._spec

    @property
    def buffers(self) -> KVBuffers:
        """The arrays, for your own ``@njit`` code (`kvnumba.kernels`). Growing replaces them: `reserve` first.

        They are this cache's alone: if it shares arrays with a snapshot its tokens are copied first, and as long as it
        has the arrays that were handed out, `freeze` copies too.
        """
        if self._settle():
            self._part()
        self._exposed = True
        return self._buffers

    def _held(self) -> tuple[int, SharedBytes]:
        return stores_held(self._buffers[:2], self._lengths()[: self._spec.batch_size])

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of all arrays, spare capacity and the float32 rows kept for `truncate` included."""
        return sum(array.nbytes for store in self._buffers[:2] for array in store)

    def __repr__(self) -> str:
        s = self._spec
        values = f", v_head_dim={s.v_head_dim}" if s.v_head_dim != s.head_dim else ""
        window = "" if s.window is None else f", window={s.window}"
        return (
            f"KVCache(num_kv_heads={s.num_kv_heads}, head_dim={s.head_dim}{values}, k_format={s.k_format!r}, "
            f"v_format={s.v_format!r}, batch_size={s.batch_size}{window}, length={len(self)}, capacity={self.capacity})"
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

    # What `_own` sets.
    _lead: tuple[int, ...] | None
    _dim: int
    _store: Any
    _state: IntArray

    def __init__(self, layout: str = "per_channel", bits: int = 8) -> None:
        self._layout, self._bits = checks.layout(layout), checks.bits(bits)
        channel = self._layout == "per_channel"
        self._kind = {(True, 8): KeyCodes8, (True, 4): KeyCodes4, (False, 8): ValueCodes8}.get(
            (channel, self._bits), ValueCodes4
        )
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and the shape, and give the memory back."""
        self._own(_lead=None, _dim=0, _store=None, _state=np.zeros((1, 2), np.int64))

    def _own(self, **state: Any) -> None:
        """Let *state*, which nobody else has, replace that of before: at once, and that of others first."""
        self.__dict__.update(state)
        self._leave()

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
        lead = array.shape[:-2]
        rows = x.reshape(1, math.prod(lead), x.shape[-2], dim)
        if self._lead is None:
            self._own(_lead=lead, _dim=dim, _store=self._new(rows))
        self._write(rows)

    def _new(self, rows: FloatArray) -> Any:
        """A store with room for *rows*, the first."""
        return allocate_store(self._kind, 1, rows.shape[1], rows.shape[2], rows.shape[3])

    def _write(self, rows: FloatArray) -> None:
        needed = len(self) + rows.shape[2]
        if self._sharing is not None:
            self._claim([needed])
        if not append_store(self._store, rows, self._state):
            self._part(needed)
            append_store(self._store, rows, self._state)

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
        truncate_store(self._store, self._state, n, not self._settle())

    def _part(self, capacity: int = 0) -> None:
        if capacity > self.capacity:
            capacity = max(capacity, 2 * self.capacity)
        self._own(_store=self._taken(max(capacity, self.capacity)))

    def _taken(self, capacity: int) -> Any:
        """A store of the stored tokens, and of nothing else."""
        return take_store(self._store, [0], self._lengths(), capacity)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_sharing"}
        return state if self._store is None else {**state, "_store": self._taken(self.capacity)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._state = self._state.copy()
        if self._store is not None:
            self._store = self._taken(self.capacity)

    def _clone(self) -> QuantizedCache:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._state = self._state.copy()
        if self._store is not None:
            self._share_with(other)
            other._store = share_store(self._store)
        return other

    def _lengths(self) -> list[int]:
        return [len(self)]

    def _held(self) -> tuple[int, SharedBytes]:
        return stores_held(() if self._store is None else (self._store,), self._lengths())

    def save(self, path: Any) -> None:
        """Write the stored tokens to a file, as `KVCache.save`."""
        settings = {
            "layout": self._layout,
            "bits": self._bits,
            "lead": None if self._lead is None else list(self._lead),
            "dim": self._dim,
        }
        interchange.save_codes(path, settings, self._store, self._state)

    @classmethod
    def load(cls, path: Any) -> QuantizedCache:
        """A cache that goes on from what `save` wrote, as `KVCache.load`."""
        settings, store, state = interchange.load_codes(path, lambda found: cls(found["layout"], found["bits"])._kind)
        cache = cls(settings["layout"], settings["bits"])
        if store is not None:
            lead, dim = tuple(settings["lead"]), _head_dim("dim", settings["dim"])
            cache._own(_lead=lead, _dim=dim, _store=store, _state=state)
        return cache

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


def stores_held(stores: Sequence[Any], lengths: Sequence[int]) -> tuple[int, SharedBytes]:
    """Bytes of the tokens in *stores* whose rows hold *lengths* tokens, as `Freezable._held`."""
    alone, shared = 0, SharedBytes()
    for store in stores:
        array = store[0] if type(store) in FloatRows else store.codes
        for row, length in enumerate(lengths):
            own, size = _row_held(store, length)
            alone += own
            shared[id(array), row] = size
    return alone, shared


def _row_held(store: Any, length: int) -> tuple[int, int]:
    """Bytes of *length* tokens of one row: as float32 beside codes, and all others."""
    first = store[0]
    heads, row = first.shape[1], first.shape[3] * first.itemsize
    if type(store) in FloatRows:
        return 0, heads * length * row
    coded = max(0, length - SINK)
    sinks = heads * min(length, SINK) * row
    if type(store) in KeyCodes:
        blocks, rest = divmod(coded, BLOCK)
        return sinks + heads * rest * row, heads * blocks * (store.codes.shape[3] + store.params.shape[4] * 8)
    return sinks, heads * coded * (store.codes.shape[3] // BLOCK + 8)


def _head_dim(name: str, value: Any) -> int:
    dim = checks.positive_int(name, value)
    if dim > MAX_HEAD_DIM:
        raise ValueError(f"{name} must be at most {MAX_HEAD_DIM}, got {dim}")
    return dim

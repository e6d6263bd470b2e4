"""Sliding windows: a `KVCache` of the first tokens and the newest ones, at constant memory.

The buffers hold the sinks and then tokens that follow each other. Before they outgrow their limit, the oldest after
the sinks are dropped and the rest is moved up, a whole number of tiles at a time: blocks keep their limits, the newest
ones their slots among the float32 rows, and tiles the tokens they hold. So codes and results are, bit for bit, those of
a cache that never dropped a token and sees the same ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvnumba import checks
from kvnumba.buffers import KEPT, LENGTH, FloatRows, KVBuffers, round_up
from kvnumba.cache import KVCache
from kvnumba.functional import Request, prepare
from kvnumba.interchange import Layer
from kvnumba.kernels.tiles import TILE
from kvnumba.spec import BLOCK, SINK
from kvnumba.storage import fault

Array = npt.NDArray[Any]

#: Tokens are dropped in multiples of this; a multiple of two key blocks.
UNIT = TILE

#: Tokens at the end that can always be taken back.
BACK = 64


class WindowedKVCache(KVCache):
    """What ``KVCache(window=W)`` makes.

    ``len`` counts all tokens ever appended and not taken back; `positions` says which of them are in memory.
    """

    _dropped = 0  #: tokens that are gone, between the sinks and the rest

    def __init__(self, *args: Any, window: int, **options: Any) -> None:
        self._window = checks.positive_int("window", window)
        self._limit = limit_of(self._window)
        super().__init__(*args, window=window, **options)

    # ---- the main work

    def append(self, k: Any, v: Any, *, lengths: Any = None) -> None:
        _refuse_lengths(lengths)
        super().append(k, v)

    def attend(self, q: Any, *, causal: bool = True, lengths: Any = None, **options: Any) -> Any:
        _refuse_lengths(lengths)
        if len(self) > self._window:
            options.setdefault("window", None)  # an option, so that this is not taken for a simple call
        return super().attend(q, causal=causal, **options)

    def step(self, q: Any, k: Any, v: Any, *, lengths: Any = None, **options: Any) -> Any:
        _refuse_lengths(lengths)
        k, v = self._checked(k, v)
        query = checks.numbers("q", q)
        size, rows = k.shape[2], query.shape[2] if query.ndim == 4 else 0
        if size == rows > chunk_of(self._window):
            return self._step_pieces(query, k, v, **options)
        most = size + BACK if size <= chunk_of(self._window) else 1 + BACK
        if rows > most:
            raise ValueError(f"q must have at most {most} queries, or as many as k has tokens, {size}, got {rows}")
        after = len(self) + size
        request, dropped = self._prepared(query, after, **options), self._dropped
        self._write(k, v)
        return self._run(request if dropped == self._dropped else self._prepared(query, after, **options))

    def _step_pieces(self, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """`step` of so many tokens that they do not fit beside the window: piece by piece."""
        before, size = len(self), k.shape[2]
        # Checks everything; of the pieces only the first can then fail, which changes nothing.
        whole = prepare(self._buffers, before + size, q, **{**options, "window": None})
        self._refuse(k, v)
        results = []
        for piece in self._pieces(size):
            part = {**options, "out": None}
            if part.get("mask") is not None:
                part["mask"] = _piece_of_mask(part["mask"], piece, before, size)
            results.append(self.step(q[:, :, piece], k[:, :, piece], v[:, :, piece], **part))
        if not whole.return_lse:
            return _joined(results, whole.out)
        return _joined([out for out, _ in results], whole.out), np.concatenate([lse for _, lse in results], 2)

    def _write(self, k: Any, v: Any, counts: Any = None) -> None:
        pieces = self._pieces(k.shape[2])
        if len(pieces) > 1 or self._stored() + k.shape[2] > self._limit:
            self._refuse(k, v)  # before anything is stored or dropped
        for piece in pieces:
            self._make_room(piece.stop - piece.start)
            super()._write(np.ascontiguousarray(k[:, :, piece]), np.ascontiguousarray(v[:, :, piece]))

    def _pieces(self, size: int) -> list[slice]:
        """Parts of *size* new tokens that fit beside the window; all but the last end where a tile does.

        So a key is read as codes or as float32 by the queries of its piece as by those of the whole.
        """
        step = chunk_of(self._window)
        if size <= step:
            return [slice(0, size)]
        first = (SINK - len(self)) % UNIT or step
        ends = [*range(first, size, step), size]
        return [slice(start, end) for start, end in zip([0, *ends], ends)]

    def _make_room(self, count: int) -> None:
        """Drop tokens if *count* more would not fit."""
        if self._stored() + count <= self._limit:
            return
        gone = max(0, self._stored() - SINK - kept_of(self._window)) // UNIT * UNIT
        if self._settle():
            self._part()
        drop(self._buffers, gone)
        self._dropped += gone

    def _prepared(self, q: Any, length: int, **options: Any) -> Request:
        window, mask = options.pop("window", None), options.pop("mask", None)
        left, right, sinks = self._window - 1, -1, SINK
        if window is not None:  # the sinks are not seen through a window that the caller asks for
            left, right, sinks = *checks.window(window), 0
            if not 0 <= left < self._window:
                raise ValueError(f"window must reach back 0 to {self._window - 1} tokens, got {left}; the rest is gone")
        if mask is not None:
            mask = self._columns(checks.numbers("mask", mask), length)
        stored = length - self._dropped
        request = prepare(self._buffers, stored, q, sinks, self._dropped, window=(left, right), mask=mask, **options)
        if self._dropped and stored - request.query.shape[2] - left < SINK:
            raise ValueError(
                f"q must have queries whose window is still there, at most {stored - left - SINK}, "
                f"got {request.query.shape[2]}; step attends while it appends"
            )
        return request

    def _columns(self, mask: Array, length: int) -> Array:
        """Columns of a mask, of *length* or one, for the tokens in memory."""
        if not self._dropped or mask.ndim == 0 or mask.shape[-1] == 1:
            return mask
        if mask.shape[-1] != length:
            raise ValueError(f"mask must have {length} columns, one for each token, got {mask.shape[-1]}")
        return np.concatenate([mask[..., :SINK], mask[..., SINK + self._dropped :]], -1)

    # ---- state

    def _cuts(self, n: Any) -> list[int]:
        n = checks.length("n", n, len(self))
        lowest = self._dropped + SINK + self._window
        if self._dropped and n < lowest:
            raise ValueError(
                f"n must be at least {lowest}, got {n}: the window of later tokens would be gone; "
                "go on from a snapshot, or reset"
            )
        return [min(stored, n - self._dropped) for stored in self._lengths()]

    def _empty(self) -> KVBuffers:
        self._wanted = min(self._wanted, self._limit)
        return super()._empty()

    def _restart(self, buffers: KVBuffers) -> None:
        self._own(buffers, _dropped=0)

    def reserve(self, capacity: int) -> None:
        """Make room for *capacity* tokens in memory, as many as it will ever need at most."""
        super().reserve(min(checks.count("capacity", capacity), self._limit))

    def _layer(self) -> Layer:
        return super()._layer()._replace(dropped=self._dropped)

    @classmethod
    def _restored(cls, layer: Layer) -> KVCache:
        if layer.spec.window is None:
            raise ValueError("path must be a file of a cache with a window, got one without; load it with KVCache")
        return super()._restored(layer)

    def _restore(self, layer: Layer) -> None:
        stored = layer.buffers.state[:, LENGTH]
        if len(set(stored.tolist())) != 1 or stored[0] > self._limit:
            raise fault("a cache with a window cannot hold such lengths")
        if layer.dropped % UNIT or (layer.dropped and stored[0] < SINK + self._window):
            raise fault("a cache with a window cannot have dropped so many")
        super()._restore(layer)
        self._dropped = layer.dropped

    def _grown(self, needed: int) -> int:
        return min(super()._grown(needed), self._limit)

    # ---- what it is

    def __len__(self) -> int:
        return self._stored() + self._dropped

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, all the same."""
        return [len(self)] * self._spec.batch_size

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        positions = np.arange(self._stored())
        positions[SINK:] += self._dropped
        return positions

    @property
    def buffers(self) -> KVBuffers:
        raise AttributeError(
            "buffers of a cache with a window are its own affair: kernels know nothing of what it drops"
        )


KVCache._windowed = WindowedKVCache


def chunk_of(window: int) -> int:
    """Tokens that are stored at once: a quarter of the window, which makes moving the rest cheap."""
    return max(2 * UNIT, round_up(window // 4, UNIT))


def kept_of(window: int) -> int:
    """Tokens after the sinks that stay when others are dropped.

    What the next token sees, and each after a cut by `BACK`; and a tile more, so that the first tile after the sinks,
    which may hold them too, is never one that a window begins in.
    """
    return window - 1 + BACK + UNIT


def limit_of(window: int) -> int:
    """Tokens that are in memory at most."""
    return SINK + round_up(kept_of(window), UNIT) + UNIT + chunk_of(window)


def drop(buffers: KVBuffers, count: int) -> None:
    """Drop *count* tokens, a multiple of UNIT, after the sinks; every batch row holds the same number of tokens."""
    stored = int(buffers.state[:, LENGTH].max())
    for store in buffers[:2]:
        if type(store) in FloatRows:
            _move_up(store.rows, SINK, stored, count)
            continue
        blocks = -(-(stored - SINK) // BLOCK)
        for array in store[1:]:
            _move_up(array, 0, blocks, count // BLOCK)
    buffers.state[:, LENGTH] -= count
    buffers.state[:, KEPT] -= count // BLOCK


def _move_up(array: Array, first: int, last: int, count: int) -> None:
    """Entries first + count to last of axis 2 move to *first*; those that they leave become 0."""
    for rows in array.reshape(-1, *array.shape[2:]):  # head by head: what NumPy copies aside stays small
        rows[first : last - count] = rows[first + count : last]
        rows[last - count : last] = 0


def _refuse_lengths(lengths: Any) -> None:
    if lengths is not None:
        raise ValueError("lengths must be None for a cache with a window, whose rows move on together")


def _piece_of_mask(mask: Any, piece: slice, before: int, size: int) -> Array:
    """Rows and columns of a mask for the queries of *piece*, of *size* that follow *before* tokens."""
    mask = checks.numbers("mask", mask)
    if mask.ndim >= 2 and mask.shape[-2] == size:
        mask = mask[..., piece, :]
    return mask[..., : before + piece.stop] if mask.ndim and mask.shape[-1] == before + size else mask


def _joined(results: list[Array], out: Array | None) -> Array:
    joined = np.concatenate(results, 2)
    if out is None:
        return joined
    out[...] = joined
    return out

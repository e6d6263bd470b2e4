"""Caches of one array that grows along one axis: by concatenation, or in place in a buffer with room to spare.

Any rank, any axis. Neither keeps a reference to an array that it was given. A chunk that does not fit is refused before
anything changes, a chunk of no tokens changes nothing, and ``truncate`` leaves no trace of the tokens that it removes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvnumba import checks, interchange
from kvnumba.buffers import aligned, doubled
from kvnumba.snapshot import Freezable, SharedBytes

_FLOATS = ("float16", "float32", "float64", "bfloat16")
_STORED = ("float32", "float16", "bfloat16")


class _Growing(Freezable):
    """What the two caches share: a buffer, None before the first tokens, whose first ``_length`` tokens are stored."""

    _axis: int
    _length: int
    _buffer: npt.NDArray[Any] | None

    def __len__(self) -> int:
        return self._length

    @property
    def length(self) -> int:
        """Tokens stored."""
        return self._length

    @property
    def axis(self) -> int:
        """The axis that grows."""
        return self._axis

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is stored; before the first tokens all that is known of it: zeros up to ``axis``."""
        return self._stored().shape

    def _held(self) -> tuple[int, SharedBytes]:
        return 0, {} if self._buffer is None else {(id(self._buffer), 0): self._stored().nbytes}

    def _lengths(self) -> list[int]:
        return [self._length]

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of the buffer, with room that is not in use."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def contiguous(self) -> npt.NDArray[Any]:
        """Return the stored tokens as an array of its own, in C order."""
        return np.array(self.view(), order="C")

    def view(self) -> npt.NDArray[Any]:
        raise NotImplementedError

    def _stored(self) -> npt.NDArray[Any]:
        if self._buffer is None:
            return np.empty((0,) * (self._axis + 1), self._storage())
        return self._buffer[self._tokens(0, self._length)]

    def _storage(self) -> np.dtype[Any]:
        raise NotImplementedError

    def _tokens(self, first: int, last: int) -> tuple[slice, ...]:
        """Index of tokens first to last along ``axis``."""
        return (slice(None),) * self._axis + (slice(first, last),)

    def _chunk(self, x: Any) -> npt.NDArray[Any]:
        """*x* as an array, after a check that it continues what is stored."""
        chunk = checks.numbers("x", x)
        if chunk.ndim <= self._axis:
            raise ValueError(
                f"x must have more than {self._axis} axes to grow along axis {self._axis}, got {list(chunk.shape)}"
            )
        if self._buffer is not None:
            known = self._buffer.shape
            if chunk.ndim != len(known) or any(
                n != m for i, (n, m) in enumerate(zip(chunk.shape, known, strict=True)) if i != self._axis
            ):
                wanted = ", ".join("S" if i == self._axis else str(n) for i, n in enumerate(known))
                raise ValueError(
                    f"x must have shape [{wanted}] as the tokens already stored, got {list(chunk.shape)}; "
                    "reset the cache to begin with another shape"
                )
        return chunk

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._buffer is not None and not self._buffer.flags.writeable:  # as after a transfer out of band
            self._buffer = self._buffer.copy()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(axis={self._axis}, shape={self.shape}, dtype={self._storage()})"


class ConcatCache(_Growing):
    """A cache that makes a new array at every append, as a concatenation node in a graph does.

    Each append copies everything stored: simple, and slow for long sequences. The arrays that ``view`` returned before
    never change.

    Parameters
    ----------
    axis : int
        The axis that grows, counted from 0.

    Raises
    ------
    TypeError, ValueError
        If *axis* is not an integer of at least 0.
    """

    def __init__(self, axis: int = 2) -> None:
        self._axis = checks.axis(axis)
        self.reset()

    def append(self, x: Any) -> None:
        """Store a copy of *x* after the tokens already there.

        Parameters
        ----------
        x : array_like
            Any float type, any strides. The first tokens fix the shape, but for ``axis``, and the dtype, in which later
            ones are stored: float16, float32, float64 or bfloat16. Integers and bool become float32; so does a
            bfloat16 tensor of PyTorch.

        Raises
        ------
        TypeError, ValueError
            An array that is not of numbers, or of another shape; nothing is stored.
        """
        chunk = self._chunk(x)
        if chunk.shape[self._axis] == 0:
            return
        dtype = _float_dtype(chunk) if self._buffer is None else self._buffer.dtype
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            new = np.array(chunk, dtype=dtype, order="C")
        self._buffer = new if self._buffer is None else np.concatenate((self._buffer, new), self._axis)
        self._length = self._buffer.shape[self._axis]

    def view(self) -> npt.NDArray[Any]:
        """Return the stored tokens as a read-only array, not copied; it never changes."""
        view = self._stored()
        view.flags.writeable = False
        return view

    def truncate(self, n: int) -> None:
        """Keep the first *n* tokens.

        Raises
        ------
        TypeError, ValueError
            If *n* is not an integer from 0 to the length.
        """
        n = checks.length("n", n, self._length)
        if self._buffer is not None and n < self._length:
            self._buffer = np.array(self._buffer[self._tokens(0, n)], order="C")
            self._length = n

    def reset(self) -> None:
        """Remove all tokens; the next ones may have another shape and dtype."""
        self._buffer, self._length = None, 0

    @property
    def capacity(self) -> int:
        """Tokens that fit: those that are stored."""
        return self._length

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The dtype of the first tokens; None before they came."""
        return None if self._buffer is None else self._buffer.dtype

    def save(self, path: Any) -> None:
        """Write the stored tokens to a file, as `KVCache.save`."""
        array = self._buffer
        interchange.save_array(path, "ConcatCache", self._axis, None if array is None else array.dtype.name, array)

    @classmethod
    def load(cls, path: Any) -> ConcatCache:
        """A cache that goes on from what `save` wrote, as `KVCache.load`."""
        axis, dtype, array = interchange.load_array(path, "ConcatCache", _dtype_named)
        cache = cls(axis)
        if array is not None:
            cache._buffer, cache._length = array, array.shape[axis]
        elif dtype is not None:
            raise ValueError(
                f"path must be a file whose dtype is that of its tokens, got {dtype} and none; save it again"
            )
        return cache

    def _storage(self) -> np.dtype[Any]:
        return np.dtype(np.float32) if self._buffer is None else self._buffer.dtype

    def _clone(self) -> ConcatCache:
        other = ConcatCache(self._axis)
        other._length, other._buffer = self._length, self._buffer  # never written again
        return other


class InPlaceCache(_Growing):
    """A cache with room to spare: an append writes only its own tokens, and a full buffer is doubled.

    Parameters
    ----------
    axis : int
        The axis that grows, counted from 0.
    dtype : str or dtype
        "float32", "float16" or "bfloat16": how tokens are stored, whatever they come as.
    capacity : int
        Tokens to make room for when the first ones come.

    Raises
    ------
    TypeError, ValueError
        If an argument is not of this kind.
    """

    def __init__(self, axis: int = 2, dtype: Any = "float32", capacity: int = 0) -> None:
        self._axis = checks.axis(axis)
        self._format = _stored_format(dtype)
        self._reserved = checks.count("capacity", capacity)
        self.reset()

    def append(self, x: Any) -> None:
        """Store *x* after the tokens already there, rounded to the dtype of the cache.

        Room is made when there is none: for twice the tokens that fitted, or for all there are if that is more.

        Parameters
        ----------
        x : array_like
            Any float type, integers or bool, any strides. The first tokens fix the shape, but for ``axis``.

        Raises
        ------
        TypeError, ValueError
            An array that is not of numbers, or of another shape; nothing is stored.
        """
        chunk = self._chunk(x)
        end = self._length + chunk.shape[self._axis]
        if end == self._length:
            return
        stored = _stored_form(chunk, self._format)
        if self._buffer is None:
            self._buffer = self._room(chunk.shape, max(self._reserved, end))
        elif end > self._buffer.shape[self._axis]:
            self._part(max(2 * self._buffer.shape[self._axis], end))
            self._reallocs += 1
        elif self._sharing is not None:
            self._claim([end])
        self._buffer[self._tokens(self._length, end)] = stored
        self._length = end

    def view(self) -> npt.NDArray[Any]:
        """Return the stored tokens as a read-only array over the buffer itself.

        It stays as it is while tokens are only appended: growth leaves the old buffer to old views. After ``truncate``
        an old view sees zeros, and then new tokens, in place of those removed, if the buffer has not been replaced and
        was never shared with a snapshot.

        A bfloat16 cache returns a view of dtype ``ml_dtypes.bfloat16`` where that package is installed, else a copy
        widened to float32.
        """
        self._viewed = True
        if self._sharing is not None:
            self._sharing.pinned = True
        view = self._stored()
        if self._format == "bfloat16":
            dtype = checks.bfloat16()
            view = _widened(view) if dtype is None else view.view(dtype)
        view.flags.writeable = False
        return view

    def truncate(self, n: int) -> None:
        """Keep the first *n* tokens, and overwrite the others with zeros, if no snapshot has them. The capacity stays.

        Raises
        ------
        TypeError, ValueError
            If *n* is not an integer from 0 to the length.
        """
        n = checks.length("n", n, self._length)
        if self._buffer is not None:
            if not self._settle():
                self._buffer[self._tokens(n, self._length)] = 0
            self._length = n

    def reset(self) -> None:
        """Give the buffer back and become as when made; the next tokens may have another shape."""
        self._length = self._reallocs = 0
        self._buffer = None
        self._leave()

    def save(self, path: Any) -> None:
        """Write the stored tokens to a file, as `KVCache.save`."""
        array = None if self._buffer is None else self._stored()
        interchange.save_array(path, "InPlaceCache", self._axis, self._format, array)

    @classmethod
    def load(cls, path: Any) -> InPlaceCache:
        """A cache that goes on from what `save` wrote, as `KVCache.load`; it has no room to spare."""
        axis, dtype, array = interchange.load_array(path, "InPlaceCache", _storage_of)
        cache = cls(axis, dtype)
        if array is not None:
            cache._buffer, cache._length = array, array.shape[axis]
        return cache

    @property
    def capacity(self) -> int:
        """Tokens that fit before the buffer must grow; before the first tokens, those that room will be made for."""
        return self._reserved if self._buffer is None else self._buffer.shape[self._axis]

    @property
    def reallocs(self) -> int:
        """How often the buffer has been replaced by a larger one."""
        return self._reallocs

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of ``view``."""
        if self._format == "bfloat16":
            return checks.bfloat16() or np.dtype(np.float32)
        return np.dtype(self._format)

    def _storage(self) -> np.dtype[Any]:
        return _storage_of(self._format)

    def _room(self, shape: tuple[int, ...], capacity: int) -> npt.NDArray[Any]:
        # Zeros, not empty: memory that is given out anew may hold tokens of another cache.
        whole = (*shape[: self._axis], capacity, *shape[self._axis + 1 :])
        return aligned(whole, self._storage(), doubled(capacity, shape[self._axis]))

    def _clone(self) -> InPlaceCache:
        other = InPlaceCache(self._axis, self._format, self._reserved)
        other._length, other._reallocs = self._length, self._reallocs
        if self._buffer is not None:
            self._share_with(other)
            other._buffer = self._buffer
        return other

    def _part(self, capacity: int = 0) -> None:
        self._buffer = self._taken(max(capacity, self.capacity))
        self._leave()  # no sooner: until then a cut must not erase what a snapshot has

    def _taken(self, capacity: int) -> npt.NDArray[Any]:
        """A buffer of the stored tokens, and of nothing else."""
        stored = self._stored()
        taken = self._room(stored.shape, capacity)
        taken[self._tokens(0, self._length)] = stored
        return taken

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_sharing", "_viewed")}
        return state if self._buffer is None else {**state, "_buffer": self._taken(self.capacity)}

    def __repr__(self) -> str:
        return (
            f"InPlaceCache(axis={self._axis}, shape={self.shape}, dtype={self._format}, capacity={self.capacity}, "
            f"reallocs={self._reallocs})"
        )


def _float_dtype(array: npt.NDArray[Any]) -> np.dtype[Any]:
    """The dtype in which a ConcatCache keeps *array*."""
    if array.dtype.name in _FLOATS:
        dtype: np.dtype[Any] = array.dtype.newbyteorder("=")
        return dtype
    return np.dtype(np.float64 if array.dtype.kind == "f" else np.float32)


def _dtype_named(name: str | None) -> np.dtype[Any]:
    """The dtype in which a ConcatCache keeps numbers called *name*."""
    if name != "bfloat16":
        return np.dtype(name)
    dtype = checks.bfloat16()
    if dtype is None:
        raise ValueError("path must be a file of numbers that NumPy knows, got bfloat16; install ml_dtypes")
    return dtype


def _storage_of(format: str | None) -> np.dtype[Any]:
    """The dtype in which an InPlaceCache keeps a format."""
    return np.dtype(np.uint16 if format == "bfloat16" else _stored_format(format))


def _stored_format(dtype: Any) -> str:
    listed = ", ".join(f'"{word}"' for word in _STORED)
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name if dtype is not None else "None"
    except TypeError:
        raise TypeError(f"dtype must be one of {listed}, got {dtype!r}") from None
    if name not in _STORED:
        raise ValueError(f"dtype must be one of {listed}, got {name!r}")
    return name


def _stored_form(chunk: npt.NDArray[Any], format: str) -> npt.NDArray[Any]:
    """*chunk* as an InPlaceCache stores it: float32 or float16, or the upper halves of float32 as uint16."""
    if format == "bfloat16":
        return _halved(checks.as_float32(chunk))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return chunk.astype(format, copy=False)


def _halved(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Upper halves of the bits of *x*, rounded to nearest, ties to even; a NaN stays a NaN."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # rounding could carry a NaN into infinity
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def _widened(halves: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)

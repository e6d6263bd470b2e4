"""Snapshots: the state of a cache at one moment, from which any number of caches can go on."""

from __future__ import annotations

import copy
from typing import Any, Generic, Protocol, TypeVar

_C = TypeVar("_C", bound="Cache")
_F = TypeVar("_F", bound="Freezable")


class Cache(Protocol):
    """What a snapshot needs of a cache."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens."""
        ...

    def _clone(self: _C) -> _C:
        """An independent copy: nothing done to the one is seen by the other."""
        ...

    def _take(self: _C) -> _C:
        """A new object that owns this one's state; this one becomes empty."""
        ...


class Snapshot(Generic[_C]):
    """The state of a cache as it was when ``freeze`` was called.

    It never changes: not with the cache it came from, nor with those that ``unfreeze`` returns. ``len`` is the number
    of tokens. It can be copied and pickled.
    """

    def __init__(self, cache: _C) -> None:
        self._cache = cache  # nobody else holds it

    def unfreeze(self) -> _C:
        """Return a cache of its own that goes on from this state."""
        return self._cache._clone()

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens."""
        return self._cache.nbytes

    def __repr__(self) -> str:
        return f"Snapshot({self._cache!r})"


class Freezable:
    """Gives a cache ``freeze``. The class provides ``_clone``, ``reset``, ``nbytes`` and ``__len__``."""

    def freeze(self: _C, *, consume: bool = False) -> Snapshot[_C]:
        """Return a snapshot of the present state.

        Parameters
        ----------
        consume : bool
            Move the state instead of copying it; this cache is then empty, as after ``reset``.
        """
        return Snapshot(self._take() if consume else self._clone())

    def _take(self: _F) -> _F:
        """A new object that owns this one's state; this one becomes empty."""
        taken = object.__new__(type(self))
        taken.__dict__.update(self.__dict__)
        self.reset()  # type: ignore[attr-defined]  # must drop its arrays, not wipe them: they are no longer its own
        return taken

    def __copy__(self: _F) -> _F:
        return self._clone()  # type: ignore[attr-defined]

    def __deepcopy__(self: _F, memo: dict[int, Any]) -> _F:
        return copy.copy(self)

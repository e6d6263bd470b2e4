"""Snapshots: the state of a cache at one moment, from which any number of caches can go on.

Taking and continuing one copies nothing that grows with the length: the owners (caches and snapshots) share arrays in
which a token is written once, past those stored before. One owner may write on, the one that holds all that was ever
written; any other first copies its own tokens into arrays of its own. Nobody erases in shared arrays.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from kvnumba.spec import Sized

_C = TypeVar("_C", bound="Cache")
_F = TypeVar("_F", bound="Freezable")

#: Held while it is settled who shares and who writes; never while tokens are copied.
_settling = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child would wait for ever for a thread that it does not have
    os.register_at_fork(before=_settling.acquire, after_in_parent=_settling.release, after_in_child=_settling.release)

#: Bytes by array and row (identity of the array, row): of two owners the one with more tokens of a row counts.
SharedBytes = dict[tuple[int, int], int]


class Cache(Protocol):
    """What a snapshot needs of a cache."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens."""
        ...

    def _clone(self: _C) -> _C:
        """An independent cache of the same tokens: nothing done to the one is seen by the other."""
        ...

    def _take(self: _C) -> _C:
        """A new object that owns this one's state; this one becomes empty."""
        ...


class Snapshot(Sized, Generic[_C]):
    """The state of a cache as it was when ``freeze`` was called.

    It never changes: not with the cache it came from, nor with those that ``unfreeze`` returns. ``len`` is the number
    of tokens. It can be copied and pickled, and used by any number of threads at once.
    """

    def __init__(self, cache: _C) -> None:
        self._cache = cache  # nobody else holds it

    def unfreeze(self) -> _C:
        """Return a cache of its own that goes on from this state.

        It takes the same time for any length. Tokens are copied when a second owner writes: the first cache that
        appends past the longest state of all who share the arrays does so in place.
        """
        return self._cache._clone()

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens, those shared with other owners included: `kvnumba.nbytes` counts them once."""
        return self._cache.nbytes

    def __repr__(self) -> str:
        return f"Snapshot({self._cache!r})"


class _Sharing:
    """Who shares a set of arrays, and how much was ever written into them."""

    def __init__(self, written: list[int], pinned: bool) -> None:
        self.written = written  #: tokens of each row
        self.pinned = pinned  #: whether views of the arrays are about, which must not see anything overwritten
        self.owners: WeakSet[Any] = WeakSet()


class Freezable(Sized):
    """Gives a cache ``freeze``, and what it needs to share arrays.

    The class provides ``_clone``, ``reset``, ``_lengths``, ``_part`` and ``_held``.
    """

    _sharing: _Sharing | None = None
    #: Whether views of the arrays are about.
    _viewed = False

    def freeze(self: _C, *, consume: bool = False) -> Snapshot[_C]:
        """Return a snapshot of the present state; it takes the same time for any length.

        Parameters
        ----------
        consume : bool
            Move the state instead of sharing it; this cache is then empty, as after ``reset``.
        """
        return Snapshot(self._take() if consume else self._clone())

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens: rows, codes, parameters, sinks and residual; not spare capacity.

        Bytes shared with other owners are included: `kvnumba.nbytes` counts them once.
        """
        return nbytes(self)

    def _lengths(self) -> list[int]:
        """Tokens stored in each row."""
        raise NotImplementedError

    def _part(self, capacity: int = 0) -> None:
        """Copy the stored tokens into arrays of its own, with room for *capacity*, and leave those who share."""
        raise NotImplementedError

    def _held(self) -> tuple[int, SharedBytes]:
        """Bytes of the stored tokens: in arrays of this owner alone, and in those that may be shared."""
        raise NotImplementedError

    # ---- sharing

    def _share_with(self, other: Freezable) -> None:
        """Let *other* own the same arrays."""
        with _settling:
            sharing = self._sharing or _Sharing(self._lengths(), self._viewed)
            sharing.owners.add(self)  # before it shares: an owner that is not counted would be overwritten
            sharing.owners.add(other)
            self._sharing = other._sharing = sharing

    def _leave(self) -> None:
        """Share no longer: the arrays of this cache have been, or will be, replaced."""
        with _settling:
            sharing, self._sharing = self._sharing, None
            if sharing is not None:
                sharing.owners.discard(self)
        self._viewed = False

    def _settle(self) -> bool:
        """Whether others may read the arrays. They are this cache's alone again if the others are gone."""
        if self._sharing is None:
            return False
        with _settling:
            sharing = self._sharing
            # What others wrote past the tokens of this cache must not be taken for room: then it parts instead.
            alone = len(sharing.owners) == 1 and not sharing.pinned and sharing.written == self._lengths()
            if alone:
                self._sharing = None
        return not alone

    def _claim(self, after: list[int]) -> None:
        """Before a cache that shares writes: see to it that it may, up to *after* tokens in each row."""
        if not self._settle():
            return
        with _settling:
            sharing = self._sharing
            first = sharing is not None and sharing.written == self._lengths()
            if first and sharing is not None:
                sharing.written = after
        if not first:
            self._part(max(after))

    def _unclaim(self) -> None:
        """Nothing was written after all."""
        if self._sharing is not None:
            self._sharing.written = self._lengths()

    def _take(self: _F) -> _F:
        """A new object that owns this one's state; this one becomes empty."""
        taken = object.__new__(type(self))
        taken.__dict__.update(self.__dict__)
        if self._sharing is not None:
            with _settling:
                self._sharing.owners.add(taken)
        self.reset()  # type: ignore[attr-defined]  # must drop its arrays, not wipe them: they are no longer its own
        return taken

    def __copy__(self: _F) -> _F:
        return self._clone()  # type: ignore[attr-defined]

    def __deepcopy__(self: _F, memo: dict[int, Any]) -> _F:
        return copy.copy(self)


def nbytes(*objects: Freezable | Snapshot[Any] | Iterable[Any]) -> int:
    """Bytes of the stored tokens of caches and snapshots together, each shared byte counted once.

    Parameters
    ----------
    *objects : caches, snapshots, or iterables of them
        The ``nbytes`` of each counts what it can read, so their sum counts shared bytes more than once.
    """
    alone, shared = 0, SharedBytes()
    for cache in {id(cache): cache for cache in _caches(objects)}.values():
        own, parts = cache._held()
        alone += own
        for place, size in parts.items():
            shared[place] = max(size, shared.get(place, 0))
    return alone + sum(shared.values())


def _caches(objects: Sequence[Any]) -> Iterable[Freezable]:
    for one in objects:
        if isinstance(one, Snapshot):
            one = one._cache
        if isinstance(one, Freezable):
            yield one
        elif isinstance(one, Iterable) and not isinstance(one, (str, bytes)):
            yield from _caches(tuple(one))
        else:
            raise TypeError(f"objects must be caches, snapshots or iterables of them, got {type(one).__name__}")

"""Compilation: the decorators of the package, and where compiled code is kept.

``exact`` compiles what makes bytes: plain IEEE arithmetic, so that codes are the same on every host.
``sums`` compiles what makes sums: contraction, reassociation and approximate functions are allowed.
Neither assumes the absence of NaN or infinity: a masked score is ``-inf``. ``inner`` marks a part of such functions.

Compiled code is kept on disk where Numba would keep it (``NUMBA_CACHE_DIR``, the package's own
``__pycache__``, or the user's cache folder) with one difference: its stamp covers the package's version and every
source file that compiled code is made of (``SOURCES``), so that a newer release, or an edit in a called file, never
runs stale code. Where no place is writable the code is compiled in memory, with one warning.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import caching, config
from numba.extending import register_jitable

from kvnumba._version import __version__

F = TypeVar("F", bound=Callable[..., Any])

#: False when the user asked Numba not to compile (``NUMBA_DISABLE_JIT=1``): classes then use ``reference``.
COMPILED: bool = not config.DISABLE_JIT

#: Floating-point freedoms of ``sums``. Never ``nnan`` or ``ninf``.
SUM_FLAGS = {"nsz", "arcp", "contract", "afn", "reassoc"}

#: Files and folders that hold all compiled functions and all they import: an edit elsewhere leaves compiled code valid.
SOURCES = ("_jit.py", "_version.py", "buffers.py", "kernels", "simd.py", "spec.py")


def _package_stamp() -> str:
    """Digest of the version and of the source files in ``SOURCES``.

    Of what they hold, not of when they were written: installing the same package again leaves compiled code valid.
    """
    root = Path(__file__).parent
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if place.parts[0] in SOURCES:
            source = path.read_bytes()
            digest.update(f"{place.as_posix()}:{len(source)}:".encode() + source)
    return digest.hexdigest()


_stamp: str | None = None


class _Stamped:
    """Mixin for Numba's cache locators: compiled code is valid for one state of ``SOURCES``."""

    def get_source_stamp(self) -> str:
        global _stamp
        if _stamp is None:
            _stamp = _package_stamp()
        return _stamp


class _UserProvided(_Stamped, caching.UserProvidedCacheLocator):  # type: ignore[misc]
    pass


class _InTree(_Stamped, caching.InTreeCacheLocator):  # type: ignore[misc]
    pass


class _UserWide(_Stamped, caching.UserWideCacheLocator):  # type: ignore[misc]
    pass


class _PackageCacheImpl(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_UserProvided, _InTree, _UserWide)


@contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Hold the lock of a cache folder, against other processes that add to its index; without one where none can be."""
    try:
        import fcntl

        handle = open(os.path.join(folder, "kvnumba.lock"), "ab")  # noqa: SIM115
    except (ImportError, OSError):
        yield
        return
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class _PackageCache(caching.FunctionCache):  # type: ignore[misc]
    """Numba's function cache with the package's stamp; a damaged entry counts as absent.

    Two processes that save the same function at once could name their files alike, and one would then load the code
    of the other's signature: entries are added under a lock, and what is loaded must be of the signature asked for.
    """

    _impl_class = _PackageCacheImpl

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
        except Exception:
            return None  # a cut or foreign file: compile again, and the entry is written anew
        return found if found is not None and found.signature.args == tuple(sig) else None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            self._impl.locator.ensure_cache_path()
            with _alone(self.cache_path):
                try:
                    super().save_overload(sig, data)
                except Exception:  # a damaged index cannot be added to: begin a new one
                    self.flush()
                    super().save_overload(sig, data)
        except Exception as error:
            _warn_uncached(error)


_warned = False


def _warn_uncached(reason: object) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"kvnumba: compiled code cannot be kept on disk ({reason}), so every process compiles anew; "
            "set NUMBA_CACHE_DIR to a writable folder",
            RuntimeWarning,
            stacklevel=3,
        )


def _compile(function: F, **options: Any) -> F:
    dispatcher = numba.njit(nogil=True, error_model="numpy", **options)(function)
    if COMPILED:
        try:
            dispatcher._cache = _PackageCache(function)
        except (RuntimeError, OSError) as error:
            _warn_uncached(error)
    return dispatcher


def exact(function: F) -> F:
    """Compile *function* with IEEE arithmetic: for everything that makes codes, copies and state."""
    return _compile(function)


def sums(function: F) -> F:
    """Compile *function* with the freedoms of ``SUM_FLAGS``: for scores, softmax and weighted sums."""
    return _compile(function, fastmath=SUM_FLAGS)


def inner(function: F) -> F:
    """Make *function* a part of compiled functions: compiled into each of its callers, with their options.

    It is not turned into machine code by itself, which halves the time to the first token.
    """
    return register_jitable(function)


def cache_folder() -> str | None:
    """Folder that holds the package's compiled code, or None when there is no writable one."""
    try:
        return os.fspath(_PackageCache(_package_stamp).cache_path)
    except (RuntimeError, OSError):
        return None

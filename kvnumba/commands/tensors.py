"""Arrays in files, read a part at a time: npy, npz and safetensors. Nothing is ever unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvnumba import checks
from kvnumba.commands import CommandError

Array = npt.NDArray[Any]


class Source(NamedTuple):
    """An array that may be larger than memory."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[tuple[Any, ...]], Array]  #: the part at an index of integers and slices


class Arrays(NamedTuple):
    """The arrays of a file."""

    names: list[str] | None  #: None: one without a name
    get: Callable[[str], Source]


def open_array(path: Path, name: str | None) -> Source:
    """The array *name* of a file; without a name its only one."""
    names, get = open_arrays(path)
    if names is None:
        if name is not None:
            raise CommandError(f"--array must be left out for npy files, got {name!r}", 2)
        return get("")
    if name is None and len(names) == 1:
        return get(names[0])
    if name not in names:
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        got = "none" if name is None else name
        raise CommandError(f"--array must be one of the {len(names)} arrays of {path}, {listed}; got {got}", 2)
    return get(name)


def open_arrays(path: Path, known: str = "an npy, npz or safetensors file") -> Arrays:
    """All arrays of a file; *known* is what the file must be, for the message."""
    with path.open("rb") as file:
        start = file.read(9)
    if path.suffix == ".safetensors" or start[8:] == b"{":
        return _safetensors(path)
    if start.startswith(b"\x93NUMPY"):
        return Arrays(None, lambda _: _npy(path))
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _npz(path, known)
    raise CommandError(f"{path} must be {known}, got a file of another kind")


def _npy(path: Path) -> Source:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # whatever the reader raises for a damaged file
        raise _unreadable(path, "an npy file", error) from None
    return Source(array.shape, str(array.dtype), lambda index: np.asarray(array[index]))


def _npz(path: Path, known: str) -> Arrays:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except Exception as error:  # as above
        raise CommandError(f"{path} must be {known}, got a damaged zip archive: {error}") from None
    if not names:
        raise CommandError(f"{path} must be {known}, got a zip archive without arrays")

    def get(name: str) -> Source:
        try:
            with np.load(path, allow_pickle=False) as archive:
                array = archive[name]  # compressed or not, an npz cannot be mapped
            if not isinstance(array, np.ndarray):
                raise ValueError(f"{name}.npy is no array")
        except Exception as error:  # as above
            raise _unreadable(path, "an npz file", error) from None
        return Source(array.shape, str(array.dtype), lambda index: np.asarray(array[index]))

    return Arrays(names, get)


def _safetensors(path: Path) -> Arrays:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise CommandError('safetensors files need the package safetensors; pip install "kvnumba[cli]"', 2) from None
    checks.bfloat16()  # NumPy knows the type from then on
    try:
        file: Any = safe_open(path, framework="numpy")
        names = list(file.keys())
    except SafetensorError as error:
        raise _unreadable(path, "a safetensors file", error) from None

    def get(name: str) -> Source:
        part = file.get_slice(name)
        dtype = str(part.get_dtype())

        def read(index: tuple[Any, ...]) -> Array:
            try:
                return np.asarray(part[index])
            except (TypeError, AttributeError):  # NumPy has no such type
                needs = "; BF16 needs the package ml_dtypes" if dtype == "BF16" else ""
                raise CommandError(
                    f"{path}: {name} must be F64, F32, F16, BF16 or integers, got {dtype}{needs}"
                ) from None

        return Source(tuple(part.get_shape()), dtype, read)

    return Arrays(names, get)


def _unreadable(path: Path, kind: str, error: Exception) -> CommandError:
    """What to raise for *error* of a reader."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "pickle" in reason or "Python objects" in reason:
        reason = "it holds Python objects, which are never unpickled"
    return CommandError(f"{path} must be {kind} of numbers: {reason}")

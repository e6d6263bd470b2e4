"""Arrays in files, read a part at a time: npy, npz and safetensors. Nothing is ever unpickled."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvnumba import checks
from kvnumba.commands import CommandError

Array = npt.NDArray[Any]

#: Types of safetensors files that NumPy has, little-endian; BF16 as its bits.
TYPES = {
    name: np.dtype(code).newbyteorder("<")
    for name, code in (
        ("F64", "f8"), ("F32", "f4"), ("F16", "f2"), ("BF16", "u2"), ("BOOL", "?"), ("I64", "i8"), ("I32", "i4"),
        ("I16", "i2"), ("I8", "i1"), ("U64", "u8"), ("U32", "u4"), ("U16", "u2"), ("U8", "u1"),
    )
}  # fmt: skip
#: Longest header of a safetensors file.
MAX_HEADER = 100_000_000
_ENTRY = ("dtype", "shape", "data_offsets")


class Source(NamedTuple):
    """An array that may be larger than memory."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int  #: as it is stored, not compressed
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
    if path.suffix.lower() == ".safetensors" or start[8:] == b"{":
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
    return Source(array.shape, str(array.dtype), array.nbytes, lambda index: np.asarray(array[index]))


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
            with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as member:
                shape, dtype = _npy_header(name, member)
        except Exception as error:  # as above
            raise _unreadable(path, "an npz file", error) from None

        @cache
        def array() -> Array:
            """The array in memory: compressed or not, an npz cannot be mapped."""
            try:
                with np.load(path, allow_pickle=False) as archive:
                    return np.asarray(archive[name])
            except Exception as error:  # as above
                raise _unreadable(path, "an npz file", error) from None

        return Source(shape, str(dtype), math.prod(shape) * dtype.itemsize, lambda index: np.asarray(array()[index]))

    return Arrays(names, get)


def _npy_header(name: str, file: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of a member of an npz file."""
    try:
        version = np.lib.format.read_magic(file)
    except ValueError:
        raise ValueError(f"{name}.npy is no array") from None
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:  # of names of fields alone
        raise ValueError(f"{name} is no plain array")
    shape, _, dtype = read[version](file)
    if dtype.hasobject:
        raise ValueError("Python objects")
    return shape, dtype


def _safetensors(path: Path) -> Arrays:
    """The arrays of a safetensors file. Its header is read, and of the data only what is asked for."""
    try:
        start, table = _header(path)
        for name, entry in table.items():
            _check_entry(name, entry, path.stat().st_size - start)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, "a safetensors file", error) from None

    def get(name: str) -> Source:
        dtype, shape, (begin, end) = (table[name][key] for key in _ENTRY)

        def read(index: tuple[Any, ...]) -> Array:
            if dtype not in TYPES:  # NumPy has no such type
                raise CommandError(f"{path}: {name} must be F64, F32, F16, BF16 or integers, got {dtype}")
            if begin == end:
                return np.empty(shape, TYPES[dtype])[index]
            part = np.memmap(path, TYPES[dtype], "r", start + begin, tuple(shape))[index]
            return (part.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else np.asarray(part)

        return Source(tuple(shape), dtype, end - begin, read)

    return Arrays(list(table), get)


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file begin, and its entries by name."""
    with path.open("rb") as file:
        size, first = path.stat().st_size, file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
            raise ValueError(f"its header cannot have {length} bytes")
        try:
            table = json.loads(file.read(length))
        except ValueError:
            raise ValueError("its header is no JSON") from None
    if not isinstance(table, dict):
        raise ValueError("its header is no table of arrays")
    table.pop("__metadata__", None)
    return 8 + length, table


def _check_entry(name: str, entry: Any, size: int) -> None:
    """Raise unless *entry* is that of an array in *size* bytes of data."""
    try:
        dtype, shape, (begin, end) = (entry[key] for key in _ENTRY)
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, ValueError, KeyError):
        raise ValueError(f"the entry of {name} must have dtype, shape and data_offsets") from None
    if not isinstance(dtype, str) or not whole or len(shape) > checks.MAX_AXES or not begin <= end <= size:
        raise ValueError(f"the entry of {name} is not one of an array in this file")
    if dtype in TYPES and math.prod(shape) * TYPES[dtype].itemsize != end - begin:
        raise ValueError(f"{name} of {dtype} {shape} cannot have {end - begin} bytes")


def _unreadable(path: Path, kind: str, error: Exception) -> CommandError:
    """What to raise for *error* of a reader."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "pickle" in reason or "Python objects" in reason:
        reason = "it holds Python objects, which are never unpickled"
    return CommandError(f"{path} must be {kind} of numbers: {reason}")

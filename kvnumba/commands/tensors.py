"""Arrays in files, read a part at a time: npy, npz and safetensors. Nothing is ever unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvnumba.commands import CommandError

Array = npt.NDArray[Any]


class Source(NamedTuple):
    """An array that may be larger than memory."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[tuple[Any, ...]], Array]  #: the part at an index of integers and slices


def open_array(path: Path, name: str | None) -> Source:
    """The array *name* of a file; without a name its only one."""
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path, name)
        if path.suffix == ".npz":
            return _npz(path, name)
        if name is not None:
            raise CommandError(f"--array must be left out for {path.suffix or 'npy'} files, got {name!r}", 2)
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):  # an npz of another name
            return _npz(path, name)
        return Source(array.shape, str(array.dtype), lambda index: np.asarray(array[index]))
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "pickle" in reason or "Python objects" in reason:
            reason = "it holds Python objects, which are never unpickled"
        raise CommandError(f"{path} must be an npy, npz or safetensors file of numbers: {reason}") from None


def _chosen(names: list[str], name: str | None, path: Path) -> str:
    if name is None and len(names) == 1:
        return names[0]
    if name not in names:
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise CommandError(f"--array must be one of the {len(names)} arrays of {path}, {listed}; got {name}", 2)
    return name


def _npz(path: Path, name: str | None) -> Source:
    with np.load(path, allow_pickle=False) as archive:
        array = archive[_chosen(list(archive.files), name, path)]  # compressed or not, an npz cannot be mapped
    return Source(array.shape, str(array.dtype), lambda index: np.asarray(array[index]))


def _safetensors(path: Path, name: str | None) -> Source:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise CommandError('safetensors files need the package safetensors; pip install "kvnumba[cli]"', 2) from None
    try:
        file: Any = safe_open(path, framework="numpy")
        part = file.get_slice(_chosen(list(file.keys()), name, path))
        return Source(tuple(part.get_shape()), str(part.get_dtype()), lambda index: np.asarray(part[index]))
    except SafetensorError as error:
        raise CommandError(f"{path} must be a safetensors file: {error}") from None

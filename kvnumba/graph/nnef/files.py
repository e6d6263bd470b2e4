"""NNEF models in folders and archives."""

from __future__ import annotations

import io
import os
import re
import tarfile
import tempfile
from pathlib import Path

import nnef as _nnef
import numpy as np

from kvnumba.graph.nnef.model import Array, Model, Operation, parse, text


def load(path: str | os.PathLike[str]) -> Model:
    """Read a model from a folder, or from an archive of one (``.tar``, ``.tgz``).

    Raises
    ------
    OSError
        There is no such file, or it cannot be read.
    ValueError
        It is no NNEF model, uses an operator that is not known, or is damaged.
    """
    source = Path(path)
    if source.is_dir():
        return _read(source)
    with tempfile.TemporaryDirectory(prefix="kvnumba-") as folder:
        _unpack(source, Path(folder))
        return _read(Path(folder))


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Write *model* to a folder, or to an archive where *path* ends in ``.tar``, ``.tgz`` or ``.tar.gz``.

    An archive that was there is replaced at once; into a folder the files are written one by one.
    """
    target = Path(path)
    files = {"graph.nnef": text(model).encode()}
    for label, array in model.tensors.items():
        files[f"{label}.dat"] = _written(array)
    if not target.name.endswith((".tar", ".tgz", ".tar.gz")):
        target.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (target / name).write_bytes(data)
        return
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".kvnumba-") as folder:
        made = Path(folder) / "model"
        with tarfile.open(made, "w" if target.name.endswith(".tar") else "w:gz") as archive:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        os.replace(made, target)


def _unpack(source: Path, folder: Path) -> None:
    try:
        with tarfile.open(source) as archive:
            for info in archive:
                name = Path(info.name)
                if info.isdir():
                    continue
                if not info.isfile() or len(name.parts) != 1 or name.suffix not in (".nnef", ".dat", ".quant"):
                    raise ValueError(f"{source} must hold graph.nnef and .dat files only, got {info.name!r}")
                part = archive.extractfile(info)
                assert part is not None
                (folder / name).write_bytes(part.read())
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{source} must be a folder or an archive of an NNEF model ({error})") from None


def _read(folder: Path) -> Model:
    graph = folder / "graph.nnef"
    if not graph.is_file():
        raise ValueError(f"{folder} must hold graph.nnef, got none")
    try:
        model = parse(graph.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"graph.nnef must be text ({error})") from None
    for operation in model.operations:
        if operation.kind == "variable":
            label = str(operation.attributes["label"])
            if not re.fullmatch(r"[\w.\-]+", label) or label.startswith("."):
                raise ValueError(f"label of variable {operation.output!r} must be a plain name, got {label!r}")
            model.tensors[label] = _tensor(folder / f"{label}.dat", operation)
    return model


def _tensor(path: Path, operation: Operation) -> Array:
    """The array of a variable, whose header is checked against the file before anything is allocated."""
    shape = [int(n) for n in operation.attributes["shape"]]
    if not path.is_file():
        raise ValueError(f"variable {operation.output!r} must have the file {path.name}, got none")
    size = int(np.prod(shape, dtype=object)) * 4
    found = path.stat().st_size
    if found != 128 + size:
        raise ValueError(
            f"{path.name} must have {128 + size} bytes, a header and float32 of shape {shape}, got {found}"
        )
    with path.open("rb") as file:
        try:
            array = np.asarray(_nnef.read_tensor(file))
        except Exception as error:
            raise ValueError(f"{path.name} must be a tensor of NNEF ({error})") from None
    if list(array.shape) != shape or array.dtype != np.float32:
        raise ValueError(f"{path.name} must be float32 of shape {shape}, got {array.dtype} of {list(array.shape)}")
    return array


def _written(array: Array) -> bytes:
    with tempfile.TemporaryFile() as file:
        _nnef.write_tensor(file, np.ascontiguousarray(array, np.float32))
        file.seek(0)
        return file.read()

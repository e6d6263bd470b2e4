"""NNEF models in folders and archives."""

from __future__ import annotations

import io
import os
import re
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import nnef as _nnef
import numpy as np

from kvnumba.graph.nnef.model import Array, Model, Operation, parse, text, variable
from kvnumba.storage import naming


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
        return _read(source, {})
    with tempfile.TemporaryDirectory(prefix="kvnumba-") as folder:
        return _read(source, _unpack(source, Path(folder)))


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Write *model* to a folder, or to an archive where *path* ends in ``.tar``, ``.tgz`` or ``.tar.gz``.

    All is first written under another name. An archive that was there is then replaced at once; the files of a folder
    one by one, the graph last.

    Raises
    ------
    OSError
        It cannot be written.
    ValueError
        A label is not the name of a file within the folder, or a variable has no tensor; nothing is written.
    """
    target = Path(path)
    files = {_file(one): _written(variable(model, one)) for one in model.operations if one.kind == "variable"}
    files["graph.nnef"] = text(model).encode()
    packed = target.name.endswith((".tar", ".tgz", ".tar.gz"))
    with naming(path), ExitStack() as stack:
        if not packed:
            target.mkdir(parents=True, exist_ok=True)
        beside = target.parent if packed else target
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=beside, prefix=".kvnumba-"))) / "model"
        if packed:
            _pack(files, made, "w" if target.name.endswith(".tar") else "w:gz")
            os.replace(made, target)
            return
        for name, data in files.items():
            _make_folder(made / name).write_bytes(data)
        for name in files:
            _make_folder(target / name)
        for name in files:
            os.replace(made / name, target / name)


def _make_folder(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _pack(files: dict[str, bytes], path: Path, mode: Literal["w", "w:gz"]) -> None:
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def _unpack(source: Path, folder: Path) -> dict[str, Path]:
    """The files of an archive by name. Their names in *folder* are numbers: nothing in the archive says where."""
    files: dict[str, Path] = {}
    try:
        with tarfile.open(source) as archive:
            for info in archive:
                name = info.name.removeprefix("./")
                if info.isdir():
                    continue
                if not info.isfile() or not _within(name) or not name.endswith((".nnef", ".dat", ".quant")):
                    raise ValueError(f"{source} must hold graph.nnef and .dat files only, got {info.name!r}")
                part = archive.extractfile(info)
                assert part is not None
                files[name] = folder / str(len(files))
                files[name].write_bytes(part.read())
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{source} must be a folder or an archive of an NNEF model ({error})") from None
    return files


def _read(source: Path, files: dict[str, Path]) -> Model:
    """The model of an archive with *files*, or of a folder."""
    graph = files.get("graph.nnef", source / "graph.nnef")
    if not graph.is_file():
        raise ValueError(f"{source} must hold graph.nnef, got none")
    try:
        model = parse(graph.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"graph.nnef must be text ({error})") from None
    for operation in model.operations:
        if operation.kind == "variable":
            name = _file(operation)
            model.tensors[str(operation.attributes["label"])] = _tensor(name, files.get(name, source / name), operation)
    return model


def _within(name: str) -> bool:
    """Whether *name* is that of a file in a folder, here and on other systems."""
    return all(re.fullmatch(r"""[^.\\/:*?"<>|\x00-\x1f][^\\/:*?"<>|\x00-\x1f]*""", part) for part in name.split("/"))


def _file(operation: Operation) -> str:
    """The name of the file of a variable."""
    label = str(operation.attributes["label"])
    if not _within(label):
        raise ValueError(f"label of variable {operation.output!r} must be a plain name, got {label!r}")
    return f"{label}.dat"


def _tensor(name: str, path: Path, operation: Operation) -> Array:
    """The array of a variable, whose header is checked against the file before anything is allocated."""
    shape = list(operation.attributes["shape"])
    if not path.is_file():
        raise ValueError(f"variable {operation.output!r} must have the file {name}, got none")
    size = int(np.prod(shape, dtype=object)) * 4
    found = path.stat().st_size
    if found != 128 + size:
        raise ValueError(f"{name} must have {128 + size} bytes, a header and float32 of shape {shape}, got {found}")
    with path.open("rb") as file:
        try:
            array = np.asarray(_nnef.read_tensor(file))
        except Exception as error:
            raise ValueError(f"{name} must be a tensor of NNEF ({error})") from None
    if list(array.shape) != shape or array.dtype != np.float32:
        raise ValueError(f"{name} must be float32 of shape {shape}, got {array.dtype} of {list(array.shape)}")
    return array


def _written(array: Array) -> bytes:
    with tempfile.TemporaryFile() as file:
        _nnef.write_tensor(file, np.ascontiguousarray(array))
        file.seek(0)
        return file.read()

"""``kvnumba inspect``: what a file holds."""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import kvnumba as kv
from kvnumba.commands import CommandError, existing, print_json
from kvnumba.commands.tensors import Source, open_arrays

#: Longest header of a file of this package that is looked at.
_HEADER = 1 << 26
CLASSES = {name: getattr(kv, name) for name in ("KVCache", "KVCaches", "QuantizedTensor", "QuantizedCache")}
CLASSES |= {name: getattr(kv, name) for name in ("ConcatCache", "InPlaceCache")}
#: Kinds of files, in words.
KNOWN = "a saved cache, QuantizedTensor or graph Session, an npy, npz or safetensors file, or an ONNX model (.onnx)"
#: Rows that a file may hold: the title of their table, and what is a column of it even if it is the same in all rows.
TABLES = {
    "layers": ("caches", ("lengths", "nbytes", "format", "shape", "bytes_per_token")),
    "states": ("states in the order of nodes", ("state", "class", "format", "shape", "length", "nbytes")),
    "arrays": ("arrays", ("shape", "dtype", "nbytes")),
}


def inspect(path: Path, as_json: bool) -> None:
    """Print what a saved cache or session, a quantized array, an array or an ONNX model holds."""
    told = described(existing(path))
    if as_json:
        print_json(told)
        return
    from kvnumba.commands.progress import rows, table

    listed = {name: told.pop(name) for name in TABLES if name in told}
    table(told)
    for name, found in listed.items():
        title, columns = TABLES[name]
        if not found:
            continue
        if "kind" in found[0]:  # of a node of a model: here another word than that for the kind of the file
            found = [{"node": row["node"], "operator": row["kind"], **row} for row in found]
            found = [{key: row[key] for key in row if key != "kind"} for row in found]
        rows(title, found, columns if len(found) > 1 or name == "states" else ())


def described(path: Path) -> dict[str, Any]:
    """Names and values; those of `TABLES` are rows."""
    size = path.stat().st_size
    told: dict[str, Any] = {"file": str(path), "file_bytes": size}
    if path.suffix.lower() == ".onnx":
        return told | _model(path)
    try:
        if (kind := _class_of(path)) is not None:
            return told | _loaded(kind, CLASSES[kind].load(path))
        if members := _states_of(path):
            return told | _session(path, members)
    except (ValueError, RuntimeError) as error:  # damaged; caches need compiled code
        raise CommandError(str(error)) from None
    names, get = open_arrays(path, KNOWN)
    if names is None:
        return told | {"kind": "array"} | _array(get(""))
    arrays = [{"name": name} | _array(get(name)) for name in names]
    total = sum(array["nbytes"] for array in arrays)
    return told | {"kind": "arrays", "count": len(arrays), "nbytes": total, "arrays": arrays}


def _class_of(path: Path) -> str | None:
    """Class of a file of this package; None for any other."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(path.stat().st_size - 8, _HEADER):
            return None
        try:
            meta = json.loads(file.read(length))["__metadata__"]
            kind = json.loads(meta["settings"])["class"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
    return kind if isinstance(kind, str) and kind in CLASSES else None


def _loaded(kind: str, one: Any) -> dict[str, Any]:
    if kind == "QuantizedTensor":
        parts = ("shape", "bits", "layout", "block_size", "axis", "nbytes", "bits_per_value")
        return {"kind": kind, **{name: getattr(one, name) for name in parts}}
    if kind in ("KVCache", "KVCaches"):
        layers = [_layer(i, cache) for i, cache in enumerate([one] if kind == "KVCache" else one)]
        return {"kind": kind, "length": one.length, "nbytes": one.nbytes, "layers": layers}
    told = {"kind": kind, "length": len(one), "nbytes": one.nbytes}
    names = ("layout", "bits") if kind == "QuantizedCache" else ("axis", "shape")
    return told | {name: getattr(one, name) for name in names}


def _array(array: Source) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": array.dtype, "nbytes": array.nbytes}


def _states_of(path: Path) -> list[str]:
    """Members of a file of a session, a state each; none for any other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = [info.filename for info in archive.infolist() if info.compress_type == zipfile.ZIP_STORED]
    except Exception:  # whatever the reader raises for what is no archive
        return []
    members = [f"{i}.safetensors" for i in range(len(found))]
    return members if sorted(found) == sorted(members) else []


def _session(path: Path, members: list[str]) -> dict[str, Any]:
    """What `graph.Session.save` wrote: a row for each state."""
    states: list[dict[str, Any]] = []
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(prefix="kvnumba-") as folder:
        for index, member in enumerate(members):
            one = _state(path, archive, member, os.path.realpath(folder))
            form, shape = _form(one)
            states.append(
                {"state": index, "class": type(one).__name__, "format": form, "shape": shape, "length": one.length,
                 "nbytes": one.nbytes}
            )  # fmt: skip
    length, nbytes = min(one["length"] for one in states), sum(one["nbytes"] for one in states)
    return {"kind": "Session", "length": length, "nbytes": nbytes, "states": states}


def _state(path: Path, archive: zipfile.ZipFile, member: str, folder: str) -> Any:
    """The cache in a member of a session's file."""
    part = Path(folder) / member
    try:
        archive.extract(member, folder)
        kind = _class_of(part)
        if kind not in ("KVCache", "QuantizedCache", "ConcatCache"):
            raise ValueError("it is not the file of a cache")
        return CLASSES[kind].load(part)
    except (ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged, {member}: {str(error).replace(str(part), member)}") from None
    finally:
        part.unlink(missing_ok=True)


def _form(one: Any) -> tuple[str, list[int]]:
    """Format and shape of a cache, of a `KVCache` those of the keys: [batch, num_kv_heads, length, head_dim]."""
    if isinstance(one, kv.KVCache):
        spec = one.spec
        return f"{spec.k_format}/{spec.v_format}", [spec.batch_size, spec.num_kv_heads, one.length, spec.head_dim]
    if isinstance(one, kv.QuantizedCache):
        return f"int{one.bits} {one.layout}", list(one.contiguous().shape) if one.length else []
    return str(one.dtype), list(one.shape)


def _layer(index: int, cache: kv.KVCache) -> dict[str, Any]:
    spec = cache.spec
    return {
        "layer": index, "keys": spec.k_format, "values": spec.v_format, "batch": spec.batch_size,
        "kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "v_head_dim": spec.v_head_dim,
        "window": spec.window, "lengths": cache.lengths, "nbytes": cache.nbytes,
        "bytes_per_token": spec.bytes_per_token,
    }  # fmt: skip


def _model(path: Path) -> dict[str, Any]:
    from kvnumba import graph

    try:
        model = _folded(path, graph)
        return {"kind": "ONNX model", "layers": graph.rows(model)}
    except ImportError as error:
        raise CommandError(str(error), 2) from None
    except graph.NoCacheError as error:
        raise CommandError(f"{path}: {error}") from None
    except Exception as error:  # whatever the reader of ONNX raises for a damaged file
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CommandError(f"{path} must be an ONNX model: {reason}") from None


def _folded(path: Path, graph: Any) -> Any:
    """The model as it is if it has caches of ours, else folded."""
    return path if graph.rows(path) else graph.fold_kv_cache(path)

"""``kvnumba inspect``: what a file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kvnumba as kv
from kvnumba.commands import CommandError, existing, print_json
from kvnumba.commands.tensors import open_array

#: Longest header of a file of this package that is looked at.
_HEADER = 1 << 26
CLASSES = {name: getattr(kv, name) for name in ("KVCache", "KVCaches", "QuantizedTensor", "QuantizedCache")}
CLASSES |= {name: getattr(kv, name) for name in ("ConcatCache", "InPlaceCache")}


def inspect(path: Path, as_json: bool) -> None:
    """Print what a saved cache, a quantized array, an array or an ONNX model holds."""
    told = described(existing(path))
    if as_json:
        print_json(told)
        return
    from kvnumba.commands.progress import rows, table

    layers = told.pop("layers", None)
    table(told)
    if layers:
        rows("caches", layers)


def described(path: Path) -> dict[str, Any]:
    """Names and values; "layers" are rows."""
    size = path.stat().st_size
    told: dict[str, Any] = {"file": str(path), "file_bytes": size}
    if path.suffix == ".onnx":
        return told | _model(path)
    kind = _class_of(path)
    if kind is not None:
        try:
            return told | _loaded(kind, CLASSES[kind].load(path))
        except ValueError as error:
            raise CommandError(str(error)) from None
    array = open_array(path, None)
    return told | {"kind": "array", "shape": list(array.shape), "dtype": array.dtype}


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
        raise CommandError(f"{path} must be an ONNX model: {str(error).splitlines()[0]}") from None


def _folded(path: Path, graph: Any) -> Any:
    """The model as it is if it has caches of ours, else folded."""
    return path if graph.rows(path) else graph.fold_kv_cache(path)

"""Graphs of models with their caches folded in, fused with the attention, quantized, and run.

On ONNX (extra ``onnx``)::

    model = fold_kv_cache(onnx.load("decoder.onnx"))     # past and present leave the signature
    model = quantize_kv_storage(model, "int8", "int8")   # the caches become codes
    model = fuse_kv_attention(model)                     # cache, cache, attention become one node
    session = Session(model)
    logits = session.run({"input_ids": ids})["logits"]

On NNEF, the interchange format of tract: ``kvnumba.graph.nnef``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvnumba.graph.facts import cost, output_facts, rows
    from kvnumba.graph.fold import fold_kv_cache, unfold_kv_cache
    from kvnumba.graph.fuse import fuse_kv_attention
    from kvnumba.graph.nodes import NoCacheError
    from kvnumba.graph.quantize import quantize_kv_storage
    from kvnumba.graph.session import Session

_HOMES = {
    "NoCacheError": "nodes",
    "Session": "session",
    "cost": "facts",
    "fold_kv_cache": "fold",
    "fuse_kv_attention": "fuse",
    "output_facts": "facts",
    "quantize_kv_storage": "quantize",
    "rows": "facts",
    "unfold_kv_cache": "fold",
}

__all__ = [
    "NoCacheError",
    "Session",
    "cost",
    "fold_kv_cache",
    "fuse_kv_attention",
    "output_facts",
    "quantize_kv_storage",
    "rows",
    "unfold_kv_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvnumba.graph' has no attribute {name!r}")
    try:
        return getattr(import_module(f"kvnumba.graph.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kvnumba":
            raise
        raise ImportError(
            f'kvnumba.graph.{name} needs the package {error.name}; pip install "kvnumba[onnx]"'
        ) from error

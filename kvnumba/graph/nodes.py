"""The nodes that this package puts into a graph, and models in the forms they come in.

Domain ``kvnumba``, version 1:

``Cache``
    new -> all. Appends to the state called ``state`` along ``axis`` and gives all of it. Floats as they come, or, with
    ``format`` "int8" or "int4", codes in the layout ``layout`` ("per_channel" or "per_token").
``CachedAttention``
    q, k, v[, mask] -> out. Appends k and v to the state of that name and attends all of it, [B, H, T, D].
``PastShape``
    -> int64. The shape of a state before the run, from axis ``start`` to ``end``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import onnx
import onnx_ir as ir

DOMAIN, VERSION = "kvnumba", 1
CACHE, ATTENTION, PAST_SHAPE = "Cache", "CachedAttention", "PastShape"

Model = TypeVar("Model")


class NoCacheError(ValueError):
    """The model has nothing of the kind that was to be rewritten; it is unchanged."""


def rewritten(model: Model, change: Callable[[ir.Model], None]) -> Model:
    """Return a changed copy of *model*, in the form it came in.

    Parameters
    ----------
    model : onnx.ModelProto, onnx_ir.Model, str or path
        A path gives an ``onnx.ModelProto``.
    change : callable
        Changes an ``onnx_ir.Model`` in place.
    """
    if isinstance(model, ir.Model):
        copy: Any = model.clone()
        change(copy)
        return copy
    proto = as_proto(model)
    copy = ir.from_proto(proto)
    change(copy)
    made: Any = ir.to_proto(copy)
    return made


def as_proto(model: Any) -> onnx.ModelProto:
    """Return *model* as ``onnx.ModelProto``; TypeError for what is none."""
    if isinstance(model, onnx.ModelProto):
        return model
    if isinstance(model, ir.Model):
        made: onnx.ModelProto = ir.to_proto(model)
        return made
    if isinstance(model, (str, os.PathLike)):
        return onnx.load(model)
    raise TypeError(f"model must be an onnx.ModelProto, an onnx_ir.Model or a path, got {type(model).__name__}")


def as_ir(model: Any) -> ir.Model:
    """Return *model* as ``onnx_ir.Model``, itself if it is one."""
    return model if isinstance(model, ir.Model) else ir.from_proto(as_proto(model))


def ours(model: ir.Model, *kinds: str) -> list[ir.Node]:
    """The nodes of this package in *model*, of these kinds or of any."""
    return [n for n in model.graph if n.domain == DOMAIN and (not kinds or n.op_type in kinds)]


def make(kind: str, inputs: list[ir.Value | None], name: str, attributes: dict[str, Any], outputs: int = 1) -> ir.Node:
    """A node of this package."""
    attrs = ir.convenience.convert_attributes(attributes)
    return ir.Node(DOMAIN, kind, inputs, attrs, num_outputs=outputs, name=name)


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """Value of an attribute as a plain Python object, *default* where it is absent."""
    found = node.attributes.get(name)
    if found is None:
        return default
    return list(found.value) if isinstance(found.value, (tuple, list)) else found.value


def is_op(node: ir.Node | None, *kinds: str, domain: str = "") -> bool:
    """Whether *node* is one of these operators of *domain*."""
    return node is not None and node.domain == domain and node.op_type in kinds


def dims(value: ir.Value | None) -> list[int | str | None] | None:
    """Shape of *value* as integers, names of symbols, and None for what is not known; None without a rank."""
    if value is None or value.shape is None:
        return None
    return [d if isinstance(d, int) else d.value for d in value.shape]


def described(node: ir.Node) -> str:
    """How messages call a node."""
    return f"node {node.name!r} ({node.domain + '.' if node.domain else ''}{node.op_type})"


def drop_dead(model: ir.Model) -> None:
    """Remove nodes that nothing reads, and initializers likewise."""
    for node in reversed(list(model.graph)):
        if not any(out.uses() or out.is_graph_output() for out in node.outputs):
            model.graph.remove(node, safe=True)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            del model.graph.initializers[name]

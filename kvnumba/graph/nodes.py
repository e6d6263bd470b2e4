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

#: Element types that every cache keeps exactly.
_STORED = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

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
    copy: Any = model.clone() if isinstance(model, ir.Model) else ir.from_proto(as_proto(model))
    try:
        change(copy)
    except OSError as error:
        raise _without_data(error) from None
    return copy if isinstance(model, ir.Model) else ir.to_proto(copy)


def as_proto(model: Any) -> onnx.ModelProto:
    """Return *model* as ``onnx.ModelProto``; TypeError for what is none."""
    if isinstance(model, onnx.ModelProto):
        return model
    if isinstance(model, ir.Model):
        made: onnx.ModelProto = ir.to_proto(with_its_data(model.clone()))
        return made
    if isinstance(model, (str, os.PathLike)):
        return onnx.load(model)
    raise TypeError(f"model must be an onnx.ModelProto, an onnx_ir.Model or a path, got {type(model).__name__}")


def with_its_data(model: ir.Model) -> ir.Model:
    """Take the data that *model* has in other files into memory, and return it; ValueError if they are not there."""
    try:
        return ir.external_data.load_to_model(model)
    except OSError as error:
        raise _without_data(error) from None


def _without_data(error: OSError) -> ValueError:
    return ValueError(
        f"model must come with its external data, got the name of a file that cannot be read ({error}); pass the path "
        "of the model, or load its data first"
    )


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


def number(text: str) -> int | None:
    """The number that a dimension in the form of `texts` is, None for a symbol."""
    return int(text) if text.isdecimal() else None


def texts(value: ir.Value | None) -> list[str]:
    """Shape of *value* as attributes keep it: numbers, names of symbols, and "?" for what is not known."""
    return ["?" if n is None else str(n) for n in dims(value) or []]


def is_stored(value: ir.Value) -> bool:
    """Whether a cache keeps what *value* holds exactly, and attributes keep its shape: no symbol like a number."""
    known = [n for n in dims(value) or [] if isinstance(n, str)]
    return value.dtype in _STORED and not any(number(symbol) is not None or symbol == "?" for symbol in known)


def free_name(model: ir.Model, name: str) -> str:
    """*name*, longer if a value of *model* has it."""
    nodes = list(model.graph.all_nodes())
    values = [value for node in nodes for value in (*node.inputs, *node.outputs)] + list(model.graph.inputs)
    taken = {value.name for value in values if value is not None} | set(model.graph.initializers)
    while name in taken:
        name += "_"
    return name


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

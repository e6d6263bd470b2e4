"""Past inputs and present outputs of a decoder, folded into stateful nodes, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import onnx_ir as ir

from kvnumba.graph.nodes import (
    ATTENTION,
    CACHE,
    DOMAIN,
    PAST_SHAPE,
    VERSION,
    Model,
    NoCacheError,
    attribute,
    described,
    dims,
    free_name,
    is_op,
    is_stored,
    make,
    number,
    ours,
    rewritten,
    texts,
)


class Pattern(NamedTuple):
    """past input -> Concat with new tokens -> present output."""

    past: ir.Value
    new: ir.Value
    concat: ir.Node
    axis: int
    past_first: bool
    shapes: list[ir.Node]  #: Shape nodes that read the past


def fold_kv_cache(model: Model) -> Model:
    """Turn each past input that is concatenated with new tokens into a present output into a stateful node.

    The past input and the present output leave the signature. The concatenation becomes a ``kvnumba.Cache`` node, on
    any axis and in either order of the operands; the shape of the past, where the graph asks for it, a
    ``kvnumba.PastShape`` node. The symbols of the past length stay in the shapes; `Session` binds them.

    Only the exact pattern is folded: the past is float32, float16 or bfloat16 and has no other reader, the shapes
    differ along the axis only, where the past has a symbol, and something besides the output reads the result. Anything
    else is left alone.

    Parameters
    ----------
    model : onnx.ModelProto, onnx_ir.Model, str or path
        It is not changed.

    Returns
    -------
    onnx.ModelProto or onnx_ir.Model

    Raises
    ------
    NoCacheError
        The model has no such pattern.
    """
    return rewritten(model, _fold)


def unfold_kv_cache(model: Model) -> Model:
    """The reverse of `fold_kv_cache`: the same inputs and outputs, in the same order, as before.

    Raises
    ------
    NoCacheError
        The model has no folded cache.
    ValueError
        A cache was quantized or fused since: its state is no array that could be an input.
    """
    return rewritten(model, _unfold)


def find(model: ir.Model) -> list[Pattern]:
    """All exact patterns of a model, in the order of its inputs.

    Where both operands of a concatenation could be the past, the first one is: caches grow at their end.
    """
    found = [one for past in model.graph.inputs if (one := _pattern(past, model.graph)) is not None]
    first = {id(one.concat) for one in found if one.past_first}
    return [one for one in found if one.past_first or id(one.concat) not in first]


def _pattern(past: ir.Value, graph: ir.Graph) -> Pattern | None:
    users = [node for node, _ in past.uses() if node.graph is graph]
    concats = [node for node in users if is_op(node, "Concat")]
    shapes = [node for node in users if is_op(node, "Shape")]
    if past.is_initializer() or past.is_graph_output() or not is_stored(past):
        return None
    if len(concats) != 1 or len(past.uses()) != 1 + len(shapes):
        return None
    (concat,) = concats
    out = concat.outputs[0]
    if len(concat.inputs) != 2 or sum(one is out for one in graph.outputs) != 1 or not out.uses():
        return None
    past_first = concat.inputs[0] is past
    new = concat.inputs[1 if past_first else 0]
    known = dims(past)
    if new is None or known is None:
        return None
    axis = attribute(concat, "axis", 1)
    axis = axis + len(known) if axis < 0 else axis
    other = dims(new)
    if not isinstance(known[axis], str) or any(isinstance(n, str) and n == known[axis] for n in _others(known, axis)):
        return None
    if other is not None and (len(other) != len(known) or not _agree(_others(known, axis), _others(other, axis))):
        return None
    return Pattern(past, new, concat, axis, past_first, shapes)


def _others(shape: list[Any], axis: int) -> list[Any]:
    return shape[:axis] + shape[axis + 1 :]


def _agree(one: list[Any], other: list[Any]) -> bool:
    """Whether two shapes may be the same: integers must be equal."""
    return all(n == m or not isinstance(n, int) or not isinstance(m, int) for n, m in zip(one, other, strict=True))


def _fold(model: ir.Model) -> None:
    patterns = find(model)
    if not patterns:
        raise NoCacheError(
            "model must have a past input that is concatenated with new tokens into a present output, got none among "
            f"the inputs {[value.name for value in model.graph.inputs]}; it is unchanged"
        )
    inputs, outputs = list(model.graph.inputs), list(model.graph.outputs)
    model.opset_imports[DOMAIN] = VERSION
    for found in patterns:
        past, out = found.past, found.concat.outputs[0]
        described_past = {
            "state": past.name,
            "axis": found.axis,
            "past_first": int(found.past_first),
            "past_shape": texts(past),
            "dtype": past.dtype.value,
            "present": out.name,
            "input_index": inputs.index(past),
            "output_index": outputs.index(out),
            "format": "float",
        }
        cache = make(CACHE, [found.new], f"{past.name}.cache", described_past)
        made = cache.outputs[0]
        made.name, made.shape, made.type = free_name(model, f"{out.name}.all"), out.shape, out.type
        if made.type is None:
            made.type = past.type
        model.graph.insert_before(found.concat, cache)
        _take_place(model, found.concat, made)
        for node in found.shapes:
            ends = {"state": past.name, "rank": len(dims(past) or [])}
            ends |= {name: attribute(node, name) for name in ("start", "end") if name in node.attributes}
            shape = make(PAST_SHAPE, [], f"{node.name}.past", ends)
            shape.outputs[0].shape, shape.outputs[0].type = node.outputs[0].shape, ir.TensorType(ir.DataType.INT64)
            model.graph.insert_before(node, shape)
            _take_over(model, node, shape.outputs[0])
        model.graph.inputs.remove(past)


def _take_place(model: ir.Model, node: ir.Node, value: ir.Value) -> None:
    """Let *value* be read wherever the output of *node* is, and remove *node*; an output of the graph goes with it."""
    out = node.outputs[0]
    for index in reversed([i for i, one in enumerate(model.graph.outputs) if one is out]):
        model.graph.outputs.pop(index)
    out.replace_all_uses_with(value)
    model.graph.remove(node, safe=True)


def _take_over(model: ir.Model, node: ir.Node, value: ir.Value) -> None:
    """As `_take_place`, but *value* becomes the output of the graph too, under the same name."""
    out = node.outputs[0]
    out.replace_all_uses_with(value, replace_graph_outputs=True)
    out.name, value.name = f"{out.name}.before", out.name
    model.graph.remove(node, safe=True)


def _unfold(model: ir.Model) -> None:
    caches = ours(model, CACHE)
    others = [n for n in ours(model, ATTENTION, CACHE) if n.op_type == ATTENTION or attribute(n, "format") != "float"]
    if others:
        raise ValueError(
            f"model must have caches of floats only to be unfolded, got {described(others[0])} and {len(others) - 1} "
            "more; unfold before quantizing and fusing"
        )
    if not caches:
        raise NoCacheError("model must have a folded cache (kvnumba.Cache), got none; it is unchanged")
    pasts: dict[str, ir.Value] = {}
    places: list[tuple[int, ir.Value, int, ir.Value]] = []
    for node in caches:
        name, shape = attribute(node, "state"), [_dim(text) for text in attribute(node, "past_shape")]
        kind = ir.TensorType(ir.DataType(attribute(node, "dtype")))
        past = ir.Value(name=name, shape=ir.Shape(shape), type=kind)
        pasts[name] = past
        operands = [past, node.inputs[0]] if attribute(node, "past_first") else [node.inputs[0], past]
        axis = ir.convenience.convert_attributes({"axis": attribute(node, "axis")})
        concat = ir.Node("", "Concat", operands, axis, name=f"{name}.concat")
        out = concat.outputs[0]
        out.shape, out.type = node.outputs[0].shape, kind
        model.graph.insert_before(node, concat)
        _take_place(model, node, out)
        out.name = attribute(node, "present")
        places.append((attribute(node, "input_index"), past, attribute(node, "output_index"), out))
    for index, past, _, _ in sorted(places, key=lambda place: place[0]):
        model.graph.inputs.insert(index, past)
    for _, _, index, out in sorted(places, key=lambda place: place[2]):
        model.graph.outputs.insert(index, out)
    for node in ours(model, PAST_SHAPE):
        names = [name for name in ("start", "end") if name in node.attributes]
        ends = ir.convenience.convert_attributes({name: attribute(node, name) for name in names})
        back = ir.Node("", "Shape", [pasts[attribute(node, "state")]], ends, name=f"{node.name}.shape")
        back.outputs[0].shape, back.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
        model.graph.insert_before(node, back)
        _take_over(model, node, back.outputs[0])
    del model.opset_imports[DOMAIN]


def _dim(text: str) -> int | str | None:
    known = number(text)
    return None if text == "?" else text if known is None else known

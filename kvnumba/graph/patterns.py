"""Attention, in the forms that exporters write it, and the way back from its keys and values to their caches."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from kvnumba.graph.nodes import CACHE, DOMAIN, attribute, dims, is_op

#: Operators that move or convert keys and values between their cache and the attention.
PLUMBING = ("Cast", "Expand", "Identity", "Reshape", "RotaryEmbedding", "Squeeze", "Transpose", "Unsqueeze")


class Attention(NamedTuple):
    """softcap(q.k * scale) + mask, softmax, times v; q, k and v are [B, H, S|T, D]."""

    q: ir.Value
    k: ir.Value
    v: ir.Value
    mask: ir.Value | None
    scale: float  #: NaN: 1/sqrt(D)
    softcap: float
    out: ir.Value
    last: ir.Node  #: makes *out*


def find(model: ir.Model) -> list[Attention]:
    """All attentions of a model over keys and values that are computed outside of them."""
    found = []
    for node in model.graph:
        one = _operator(node) if is_op(node, "Attention") else _softmax(node) if is_op(node, "Softmax") else None
        if one is not None:
            found.append(one)
    return found


def plain_cache(value: ir.Value) -> ir.Node | None:
    """The cache whose output *value* is, as it is or with each head repeated for a group of query heads."""
    node = value.producer()
    if is_op(node, "Reshape") and node is not None:
        expand = _producer(node.inputs[0])
        unsqueeze = _producer(expand.inputs[0]) if is_op(expand, "Expand") and expand is not None else None
        if unsqueeze is None or not is_op(unsqueeze, "Unsqueeze") or _axes(unsqueeze) not in ([2], [-3]):
            return None
        source, out = unsqueeze.inputs[0], dims(node.outputs[0])
        inner = dims(source)
        if source is None or out is None or inner is None or len(out) != 4 or len(inner) != 4:
            return None
        heads, kv_heads = out[1], inner[1]
        if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads % kv_heads or out[3] != inner[3]:
            return None
        node = source.producer()
    return node if is_op(node, CACHE, domain=DOMAIN) else None


def any_cache(value: ir.Value) -> ir.Node | None:
    """The cache that *value* comes from, through rotary embedding, repetition, changes of axes and casts.

    Every edge on the way must have one reader, so that nobody else sees what the cache gives.
    """
    while True:
        node = value.producer()
        readers = {id(user) for user, _ in value.uses() if not is_op(user, "Shape")}
        if node is None or len(readers) != 1 or value.is_graph_output():
            return None
        if is_op(node, CACHE, domain=DOMAIN):
            return node
        moves = is_op(node, *PLUMBING) or is_op(node, "RotaryEmbedding", domain="com.microsoft")
        if not moves and _scaled(value)[0] is value:
            return None
        first = _scaled(value)[0] if not moves else node.inputs[0]
        if first is None:
            return None
        value = first


def _operator(node: ir.Node) -> Attention | None:
    """The ONNX operator without a past of its own."""
    inputs = [*node.inputs, *[None] * 7][:7]
    q, k, v, mask = inputs[:4]
    causal = attribute(node, "is_causal", 0)  # counted from the first key, not from the end: no cache works so
    windows = [attribute(node, name, -1) for name in ("left_window_size", "right_window_size")]
    if q is None or k is None or v is None or any(inputs[4:]) or causal or windows != [-1, -1]:
        return None
    if any(len(dims(x) or []) != 4 for x in (q, k, v)) or not offered(node):
        return None
    scale = attribute(node, "scale", math.nan)
    return Attention(q, k, v, mask, scale, attribute(node, "softcap", 0.0), node.outputs[0], node)


def offered(node: ir.Node) -> bool:
    """Whether an ONNX Attention asks for nothing that is not offered: scores as an output, a narrow softmax."""
    precise = attribute(node, "softmax_precision", ir.DataType.FLOAT.value) == ir.DataType.FLOAT.value
    return precise and not any(out.uses() or out.is_graph_output() for out in node.outputs[3:])


def _softmax(node: ir.Node) -> Attention | None:
    """MatMul, scale, softcap, mask, Softmax, MatMul."""
    scores = node.inputs[0]
    rank = len(dims(scores) or dims(node.outputs[0]) or [])
    if scores is None or attribute(node, "axis", _default_axis(node)) not in (-1, rank - 1):
        return None
    last = _product_with_values(node.outputs[0])
    if last is None or last.inputs[1] is None:
        return None
    mask, inner = None, _scores(scores)
    add = scores.producer()
    if inner is None and add is not None and is_op(add, "Add"):
        for one, other in ((0, 1), (1, 0)):
            first = add.inputs[one]
            inner = _scores(first) if first is not None else None
            if inner is not None:
                mask = add.inputs[other]
                break
    if inner is None:
        return None
    q, k, scale, softcap = inner
    if any(len(dims(x) or []) != 4 for x in (q, k, last.inputs[1])):
        return None
    return Attention(q, k, last.inputs[1], mask, scale, softcap, last.outputs[0], last)


def _default_axis(softmax: ir.Node) -> int:
    """The axis of a Softmax that names none: before opset 13 it was 1, and those after it belonged to it."""
    versions = {} if softmax.graph is None else softmax.graph.opset_imports
    return -1 if versions.get("", versions.get("ai.onnx", 0)) >= 13 else 1


def _product_with_values(weights: ir.Value) -> ir.Node | None:
    """The MatMul that *weights* go into, past a guard that turns rows of NaN, those without a key, to zeros."""
    users = [user for user, _ in weights.uses()]
    if len(users) == 2 and any(is_op(user, "IsNaN") for user in users):
        wheres = [user for user in users if is_op(user, "Where")]
        if len(wheres) != 1 or wheres[0].inputs[2] is not weights or _scalar(wheres[0].inputs[1]) != 0:
            return None
        guard = _producer(wheres[0].inputs[0])
        if guard is None or not is_op(guard, "IsNaN") or guard.inputs[0] is not weights:
            return None
        weights = wheres[0].outputs[0]
        users = [user for user, _ in weights.uses()]
    if len(users) != 1 or not is_op(users[0], "MatMul") or users[0].inputs[0] is not weights:
        return None
    producer = weights.producer()
    if producer is None or users[0].graph is not producer.graph:  # in a branch, which may not run
        return None
    return users[0]


def _scores(value: ir.Value) -> tuple[ir.Value, ir.Value, float, float] | None:
    """(q, k, scale, softcap) of scores before a mask."""
    value, factor = _scaled(value)
    node, softcap = value.producer(), 0.0
    if is_op(node, "Tanh") and node is not None and node.inputs[0] is not None:
        softcap = factor  # softcap * tanh(score / softcap)
        value, factor = _scaled(node.inputs[0])
        factor *= softcap
        node = value.producer()
    if node is None or not is_op(node, "MatMul") or node.inputs[0] is None or node.inputs[1] is None:
        return None
    q, q_factor = _scaled(node.inputs[0])
    turned, k_factor = _scaled(node.inputs[1])
    k = _turned(turned)
    return None if k is None else (q, k, factor * q_factor * k_factor, softcap)


def _turned(value: ir.Value) -> ir.Value | None:
    """[B, H, T, D] of [B, H, D, T]: a transposition of the last two axes, in four axes or with the first two merged."""
    node = value.producer()
    if node is None:
        return None
    if is_op(node, "Transpose") and attribute(node, "perm") == [0, 1, 3, 2]:
        return node.inputs[0]
    inner = _producer(node.inputs[0]) if is_op(node, "Reshape") else None
    if inner is None or not is_op(inner, "Transpose") or attribute(inner, "perm") != [0, 2, 1]:
        return None
    merge = _producer(inner.inputs[0])
    if merge is None or not is_op(merge, "Reshape") or merge.inputs[0] is None:
        return None
    before, after = dims(merge.inputs[0]), dims(value)
    if before is None or len(before) != 4 or not isinstance(before[3], int):
        return None
    if after is not None and (len(after) != 4 or after[2] not in (before[3], None)):
        return None
    merged = dims(merge.outputs[0])
    return merge.inputs[0] if merged is None or merged[-1] in (before[3], None) else None


def _scaled(value: ir.Value) -> tuple[ir.Value, float]:
    """*value* without factors that are constants, and their product."""
    factor = 1.0
    while True:
        node = value.producer()
        if node is None or not is_op(node, "Mul", "Div"):
            return value, factor
        a, b = node.inputs
        number = _scalar(b)
        if number is not None and a is not None:
            value, factor = a, factor * number if node.op_type == "Mul" else factor / number
        elif node.op_type == "Mul" and (number := _scalar(a)) is not None and b is not None:
            value, factor = b, factor * number
        else:
            return value, factor


def _scalar(value: ir.Value | None) -> float | None:
    """The number that a value is, if it is one, known beforehand."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1 or tensor.dtype == ir.DataType.STRING:
        return None
    return float(np.asarray(tensor.numpy(), np.float64).reshape(()))


def _axes(node: ir.Node) -> list[int] | None:
    """Axes of an Unsqueeze, as an input or as an attribute."""
    if "axes" in node.attributes:
        return [int(n) for n in attribute(node, "axes")]
    tensor = ir.convenience.get_const_tensor(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    return None if tensor is None else [int(n) for n in tensor.numpy().reshape(-1)]


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()

"""A cache of keys, a cache of values and the attention over both, fused into one stateful node."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from kvnumba.graph import patterns
from kvnumba.graph.nodes import (
    ATTENTION,
    CACHE,
    DOMAIN,
    VERSION,
    Model,
    NoCacheError,
    attribute,
    dims,
    drop_dead,
    is_op,
    is_stored,
    make,
    number,
    ours,
    rewritten,
    texts,
)


def fuse_kv_attention(model: Model) -> Model:
    """Turn cache, cache and attention into one ``kvnumba.CachedAttention`` node, which attends codes as they are.

    Attention may be the ONNX operator (23 to 25), a MatMul-Softmax-MatMul as exporters write it, over caches that
    `fold_kv_cache` made, or an operator that has a past of its own: ONNX Attention, and GroupQueryAttention and
    MultiHeadAttention of ``com.microsoft``. Heads that were repeated for grouped queries are no longer. Scale, softcap,
    causal order and mask are carried over.

    Only where each cache feeds that attention alone, holds [B, H, T, D] and grows at its end. Anything else is left.

    Raises
    ------
    NoCacheError
        Nothing can be fused.
    """
    return rewritten(model, _fuse)


def _fuse(model: ir.Model) -> None:
    model.opset_imports.setdefault(DOMAIN, VERSION)
    fused = sum(_over_caches(model, found) for found in patterns.find(model))
    fused += sum(_with_its_own_past(model, node) for node in list(model.graph))
    if not fused:
        raise NoCacheError(
            "model must have an attention whose keys and values come from caches that nothing else reads, got none; "
            f"it has {len(ours(model, CACHE))} folded caches and {len(patterns.find(model))} attentions"
        )
    drop_dead(model)


def _over_caches(model: ir.Model, found: patterns.Attention) -> bool:
    k, v = patterns.plain_cache(found.k), patterns.plain_cache(found.v)
    if k is None or v is None or k is v or not (_grows_at_its_end(k) and _grows_at_its_end(v)):
        return False
    if not _same_rows(found.q, attribute(k, "past_shape"), attribute(v, "past_shape")):
        return False
    inputs = [found.q, k.inputs[0], v.inputs[0], *([] if found.mask is None else [found.mask])]
    attributes = _states(k, v) | {"scale": found.scale, "softcap": found.softcap, "is_causal": 0}
    made = _insert(model, found.last, inputs, attributes, found.out)
    found.out.replace_all_uses_with(made.outputs[0], replace_graph_outputs=True)
    if {id(k), id(v)} & _alive(model):  # somebody else reads a cache
        made.outputs[0].replace_all_uses_with(found.out, replace_graph_outputs=True)
        model.graph.remove(made, safe=True)
        return False
    made.outputs[0].name, found.out.name = found.out.name, f"{found.out.name}.before"
    return True


def _grows_at_its_end(cache: ir.Node) -> bool:
    shape = attribute(cache, "past_shape")
    return len(shape) == 4 and attribute(cache, "axis") == 2 and attribute(cache, "past_first") == 1


def _same_rows(q: ir.Value, k: list[str], v: list[str]) -> bool:
    """Whether batch and heads fit as in a cache: a product of matrices would repeat those of values, or of queries."""
    (rows, heads, *_), batch, kv_heads = dims(q) or [None, None], number(k[0]), number(k[1])
    return (
        k[:2] == v[:2]
        and (batch is None or not isinstance(rows, int) or rows == batch)
        and (kv_heads is None or not isinstance(heads, int) or heads % kv_heads == 0)
    )


def _states(k: ir.Node, v: ir.Node) -> dict[str, Any]:
    return {
        "k_state": attribute(k, "state"),
        "v_state": attribute(v, "state"),
        "k_shape": attribute(k, "past_shape"),
        "v_shape": attribute(v, "past_shape"),
        "k_format": _format(k),
        "v_format": _format(v),
        "dtype": attribute(k, "dtype"),
    }


def _format(cache: ir.Node) -> str:
    """The format of `KVCache` that stores what the node stores."""
    form: str = attribute(cache, "format")
    return stored_as(attribute(cache, "dtype")) if form == "float" else form


def stored_as(dtype: int) -> str:
    """The float format of `KVCache` for an element type of ONNX."""
    narrow = {ir.DataType.FLOAT16.value: "float16", ir.DataType.BFLOAT16.value: "bfloat16"}
    return narrow.get(dtype, "float32")


def _insert(
    model: ir.Model, before: ir.Node, inputs: list[ir.Value | None], attributes: dict[str, Any], out: ir.Value
) -> ir.Node:
    made = make(ATTENTION, inputs, f"{attributes['k_state']}.attention", attributes)
    made.outputs[0].name, made.outputs[0].shape, made.outputs[0].type = f"{out.name}.fused", out.shape, out.type
    model.graph.insert_before(before, made)
    return made


def _alive(model: ir.Model) -> set[int]:
    """Identities of the nodes that an output of the graph, or a graph inside it, depends on."""
    alive: set[int] = set()
    inside = [value for node in model.graph.all_nodes() if node.graph is not model.graph for value in node.inputs]
    waiting = [value.producer() for value in [*model.graph.outputs, *inside] if value is not None]
    while waiting:
        node = waiting.pop()
        if node is not None and id(node) not in alive:
            alive.add(id(node))
            waiting += [value.producer() for value in node.inputs if value is not None]
    return alive


# ---- operators with a past of their own


def _with_its_own_past(model: ir.Model, node: ir.Node) -> bool:
    if is_op(node, "Attention"):
        q, k, v, mask, k_past, v_past, *more = [*node.inputs, *[None] * 7][:7]
        lengths, known = None, patterns.offered(node) and not any(more)
        options = {
            "is_causal": attribute(node, "is_causal", 0),
            "window": [attribute(node, "left_window_size", -1), attribute(node, "right_window_size", -1)],
            "q_num_heads": attribute(node, "q_num_heads", 0),
            "kv_num_heads": attribute(node, "kv_num_heads", 0),
        }
    elif is_op(node, "GroupQueryAttention", domain="com.microsoft"):
        q, k, v, k_past, v_past, lengths, _, *more = [*node.inputs, *[None] * 14][:14]
        mask, others = more[3], more[4:]
        left = attribute(node, "local_window_size", -1)
        known = not any(others) and not attribute(node, "do_rotary", 0) and attribute(node, "smooth_softmax", 0) != 1
        options = {
            "is_causal": 1,
            "window": [left - 1 if left > 0 else -1, -1],
            "q_num_heads": attribute(node, "num_heads"),
            "kv_num_heads": attribute(node, "kv_num_heads"),
        }
    elif is_op(node, "MultiHeadAttention", domain="com.microsoft"):
        q, k, v, bias, padding, mask, k_past, v_past, *more = [*node.inputs, *[None] * 10][:10]
        lengths, known = None, not any((bias, padding, *more)) and len(dims(k) or [0, 0, 0]) == 3
        heads = attribute(node, "num_heads")
        options = {
            "is_causal": attribute(node, "unidirectional", 0), "window": [-1, -1],
            "q_num_heads": heads, "kv_num_heads": heads,
        }  # fmt: skip
    else:
        return False
    if not known or q is None or k is None or v is None or k_past is None or v_past is None:
        return False
    presents = list(node.outputs[1:3])
    if not all(_is_past(past) for past in (k_past, v_past)) or not all(_is_present(out) for out in presents):
        return False
    scale = attribute(node, "scale", 0.0)
    attributes = {
        "k_state": k_past.name, "v_state": v_past.name,
        "k_shape": texts(k_past), "v_shape": texts(v_past),
        "dtype": k_past.dtype.value, "k_format": stored_as(k_past.dtype.value),
        "v_format": stored_as(v_past.dtype.value), "scale": scale if scale else math.nan,
        "softcap": attribute(node, "softcap", 0.0), **options,
    }  # fmt: skip
    inputs = [q, k, v, mask, lengths]
    while inputs[-1] is None:
        inputs.pop()
    made = _insert(model, node, inputs, attributes, node.outputs[0])
    out = node.outputs[0]
    out.replace_all_uses_with(made.outputs[0], replace_graph_outputs=True)
    made.outputs[0].name, out.name = out.name, f"{out.name}.before"
    for present in presents:
        while present.is_graph_output():
            model.graph.outputs.remove(present)
    model.graph.remove(node, safe=True)
    for past in (k_past, v_past):
        model.graph.inputs.remove(past)
    return True


def _is_past(value: ir.Value) -> bool:
    shape = dims(value)
    return (
        value.is_graph_input() and not value.is_initializer() and not value.is_graph_output()
        and len(value.uses()) == 1 and is_stored(value) and shape is not None and len(shape) == 4
        and not isinstance(shape[2], int)
    )  # fmt: skip


def _is_present(value: ir.Value) -> bool:
    """A present that nothing in the graph reads; it need not be an output."""
    return not value.uses()

"""What the stateful nodes of a graph give and cost: symbolic shapes, values and bytes for each token."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from kvnumba.graph.nodes import ATTENTION, CACHE, as_ir, attribute, described, dims, number, ours
from kvnumba.spec import CacheSpec


def output_facts(model: Any) -> dict[str, tuple[str, list[str]]]:
    """Element type and symbolic shape of the output of each cache node.

    Parameters
    ----------
    model : onnx.ModelProto, onnx_ir.Model, str or path

    Returns
    -------
    dict
        Name of the node to (element type, dimensions); along the axis that grows "P+S", past and new tokens.
    """
    return {node.name or "": (row["dtype"], row["shape"]) for node, row in _described(as_ir(model))}


def cost(model: Any) -> dict[str, dict[str, float | str]]:
    """Values and bytes that each cache node stores for a token, parameters of codes included.

    Returns
    -------
    dict
        Name of the node to {"values_per_token": ..., "bytes_per_token": ...}; products with symbols are text.
    """
    return {
        node.name or "": {"values_per_token": row["values_per_token"], "bytes_per_token": row["bytes_per_token"]}
        for node, row in _described(as_ir(model))
    }


def rows(model: Any) -> list[dict[str, Any]]:
    """A row for each cache node: node, kind, format, dtype, shape, values_per_token, bytes_per_token."""
    return [{"node": node.name, "kind": node.op_type, **row} for node, row in _described(as_ir(model))]


def _described(model: ir.Model) -> list[tuple[ir.Node, dict[str, Any]]]:
    return [
        (node, _cache(node) if node.op_type == CACHE else _attention(node)) for node in ours(model, CACHE, ATTENTION)
    ]


def _cache(node: ir.Node) -> dict[str, Any]:
    shape, axis = attribute(node, "past_shape"), attribute(node, "axis")
    new = dims(node.inputs[0])
    form, dtype = attribute(node, "format"), ir.DataType(attribute(node, "dtype"))
    out = list(shape)
    out[axis] = f"{shape[axis]}+{new[axis] if new and new[axis] is not None else 'S'}"
    values = _product(shape[:axis] + shape[axis + 1 :])
    if form == "float":
        size = _times(values, int(dtype.itemsize))
    else:
        dim = _number(node, shape[-1])
        per_channel = attribute(node, "layout") == "per_channel"
        spec = CacheSpec(1, dim, dim, *((form, "float32") if per_channel else ("float32", form)))
        size = _times(_product(shape[:axis]), spec.bytes_per_token - 4 * dim)
    return {
        "format": form if form != "float" else dtype.name.lower(), "dtype": dtype.name.lower(), "shape": out,
        "values_per_token": values, "bytes_per_token": size,
    }  # fmt: skip


def _attention(node: ir.Node) -> dict[str, Any]:
    k, v = attribute(node, "k_shape"), attribute(node, "v_shape")
    k_format, v_format = attribute(node, "k_format"), attribute(node, "v_format")
    dtype = ir.DataType(attribute(node, "dtype"))
    spec = CacheSpec(_number(node, k[1]), _number(node, k[3]), _number(node, v[3]), k_format, v_format)
    out = dims(node.outputs[0])
    rows = [k[0]]
    return {
        "format": f"{k_format}/{v_format}", "dtype": dtype.name.lower(),
        "shape": ["?" if n is None else str(n) for n in out] if out else [k[0], "H", "S", v[3]],
        "values_per_token": _product([*rows, str(spec.num_kv_heads * (spec.head_dim + spec.v_head_dim))]),
        "bytes_per_token": _times(_product(rows), spec.bytes_per_token),
    }  # fmt: skip


def _number(node: ir.Node, text: str) -> int:
    known = number(text)
    if known is None:
        raise ValueError(f"{described(node)} must have a known number of heads and channels, got {text!r}")
    return known


def _product(parts: list[str]) -> float | str:
    """Product of numbers and symbols: a number if there are no symbols."""
    symbols = [part for part in parts if number(part) is None]
    known = math.prod(number(part) or 0 for part in parts if part not in symbols)
    return "*".join([str(known), *symbols] if known != 1 else symbols) if symbols else known


def _times(product: float | str, factor: float) -> float | str:
    if isinstance(product, str):
        return f"{factor:g}*{product}"
    return product * factor

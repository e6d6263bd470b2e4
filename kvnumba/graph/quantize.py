"""The caches that feed attentions, stored as codes."""

from __future__ import annotations

import onnx_ir as ir

from kvnumba import checks
from kvnumba.graph import patterns
from kvnumba.graph.nodes import ATTENTION, CACHE, Model, NoCacheError, attribute, ours, rewritten
from kvnumba.spec import CODE_FORMATS


def quantize_kv_storage(model: Model, k_format: str = "int8", v_format: str = "int8") -> Model:
    """Store the keys that attentions read per channel, and their values per token, in 8 or 4 bits.

    From each attention the way back to its caches leads through rotary embedding, repeated heads, changes of axes and
    casts, over edges with one reader. Shapes, positions and the attention stay as they are; the caches must hold
    [B, H, T, D] and grow at their end. Keys and values from one cache are left alone. Nodes that `fuse_kv_attention`
    made get the formats too, and attend the codes as they are.

    Parameters
    ----------
    model : onnx.ModelProto, onnx_ir.Model, str or path
    k_format, v_format : str
        Of `KVCache`: "int8", "int4", or a float format, which leaves a cache that is not fused as it is.

    Raises
    ------
    NoCacheError
        No attention reads such caches.
    """
    k_format, v_format = checks.format("k_format", k_format), checks.format("v_format", v_format)

    def change(copy: ir.Model) -> None:
        fused = ours(copy, ATTENTION)
        for node in fused:
            node.attributes["k_format"] = ir.AttrString("k_format", k_format)
            node.attributes["v_format"] = ir.AttrString("v_format", v_format)
        pairs = [(patterns.any_cache(one.k), patterns.any_cache(one.v)) for one in patterns.find(copy)]
        good = [(k, v) for k, v in pairs if k is not None and v is not None and k is not v and _fit(k) and _fit(v)]
        if not fused and not good:
            raise NoCacheError(
                "model must have an attention that alone reads a cache of keys and another of values, got "
                f"{len(pairs)} attentions and {len(ours(copy, CACHE))} folded caches; fold_kv_cache makes caches"
            )
        for k, v in good:
            _code(k, k_format, "per_channel")
            _code(v, v_format, "per_token")

    return rewritten(model, change)


def _fit(cache: ir.Node) -> bool:
    rank = len(attribute(cache, "past_shape"))
    return rank >= 2 and attribute(cache, "axis") == rank - 2 and attribute(cache, "past_first") == 1


def _code(cache: ir.Node, form: str, layout: str) -> None:
    if form in CODE_FORMATS:
        cache.attributes["format"] = ir.AttrString("format", form)
        cache.attributes["layout"] = ir.AttrString("layout", layout)

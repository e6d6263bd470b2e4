"""Small decoder graphs in the text form of ONNX, and what the tests of `kvnumba.graph` ask of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser

#: Batch, KV heads, query heads, channels.
B, H_KV, H_Q, D = 2, 2, 4, 8


def parse(text: str, opset: int = 24, contrib: bool = False) -> onnx.ModelProto:
    """A checked model with inferred shapes from the text of its graph."""
    domains = f'"" : {opset}' + (', "com.microsoft" : 1' if contrib else "")
    model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{domains}]>\n{text}")
    if not contrib:
        onnx.checker.check_model(model, full_check=True)
    return onnx.shape_inference.infer_shapes(model)


def cached(axis: int = 2, past_first: bool = True, dtype: str = "float", past: str = "P") -> onnx.ModelProto:
    """past, new -> Concat -> present; its sum is read too."""
    shape, new = ["2", "3", "4", "5"], ["2", "3", "4", "5"]
    shape[axis], new[axis] = past, "S"
    operands = "past, same" if past_first else "same, past"
    return parse(f"""
        toy ({dtype}[{", ".join(shape)}] past, {dtype}[{", ".join(new)}] new)
            => ({dtype}[a, b, c, d] present, {dtype}[a, b, c, d] twice) {{
            same = Identity (new)
            present = Concat <axis = {axis}> ({operands})
            twice = Add (present, present)
        }}
    """)


#: Ways to write an attention of q [B, 4, S, 8] over K, V [B, 2, T, 8]; {mask} is None or the name of an input.
REPEAT = """
    {x}_5 = Unsqueeze ({x}, two)
    {x}_e = Expand ({x}_5, wide)
    {x}_r = Reshape ({x}_e, merged)
"""
CONSTANTS = """
    two = Constant <value_ints = [2]> ()
    wide = Constant <value_ints = [1, 1, 2, 1, 1]> ()
    merged = Constant <value_ints = [0, 4, -1, 8]> ()
    factor = Constant <value_float = 0.3> ()
    cap = Constant <value_float = 2.0> ()
"""


def attention(kind: str, mask: str = "float") -> onnx.ModelProto:
    """Two caches and an attention, as *kind*: "operator", "grouped", "matmul" or "softcap"."""
    last = "" if mask == "none" else ", mask"
    named = "" if mask == "none" else f", {mask}[S, T] mask"
    body = (
        CONSTANTS
        + """
        present_k = Concat <axis = 2> (past_k, k)
        present_v = Concat <axis = -2> (past_v, v)
    """
    )
    if kind == "grouped":
        body += f"out = Attention <scale = 0.3, softcap = 2.0> (q, present_k, present_v{last})"
    else:
        body += REPEAT.format(x="present_k") + REPEAT.format(x="present_v")
    if kind == "operator":
        body += f"out = Attention <scale = 0.3> (q, present_k_r, present_v_r{last})"
    if kind in ("matmul", "softcap"):
        body += """
            turned = Transpose <perm = [0, 1, 3, 2]> (present_k_r)
            raw = MatMul (q, turned)
            scaled = Mul (raw, factor)
        """
        score = "scaled"
        if kind == "softcap":
            body += """
                small = Div (scaled, cap)
                bent = Tanh (small)
                capped = Mul (cap, bent)
            """
            score = "capped"
        if mask != "none":
            body += f"masked = Add ({score}, mask)\n"
            score = "masked"
        body += f"""
            weights = Softmax <axis = -1> ({score})
            out = MatMul (weights, present_v_r)
        """
    return parse(f"""
        toy (float[2, 4, S, 8] q, float[2, 2, S, 8] k, float[2, 2, S, 8] v,
             float[2, 2, P, 8] past_k, float[2, 2, P, 8] past_v{named})
            => (float[2, 4, S, 8] out, float[2, 2, T, 8] present_k, float[2, 2, T, 8] present_v) {{
            {body}
        }}
    """)


def steps(sizes: tuple[int, ...] = (5, 1, 1, 3), mask: str = "float", seed: int = 0) -> list[dict[str, Any]]:
    """Inputs of several calls of `attention`, without the pasts."""
    rng = np.random.default_rng(seed)
    calls, total = [], 0
    for new in sizes:
        total += new
        call: dict[str, Any] = {
            name: rng.standard_normal((B, heads, new, D), dtype=np.float32)
            for name, heads in (("q", H_Q), ("k", H_KV), ("v", H_KV))
        }
        seen = np.tri(new, total, total - new, dtype=bool)
        if mask == "bool":
            call["mask"] = seen
        elif mask == "float":
            call["mask"] = np.where(seen, rng.standard_normal(seen.shape), -np.inf).astype(np.float32)
        calls.append(call)
    return calls


def by_hand(model: onnx.ModelProto, calls: list[dict[str, Any]], pasts: dict[str, Any]) -> list[dict[str, Any]]:
    """Outputs of the original model, with each present fed back as the next past."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(model)
    names = [value.name for value in model.graph.output]
    results = []
    for call in calls:
        results.append(dict(zip(names, evaluator.run(None, {**call, **pasts}), strict=True)))
        pasts = {past: results[-1][past.replace("past", "present")] for past in pasts}
    return results


def empty_pasts() -> dict[str, Any]:
    return {name: np.zeros((B, H_KV, 0, D), np.float32) for name in ("past_k", "past_v")}

"""Cache, cache and attention as one node; the same with codes."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnx_ir", reason="onnx-ir is not installed")

from graphs import H_KV, H_Q, B, D, attention, by_hand, empty_pasts, parse, steps  # noqa: E402

import kvnumba as kv  # noqa: E402
from kvnumba import graph  # noqa: E402

pytestmark = pytest.mark.onnx

KINDS = ("operator", "grouped", "matmul", "softcap")
MASKS = {"operator": ("none", "bool", "float"), "grouped": ("none", "bool", "float")}


def operators(model):
    return [f"{node.domain}.{node.op_type}" for node in model.graph.node]


def results(model, calls, backend="reference"):
    session = graph.Session(model, backend=backend)
    return [session.run(call)["out"] for call in calls]


@pytest.mark.parametrize(
    ("kind", "mask"), [(kind, mask) for kind in KINDS for mask in MASKS.get(kind, ("none", "float"))]
)
def test_every_way_to_write_attention_becomes_one_node_with_the_same_results(kind, mask):
    model, calls = attention(kind, mask), steps(mask=mask)
    fused = graph.fuse_kv_attention(graph.fold_kv_cache(model))
    assert operators(fused) == ["kvnumba.CachedAttention"]
    expected = by_hand(model, calls, empty_pasts())
    for got, one in zip(results(fused, calls), expected, strict=True):
        np.testing.assert_allclose(got, one["out"], rtol=0, atol=3e-6)


@pytest.mark.parametrize("formats", [("int8", "int8"), ("int8", "int4")], ids="-".join)
@pytest.mark.parametrize("order", ["quantize, fuse", "fuse, quantize"])
def test_codes_are_those_of_a_kvcache_in_either_order_of_the_rewrites(order, formats):
    calls = steps((40, 1, 35, 1))
    folded = graph.fold_kv_cache(attention("matmul"))
    if order == "quantize, fuse":
        model = graph.fuse_kv_attention(graph.quantize_kv_storage(folded, *formats))
    else:
        model = graph.quantize_kv_storage(graph.fuse_kv_attention(folded), *formats)
    cache = kv.KVCache(H_KV, D, k_format=formats[0], v_format=formats[1], batch_size=B)
    for call, got in zip(calls, results(model, calls), strict=True):
        expected = cache.step(call["q"], call["k"], call["v"], mask=call["mask"], sm_scale=0.3, causal=False)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_quantized_caches_alone_give_decoded_codes():
    calls = steps((40, 1, 35, 1))
    quantized = graph.quantize_kv_storage(graph.fold_kv_cache(attention("operator")), "int4", "int4")
    formats = {
        n.name: [a.s.decode() for a in n.attribute if a.name in ("format", "layout")] for n in quantized.graph.node
    }
    assert formats["past_k.cache"] == ["int4", "per_channel"]
    assert formats["past_v.cache"] == ["int4", "per_token"]
    k, v = kv.QuantizedCache("per_channel", 4), kv.QuantizedCache("per_token", 4)
    for call, got in zip(calls, results(quantized, calls), strict=True):
        k.append(call["k"])
        v.append(call["v"])
        expected = kv.attention(call["q"], k.contiguous(), v.contiguous(), mask=call["mask"], sm_scale=0.3)
        np.testing.assert_allclose(got, expected, rtol=0, atol=3e-6)


PLUMBED = """
    toy (float[1, 2, S, 8] q, float[1, 2, S, 8] k, float[1, 2, S, 8] v, float[S2, 4] angles, int64[1, T2] at,
         float[1, 2, P, 8] past_k, float[1, 2, P, 8] past_v)
        => (float[1, 2, S, 8] out, float[1, 2, T, 8] present_k, float[1, 2, T, 8] present_v{more}) {{
        present_k = Concat <axis = 2> (past_k, k)
        present_v = Concat <axis = 2> (past_v, v)
        turned = RotaryEmbedding (present_k, angles, angles, at)
        narrow = Cast <to = 10> (turned)
        wide = Cast <to = 1> (narrow)
        swapped = Transpose <perm = [0, 2, 1, 3]> ({values})
        again = Transpose <perm = [0, 2, 1, 3]> (swapped)
        out = Attention (q, wide, again)
        {extra}
    }}
"""


def test_quantize_walks_back_through_rotary_embedding_casts_and_changes_of_axes():
    model = parse(PLUMBED.format(values="present_v", more="", extra=""))
    quantized = graph.quantize_kv_storage(graph.fold_kv_cache(model))
    assert [row["format"] for row in graph.rows(quantized)] == ["int8", "int8"]
    with pytest.raises(graph.NoCacheError, match="from caches that nothing else reads"):
        graph.fuse_kv_attention(quantized)  # keys are turned on the way


@pytest.mark.parametrize(
    ("values", "more", "extra"),
    [
        ("present_k", "", ""),  # keys and values from one cache
        ("present_v", ", float[1, 2, T, 8] seen", "seen = Neg (narrow_again)\n narrow_again = Neg (wide)"),
    ],
)
def test_caches_that_somebody_else_reads_are_left_alone(values, more, extra):
    body = extra if not extra else "narrow_again = Neg (wide)\n seen = Neg (narrow_again)"
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 24]>' + PLUMBED.format(values=values, more=more, extra=body)
    )
    folded = graph.fold_kv_cache(onnx.shape_inference.infer_shapes(model))
    with pytest.raises(graph.NoCacheError, match="model must have an attention that alone reads a cache of keys"):
        graph.quantize_kv_storage(folded)
    with pytest.raises(graph.NoCacheError):
        graph.fuse_kv_attention(folded)


def test_a_cache_that_feeds_two_attentions_is_not_fused():
    model = parse("""
        toy (float[1, 2, S, 8] q, float[1, 2, S, 8] k, float[1, 2, S, 8] v,
             float[1, 2, P, 8] past_k, float[1, 2, P, 8] past_v)
            => (float[1, 2, S, 8] out, float[1, 2, S, 8] other,
                float[1, 2, T, 8] present_k, float[1, 2, T, 8] present_v) {
            present_k = Concat <axis = 2> (past_k, k)
            present_v = Concat <axis = 2> (past_v, v)
            out = Attention (q, present_k, present_v)
            other = Attention (k, present_k, present_v)
        }
    """)
    folded = graph.fold_kv_cache(model)
    with pytest.raises(graph.NoCacheError, match="it has 2 folded caches and 2 attentions"):
        graph.fuse_kv_attention(folded)


def product(heads="4, 4, 4", batch="1, 1, 1", opset=13, softmax=""):
    """Two caches, MatMul, Softmax, MatMul; *heads* and *batch* are those of q, k and v."""
    (b_q, b_k, b_v), (q, k, v) = batch.split(", "), heads.split(", ")
    return onnx.shape_inference.infer_shapes(
        onnx.parser.parse_model(f"""
        <ir_version: 7, opset_import: ["" : {opset}]>
        toy (float[{b_q}, {q}, S, 8] q, float[{b_k}, {k}, S, 8] k, float[{b_v}, {v}, S, 8] v,
             float[{b_k}, {k}, P, 8] past_k, float[{b_v}, {v}, P, 8] past_v)
            => (float[A, B, S, 8] out, float[{b_k}, {k}, T, 8] present_k, float[{b_v}, {v}, T, 8] present_v) {{
            present_k = Concat <axis = 2> (past_k, k)
            present_v = Concat <axis = 2> (past_v, v)
            turned = Transpose <perm = [0, 1, 3, 2]> (present_k)
            scores = MatMul (q, turned)
            weights = Softmax {softmax} (scores)
            out = MatMul (weights, present_v)
        }}
    """)
    )


@pytest.mark.parametrize(
    ("opset", "softmax", "fused"),
    [
        (11, "", False), (11, "<axis = 2>", False), (11, "<axis = 3>", True), (12, "<axis = -1>", True),
        (13, "", True), (13, "<axis = 1>", False),
    ],
)  # fmt: skip
def test_a_softmax_over_more_than_the_last_axis_is_left_alone(opset, softmax, fused):
    """Before opset 13 the axis was 1 if it was not named, and those after it belonged to it."""
    folded = graph.fold_kv_cache(product(opset=opset, softmax=softmax))
    if fused:
        assert operators(graph.fuse_kv_attention(folded)) == ["kvnumba.CachedAttention"]
    else:
        with pytest.raises(graph.NoCacheError):
            graph.fuse_kv_attention(folded)


@pytest.mark.parametrize(
    ("heads", "batch"), [("4, 4, 1", "1, 1, 1"), ("1, 4, 4", "1, 1, 1"), ("4, 4, 4", "1, 2, 2"), ("4, 4, 4", "2, 2, 1")]
)
def test_products_that_repeat_keys_values_or_queries_are_left_alone(heads, batch):
    with pytest.raises(graph.NoCacheError, match="it has 2 folded caches and 1 attentions"):
        graph.fuse_kv_attention(graph.fold_kv_cache(product(heads, batch)))


def test_one_head_of_keys_and_values_for_all_queries_is_fused():
    assert operators(graph.fuse_kv_attention(graph.fold_kv_cache(product("4, 1, 1")))) == ["kvnumba.CachedAttention"]


@pytest.mark.parametrize(
    ("attention", "branch"),
    [
        ("out = Attention (q, present_k, present_v)", "x = Neg (present_k)"),
        (
            """turned = Transpose <perm = [0, 1, 3, 2]> (present_k)
            scores = MatMul (q, turned)
            weights = Softmax (scores)
            out = Neg (present_v)""",
            "x = MatMul (weights, present_v)",
        ),
    ],
    ids=["cache", "weights"],
)
def test_what_a_branch_reads_is_left_alone(attention, branch):
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 24]>
        toy (float[1, 2, S, 8] q, float[1, 2, S, 8] k, float[1, 2, S, 8] v, bool yes,
             float[1, 2, P, 8] past_k, float[1, 2, P, 8] past_v)
            => (float[1, 2, R, 8] out, float[1, 2, R2, 8] seen,
                float[1, 2, T, 8] present_k, float[1, 2, T, 8] present_v) {{
            present_k = Concat <axis = 2> (past_k, k)
            present_v = Concat <axis = 2> (past_v, v)
            {attention}
            seen = If (yes) <
                then_branch = a () => (float[1, 2, A, 8] x) {{ {branch} }},
                else_branch = b () => (float[1, 2, A, 8] z) {{ z = Neg (k) }}
            >
        }}
    """)
    folded = graph.fold_kv_cache(onnx.shape_inference.infer_shapes(model))
    with pytest.raises(graph.NoCacheError, match="it has 2 folded caches"):
        graph.fuse_kv_attention(folded)


def test_causal_order_that_counts_from_the_first_key_is_left_alone():
    """An ONNX Attention without a past of its own starts to count at key 0; fusing would change what it means."""
    model = parse("""
        toy (float[1, 2, S, 8] q, float[1, 2, S, 8] k, float[1, 2, S, 8] v,
             float[1, 2, P, 8] past_k, float[1, 2, P, 8] past_v)
            => (float[1, 2, S, 8] out, float[1, 2, T, 8] present_k, float[1, 2, T, 8] present_v) {
            present_k = Concat <axis = 2> (past_k, k)
            present_v = Concat <axis = 2> (past_v, v)
            out = Attention <is_causal = 1> (q, present_k, present_v)
        }
    """)
    with pytest.raises(graph.NoCacheError):
        graph.fuse_kv_attention(graph.fold_kv_cache(model))


# ---- operators that have a past of their own


def own_past(flat=False, attributes="is_causal = 1", dtype="float"):
    new = [f"{dtype}[2, S, {H_Q * D}] q", f"{dtype}[2, S, {H_KV * D}] k", f"{dtype}[2, S, {H_KV * D}] v"]
    four = [f"{dtype}[2, {H_Q}, S, {D}] q", f"{dtype}[2, {H_KV}, S, {D}] k", f"{dtype}[2, {H_KV}, S, {D}] v"]
    heads = f", q_num_heads = {H_Q}, kv_num_heads = {H_KV}" if flat else ""
    out = f"{dtype}[2, S, {H_Q * D}] out" if flat else f"{dtype}[2, {H_Q}, S, {D}] out"
    past = [f"{dtype}[2, {H_KV}, P, {D}] past_{x}" for x in "kv"]
    return parse(f"""
        toy ({", ".join([*(new if flat else four), *past])})
            => ({out}, {dtype}[2, {H_KV}, T, {D}] present_k, {dtype}[2, {H_KV}, T, {D}] present_v) {{
            out, present_k, present_v = Attention <{attributes}{heads}> (q, k, v, , past_k, past_v)
        }}
    """)


@pytest.mark.parametrize(("dtype", "length"), [("double", "P"), ("float", "7"), ("float", '"3"')])
def test_a_past_that_a_cache_cannot_stand_for_is_left_alone(dtype, length):
    model = own_past(dtype=dtype)
    for value in model.graph.input[3:]:
        dim = value.type.tensor_type.shape.dim[2]
        if length.isdecimal():
            dim.dim_value = int(length)
        else:
            dim.dim_param = length.strip('"')
    with pytest.raises(graph.NoCacheError):
        graph.fuse_kv_attention(model)


def test_a_present_that_is_listed_twice_leaves_the_signature():
    model = own_past()
    model.graph.output.append(model.graph.output[1])
    assert [value.name for value in graph.fuse_kv_attention(model).graph.output] == ["out"]


def flattened(calls):
    return [{n: x.transpose(0, 2, 1, 3).reshape(B, x.shape[2], -1) for n, x in call.items()} for call in calls]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("attributes", ["is_causal = 1", "is_causal = 0, scale = 0.2, softcap = 1.5"])
def test_an_onnx_attention_with_its_own_past(flat, attributes):
    model, calls = own_past(flat, attributes), steps(mask="none")
    calls = flattened(calls) if flat else calls
    fused = graph.fuse_kv_attention(model)
    assert operators(fused) == ["kvnumba.CachedAttention"]
    assert [value.name for value in fused.graph.input] == ["q", "k", "v"]
    for got, one in zip(results(fused, calls), by_hand(model, calls, empty_pasts()), strict=True):
        np.testing.assert_allclose(got, one["out"], rtol=0, atol=3e-6)


def test_k37_float16_from_an_empty_past_keeps_its_dtype():
    model = own_past(dtype="float16")
    calls = [{name: x.astype(np.float16) for name, x in call.items()} for call in steps(mask="none")]
    pasts = {name: x.astype(np.float16) for name, x in empty_pasts().items()}
    fused = graph.fuse_kv_attention(model)
    session = graph.Session(fused, backend="reference")
    length = 0
    for call, one in zip(calls, by_hand(model, calls, pasts), strict=True):
        got = session.run(call)["out"]
        length += call["k"].shape[2]
        assert got.dtype == np.float16
        assert session.length == length
        np.testing.assert_allclose(got.astype(float), one["out"].astype(float), rtol=0, atol=4e-3)
    assert graph.rows(fused)[0]["format"] == "float16/float16"


def grouped_query(attributes="", inputs=""):
    q, k = f"float[2, S, {H_Q * D}]", f"float[2, S, {H_KV * D}]"
    return parse(
        f"""
        toy ({q} q, {k} k, {k} v, float[2, {H_KV}, P, {D}] past_k, float[2, {H_KV}, P, {D}] past_v, int32[R] lengths,
             int32 total) => ({q} out, float[2, {H_KV}, T, {D}] present_k, float[2, {H_KV}, T, {D}] present_v) {{
            out, present_k, present_v = com.microsoft.GroupQueryAttention
                <num_heads = {H_Q}, kv_num_heads = {H_KV}{attributes}> (q, k, v, past_k, past_v, lengths, total{inputs})
        }}
        """,
        contrib=True,
    )


def with_lengths(calls, shape=(B,)):
    total, made = 0, []
    for call in calls:
        total += call["k"].shape[1]
        made.append({**call, "lengths": np.full(shape, total - 1, np.int32), "total": np.array(total, np.int32)})
    return made


@pytest.mark.parametrize("shape", [(B,), (B, 1)])
@pytest.mark.parametrize(
    ("attributes", "window"), [("", None), (", scale = 0.2, softcap = 1.5", None), (", local_window_size = 3", 3)]
)
def test_k37_grouped_query_attention(attributes, window, shape):
    calls = steps(mask="none")
    fused = graph.fuse_kv_attention(grouped_query(attributes))
    cache = kv.KVCache(H_KV, D, batch_size=B)
    options = {"sm_scale": 0.2, "softcap": 1.5} if "scale" in attributes else {}
    if window:
        options["window"] = (window - 1, -1)
    for call, got in zip(calls, results(fused, with_lengths(flattened(calls), shape)), strict=True):
        expected = cache.step(call["q"], call["k"], call["v"], **options)
        np.testing.assert_allclose(got, flattened([{"q": expected}])[0]["q"], rtol=0, atol=1e-6)


def test_k37_grouped_query_attention_is_that_of_onnx_runtime():
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model, calls = grouped_query(), with_lengths(flattened(steps((5, 1, 1), mask="none")))
    engine = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    pasts = empty_pasts()
    for call, got in zip(calls, results(graph.fuse_kv_attention(model), calls), strict=True):
        out, k, v = engine.run(None, {**call, **pasts})
        pasts = {"past_k": k, "past_v": v}
        np.testing.assert_allclose(got, out, rtol=0, atol=3e-6)


def test_k37_rows_of_unequal_length_and_lengths_out_of_range():
    call = flattened(steps((4,), mask="none"))[0]
    call["total"] = np.array(4, np.int32)
    session = graph.Session(graph.fuse_kv_attention(grouped_query()), backend="reference")
    session.run({**call, "lengths": np.array([3, 1], np.int32)})
    held = next(iter(session._states.by_name.values()))
    assert held.cache.lengths == [4, 2]
    for lengths in ([8, 3], [-1, 3], [4, 0]):
        with pytest.raises(ValueError, match=r"past_k.attention.*seqlens_k must be from"):
            session.run({**call, "lengths": np.array(lengths, np.int32)})
    with pytest.raises(ValueError, match=r"seqlens_k must have shape \[2\] = \[batch\], got \[3\]"):
        session.run({**call, "lengths": np.array([4, 4, 4], np.int32)})
    assert next(iter(session._states.by_name.values())).cache.lengths == [4, 2]


@pytest.mark.parametrize("attributes", [", do_rotary = 1", ", smooth_softmax = 1"])
def test_what_is_not_offered_of_grouped_query_attention_is_left_alone(attributes):
    with pytest.raises(graph.NoCacheError):
        graph.fuse_kv_attention(grouped_query(attributes))


def test_multi_head_attention():
    wide = f"float[2, S, {H_Q * D}]"
    past = f"float[2, {H_Q}, P, {D}]"
    model = parse(
        f"""
        toy ({wide} q, {wide} k, {wide} v, {past} past_k, {past} past_v)
            => ({wide} out, float[2, {H_Q}, T, {D}] present_k, float[2, {H_Q}, T, {D}] present_v) {{
            out, present_k, present_v = com.microsoft.MultiHeadAttention
                <num_heads = {H_Q}, unidirectional = 1> (q, k, v, , , , past_k, past_v)
        }}
        """,
        contrib=True,
    )
    rng = np.random.default_rng(0)
    cache = kv.KVCache(H_Q, D, batch_size=B)
    session = graph.Session(graph.fuse_kv_attention(model), backend="reference")
    for new in (5, 1, 3):
        q, k, v = rng.standard_normal((3, B, H_Q, new, D), dtype=np.float32)
        expected = cache.step(q, k, v)
        (call,) = flattened([{"q": q, "k": k, "v": v}])
        np.testing.assert_allclose(session.run(call)["out"], flattened([{"q": expected}])[0]["q"], rtol=0, atol=1e-6)


def test_k37_a_present_that_is_no_output_is_stored_all_the_same():
    model = own_past()
    del model.graph.output[1:]
    fused = graph.fuse_kv_attention(model)
    calls = steps(mask="none")
    for got, one in zip(results(fused, calls), by_hand(own_past(), calls, empty_pasts()), strict=True):
        np.testing.assert_allclose(got, one["out"], rtol=0, atol=3e-6)


def test_facts_and_cost():
    folded = graph.fold_kv_cache(attention("grouped"))
    assert graph.output_facts(folded)["past_v.cache"] == ("float", ["2", "2", "P+S", "8"])
    assert graph.cost(folded)["past_k.cache"] == {"values_per_token": 32, "bytes_per_token": 128}
    quantized = graph.quantize_kv_storage(folded, "int8", "int4")
    spec = kv.CacheSpec(H_KV, D, D, "int8", "int4", batch_size=B)
    each = graph.cost(quantized)
    assert sum(one["bytes_per_token"] for one in each.values()) == spec.bytes_per_token
    (row,) = graph.rows(graph.fuse_kv_attention(quantized))
    assert (row["kind"], row["format"], row["shape"]) == ("CachedAttention", "int8/int4", ["2", "4", "S", "8"])
    assert (row["values_per_token"], row["bytes_per_token"]) == (spec.values_per_token, spec.bytes_per_token)

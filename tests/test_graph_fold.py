"""Folding a past and a present into a stateful node, and unfolding them again."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnx_ir", reason="onnx-ir is not installed")

import onnx_ir as ir  # noqa: E402
from graphs import attention, by_hand, cached, empty_pasts, parse, steps  # noqa: E402

from kvnumba import graph  # noqa: E402

pytestmark = pytest.mark.onnx


def names(model):
    return [value.name for value in model.graph.input], [value.name for value in model.graph.output]


def kinds(model):
    return [node.op_type for node in model.graph.node]


def run(session, chunks):
    return [session.run({"new": chunk})["twice"] for chunk in chunks]


@pytest.mark.parametrize("past_first", [True, False])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_any_axis_and_both_orders_of_the_operands(axis, past_first, rng):
    model = cached(axis, past_first)
    folded = graph.fold_kv_cache(model)
    assert names(folded) == (["new"], ["twice"])
    shape = [2, 3, 4, 5]
    chunks = []
    for new in (3, 1, 0, 2):
        shape[axis] = new
        chunks.append(rng.standard_normal(shape).astype(np.float32))
    shape[axis] = 0
    expected = by_hand(model, [{"new": chunk} for chunk in chunks], {"past": np.zeros(shape, np.float32)})
    session = graph.Session(folded, backend="reference")
    for got, one in zip(run(session, chunks), expected, strict=True):
        np.testing.assert_array_equal(got, one["twice"])
    assert session.length == 6


@pytest.mark.parametrize("past_first", [True, False])
def test_fold_then_unfold_gives_the_same_signature_and_results(past_first, rng):
    model = cached(2, past_first)
    back = graph.unfold_kv_cache(graph.fold_kv_cache(model))
    onnx.checker.check_model(back, full_check=True)
    assert names(back) == names(model)
    assert [v.type for v in back.graph.input] == [v.type for v in model.graph.input]
    assert kinds(back) == kinds(model)
    assert not any(one.domain == "kvnumba" for one in back.opset_import)
    calls = [{"new": rng.standard_normal((2, 3, n, 5)).astype(np.float32)} for n in (3, 1)]
    pasts = {"past": np.zeros((2, 3, 0, 5), np.float32)}
    for got, expected in zip(by_hand(back, calls, pasts), by_hand(model, calls, pasts), strict=True):
        assert all(np.array_equal(got[name], expected[name]) for name in expected)


def test_several_layers_keep_the_order_of_inputs_and_outputs():
    model = attention("matmul")
    folded = graph.fold_kv_cache(model)
    assert names(folded) == (["q", "k", "v", "mask"], ["out"])
    assert kinds(folded).count("Cache") == 2
    assert names(graph.unfold_kv_cache(folded)) == names(model)


def test_k37_symbols_stay_and_are_bound_to_the_state():
    """The graph asks for the length of the past, as for positions."""
    model = parse("""
        toy (float[1, 2, P, 4] past, float[1, 2, S, 4] new) => (float[1, 2, T, 4] present, float[1, 2, T, 4] twice,
                                                               int64[1] start, int64[4] shape) {
            present = Concat <axis = 2> (past, new)
            twice = Add (present, present)
            start = Shape <start = 2, end = 3> (past)
            shape = Shape (past)
        }
    """)
    folded = graph.fold_kv_cache(model)
    assert names(folded) == (["new"], ["twice", "start", "shape"])
    facts = graph.output_facts(folded)
    assert facts == {"past.cache": ("float", ["1", "2", "P+S", "4"])}
    session = graph.Session(folded, backend="reference")
    for length, new in ((0, 3), (3, 1), (4, 2)):
        got = session.run({"new": np.ones((1, 2, new, 4), np.float32)})
        assert got["start"].tolist() == [length]
        assert got["shape"].tolist() == [1, 2, length, 4]
        assert got["twice"].shape == (1, 2, length + new, 4)
    assert kinds(graph.unfold_kv_cache(folded)) == kinds(model)


@pytest.mark.parametrize(
    "body",
    [
        "present = Concat <axis = 2> (past, new)\n twice = Add (past, past)",  # somebody else reads the past
        "joined = Concat <axis = 2> (past, new)\n present = Neg (joined)\n twice = Neg (joined)",
        "present = Concat <axis = 2> (past, new, new)\n twice = Neg (present)",
        "present = Concat <axis = 3> (past, new)\n twice = Neg (present)",  # not where the symbol is
        "present = Concat <axis = 2> (past, new)\n twice = Neg (new)",  # nothing reads what is stored
        "present = Add (past, new)\n twice = Neg (present)",
    ],
)
def test_anything_but_the_exact_pattern_is_left_alone(body):
    text = "toy (float[1, 2, P, 4] past, float[1, 2, S, 4] new) => (float[a, b, c, d] present, float[e, f, g, h] twice)"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 24]>\n{text} {{ {body} }}')
    before = model.SerializeToString()
    with pytest.raises(graph.NoCacheError, match=r"model must have a past input .* among the inputs \['past', 'new'\]"):
        graph.fold_kv_cache(model)
    assert model.SerializeToString() == before


def test_a_past_of_fixed_length_is_no_cache():
    with pytest.raises(graph.NoCacheError, match="it is unchanged"):
        graph.fold_kv_cache(cached(past="7"))


def test_models_come_as_proto_ir_or_path(tmp_path):
    model = cached()
    onnx.save(model, tmp_path / "model.onnx")
    assert isinstance(graph.fold_kv_cache(tmp_path / "model.onnx"), onnx.ModelProto)
    source = ir.from_proto(model)
    folded = graph.fold_kv_cache(source)
    assert isinstance(folded, ir.Model)
    assert [value.name for value in source.graph.inputs] == ["past", "new"]  # not changed
    with pytest.raises(TypeError, match=r"model must be an onnx.ModelProto, an onnx_ir.Model or a path, got int"):
        graph.fold_kv_cache(3)


def test_unfold_says_what_it_cannot_do():
    with pytest.raises(graph.NoCacheError, match="must have a folded cache"):
        graph.unfold_kv_cache(cached())
    quantized = graph.quantize_kv_storage(graph.fold_kv_cache(attention("matmul")))
    with pytest.raises(ValueError, match=r"caches of floats only .* 'past_k.cache' \(kvnumba.Cache\) and 1 more"):
        graph.unfold_kv_cache(quantized)


def test_a_folded_model_is_valid_and_survives_a_file(tmp_path, rng):
    folded = graph.fold_kv_cache(attention("operator"))
    onnx.save(folded, tmp_path / "folded.onnx")
    calls = steps()
    expected = by_hand(attention("operator"), calls, empty_pasts())
    session = graph.Session(tmp_path / "folded.onnx", backend="reference")
    for call, one in zip(calls, expected, strict=True):
        np.testing.assert_array_equal(session.run(call)["out"], one["out"])

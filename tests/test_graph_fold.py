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
    for new in (0, 3, 1, 0, 2):
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


BRANCHES = """
    <ir_version: 10, opset_import: ["" : 24]>
    toy (float[1, 2, P, 4] past, float[1, 2, S, 4] new, bool yes)
        => (float[1, 2, T, 4] present, float[1, 2, T, 4] twice, int64[4] shape) {{ {body} }}
"""


@pytest.mark.parametrize(
    "body",
    [
        """present = If (yes) <
            then_branch = a () => (float[1, 2, A, 4] x) { x = Concat <axis = 2> (past, new) y = Neg (x) },
            else_branch = b () => (float[1, 2, A, 4] z) { z = Identity (new) }
        >
        twice = Neg (new)
        shape = Shape (new)""",
        """present = Concat <axis = 2> (past, new)
        twice = Add (present, present)
        shape = If (yes) <
            then_branch = a () => (int64[4] x) { x = Shape (past) },
            else_branch = b () => (int64[4] z) { z = Shape (new) }
        >""",
    ],
    ids=["concatenation", "shape"],
)
def test_a_past_that_a_branch_reads_is_left_alone(body):
    model = onnx.parser.parse_model(BRANCHES.format(body=body))
    with pytest.raises(graph.NoCacheError, match="it is unchanged"):
        graph.fold_kv_cache(model)


@pytest.mark.parametrize("dtype", ["int64", "int32", "double"])
def test_a_past_that_no_cache_keeps_exactly_is_left_alone(dtype):
    with pytest.raises(graph.NoCacheError, match="it is unchanged"):
        graph.fold_kv_cache(cached(dtype=dtype))


def test_a_present_that_is_listed_twice_is_left_alone():
    model = cached()
    model.graph.output.append(model.graph.output[0])
    with pytest.raises(graph.NoCacheError, match="it is unchanged"):
        graph.fold_kv_cache(model)


def renamed_symbol(symbol):
    model = cached()
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = symbol
    return model


@pytest.mark.parametrize("symbol", ["3", "?", "٣"])
def test_a_symbol_like_a_number_is_left_alone(symbol):
    with pytest.raises(graph.NoCacheError, match="it is unchanged"):
        graph.fold_kv_cache(renamed_symbol(symbol))


@pytest.mark.parametrize("symbol", ["²", "past length", "a+b"])
def test_any_other_symbol_comes_back(symbol):
    folded = graph.fold_kv_cache(renamed_symbol(symbol))
    assert graph.output_facts(folded) == {"past.cache": ("float", ["2", "3", f"{symbol}+S", "5"])}
    back = graph.unfold_kv_cache(folded)
    assert back.graph.input[0].type.tensor_type.shape.dim[2].dim_param == symbol


@pytest.mark.parametrize("backend", ["onnxruntime", "reference"])
def test_names_that_folding_makes_may_be_taken(backend, rng):
    if backend == "onnxruntime":
        pytest.importorskip("onnxruntime_extensions", reason="onnxruntime-extensions is not installed")
    text = """
        toy (float16[1, 2, P, 4] past, float16[1, 2, S, 4] X) => (
            float16[1, 2, T, 4] present, float16[1, 2, T, 4] A, float16[1, 2, T, 4] B, int64[4] C, int64[4] D) {
            present = Concat <axis = 2> (past, X)
            A = Add (present, present)
            B = Neg (present)
            C = Shape (past)
            E = Add (C, C)
            D = Neg (E)
        }
    """
    model = parse(text)
    taken = {"A": "present.all", "B": "present.all.python", "E": "C.fed", "D": "X.real"}
    for node in model.graph.node:
        node.output[0] = taken.get(node.output[0], node.output[0])
        node.input[:] = [taken.get(name, name) for name in node.input]
    for value in model.graph.output:
        value.name = taken.get(value.name, value.name)
    onnx.checker.check_model(model)
    folded = graph.fold_kv_cache(model)
    assert len({node.output[0] for node in folded.graph.node}) == len(folded.graph.node)
    x = rng.standard_normal((1, 2, 3, 4)).astype(np.float16)
    (expected,) = by_hand(model, [{"X": x}], {"past": x[:, :, :0]})
    for name, got in graph.Session(folded, backend=backend).run({"X": x}).items():
        np.testing.assert_array_equal(got, expected[name])


@pytest.mark.parametrize("symbol", ["N", "unknown"])
def test_a_symbol_of_the_past_is_bound_by_the_inputs_of_the_first_call(symbol, rng):
    """What no input tells counts as 1 until the first tokens are stored."""
    model = parse(f"""
        toy (float[{symbol}, 2, P, 4] past, float[N, 2, S, 4] new)
            => (float[N, 2, T, 4] present, float[N, 2, T, 4] twice, int64[4] shape) {{
            present = Concat <axis = 2> (past, new)
            twice = Add (present, present)
            shape = Shape (past)
        }}
    """)
    session = graph.Session(graph.fold_kv_cache(model), backend="reference")
    x = rng.standard_normal((3, 2, 5, 4)).astype(np.float32)
    assert session.run({"new": x})["shape"].tolist() == [3 if symbol == "N" else 1, 2, 0, 4]
    assert session.run({"new": x})["shape"].tolist() == [3, 2, 5, 4]


def test_a_shape_without_ends_comes_back_without_them():
    """Before opset 15 a Shape had no attributes."""
    model = parse(
        """
        toy (float[1, 2, P, 4] past, float[1, 2, S, 4] new)
            => (float[1, 2, T, 4] present, float[1, 2, T, 4] twice, int64[4] shape) {
            present = Concat <axis = 2> (past, new)
            twice = Add (present, present)
            shape = Shape (past)
        }
        """,
        opset=13,
    )
    onnx.checker.check_model(graph.unfold_kv_cache(graph.fold_kv_cache(model)), full_check=True)


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

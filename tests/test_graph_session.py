"""Sessions: both engines, the state of all layers, files, errors."""

import copy
import pickle

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnx_ir", reason="onnx-ir is not installed")
pytest.importorskip("onnxruntime_extensions", reason="onnxruntime-extensions is not installed")

import onnx_ir as ir  # noqa: E402
from graphs import attention, by_hand, cached, empty_pasts, parse, steps  # noqa: E402

from kvnumba import graph  # noqa: E402
from kvnumba.graph.states import ArrayState  # noqa: E402

pytestmark = pytest.mark.onnx

BACKENDS = ("onnxruntime", "reference")


def folded():
    return graph.fold_kv_cache(attention("matmul"))


def fused(k_format="float32", v_format="float32"):
    return graph.quantize_kv_storage(graph.fuse_kv_attention(folded()), k_format, v_format)


MODELS = {
    "folded": folded,
    "fused": fused,
    "codes": lambda: graph.quantize_kv_storage(folded(), "int8", "int4"),
    "fused codes": lambda: fused("int8", "int4"),
}


@pytest.mark.parametrize("form", MODELS)
def test_both_engines_give_the_same(form):
    calls = steps((40, 1, 0, 35, 1))
    outs = []
    for backend in BACKENDS:
        session = graph.Session(MODELS[form](), backend=backend)
        outs.append([session.run(call)["out"] for call in calls])
        assert session.length == 77
    for one, other in zip(*outs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)
    if form in ("folded", "fused"):
        for got, one in zip(outs[0], by_hand(attention("matmul"), calls, empty_pasts()), strict=True):
            np.testing.assert_allclose(got, one["out"], rtol=0, atol=3e-6)


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_masks_of_every_kind_reach_the_operators_of_onnx_runtime(mask):
    calls = steps(mask=mask)
    session = graph.Session(graph.fuse_kv_attention(graph.fold_kv_cache(attention("operator", mask))))
    for call, one in zip(calls, by_hand(attention("operator", mask), calls, empty_pasts()), strict=True):
        np.testing.assert_allclose(session.run(call)["out"], one["out"], rtol=0, atol=3e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_keeps_its_dtype(backend):
    session = graph.Session(graph.fold_kv_cache(cached(dtype="float16")), backend=backend)
    x = np.random.default_rng(0).standard_normal((2, 3, 2, 5)).astype(np.float16)
    session.run({"new": x})
    got = session.run({"new": x[:, :, :1]})["twice"]
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, 2 * np.concatenate([x, x[:, :, :1]], 2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("k", "v"), [("float", "float16"), ("float16", "float")])
def test_keys_and_values_may_be_of_two_types(k, v, backend):
    model = parse(f"""
        toy ({k}[1, 2, S, 8] q, {k}[1, 2, S, 8] k, {v}[1, 2, S, 8] v, {k}[1, 2, P, 8] past_k, {v}[1, 2, P, 8] past_v)
            => ({k}[1, 2, S, 8] out, {k}[1, 2, T, 8] present_k, {v}[1, 2, T, 8] present_v) {{
            present_k = Concat <axis = 2> (past_k, k)
            present_v = Concat <axis = 2> (past_v, v)
            out = Attention (q, present_k, present_v)
        }}
    """)
    session = graph.Session(graph.fuse_kv_attention(graph.fold_kv_cache(model)), backend=backend)
    q_, k_, v_ = (np.ones((1, 2, 3, 8), {"float": "float32"}.get(name, name)) for name in (k, k, v))
    out = session.run({"q": q_, "k": k_, "v": v_})["out"]
    assert out.dtype == k_.dtype
    np.testing.assert_array_equal(out, k_)


@pytest.mark.parametrize("form", MODELS)
def test_truncate_reset_and_freeze_go_back_exactly(form):
    first, *rest = steps((40, 1, 1, 1))
    session = graph.Session(MODELS[form](), backend="reference")
    session.run(first)
    snapshot, size = session.freeze(), session.nbytes
    expected = [session.run(call)["out"] for call in rest]
    session.truncate(40)
    assert (session.length, session.nbytes) == (40, size)
    assert [session.run(call)["out"].tobytes() for call in rest] == [out.tobytes() for out in expected]
    session.unfreeze(snapshot)
    assert len(snapshot) == session.length == 40
    assert [session.run(call)["out"].tobytes() for call in rest] == [out.tobytes() for out in expected]
    session.reset()
    assert session.length == 0
    session.run(first)
    assert session.run(rest[0])["out"].tobytes() == expected[0].tobytes()
    with pytest.raises(ValueError, match="n must be from 0 to the length 41, got 42"):
        session.truncate(42)
    with pytest.raises(ValueError, match="snapshot must come from a session of the same model"):
        graph.Session(graph.fold_kv_cache(cached()), backend="reference").unfreeze(snapshot)


@pytest.mark.parametrize("form", MODELS)
def test_a_file_goes_on_bit_for_bit(form, tmp_path):
    first, *rest = steps((70, 1, 1))
    session = graph.Session(MODELS[form](), backend="reference")
    session.run(first)
    session.save(tmp_path / "state")
    other = graph.Session(MODELS[form](), backend="reference")
    other.load(tmp_path / "state")
    assert other.length == 70
    for call in rest:
        assert other.run(call)["out"].tobytes() == session.run(call)["out"].tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


def test_damaged_and_foreign_files_change_nothing(tmp_path):
    session = graph.Session(fused("int8", "int4"), backend="reference")
    session.run(steps((40,))[0])
    session.save(tmp_path / "state")
    good = (tmp_path / "state").read_bytes()
    for place in range(0, len(good), 97):
        data = bytearray(good)
        data[place] ^= 4
        (tmp_path / "bad").write_bytes(data)
        try:
            session.load(tmp_path / "bad")
        except ValueError:
            assert session.length == 40
        else:  # a bit of the archive that says nothing about the states, such as a date
            session.save(tmp_path / "again")
            fresh = graph.Session(fused("int8", "int4"), backend="reference")
            fresh.load(tmp_path / "again")
            assert fresh.nbytes == session.nbytes
    for cut in (0, 10, len(good) // 2, len(good) - 1):
        (tmp_path / "bad").write_bytes(good[:cut])
        with pytest.raises(ValueError, match="path must"):
            session.load(tmp_path / "bad")
    other = graph.Session(folded(), backend="reference")
    with pytest.raises(ValueError, match="path must hold 2 states, got 1 members"):
        other.load(tmp_path / "state")
    with pytest.raises(ValueError, match=r"path must hold a state 'past_k' of \('float32', 'float32'\)"):
        graph.Session(fused(), backend="reference").load(tmp_path / "state")
    with pytest.raises(FileNotFoundError):
        session.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"state 'past_k' cannot be saved: .* must hold tokens"):
        graph.Session(fused(), backend="reference").save(tmp_path / "empty")
    assert not (tmp_path / "empty").exists()
    assert session.length == 40


def layer(heads=2, dtype="float", fuse=False, form=None, backend="reference"):
    """A session of one attention, not run yet."""
    model = graph.fold_kv_cache(
        parse(f"""
        toy ({dtype}[1, 4, S, 8] q, {dtype}[1, {heads}, S, 8] k, {dtype}[1, {heads}, S, 8] v,
             {dtype}[1, {heads}, P, 8] past_k, {dtype}[1, {heads}, P, 8] past_v)
            => ({dtype}[1, 4, S, 8] out, {dtype}[1, {heads}, T, 8] present_k, {dtype}[1, {heads}, T, 8] present_v) {{
            present_k = Concat <axis = 2> (past_k, k)
            present_v = Concat <axis = 2> (past_v, v)
            out = Attention (q, present_k, present_v)
        }}
    """)
    )
    model = graph.fuse_kv_attention(model) if fuse else model
    return graph.Session(graph.quantize_kv_storage(model, form, form) if form else model, backend=backend)


def tokens(heads=2, dtype="float", count=3):
    rng, kind = np.random.default_rng(0), {"float": "float32"}.get(dtype, dtype)
    return {x: rng.standard_normal((1, n, count, 8)).astype(kind) for x, n in (("q", 4), ("k", heads), ("v", heads))}


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(
    "other", [{"heads": 4}, {"dtype": "float16"}, {"form": "int4"}], ids=["heads", "dtype", "form"]
)
def test_the_state_of_another_model_is_refused_and_changes_nothing(other, fuse, tmp_path):
    session, stranger = layer(fuse=fuse), layer(fuse=fuse, **other)
    session.run(tokens())
    stranger.run(tokens(**{name: value for name, value in other.items() if name != "form"}, count=5))
    stranger.save(tmp_path / "state")
    with pytest.raises(ValueError, match=r"path must .*'past_k'|path must be"):
        session.load(tmp_path / "state")
    with pytest.raises(ValueError, match="snapshot must come from a session of the same model, got another one"):
        session.unfreeze(stranger.freeze())
    assert session.length == 3
    session.run(tokens(count=1))


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_no_tokens_in_the_first_call_give_an_empty_result(form):
    session = layer(fuse=True, form=form)
    assert [session.run(tokens(count=n))["out"].shape for n in (0, 2, 0)] == [(1, 4, n, 8) for n in (0, 2, 0)]


@pytest.mark.parametrize(("form", "layout"), [("float", ""), ("int8", "per_channel"), ("int4", "per_token")])
def test_a_state_without_tokens_gives_the_shape_of_what_came(form, layout):
    state = ArrayState("past", 2, ["1", "2", "P", "8"], form, layout)
    for count, total in ((0, 0), (2, 2), (0, 2)):
        assert state.append(np.ones((1, 2, count, 8), np.float32)).shape == (1, 2, total, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_with_a_value_of_its_own_may_be_left_out(backend):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 24]>
        toy (float[1, 2, P, 4] past, float[1, 2, S, 4] new, float[1] factor)
            => (float[1, 2, T, 4] present, float[1, 2, T, 4] seen) <float[1] factor = {2.0}> {
            present = Concat <axis = 2> (past, new)
            seen = Mul (present, factor)
        }
    """)
    session = graph.Session(graph.fold_kv_cache(model), backend=backend)
    x = np.ones((1, 2, 3, 4), np.float32)
    assert (session.run({"new": x})["seen"] == 2).all()
    assert (session.run({"new": x, "factor": np.array([5], np.float32)})["seen"] == 5).all()
    with pytest.raises(ValueError, match=r"feeds must have the inputs \['factor', 'new'\], got \['factor'\]"):
        session.run({"factor": np.array([5], np.float32)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_data_in_other_files_is_found_or_missed_by_name(backend, tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 24]>
        toy (float[1, 2, P, 4] past, float[1, 2, S, 4] new) => (float[1, 2, T, 4] present, float[1, 2, T, 4] seen) {
            present = Concat <axis = 2> (past, new)
            seen = Mul (present, factor)
        }
    """)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(4, 3, np.float32), "factor"))
    path = tmp_path / "model.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location="data.bin", size_threshold=0)
    for one in (path, ir.load(path)):
        session = graph.Session(graph.fold_kv_cache(one), backend=backend)
        assert (session.run({"new": np.ones((1, 2, 3, 4), np.float32)})["seen"] == 3).all()
    with pytest.raises(ValueError, match=r"model must come with its external data, .*data.bin.*; pass the path"):
        graph.Session(graph.fold_kv_cache(onnx.load(path, load_external_data=False)), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("x", [0.5, "text", None, [[1.0]], np.zeros((2, 3, 1, 5)), np.zeros((2, 3, 1, 5), np.float16)])
def test_an_input_of_another_type_is_refused_by_name(x, backend):
    session = graph.Session(graph.fold_kv_cache(cached()), backend=backend)
    with pytest.raises(TypeError, match=r"input 'new' must be float32, as the model says, got "):
        session.run({"new": x})
    assert session.length == 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_is_not_copied_but_its_snapshots_are(duplicate):
    session = layer()
    session.run(tokens())
    with pytest.raises(TypeError, match="a Session cannot be copied"):
        duplicate(session)
    snapshot = session.freeze()
    session.reset()
    session.unfreeze(copy.copy(snapshot))
    assert session.length == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["fused codes", "codes"])
def test_an_error_names_the_node_and_leaves_every_state_as_it_was(form, backend):
    first, second = steps((40, 1))
    session = graph.Session(MODELS[form](), backend=backend)
    session.run(first)
    bad = {**second, "v": second["v"].copy()}
    bad["v"][1, 0, 0, 3] = np.nan
    with pytest.raises(ValueError, match=r"node 'past_[kv]\.(attention|cache)' \(kvnumba\.\w+\): .* must be finite"):
        session.run(bad)
    assert {state.length() for state in session._states.by_name.values()} == {40}
    fresh = graph.Session(MODELS[form](), backend=backend)
    fresh.run(first)
    assert session.run(second)["out"].tobytes() == fresh.run(second)["out"].tobytes()


def test_a_failed_save_names_the_path_that_was_given(tmp_path):
    session = graph.Session(folded(), backend="reference")
    with pytest.raises(FileNotFoundError) as caught:
        session.save(tmp_path / "missing" / "state.kv")
    assert caught.value.filename == str(tmp_path / "missing" / "state.kv")


def test_wrong_calls_are_refused_by_name():
    with pytest.raises(graph.NoCacheError, match="model must have folded caches, got none"):
        graph.Session(attention("matmul"))
    with pytest.raises(ValueError, match="backend must be one of onnxruntime, reference, got 'cuda'"):
        graph.Session(folded(), backend="cuda")
    session = graph.Session(folded(), backend="reference")
    with pytest.raises(ValueError, match=r"feeds must have the inputs \['k', 'mask', 'q', 'v'\], got \['q'\]"):
        session.run({"q": 1})
    with pytest.raises(TypeError, match="feeds must be a mapping of names of inputs to arrays, got NoneType"):
        session.run(None)
    with pytest.raises(TypeError, match="snapshot must come from freeze of a session, got str"):
        session.unfreeze("x")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        graph.nothing  # noqa: B018


def test_two_sessions_of_one_model_do_not_share_states():
    one, two = graph.Session(folded()), graph.Session(folded())
    one.run(steps((3,))[0])
    assert (one.length, two.length) == (3, 0)
    assert repr(graph.Session(fused())).startswith("Session(1 state, length=0")
    assert repr(one).startswith("Session(2 states, length=3")

"""Sessions: both engines, the state of all layers, files, errors."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnx_ir", reason="onnx-ir is not installed")
pytest.importorskip("onnxruntime_extensions", reason="onnxruntime-extensions is not installed")

from graphs import attention, by_hand, cached, empty_pasts, steps  # noqa: E402

from kvnumba import graph  # noqa: E402

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
@pytest.mark.parametrize("dtype", ["float16", "double"])
def test_other_types_keep_their_dtype(backend, dtype):
    if (backend, dtype) == ("onnxruntime", "double"):
        pytest.skip("operators in Python compute in float32")
    session = graph.Session(graph.fold_kv_cache(cached(dtype=dtype)), backend=backend)
    x = np.random.default_rng(0).standard_normal((2, 3, 2, 5)).astype({"double": float}.get(dtype, dtype))
    session.run({"new": x})
    got = session.run({"new": x[:, :, :1]})["twice"]
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, 2 * np.concatenate([x, x[:, :, :1]], 2))


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


def test_wrong_calls_are_refused_by_name():
    with pytest.raises(graph.NoCacheError, match="model must have folded caches, got none"):
        graph.Session(attention("matmul"))
    with pytest.raises(ValueError, match="backend must be one of onnxruntime, reference, got 'cuda'"):
        graph.Session(folded(), backend="cuda")
    session = graph.Session(folded(), backend="reference")
    with pytest.raises(ValueError, match=r"feeds must have the inputs \['k', 'mask', 'q', 'v'\], got \['q'\]"):
        session.run({"q": 1})
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        graph.nothing  # noqa: B018


def test_two_sessions_of_one_model_do_not_share_states():
    one, two = graph.Session(folded()), graph.Session(folded())
    one.run(steps((3,))[0])
    assert (one.length, two.length) == (3, 0)
    assert repr(one).startswith("Session(2 states, length=3")

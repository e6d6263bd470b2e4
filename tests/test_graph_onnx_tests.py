"""The ONNX project's own tests of the Attention operator, on `kvnumba.attention` and `KVCache`."""

import warnings

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed")

from onnx import helper, numpy_helper  # noqa: E402

import kvnumba as kv  # noqa: E402

pytestmark = pytest.mark.onnx

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from onnx.backend.test.loader import load_model_tests

    CASES = {
        case.name: case
        for case in load_model_tests(kind="node")
        if case.name.startswith("test_attention_") and not case.name.endswith("_expanded")
    }


def loaded(case):
    """Attributes of the node, inputs by name of the operator, expected outputs."""
    (node,) = case.model.graph.node
    arrays, expected = case.data_sets[0]
    arrays, expected = (
        [x if isinstance(x, np.ndarray) else numpy_helper.to_array(x) for x in part] for part in (arrays, expected)
    )
    given = dict(zip([value.name for value in case.model.graph.input], arrays, strict=True))
    names = ("q", "k", "v", "mask", "past_k", "past_v", "lengths")
    inputs = {name: given[one] for name, one in zip(names, node.input) if one}
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}, inputs, expected


def heads(x, count):
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)


def padded(mask, T):
    """A mask over fewer keys hides the others."""
    missing = T - mask.shape[-1]
    hidden = np.zeros((*mask.shape[:-1], missing), mask.dtype)
    return np.concatenate([mask, hidden if mask.dtype == bool else hidden - np.inf], -1) if missing > 0 else mask


def prepared(case):
    attributes, inputs, expected = loaded(case)
    q = heads(inputs["q"], attributes.get("q_num_heads"))
    k, v, past_k, past_v = (
        None if x is None else heads(x, attributes.get("kv_num_heads"))
        for x in map(inputs.get, ("k", "v", "past_k", "past_v"))
    )
    options = {"sm_scale": attributes.get("scale"), "softcap": attributes.get("softcap", 0.0)}
    total = k.shape[2] + (0 if past_k is None else past_k.shape[2])
    options["causal"] = bool(attributes.get("is_causal", 0))
    if "mask" in inputs:
        options["mask"] = padded(inputs["mask"], total)
    window = tuple(attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if window != (-1, -1):
        options["window"] = window
    past = 0 if past_k is None else past_k.shape[2]
    if past + q.shape[2] != total and (options["causal"] or "window" in options):
        # The operator counts queries from the end of the past, ours from the last key: a mask says the difference.
        at = past + np.arange(q.shape[2])[:, None] - np.arange(total)[None]
        seen = (at >= 0) if options["causal"] else np.ones_like(at, bool)
        for side, bound in zip((at, -at), window):
            seen &= (side <= bound) if bound >= 0 else True
        options.pop("window", None)
        options["causal"] = False
        mask = options.get("mask")
        options["mask"] = (
            seen
            if mask is None
            else seen & mask
            if mask.dtype == bool
            else np.where(seen, mask, -np.inf).astype(mask.dtype)
        )
    return q, k, v, past_k, past_v, options, expected, inputs["q"].ndim


def compare(out, expected, axes, name):
    if axes == 3:
        out = out.transpose(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], -1)
    assert out.dtype == expected.dtype
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(expected.dtype.name, 2e-6)
    np.testing.assert_allclose(
        out.astype(np.float64), expected.astype(np.float64), rtol=0, atol=tolerance, err_msg=name
    )


def reason(name):
    """Why a test is left out; None if it is not."""
    attributes, inputs, expected = loaded(CASES[name])
    if "lengths" in inputs:
        return "nonpad_kv_seqlen: a cache of fixed size that the caller holds"
    if "qk_matmul_output_mode" in attributes or len(expected) == 4 or (len(expected) == 2 and "past_k" not in inputs):
        return "qk_matmul_output: the scores as an output"
    return None


OFFERED = sorted(name for name in CASES if reason(name) is None)


@pytest.mark.parametrize("name", OFFERED)
def test_attention_gives_what_the_project_expects(name):
    q, k, v, past_k, past_v, options, expected, axes = prepared(CASES[name])
    if past_k is not None:
        k, v = np.concatenate([past_k, k], 2), np.concatenate([past_v, v], 2)
    compare(kv.attention(q, k, v, **options), expected[0], axes, name)


@pytest.mark.parametrize("name", [name for name in OFFERED if "past" in name])
def test_a_cache_with_a_past_gives_what_the_project_expects(name):
    q, k, v, past_k, past_v, options, expected, axes = prepared(CASES[name])
    form = k.dtype.name if k.dtype.name in kv.FORMATS else "float32"
    cache = kv.KVCache(
        k.shape[1], k.shape[3], k_format=form, v_format=form, batch_size=k.shape[0], v_head_dim=v.shape[3]
    )
    cache.append(past_k, past_v)
    compare(cache.step(q, k, v, **options), expected[0], axes, name)
    if len(expected) > 1:
        np.testing.assert_array_equal(cache.keys(), expected[1].astype(np.float32))
        np.testing.assert_array_equal(cache.values(), expected[2].astype(np.float32))


def test_what_is_left_out_is_listed_with_its_reason():
    left = {name: why for name in CASES if (why := reason(name))}
    assert len(OFFERED) + len(left) == len(CASES)
    assert len(OFFERED) >= 62, left  # of 93 in onnx 1.23

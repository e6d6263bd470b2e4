"""The tract engine's quantized key/value cache as a peer: the same tokens must come back as the same numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import normal

import kvnumba as kv
from kvnumba import reference

tract = pytest.importorskip("tract", reason="the peer engine (package tract) is not installed")

HEADS, DIM = 2, 33  # an odd number of channels: int4 rows end in half a byte
STEPS = [5, 1, 1, 30, *[1] * 163]  # 200 tokens

HEAD = """version 1.0;

extension tract_registry tract_core;
extension tract_registry tract_transformers;
extension tract_symbol S;
extension tract_symbol P;

graph network({inputs}) -> ({output})
{{
"""


def load(text, folder, transform=None):
    """Load an NNEF graph, turn it by *transform*, and make it ready to run."""
    folder.mkdir()
    (folder / "graph.nnef").write_text(text, encoding="utf-8")
    model = tract.nnef().with_tract_transformers().load(str(folder))
    if transform is not None:
        model.transform(transform)
    return model.into_runnable()


def external(name, heads=HEADS):
    return f"    {name} = tract_core_external(shape=[1,{heads},S,{DIM}], datum_type='f32');\n"


def shapes():
    return f"past_sequence_shape=[1,{HEADS},P,{DIM}], input_sequence_shape=[1,{HEADS},S,{DIM}]"


def cache_graph(bits, per_channel):
    """A graph whose output is what the peer's quantized cache gives back."""
    return (
        HEAD.format(inputs="x", output="y")
        + external("x")
        + "    y = tract_transformers_quantized_dyn_kv_cache(x, name='cache', axis=2, "
        + f"bits={bits}, per_channel={per_channel}, datum_type='f32', {shapes()});\n}}\n"
    )


def attention_graph():
    """Two plain caches that feed an attention: what the peer's transforms look for."""
    caches = "".join(
        f"    {name}c = tract_transformers_dyn_kv_cache({name}, name='{name}cache', axis=2, datum_type='f32', "
        f"{shapes()});\n"
        for name in "kv"
    )
    return (
        HEAD.format(inputs="q, k, v", output="o")
        + external("q", 2 * HEADS)
        + external("k")
        + external("v")
        + caches
        + "    o = tract_transformers_sdpa(q, kc, vc, datum_type='f32', acc_datum_type='f32', is_causal=false);\n}\n"
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["per_channel", "per_token"])
def test_quantized_cache_gives_back_what_the_peer_gives_back(rng, tmp_path, bits, layout):
    state = load(cache_graph(bits, int(layout == "per_channel")), tmp_path / "graph").spawn_state()
    cache = kv.QuantizedCache(layout=layout, bits=bits)
    x = normal(rng, 1, HEADS, 200, DIM)
    x[..., 3] *= 50
    x[:, :, 60:] *= 3  # the range grows
    start = 0
    for count in STEPS:
        part = x[:, :, start : start + count]
        start += count
        theirs = state.run([part])[0].to_numpy()
        cache.append(part)
        ours = cache.contiguous()
        assert ours.shape == theirs.shape == (1, HEADS, start, DIM)
        # Both compute lo + code * scale in float32; one of them may leave out the rounding of the product.
        bound = np.spacing(np.abs(x[:, :, :start]).max())
        assert np.abs(ours - theirs).max() <= bound
    assert start == 200
    assert np.abs(ours - x).max() > 1000 * bound  # it is quantized


@pytest.mark.parametrize(
    ("bits", "transform"), [(8, "quantize_kv_storage"), (4, "quantize_kv_storage_int4"), (32, None)]
)
def test_attention_over_the_peers_transformed_graph_equals_ours(rng, tmp_path, bits, transform):
    runnable = load(attention_graph(), tmp_path / "graph", transform)
    profile = runnable.profile_json([np.zeros((1, h, 1, DIM), np.float32) for h in (2 * HEADS, HEADS, HEADS)])
    names = {node["op_name"] for node in json.loads(profile)["nodes"]}
    assert (transform is not None) == ("QuantizedDynKeyValueCache" in names)
    state = runnable.spawn_state()
    format = {8: "int8", 4: "int4", 32: "float32"}[bits]
    cache = kv.KVCache(HEADS, DIM, k_format=format, v_format=format)
    k, v, q = (normal(rng, 1, heads, 200, DIM) for heads in (HEADS, HEADS, 2 * HEADS))
    start = 0
    for count in STEPS:
        part = slice(start, start + count)
        start += count
        theirs = state.run([np.ascontiguousarray(x[:, :, part]) for x in (q, k, v)])[0].to_numpy()
        cache.append(k[:, :, part], v[:, :, part])
        if start % 20 and count == 1:
            continue
        # Their attention is that of the decoded cache, which is ours: float32 rounding of sums of 200 terms.
        truth = reference.attention(q[:, :, part], cache.keys(), cache.values())
        assert np.abs(theirs - truth).max() <= 2e-6

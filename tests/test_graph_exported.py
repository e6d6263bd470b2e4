"""Models that torch exported, folded, fused and quantized.

Of SmolLM2 the first layers are taken; ``KVNUMBA_LAYERS=30`` takes all, by hand.
"""

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
for name in ("transformers", "accelerate", "onnxscript", "onnxruntime_extensions", "onnx_ir"):
    pytest.importorskip(name, reason=f"{name} is not installed")

import onnxruntime  # noqa: E402
from tiny_models import tiny  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

from kvnumba import graph  # noqa: E402
from kvnumba.demo import measure  # noqa: E402
from kvnumba.demo.model import read_model  # noqa: E402
from kvnumba.demo.text import read_text  # noqa: E402
from kvnumba.demo.weights import find_weights  # noqa: E402

pytestmark = pytest.mark.onnx


class Flat(torch.nn.Module):
    """A model whose pasts are arguments, and whose presents are results."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, *pasts):
        cache = DynamicCache(config=self.model.config)
        for i in range(0, len(pasts), 2):
            cache.update(pasts[i], pasts[i + 1], i // 2)
        logits = self.model(input_ids=input_ids, cache=cache).logits
        return (logits, *[x for layer in cache.layers for x in (layer.keys, layer.values)])


def exported(model, attention, opset):
    """``onnx.ModelProto`` with symbols S and P."""
    model.set_attn_implementation(attention)
    config = model.config
    names = [f"past.{i}.{side}" for i in range(config.num_hidden_layers) for side in ("key", "value")]
    pasts = [torch.zeros(1, config.num_key_value_heads, 7, config.head_dim) for _ in names]
    new, old = torch.export.Dim("S", min=1, max=8192), torch.export.Dim("P", min=0, max=8192)
    program = torch.onnx.export(
        Flat(model).eval(), (torch.ones(1, 3, dtype=torch.long), *pasts), dynamo=True, opset_version=opset,
        verbose=False,
        dynamic_shapes=({1: new}, tuple({2: old} for _ in pasts)), input_names=["input_ids", *names],
        output_names=["logits", *[name.replace("past", "present") for name in names]],
    )  # fmt: skip
    return program.model_proto


class ByHand:
    """The exported model with its presents fed back."""

    def __init__(self, model):
        self.engine = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        self.pasts = {
            one.name: np.zeros([0 if isinstance(n, str) else n for n in one.shape], np.float32)
            for one in self.engine.get_inputs()[1:]
        }

    def run(self, feeds):
        logits, *presents = self.engine.run(None, {**feeds, **self.pasts})
        self.pasts = dict(zip(self.pasts, presents, strict=True))
        return {"logits": logits}


def greedy(session, ids, count):
    """Logits of each call, and the tokens that follow *ids*."""
    chosen, logits = [], []
    for _ in range(count):
        logits.append(session.run({"input_ids": ids})["logits"][:, -1])
        ids = logits[-1].argmax(-1)[:, None]
        chosen.append(int(ids[0, 0]))
    return np.concatenate(logits), chosen


@pytest.mark.parametrize(("attention", "opset"), [("sdpa", 18), ("sdpa", 24), ("eager", 18)])
def test_a_tiny_llama_gives_the_same_tokens_folded_and_fused(attention, opset):
    model = tiny("Llama")
    proto = exported(model, attention, opset)
    ids = np.random.default_rng(0).integers(1, 64, (1, 50))
    expected, tokens = greedy(ByHand(proto), ids, 12)
    folded = graph.fold_kv_cache(proto)
    assert [value.name for value in folded.graph.input] == ["input_ids"]
    assert [value.name for value in folded.graph.output] == ["logits"]
    back = graph.unfold_kv_cache(folded)
    assert [value.name for value in back.graph.input] == [value.name for value in proto.graph.input]
    assert [value.name for value in back.graph.output] == [value.name for value in proto.graph.output]
    fused = graph.fuse_kv_attention(folded)
    assert [row["kind"] for row in graph.rows(fused)] == 3 * ["CachedAttention"]
    for session in (ByHand(back), graph.Session(folded), graph.Session(fused)):
        logits, chosen = greedy(session, ids, 12)
        assert chosen == tokens
        assert np.abs(logits - expected).max() < 1e-4
    errors = {}
    for form in ("int8", "int4"):
        quantized = graph.quantize_kv_storage(folded, form, form)
        # The second and third layer quantize what the layer before gave, so that a rounding there may move a code here.
        apart = [greedy(graph.Session(one), ids, 1)[0] for one in (quantized, graph.fuse_kv_attention(quantized))]
        assert np.abs(apart[0] - apart[1]).max() < 0.5 * np.abs(apart[0] - expected[0]).max()
        errors[form] = np.abs(apart[1] - expected[0]).mean()
    assert 0 < errors["int8"] < errors["int4"] / 4


@pytest.mark.slow
def test_smollm2_gives_the_same_tokens_folded_and_fused_and_nearly_the_same_perplexity_quantized():
    path = find_weights(lambda done, total: None)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    layers = int(os.environ.get("KVNUMBA_LAYERS", "3"))
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    (text,) = measure.windows(read_text(read_model(path)[1]), [0], 257)
    folded = graph.fold_kv_cache(exported(model, "sdpa", 24))
    unfolded = ByHand(graph.unfold_kv_cache(folded))
    prompt = text[None, :40]
    expected, tokens = greedy(unfolded, prompt, 12)
    del unfolded
    losses = {}
    for name, one in (
        ("float32", graph.fuse_kv_attention(folded)),
        ("int8", graph.fuse_kv_attention(graph.quantize_kv_storage(folded, "int8", "int8"))),
    ):
        session = graph.Session(one)
        if name == "float32":
            logits, chosen = greedy(session, prompt, 12)
            assert chosen == tokens
            assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
            session.reset()
        total = 0.0
        for start in range(0, 256, 32):
            logits = session.run({"input_ids": text[None, start : start + 32]})["logits"][0].astype(np.float64)
            logits -= logits.max(-1, keepdims=True)
            chosen = logits[np.arange(32), text[start + 1 : start + 33]]
            total -= (chosen - np.log(np.exp(logits).sum(-1))).sum()
        losses[name] = total / 256
    assert abs(np.exp(losses["int8"] - losses["float32"]) - 1) < 0.005  # the demo: 0.01 % over 4,096 tokens

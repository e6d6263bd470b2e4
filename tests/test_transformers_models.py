"""Models of Hugging Face transformers on our cache and our attention give what they give on their own."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import KINDS, NO_SDPA, prompts, tiny  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

from kvnumba.integrations.transformers import KVNumbaCache  # noqa: E402

pytestmark = pytest.mark.transformers

PLAIN = {"k_format": "float32", "v_format": "float32"}
#: A small difference may choose another expert, and then the logits are other ones.
MIXTURES = ("GptOss", "Qwen2Moe")
CODES = [{"k_format": "int8", "v_format": "int4"}, {"k_format": "int4", "v_format": "int4"}]


def generated(model, implementation, cache, inputs, **options):
    model.set_attn_implementation(implementation)
    return model.generate(
        **inputs, cache=cache, max_new_tokens=16, do_sample=False, return_dict_in_generate=True, output_logits=True,
        **options,
    )  # fmt: skip


def apart(a, b):
    """Largest difference of the logits of two results of ``generate``."""
    assert torch.equal(a.sequences, b.sequences)
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(a.logits, b.logits, strict=True))


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("implementation", ["kvnumba", "eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_cache_gives_the_same_tokens_as_eager_attention_with_the_cache_of_the_library(
    kind, implementation, padding
):
    if implementation == "sdpa" and kind in NO_SDPA:
        pytest.skip(f"transformers has no sdpa for {kind}")
    model, inputs = tiny(kind), prompts(padding=padding)
    expected = generated(model, "eager", DynamicCache(config=model.config), inputs)
    got = generated(model, implementation, KVNumbaCache(model.config, **PLAIN), inputs)
    assert apart(got, expected) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_our_attention_works_with_the_caches_of_the_library(kind):
    model, inputs = tiny(kind), prompts()
    expected = generated(model, "eager", DynamicCache(config=model.config), inputs)
    assert apart(generated(model, "kvnumba", DynamicCache(config=model.config), inputs), expected) < 1e-4
    static = StaticCache(model.config, max_cache_len=48)
    assert apart(generated(model, "kvnumba", static, inputs), expected) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_cache_a_whole_sequence_gives_the_same_logits(kind):
    model, inputs = tiny(kind), prompts()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**inputs, use_cache=False).logits
        model.set_attn_implementation("kvnumba")
        got = model(**inputs, use_cache=False).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[real], expected[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("formats", CODES, ids=lambda f: "-".join(f.values()))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MIXTURES])
def test_attention_on_codes_gives_what_eager_attention_on_the_decoded_tensors_gives(kind, formats):
    """Both read the same codes; ours adds at most a tenth of the error that the codes cause."""
    model, inputs = tiny(kind), prompts(tokens=90)
    with torch.no_grad():
        logits = {}
        for name, implementation, cache in (
            ("exact", "eager", DynamicCache(config=model.config)),
            ("decoded", "eager", KVNumbaCache(model.config, **formats)),
            ("codes", "kvnumba", KVNumbaCache(model.config, **formats)),
        ):
            model.set_attn_implementation(implementation)
            model(inputs["input_ids"][:, :80], attention_mask=inputs["attention_mask"][:, :80], cache=cache)
            steps = [
                model(
                    inputs["input_ids"][:, i : i + 1], attention_mask=inputs["attention_mask"][:, : i + 1], cache=cache
                )
                for i in range(80, 90)
            ]
            logits[name] = torch.cat([step.logits for step in steps], 1)
    caused = float((logits["decoded"] - logits["exact"]).square().mean().sqrt())
    added = float((logits["codes"] - logits["decoded"]).square().mean().sqrt())
    assert 0 < caused < float(logits["exact"].std())
    assert added <= 0.1 * caused


@pytest.mark.parametrize("implementation", ["kvnumba", "eager"])
def test_a_compiled_model_runs_cache_and_attention_outside_its_graphs(implementation):
    model, inputs = tiny("Llama"), prompts()
    expected = generated(model, implementation, KVNumbaCache(model.config, **PLAIN), inputs)
    model.forward = torch.compile(model.forward, backend="eager")
    for cache in (KVNumbaCache(model.config, **PLAIN), StaticCache(model.config, max_cache_len=48)):
        assert apart(generated(model, implementation, cache, inputs), expected) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_of_narrow_floats(dtype):
    """The difference of two implementations is of the size of the rounding of the type, as that of eager and sdpa."""
    model, inputs = tiny("Llama", dtype=getattr(torch, dtype)), prompts()
    formats = {"k_format": dtype, "v_format": dtype}
    with torch.no_grad():
        logits = {}
        for name, cache in (
            ("eager", DynamicCache(config=model.config)),
            ("sdpa", DynamicCache(config=model.config)),
            ("kvnumba", KVNumbaCache(model.config, **formats)),
        ):
            model.set_attn_implementation(name)
            first = model(**inputs, cache=cache).logits
            more = torch.ones(2, 21, dtype=torch.long)
            more[0, :5] = 0
            second = model(inputs["input_ids"][:, :1], attention_mask=more, cache=cache).logits
            logits[name] = torch.cat([first[:, 5:], second], 1)
    assert logits["kvnumba"].dtype is getattr(torch, dtype)
    scale = float(logits["eager"].abs().max())
    assert float((logits["kvnumba"] - logits["eager"]).abs().max()) < 8 * torch.finfo(getattr(torch, dtype)).eps * scale


def test_k33_rows_of_a_padded_batch_are_generated_as_if_alone():
    model, inputs = tiny("Llama"), prompts()
    cache = KVNumbaCache(model.config, **PLAIN)
    together = generated(model, "kvnumba", cache, inputs).sequences[0, 20:]
    alone = {name: x[:1, 5:] for name, x in inputs.items()}
    assert torch.equal(
        together, generated(model, "kvnumba", KVNumbaCache(model.config, **PLAIN), alone).sequences[0, 15:]
    )

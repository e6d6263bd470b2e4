"""SmolLM2-135M, from the file of the demo, on our cache and attention in Hugging Face transformers."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate, which is not installed")

from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

from kvnumba.demo import measure  # noqa: E402
from kvnumba.demo.model import read_model  # noqa: E402
from kvnumba.demo.text import read_text  # noqa: E402
from kvnumba.demo.weights import find_weights  # noqa: E402
from kvnumba.integrations.transformers import KVNumbaCache  # noqa: E402

pytestmark = [pytest.mark.transformers, pytest.mark.slow]


@pytest.fixture(scope="module")
def path():
    return find_weights(lambda done, total: None)


@pytest.fixture(scope="module")
def model(path):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokens(path):
    (window,) = measure.windows(read_text(read_model(path)[1]), [0], 160)
    return torch.from_numpy(window)[None]


def logits(model, implementation, cache, tokens, prompt=100):
    """Logits of each token but the last: a prompt at once, then one by one."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        parts = [model(tokens[:, :prompt], cache=cache).logits]
        parts += [model(tokens[:, i : i + 1], cache=cache).logits for i in range(prompt, tokens.shape[1] - 1)]
    return torch.cat(parts, 1)[0]


@pytest.fixture(scope="module")
def exact(model, tokens):
    return logits(model, "eager", DynamicCache(config=model.config), tokens)


def test_float32_gives_the_logits_and_the_tokens_of_eager_attention(model, tokens, exact):
    formats = {"k_format": "float32", "v_format": "float32"}
    got = logits(model, "kvnumba", KVNumbaCache(model.config, **formats), tokens)
    assert float((got - exact).abs().max()) < 1e-4 * float(exact.abs().max())
    answers = []
    for implementation, cache in (
        ("eager", DynamicCache(config=model.config)),
        ("kvnumba", KVNumbaCache(model.config, **formats)),
    ):
        model.set_attn_implementation(implementation)
        ids = tokens[:, :40]
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
        answers.append(model.generate(ids, cache=cache, **options))
    assert torch.equal(*answers)


@pytest.mark.parametrize(("k_format", "v_format", "limit"), [("int8", "int8", 0.001), ("int4", "int4", 0.05)])
def test_codes_move_the_distribution_of_the_next_token_as_little_as_in_the_demo(
    model, tokens, exact, k_format, v_format, limit
):
    """The demo measures a KL divergence of 0.00004 (int8) and 0.011 (int4) over 4,096 tokens; this is a short text."""
    cache = KVNumbaCache(model.config, k_format=k_format, v_format=v_format, attend_stored=True)
    p, q = (x.double().log_softmax(-1) for x in (exact, logits(model, "kvnumba", cache, tokens)))
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    assert 0 < kl < limit

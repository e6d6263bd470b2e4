"""Every way of ``generate`` of Hugging Face transformers works on our cache."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import prompts, tiny  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from kvnumba.integrations.transformers import KVNumbaCache  # noqa: E402

pytestmark = pytest.mark.transformers

PLAIN = {"k_format": "float32", "v_format": "float32"}
CODES = {"k_format": "int4", "v_format": "int4"}
KINDS = ("Llama", "Mistral")  # all layers see everything; all layers slide


@pytest.fixture(params=KINDS)
def model(request):
    made = tiny(request.param)
    made.set_attn_implementation("kvnumba")
    return made


def both(model, inputs, **options):
    """What ``generate`` gives on the library's cache with eager attention, and on ours."""
    options = {"max_new_tokens": 16, "do_sample": False, **options}
    results = []
    for name, cache in (("eager", DynamicCache(config=model.config)), ("kvnumba", KVNumbaCache(model.config, **PLAIN))):
        model.set_attn_implementation(name)
        torch.manual_seed(3)
        results.append(model.generate(**inputs, cache=cache, **options))
    return results


def test_sampling(model):
    expected, got = both(model, prompts(), do_sample=True, top_k=10)
    assert torch.equal(got, expected)


def test_k07_beam_search_and_several_sequences(model):
    expected, got = both(model, prompts(), num_beams=4, num_return_sequences=3)
    assert got.shape[0] == 6
    assert torch.equal(got, expected)


def test_k07_beams_over_codes_choose_whole_rows(model):
    """With codes the rows must follow the beams as in a cache that is decoded each time."""
    inputs = prompts(tokens=70)
    sequences = []
    for name in ("eager", "kvnumba"):
        model.set_attn_implementation(name)
        cache = KVNumbaCache(model.config, k_format="int8", v_format="int8")
        sequences.append(model.generate(**inputs, cache=cache, num_beams=3, max_new_tokens=40, do_sample=False))
    assert torch.equal(*sequences)


def test_prompt_lookup_takes_guesses_back(model):
    one = {"input_ids": torch.tensor([[5, 6, 7, 8, 9] * 8])}
    expected, got = both(model, one, prompt_lookup_num_tokens=4)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("formats", [PLAIN, CODES], ids=["float32", "int4"])
def test_assisted_decoding_takes_guesses_back(model, formats):
    """Guesses of another model are cut off again; what is left is what greedy decoding gives."""
    one = {name: x[1:] for name, x in prompts(tokens=40).items()}
    options = {"max_new_tokens": 40, "do_sample": False}
    expected = model.generate(**one, cache=KVNumbaCache(model.config, **formats), **options)
    helper = tiny("Llama", num_hidden_layers=1)
    got = model.generate(**one, cache=KVNumbaCache(model.config, **formats), assistant_model=helper, **options)
    assert got.shape == expected.shape
    if formats is PLAIN:
        assert torch.equal(got, expected)


def test_prompts_in_chunks(model):
    expected, got = both(model, prompts(tokens=37), prefill_chunk_size=8)
    assert torch.equal(got, expected)


def test_several_turns_over_one_cache(model):
    one = prompts(rows=1, padding=0)["input_ids"]
    sequences = []
    for name, cache in (("eager", DynamicCache(config=model.config)), ("kvnumba", KVNumbaCache(model.config, **PLAIN))):
        model.set_attn_implementation(name)
        so_far = one
        for turn in range(3):
            so_far = torch.cat([so_far, torch.full((1, 4), turn + 1)], 1)
            so_far = model.generate(
                so_far, attention_mask=torch.ones_like(so_far), cache=cache, max_new_tokens=6, do_sample=False
            )
            assert cache.get_seq_length() == so_far.shape[1] - 1
        sequences.append(so_far)
    assert torch.equal(*sequences)


def continued(model, cache, one, question):
    ids = torch.cat([one, question], 1)
    return model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("formats", [PLAIN, CODES], ids=["float32", "int4"])
@pytest.mark.parametrize("way", ["deepcopy", "freeze", "file"])
def test_a_prompt_is_read_once_and_gone_on_from_many_times(model, way, formats, tmp_path):
    one = prompts(rows=1, padding=0, tokens=70)["input_ids"]
    questions = [torch.full((1, 3), 9), torch.full((1, 5), 11)]

    def fresh():
        cache = KVNumbaCache(model.config, **formats)
        with torch.no_grad():
            model(one, cache=cache)
        return cache

    expected = [continued(model, fresh(), one, question) for question in questions]
    prompt = fresh()
    snapshot = prompt.freeze()
    prompt.save(tmp_path / "prompt.safetensors")
    for question, answer in zip(questions, expected):
        if way == "deepcopy":
            cache = copy.deepcopy(prompt)
        elif way == "freeze":
            cache = snapshot.unfreeze()
        else:
            cache = KVNumbaCache.load(tmp_path / "prompt.safetensors", model.config)
        assert torch.equal(continued(model, cache, one, question), answer)
        assert prompt.get_seq_length() == snapshot.unfreeze().get_seq_length() == 70

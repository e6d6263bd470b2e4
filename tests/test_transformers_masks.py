"""The mask function: what a query sees is what eager attention lets it see, whoever reads the mask."""

import importlib.util
import itertools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DynamicCache, LlamaConfig, QuantizedCache, StaticCache  # noqa: E402
from transformers import masking_utils as library  # noqa: E402

from kvnumba.integrations.transformers import KVNumbaCache, attention_forward, attention_mask  # noqa: E402
from kvnumba.integrations.transformers.masks import Mask  # noqa: E402

pytestmark = pytest.mark.transformers

LIMIT = 8  # size of windows and chunks
BATCH, HEADS, DIM = 2, 2, 8
SLIDING, CHUNKED, FULL = (
    {"layer_types": ["full_attention", kind]} for kind in ("sliding_attention", "chunked_attention", "full_attention")
)


def prefix(batch, head, query, key):
    """The first tokens see one another, as those of an image do."""
    return (query < 5) & (key < 5)


def odd(batch, head, query, key):
    return (query - key) % 2 == 0


#: What makes the mask, the config's layers, more arguments of the function.
KINDS = {
    "full": (library.create_causal_mask, FULL, {}),
    "sliding": (library.create_sliding_window_causal_mask, SLIDING, {}),
    "chunked": (library.create_chunked_causal_mask, CHUNKED, {}),
    "bidirectional": (library.create_bidirectional_mask, FULL, {}),
    "bidirectional sliding": (library.create_bidirectional_sliding_window_mask, FULL, {}),
    "bidirectional decoder": (library.create_causal_mask, {**FULL, "is_causal": False}, {}),
    "prefix": (library.create_causal_mask, FULL, {"or_mask_function": prefix}),
    "sliding prefix": (library.create_sliding_window_causal_mask, SLIDING, {"or_mask_function": prefix}),
    "chunked prefix": (library.create_chunked_causal_mask, CHUNKED, {"or_mask_function": prefix}),
    "and": (library.create_causal_mask, FULL, {"and_mask_function": odd}),
    "blocks": (
        library.create_causal_mask,
        FULL,
        {"block_sequence_ids": torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1]] * 2)},
    ),
    "written out": (library.create_causal_mask, FULL, {"allow_is_causal_skip": False}),
}
CACHES = {
    "none": None,
    "dynamic": lambda config: DynamicCache(),
    "of the config": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config, max_cache_len=40),
    "ours": lambda config: KVNumbaCache(config, k_format="float32", v_format="float32"),
}
if any(importlib.util.find_spec(name) for name in ("hqq", "quanto")):
    CACHES["quantized"] = lambda config: QuantizedCache(
        "hqq" if importlib.util.find_spec("hqq") else "quanto", config, nbits=8
    )
#: Tokens stored, and tokens that come: around the limit and around twice the limit.
LENGTHS = [(past, new) for past, new in itertools.product((0, 1, 7, 8, 9, 16), (1, 2, 8, 9, 17)) if past or new > 1]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Module(torch.nn.Module):
    is_causal = True


def made(config, implementation, function, S, cache, padding, options):
    config._attn_implementation = implementation
    embeds = torch.zeros(BATCH, S, DIM)
    return function(config=config, inputs_embeds=embeds, attention_mask=padding, cache=cache, **options)


def eager(q, k, v, mask):
    score = q @ k.mT * DIM**-0.5
    return ((score if mask is None else score + mask).softmax(-1) @ v).transpose(1, 2)


def configured(layers):
    config = LlamaConfig(
        num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=HEADS, hidden_size=HEADS * DIM, **layers
    )
    config.sliding_window = LIMIT if layers != CHUNKED else None
    config.attention_chunk_size = LIMIT if layers == CHUNKED else None
    return config


def check(function, config, past, new, cache=None, padding=None, **options):
    """Our attention with our mask gives what eager attention with eager's mask gives; written out they are equal."""
    draw = torch.Generator().manual_seed(past * 100 + new)
    q, k, v = (torch.randn(BATCH, HEADS, n, DIM, generator=draw) for n in (new, past + new, past + new))
    cache = cache and cache(config)
    if past:
        for layer in (0, 1):
            cache.update(k[:, :, :past], v[:, :, :past], layer)
    if padding is not None:
        padding = padding(past + new)
    expected, got = (made(config, name, function, new, cache, padding, options) for name in ("eager", "kvnumba"))
    if cache is not None:
        k, v = [cache.update(k[:, :, past:], v[:, :, past:], layer) for layer in (0, 1)][1]
    out, _ = attention_forward(Module(), q, k, v, got)
    truth = eager(q, k, v, expected)
    seen = torch.ones(BATCH, new, dtype=torch.bool) if expected is None else (expected == 0).any(-1)[:, 0]
    assert float((out - truth)[seen].abs().max()) < 1e-5
    assert type(got) is Mask
    assert torch.equal(got + 0, torch.zeros(got.shape) if expected is None else expected)
    assert float((attention_forward(Module(), q, k, v, got)[0] - out)[seen].abs().max()) < 1e-5


PADDINGS = {
    "whole": None,
    "ones": lambda T: torch.ones(BATCH, T, dtype=torch.long),
    "left": lambda T: (torch.arange(T)[None] >= torch.tensor([[3], [0]])).long(),
    "right": lambda T: (torch.arange(T)[None] < torch.tensor([[max(T - 2, 1)], [T]])).long(),
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_mask_lets_a_query_see_what_eager_attention_lets_it_see(kind, cache, padding):
    """With every cache, at lengths around every limit."""
    function, layers, options = KINDS[kind]
    config = configured(layers)
    for past, new in LENGTHS:
        if past == 0 or cache != "none":
            check(function, config, past, new, CACHES[cache], PADDINGS[padding], **options)


@pytest.mark.parametrize("kind", ["full", "sliding", "chunked", "prefix"])
def test_packed_sequences_do_not_see_one_another(kind):
    function, layers, options = KINDS[kind]
    for first in (1, 3, 7, 8, 9, 12):
        positions = torch.cat([torch.arange(first), torch.arange(20 - first)])[None].expand(BATCH, -1)
        check(function, configured(layers), 0, 20, position_ids=positions, **options)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("S", "T"), [(1, 9), (4, 9), (9, 4)])
def test_cross_attention_sees_all_of_the_encoder_but_its_padding(S, T, padded):
    config = configured(FULL)
    padding = (torch.arange(T)[None] < torch.tensor([[T - 2], [T]])).long() if padded else None
    options = {"encoder_hidden_states": torch.zeros(BATCH, T, DIM)}
    expected, mask = (
        made(config, name, library.create_bidirectional_mask, S, None, padding, options)
        for name in ("eager", "kvnumba")
    )
    q, k, v = (torch.randn(BATCH, HEADS, n, DIM) for n in (S, T, T))
    for _ in range(2):  # not written out, and written out
        got, _ = attention_forward(Module(), q, k, v, mask)
        torch.testing.assert_close(got, eager(q, k, v, expected), rtol=0, atol=1e-5)
        assert torch.equal(mask + 0, torch.zeros(BATCH, 1, S, T) if expected is None else expected)


class TestStandIn:
    """In the usual case no mask is made; whoever touches it gets that of eager attention."""

    def made(self, S=4, T=9, **options):
        return attention_mask(batch_size=2, q_length=S, kv_length=T, q_offset=T - S, **options)

    @pytest.mark.parametrize("S", [1, 4, 9])
    def test_our_attention_writes_out_neither_order_nor_windows_nor_padding(self, S, monkeypatch):
        monkeypatch.setattr(Mask, "written", lambda self: pytest.fail("written out"))
        padding = torch.arange(9)[None] >= torch.tensor([[3], [0]])
        q, k, v = (torch.randn(2, 2, n, DIM, generator=torch.Generator().manual_seed(n)) for n in (S, 9, 9))
        config = configured(SLIDING)
        for options in ({}, {"local_size": LIMIT, "config": config}):
            for attention in (None, torch.ones(2, 9, dtype=torch.bool), padding):
                mask = self.made(S, attention_mask=attention, **options)
                assert mask.causal
                assert mask.window == options.get("local_size")
                assert mask.seen is None or mask.seen.shape == (2, 1, 1, 9)
                attention_forward(Module(), q, k, v, mask)

    def test_a_change_of_the_mask_counts_for_our_attention_too(self):
        q, k, v = (torch.randn(2, 2, n, DIM, generator=torch.Generator().manual_seed(n)) for n in (4, 9, 9))
        for change in ("view", "item", "in place", "new"):
            mask = self.made()
            expected = (mask + 0).clone()
            expected[:, :, :, 1] = -torch.inf
            if change == "view":
                mask[:, :, :, 1].fill_(-torch.inf)
            elif change == "item":
                mask[:, :, :, 1] = -torch.inf
            elif change == "in place":
                mask.masked_fill_(torch.arange(9) == 1, -torch.inf)
            else:
                mask = mask.masked_fill(torch.arange(9) == 1, -torch.inf)
            got, _ = attention_forward(Module(), q, k, v, mask)
            torch.testing.assert_close(got, eager(q, k, v, expected), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_it_has_the_dtype_of_the_model(self, dtype):
        mask = self.made(dtype=dtype)
        assert mask.dtype is (mask + 0).dtype is dtype
        assert float((mask + 0).min()) == torch.finfo(dtype).min
        assert repr(mask) == "Mask(shape=[2, 1, 4, 9], causal=True, window=None)"

    def test_a_mask_of_a_static_cache_is_that_of_the_time_it_was_made(self):
        """The cache counts its tokens in a tensor that it changes in place."""
        config = configured(FULL)
        cache = StaticCache(config, max_cache_len=16)
        k = torch.randn(2, HEADS, 4, DIM)
        cache.update(k, k, 0)
        cache.update(k, k, 1)
        config._attn_implementation = "kvnumba"
        mask = library.create_causal_mask(config, torch.zeros(2, 4, DIM), None, cache)
        cache.update(k, k, 0)
        seen = torch.arange(16) <= 4 + torch.arange(4)[:, None]
        assert torch.equal((mask == 0)[0, 0], seen)

    def test_a_decoded_token_of_a_chunked_layer_reads_its_chunk_only(self):
        config = configured(CHUNKED)
        for past in (8, 9, 15, 16):
            mask = self.made(1, past + 1, local_size=LIMIT, config=config)
            assert mask.window == past % LIMIT + 1
            assert mask.seen is None

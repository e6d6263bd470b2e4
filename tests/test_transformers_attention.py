"""The attention function that Hugging Face transformers calls, against formulas in float64."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

from kvnumba.integrations.transformers import KVNumbaLayer, attention_forward, attention_mask  # noqa: E402
from kvnumba.integrations.transformers.standin import Stored  # noqa: E402

pytestmark = pytest.mark.transformers


class Module(torch.nn.Module):
    def __init__(self, is_causal=None):
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def made(S=5, T=12, B=2, H_q=4, H_kv=2, D=8, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(B, h, n, D, generator=draw).to(dtype) for h, n in ((H_q, S), (H_kv, T), (H_kv, T))]


def formula(q, k, v, seen, *, scaling=None, softcap=None, sinks=None, bias=0.0):
    """Attention in float64; *seen* is broadcastable to [B, H, S, T]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    score = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    score = (score + bias).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.double().reshape(1, -1, 1, 1).expand(*score.shape[:3], 1)
        weights = torch.cat([score, column], -1).softmax(-1)[..., :-1]
    else:
        weights = score.softmax(-1).nan_to_num(0)
    return (weights @ v).transpose(1, 2)


def order(S, T, window=None):
    """Which key a query sees by their order alone."""
    ahead = torch.arange(T)[None] - (T - S + torch.arange(S)[:, None])
    return (ahead <= 0) if window is None else (ahead <= 0) & (ahead > -window)


def check(got, expected, atol=2e-6):
    out, weights = got
    assert weights is None
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


def test_the_functions_are_registered():
    assert AttentionInterface()["kvnumba"] is attention_forward
    assert AttentionMaskInterface()["kvnumba"] is attention_mask


@pytest.mark.parametrize("S", [1, 5, 12])
def test_k14_without_a_mask_it_is_causal_unless_the_module_says_otherwise(S):
    q, k, v = made(S)
    causal, everything = formula(q, k, v, order(S, 12)), formula(q, k, v, torch.ones(S, 12, dtype=torch.bool))
    check(attention_forward(Module(), q, k, v, None), causal)
    check(attention_forward(Module(True), q, k, v, None), causal)
    check(attention_forward(Module(False), q, k, v, None), everything)
    check(attention_forward(Module(True), q, k, v, None, is_causal=False), everything)


def test_k14_a_mask_is_obeyed_as_it_is():
    """As of a tree of guesses: no order can be assumed."""
    q, k, v = made()
    seen = torch.rand(2, 1, 5, 12, generator=torch.Generator().manual_seed(2)) > 0.4
    check(attention_forward(Module(), q, k, v, seen), formula(q, k, v, seen))
    lowest = torch.finfo(torch.float32).min
    added = torch.zeros(seen.shape).masked_fill(~seen, lowest)
    check(attention_forward(Module(), q, k, v, added), formula(q, k, v, seen))


def test_a_row_that_may_see_nothing_is_zero():
    q, k, v = made()
    seen = torch.zeros(2, 1, 5, 12, dtype=torch.bool)
    seen[1] = True
    out, _ = attention_forward(Module(), q, k, v, seen)
    assert not out[0].any()
    check((out, None), formula(q, k, v, seen))


@pytest.mark.parametrize("S", [1, 5])
def test_scale_softcap_sinks_bias_and_window(S):
    q, k, v = made(S)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    bias = torch.randn(1, 4, S, 12, generator=torch.Generator().manual_seed(3))
    options = {"scaling": 0.7, "softcap": 1.5, "sinks": sinks}
    got = attention_forward(Module(), q, k, v, None, scaling=0.7, softcap=1.5, s_aux=sinks, sliding_window=4)
    check(got, formula(q, k, v, order(S, 12, 4), **options))
    check(attention_forward(Module(), q, k, v, None, position_bias=bias), formula(q, k, v, order(S, 12), bias=bias))
    seen = order(S, 12, 6)[None, None]
    got = attention_forward(Module(), q, k, v, seen, position_bias=bias)
    check(got, formula(q, k, v, seen, bias=bias))
    check(attention_forward(Module(), q, k, v, bias, position_bias=bias), formula(q, k, v, seen | True, bias=2 * bias))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_has_the_dtype_and_shape_that_models_expect(kind):
    q, k, v = made(dtype=kind, D=8)
    out, _ = attention_forward(Module(), q, k, v[..., :6], None)
    assert out.dtype is kind
    assert out.shape == (2, 5, 4, 6)
    assert out.is_contiguous()  # some models take a view of it
    check((out, None), formula(q, k, v[..., :6], order(5, 12)), atol=4 * torch.finfo(kind).eps)


def test_dropout_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"dropout must be 0.*got 0\.1; call model\.eval\(\)"):
        attention_forward(Module(), *made(), None, dropout=0.1)


@pytest.mark.parametrize("name", ["query", "key", "value", "attention_mask", "s_aux", "position_bias"])
def test_a_gradient_of_any_argument_is_refused_by_name(name):
    q, k, v = made()
    given = {"query": q, "key": k, "value": v, "attention_mask": torch.zeros(1, 1, 5, 12), "s_aux": torch.zeros(4)}
    given["position_bias"] = torch.zeros(1, 4, 5, 12)
    given[name].requires_grad_()
    out, _ = attention_forward(Module(), **given)
    with pytest.raises(NotImplementedError, match=r'no gradients; train with .*"sdpa".* use_cache=False'):
        out.sum().backward()
    with torch.no_grad():
        assert not attention_forward(Module(), **given)[0].requires_grad


def test_a_mask_of_integers_is_refused_for_it_may_mean_either():
    with pytest.raises(TypeError, match=r"attention_mask of .* must be bool or a float type, got torch.int64; pass"):
        attention_forward(Module(), *made(), torch.ones(1, 1, 5, 12, dtype=torch.int64))


def test_tensors_elsewhere_are_refused_by_name():
    q, k, v = (x.to("meta") for x in made())
    with pytest.raises(TypeError, match="key must be in CPU memory, got a tensor on device meta"):
        attention_forward(Module(), q, k, v, None)


def test_the_cache_is_read_as_codes_and_nothing_is_decoded(monkeypatch):
    q, k, v = made(S=1, T=70)
    layer = KVNumbaLayer(k_format="int8", v_format="int4")
    layer.update(k[:, :, :69], v[:, :, :69])
    key, value = layer.update(k[:, :, 69:], v[:, :, 69:])
    expected = formula(q, layer.keys, layer.values, order(1, 70))
    monkeypatch.setattr(Stored, "decoded", lambda self: pytest.fail("decoded"))
    check(attention_forward(Module(), q, key, value, None), expected, atol=2e-2)
    seen = torch.rand(2, 1, 1, 70, generator=torch.Generator().manual_seed(2)) > 0.4
    check(attention_forward(Module(), q, key, value, seen), formula(q, layer.keys, layer.values, seen), atol=2e-2)


def test_a_mask_for_other_keys_or_queries_than_there_are_is_refused():
    """As of a cache that dropped its oldest tokens: cutting the mask would hide other keys than it means."""
    q, k, v = made()
    made_here = attention_mask(batch_size=2, q_length=5, kv_length=12, q_offset=7)
    check(attention_forward(Module(), q, k, v, made_here), formula(q, k, v, order(5, 12)))
    for mask in (made_here, made_here + 0, made_here == 0):
        for S, T in ((5, 11), (4, 12), (5, 1)):
            with pytest.raises(
                ValueError, match=rf"attention_mask must have shape \[batch, heads, {S}, {T}\] .* got \["
            ):
                attention_forward(Module(), q[:, :, :S], k[:, :, :T], v[:, :, :T], mask)
    with pytest.raises(ValueError, match=r"attention_mask must have shape .*, got \[2, 12\]; give"):
        attention_forward(Module(), q, k, v, torch.ones(2, 12, dtype=torch.bool))
    with pytest.raises(TypeError, match="attention_mask must be a tensor or None, got str"):
        attention_forward(Module(), q, k, v, "causal")


@pytest.mark.parametrize("S", [1, 5])
@pytest.mark.parametrize("padded", [False, True])
def test_keys_and_blocks_that_an_indexer_chose_are_the_only_ones_seen(S, padded):
    q, k, v = made(S, H_q=4, H_kv=2)
    mask = attention_mask(
        batch_size=2, q_length=S, kv_length=12, q_offset=12 - S,
        attention_mask=(torch.arange(12)[None] >= torch.tensor([[2], [0]])) if padded else None,
    )  # fmt: skip
    seen = order(S, 12)[None, None].expand(2, 1, -1, -1)
    seen = seen & (torch.arange(12) >= torch.tensor([2, 0]).reshape(2, 1, 1, 1)) if padded else seen
    draw = torch.Generator().manual_seed(4)
    indices = torch.randint(-1, 12, (2, S, 5), generator=draw)
    chosen = (indices[:, None, :, :, None] == torch.arange(12)).any(3)
    check(attention_forward(Module(), q, k, v, mask, indices=indices.int()), formula(q, k, v, seen & chosen))
    module = Module()
    module.indexer = torch.nn.Module()
    module.indexer.block_size = 5
    blocks = torch.randint(-1, 3, (2, 2, S, 2), generator=draw)
    chosen = (blocks[..., None] == torch.arange(12) // 5).any(3).repeat_interleave(2, 1)
    check(attention_forward(module, q, k, v, mask, block_indices=blocks), formula(q, k, v, seen & chosen))
    added = torch.randn(2, 1, S, 12, generator=draw)
    got = attention_forward(module, q, k, v, added, block_indices=blocks)
    check(got, formula(q, k, v, chosen, bias=added))


@pytest.mark.parametrize("S", [1, 5])
def test_a_query_may_have_a_sink_of_its_own(S):
    q, k, v = made(S)
    sinks = torch.randn(2, 4, S, 1, generator=torch.Generator().manual_seed(5))
    score = (q.double() @ k.double().repeat_interleave(2, 1).mT * 8**-0.5).masked_fill(~order(S, 12), -torch.inf)
    weights = torch.cat([score, sinks.double()], -1).softmax(-1)[..., :-1]
    expected = (weights @ v.double().repeat_interleave(2, 1)).transpose(1, 2)
    check(attention_forward(Module(), q, k, v, None, sinks=sinks), expected)

"""`KVNumbaCache` behaves as the caches of Hugging Face transformers, over codes."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers  # noqa: E402
from tiny_models import SMALL, tiny  # noqa: E402

import kvnumba as kv  # noqa: E402
from kvnumba.integrations.transformers import KVNumbaCache, KVNumbaLayer  # noqa: E402
from kvnumba.integrations.transformers.standin import Stored  # noqa: E402
from kvnumba.integrations.transformers.tensors import to_numpy, to_torch  # noqa: E402

pytestmark = pytest.mark.transformers

FORMATS = [("float32", "float32"), ("int8", "int4"), ("int4", "int4")]


def drawn(B=2, H=2, S=1, D=16, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, S, D, generator=draw).to(dtype) for _ in "kv"]


def filled(k_format="int4", v_format="int4", tokens=70, **options):
    layer = KVNumbaLayer(k_format=k_format, v_format=v_format, **options)
    layer.update(*drawn(S=tokens))
    return layer


def config(**options):
    return transformers.LlamaConfig(**{**SMALL, **options})


# ---- update


def test_the_first_tokens_come_back_as_they_are_and_later_ones_as_stored():
    layer = KVNumbaLayer(k_format="int8", v_format="int4")
    k, v = drawn(S=40)
    assert layer.update(k, v) == (k, v)
    key, value = layer.update(*drawn(seed=1))
    assert type(key) is type(value) is Stored
    assert key.shape == value.shape == (2, 2, 41, 16)
    assert key.dtype is torch.float32
    assert torch.equal(key + 0, layer.keys)
    assert torch.equal(torch.cat([value, value], 0)[2:], layer.values)
    assert type(key * 1) is torch.Tensor
    assert "Stored(keys, shape=[2, 2, 41, 16]" in repr(key)


def test_the_stored_values_are_attended_from_the_first_token_on_if_asked():
    layer = KVNumbaLayer(k_format="int4", v_format="int4", attend_stored=True)
    k, v = drawn(S=40)
    key, _ = layer.update(k, v)
    assert type(key) is Stored
    assert not torch.equal(key + 0, k)


def test_a_stored_tensor_of_an_earlier_call_is_refused_not_read_as_another():
    layer = filled()
    key, _ = layer.update(*drawn())
    layer.update(*drawn())
    with pytest.raises(RuntimeError, match="keys of a cache layer must be read before the layer changes again"):
        key + 0


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x.__setitem__((0, 0, 0), 7),
        lambda x: x.__setitem__(0, x[0] * 2),
        lambda x: torch.mul(torch.ones(()), 2, out=x),
        lambda x: torch._foreach_mul_([x], 2.0),
    ],
)
def test_a_stored_tensor_is_not_changed_in_place(change):
    key, value = filled().update(*drawn())
    before = key.clone()
    with pytest.raises(RuntimeError, match="keys of a cache layer must not be changed in place"):
        change(key)
    assert torch.equal(key, before)
    assert torch.equal(torch.zeros_like(before).add_(key), before)
    with pytest.raises(RuntimeError, match="values of a cache layer"):
        change(value)


@pytest.mark.parametrize("side", [0, 1])
def test_a_gradient_of_stored_tokens_is_refused_by_name(side):
    states = drawn()
    states[side].requires_grad_()
    made = filled().update(*states)
    assert type(made[0]) is type(made[1]) is Stored
    with pytest.raises(NotImplementedError, match="KVNumbaCache have no gradients"):
        (made[0] * made[1]).sum().backward()


@pytest.mark.parametrize(("k_format", "v_format"), FORMATS)
def test_what_is_stored_is_what_a_kvcache_stores(k_format, v_format):
    layer = filled(k_format, v_format)
    cache = kv.KVCache(2, 16, k_format=k_format, v_format=v_format, batch_size=2)
    cache.append(*(x.numpy() for x in drawn(S=70)))
    np.testing.assert_array_equal(layer.keys.numpy(), cache.keys())
    np.testing.assert_array_equal(layer.values.numpy(), cache.values())


def test_a_refused_update_changes_nothing():
    layer = filled()
    k, v = drawn()
    k[0, 0, 0, 3] = torch.nan
    before = layer.keys
    with pytest.raises(ValueError, match="k must be finite"):
        layer.update(k, v)
    with pytest.raises(ValueError, match="k must have shape"):
        layer.update(*drawn(B=3))
    assert layer.get_seq_length() == 70
    assert torch.equal(layer.keys, before)


def test_a_refused_first_update_leaves_the_shape_open():
    layer = KVNumbaLayer()
    k, v = drawn(B=2)
    k[0, 0, 0, 3] = torch.nan
    for wrong in ((k, v), (v, v[:1])):
        with pytest.raises(ValueError, match="must"):
            layer.update(*wrong)
        assert not layer.is_initialized
    layer.update(*drawn(B=1))
    assert layer.batch_size == 1


@pytest.mark.parametrize("before", [0, 40])
def test_a_model_of_more_layers_is_refused_and_leaves_nothing_behind(before):
    cache = KVNumbaCache(config(num_hidden_layers=2))
    if before:
        cache.update(*drawn(S=before), layer_idx=0)
        cache.update(*drawn(S=before), layer_idx=1)
    keys = [layer.keys for layer in cache.layers]
    for i in range(2):
        cache.update(*drawn(S=5, seed=1), layer_idx=i)
    with pytest.raises(ValueError, match="a layer for each of the model, got 2 layers, and tokens of layer 2"):
        cache.update(*drawn(S=5, seed=1), layer_idx=2)
    for layer, old in zip(cache.layers, keys, strict=True):
        assert layer.get_seq_length() == before
        assert layer.is_initialized is bool(before)
        assert old is None or torch.equal(layer.keys, old)


# ---- tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_come_and_go_without_a_copy(dtype):
    pytest.importorskip("ml_dtypes", reason="bfloat16 without a copy needs ml_dtypes")
    x = torch.randn(2, 3).to(dtype)
    array = to_numpy("x", x)
    assert array.ctypes.data == x.data_ptr()
    back = to_torch(array, dtype)
    assert back.data_ptr() == x.data_ptr()
    assert torch.equal(back, x)


def test_a_decoded_token_is_stored_and_attended_without_a_copy_of_it():
    """The states of one token, as models make them by view and transpose, are in C order already."""
    states = torch.randn(1, 1, 2 * 16).view(1, 1, 2, 16).transpose(1, 2)
    array = to_numpy("key_states", states)
    assert array.flags.c_contiguous
    assert array.ctypes.data == states.data_ptr()


# ---- state


@pytest.mark.parametrize(("k_format", "v_format"), FORMATS)
def test_crop_takes_a_number_of_tokens_back(k_format, v_format):
    layer = filled(k_format, v_format)
    layer.update(*drawn(S=5, seed=1))
    layer.crop(0)
    assert layer.get_seq_length() == 75
    layer.crop(-5)
    expected = filled(k_format, v_format)
    assert torch.equal(layer.keys, expected.keys)
    assert torch.equal(layer.values, expected.values)
    with pytest.raises(ValueError, match=r"tokens_to_remove must be 0 or negative .* got 3"):
        layer.crop(3)
    layer.crop(-1000)
    assert layer.get_seq_length() == 0
    KVNumbaLayer().crop(-3)  # as with layers that hold nothing


@pytest.mark.parametrize(("k_format", "v_format"), FORMATS)
def test_k07_rows_are_reordered_codes_and_tail_alike(k_format, v_format):
    layer = KVNumbaLayer(k_format=k_format, v_format=v_format)
    k, v = drawn(B=4, S=75)
    layer.update(k, v)
    layer.reorder_cache(torch.tensor([2, 2, 0, 1]))
    expected = KVNumbaLayer(k_format=k_format, v_format=v_format)
    expected.update(k[[2, 2, 0, 1]], v[[2, 2, 0, 1]])
    for one in (layer, expected):
        one.update(*drawn(B=4, S=30, seed=1))  # seals the block that was reordered
    assert torch.equal(layer.keys, expected.keys)
    assert torch.equal(layer.values, expected.values)


def test_rows_are_selected_by_numbers_or_by_a_bool_each_and_repeated():
    layer = filled()
    keys = layer.keys
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.keys, keys.repeat_interleave(2, 0))
    layer.batch_select_indices(torch.tensor([True, False, False, True]))
    assert torch.equal(layer.keys, keys)
    layer.batch_select_indices(torch.tensor([1]))
    assert torch.equal(layer.keys, keys[1:])
    assert layer.batch_size == 1
    with pytest.raises(ValueError, match=r"indices must have shape \[1\] = \[batch\] if they are bool, got \[2\]"):
        layer.batch_select_indices(torch.tensor([True, False]))


def test_reset_takes_a_batch_of_another_size():
    cache = KVNumbaCache(config())
    cache.update(*drawn(S=3), layer_idx=0)
    cache.reset()
    assert cache.get_seq_length() == 0
    cache.update(*drawn(B=5, S=3), layer_idx=0)
    assert cache.layers[0].batch_size == 5


# ---- the whole cache


def test_k57_each_layer_tells_its_own_length_as_a_plain_integer():
    cache = KVNumbaCache(config())
    assert [cache.get_seq_length(i) for i in range(4)] == [0, 0, 0, 0]
    cache.update(*drawn(S=3), layer_idx=0)
    cache.update(*drawn(S=2), layer_idx=1)
    lengths = [cache.get_seq_length(i) for i in range(3)]
    assert lengths == [3, 2, 0]
    assert all(type(n) is int for n in lengths)
    assert cache.get_seq_length() == 3
    assert cache.get_mask_sizes(4, 1) == (6, 0)
    assert cache.get_max_length() == -1
    assert len(cache) == 3
    assert not cache.is_compileable
    assert cache.is_croppable
    assert repr(cache) == "KVNumbaCache(3 layers, length=3)"


def test_formats_by_layer():
    formats = kv.layer_formats(3, count=1)
    cache = KVNumbaCache(config(), k_format=formats, v_format="int4")
    assert [layer.k_format for layer in cache.layers] == ["int8", "int4", "int8"]
    with pytest.raises(ValueError, match="k_format must have an entry for each of the 3 layers of the model, got 2"):
        KVNumbaCache(config(), k_format=["int8", "int4"])
    with pytest.raises(ValueError, match=r"v_format must be one of .* got 'int2'"):
        KVNumbaCache(config(), v_format="int2")
    for wrong in (None, 8, (name for name in formats)):
        with pytest.raises(TypeError, match="k_format must be one of"):
            KVNumbaCache(config(), k_format=wrong)
    with pytest.raises(TypeError, match=r"config must be the config of a model \(model.config\), got str"):
        KVNumbaCache("llama")


def test_layers_of_other_kinds_are_those_of_the_library():
    made = config(layer_types=["full_attention", "linear_attention", "sliding_attention"], sliding_window=8)
    cache = KVNumbaCache(made)
    ours = [isinstance(layer, KVNumbaLayer) for layer in cache.layers]
    assert ours == [True, False, True]
    assert cache.is_sliding == [False, False, True]
    for what in (cache.freeze, lambda: cache.nbytes, lambda: cache.save("nowhere")):
        with pytest.raises(ValueError, match="needs layers of attention only, got LinearAttentionLayer as layer 1"):
            what()


@pytest.mark.parametrize(("k_format", "v_format"), FORMATS)
def test_k64_copies_and_snapshots_go_on_alone(k_format, v_format):
    cache = KVNumbaCache(config(num_hidden_layers=1), k_format=k_format, v_format=v_format)
    cache.update(*drawn(S=70), layer_idx=0)
    before = cache.layers[0].keys
    snapshot, other = cache.freeze(), copy.deepcopy(cache)
    bytes_before = cache.nbytes
    cache.update(*drawn(S=3, seed=1), layer_idx=0)
    other.update(*drawn(S=2, seed=2), layer_idx=0)
    assert (cache.get_seq_length(), other.get_seq_length(), snapshot.unfreeze().get_seq_length()) == (73, 72, 70)
    assert torch.equal(snapshot.unfreeze().layers[0].keys, before)
    assert snapshot.nbytes == bytes_before < cache.nbytes
    taken = cache.freeze(consume=True)
    assert cache.get_seq_length() == 0
    assert taken.unfreeze().get_seq_length() == 73


@pytest.mark.parametrize(("k_format", "v_format"), FORMATS)
def test_a_file_holds_every_layer_bit_for_bit(k_format, v_format, tmp_path):
    cache = KVNumbaCache(config(num_hidden_layers=2), k_format=k_format, v_format=v_format)
    for i in range(2):
        cache.update(*drawn(S=70, seed=i), layer_idx=i)
    cache.save(tmp_path / "cache")
    loaded = KVNumbaCache.load(tmp_path / "cache", config(num_hidden_layers=2))
    for one in (cache, loaded):
        one.update(*drawn(S=30, seed=5), layer_idx=1)
    for a, b in zip(cache.layers, loaded.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
    assert len(kv.KVCaches.load(tmp_path / "cache")) == 2
    with pytest.raises(ValueError, match="k_format must have an entry for each of the 3 layers of the model, got 2"):
        KVNumbaCache.load(tmp_path / "cache", config())
    with pytest.raises(ValueError, match="must hold tokens, got none yet"):
        KVNumbaCache(config()).save(tmp_path / "empty")
    assert not (tmp_path / "empty").exists()


def test_a_loaded_cache_has_the_capacity_asked_for_and_the_dtype_of_the_model(tmp_path):
    cache = KVNumbaCache(config(num_hidden_layers=1))
    cache.update(*drawn(S=40, dtype=torch.bfloat16), layer_idx=0)
    cache.save(tmp_path / "cache")
    model = config(num_hidden_layers=1, dtype=torch.bfloat16)
    layer = KVNumbaCache.load(tmp_path / "cache", model, capacity=500).layers[0]
    assert layer.stored.capacity >= 500
    assert torch.equal(layer.keys, cache.layers[0].keys)
    assert layer.keys.dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"k must have shape \[2, 2, S, 16\] .* got \[2, 4, 1, 16\]"):
        layer.update(*drawn(H=4))
    assert layer.get_seq_length() == 40


@pytest.mark.parametrize("kind", ["window", "rows"])
def test_a_file_of_other_caches_is_refused(kind, tmp_path):
    other = kv.KVCaches(1, 2, 16, batch_size=2, window=64 if kind == "window" else None)
    x = np.zeros((2, 2, 3, 16), np.float32)
    other.append(0, x, x, **({} if kind == "window" else {"lengths": [3, 1]}))
    other.save(tmp_path / "cache")
    with pytest.raises(ValueError, match="path must be a file of caches without a window, rows of one length"):
        KVNumbaCache.load(tmp_path / "cache", config(num_hidden_layers=1))


def test_bytes_are_those_of_the_codes():
    model = tiny("Llama")
    sizes = {}
    for name, k_format, v_format in (("float32", "float32", "float32"), ("int4", "int4", "int4")):
        cache = KVNumbaCache(model.config, k_format=k_format, v_format=v_format)
        with torch.no_grad():
            model(torch.ones(1, 400, dtype=torch.long), cache=cache)
        sizes[name] = cache.nbytes
    assert sizes["float32"] == 3 * 2 * 2 * 400 * 16 * 4
    assert sizes["int4"] < sizes["float32"] / 3

"""Files: what was saved goes on exactly, and what is damaged is refused.

``python tests/test_files.py`` writes the golden files that are not there yet.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import fuzz_files
import numpy as np
import pytest
from conftest import bit_equal, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvnumba as kv
from kvnumba import buffers, reference, storage

GOLDEN = Path(__file__).parent / "golden"
LENGTHS = [0, 1, 3, 4, 5, 35, 36, 37, 68, 100]
#: Each format once as keys and once as values.
PAIRS = [("float32", "int4"), ("float16", "bfloat16"), ("bfloat16", "float16"), ("int8", "float32"), ("int4", "int8")]
pairs = pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
codes = pytest.mark.parametrize("format", ["int8", "int4"])


def new(k_format, v_format, dim=33, v_dim=30, batch=2, heads=3):
    return kv.KVCache(heads, dim, k_format=k_format, v_format=v_format, v_head_dim=v_dim, batch_size=batch)


def data(rng, cache, count):
    spec = cache.spec
    lead = (spec.batch_size, spec.num_kv_heads, count)
    return normal(rng, *lead, spec.head_dim), normal(rng, *lead, spec.v_head_dim)


def through(value, path):
    """*value* after it has been to a file and back."""
    value.save(path)
    return type(value).load(path)


def same(a, b, q=None):
    """Assert that two caches hold the same, bit for bit, and give the same results."""
    assert a.spec == b.spec
    assert a.buffers.state.tolist() == b.buffers.state.tolist()
    assert bit_equal(a.keys(), b.keys())
    assert bit_equal(a.values(), b.values())
    if q is not None and len(a):
        assert bit_equal(a.attend(q), b.attend(q))


# ---- what was saved goes on exactly


@pairs
@pytest.mark.parametrize("length", LENGTHS)
def test_k15_a_loaded_cache_goes_on_as_if_never_saved(rng, tmp_path, k_format, v_format, length):
    cache = new(k_format, v_format, dim=80, v_dim=80)
    cache.append(*data(rng, cache, length))
    loaded = through(cache, tmp_path / "state")
    q = normal(rng, 2, 6, 2, 80)
    same(cache, loaded, q)
    k, v = data(rng, cache, 64)
    for each in (cache, loaded):
        each.append(k, v)
    same(cache, loaded, q)
    for cut in (length + 40, length + 1, max(0, length - 5)):
        for each in (cache, loaded):
            each.truncate(cut)
        same(cache, loaded, q)


@given(
    formats=st.sampled_from(PAIRS),
    dims=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    batch=st.integers(0, 3),
    heads=st.integers(1, 3),
    steps=st.lists(
        st.tuples(st.sampled_from(["append", "ragged", "truncate", "freeze", "load"]), st.integers(0, 110)), max_size=8
    ),
    scale=st.sampled_from([0.0, 1e-40, 1e-3, 1.0, 1e30]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_saving_and_loading_anywhere_changes_nothing(tmp_path, formats, dims, batch, heads, steps, scale, seed):
    rng = np.random.default_rng(seed)
    cache = new(*formats, *dims, batch, heads)
    twin = new(*formats, *dims, batch, heads)
    for step, n in [*steps, ("load", 0), ("append", 40), ("truncate", 30)]:
        if step in ("append", "ragged"):
            k, v = (np.float32(scale) * x for x in data(rng, cache, n))
            if n % 3 == 0:
                k[..., ::2] = 9  # constant channels
                v[:, :, ::2] = -3  # constant tokens
            lengths = rng.integers(0, n + 1, batch) if step == "ragged" else None
            cache.append(k, v, lengths=lengths)
            twin.append(k, v, lengths=lengths)
        elif step == "freeze":  # shares its arrays with what goes on
            shared = cache
            cache = shared.freeze().unfreeze()
        elif step == "truncate":
            for each in (cache, twin):
                each.truncate(min(n, len(twin)))
        else:
            cache = through(cache, tmp_path / "state")
            written = (tmp_path / "state").read_bytes()
            cache.save(tmp_path / "state")
            assert (tmp_path / "state").read_bytes() == written
        same(cache, twin, normal(rng, batch, heads, 1, dims[0]))


@pairs
def test_a_cache_without_rows_keeps_its_length(rng, tmp_path, k_format, v_format):
    cache = new(k_format, v_format, batch=0)
    cache.append(*data(rng, cache, 78))
    loaded = through(cache, tmp_path / "state")
    assert len(loaded) == 78
    same(cache, loaded)


@codes
def test_the_rows_that_an_exact_cut_needs_are_saved(rng, tmp_path, format):
    cache, fresh = new(format, format), new(format, format)
    k, v = data(rng, cache, 78)
    cache.append(k, v)
    loaded = through(cache, tmp_path / "state")
    loaded.truncate(50)
    fresh.append(k[:, :, :50], v[:, :, :50])
    for each in (loaded, fresh):
        each.append(k, v)
    same(loaded, fresh)


@codes
def test_rows_of_different_lengths_are_saved_each_by_itself(rng, tmp_path, format):
    # What lies past the length of a row is nobody's, whatever it is.
    both = new(format, format)
    k, v = data(rng, both, 78)
    both.append(k, v)
    both.buffers.state[1] = 40, 0
    half = new(format, format, batch=1)
    half.append(k[1:], v[1:])
    half.truncate(40)
    both.buffers.k.recent[1] = half.buffers.k.recent[0]
    both.buffers.state[1, 1] = half.buffers.state[0, 1]
    loaded = through(both, tmp_path / "rows")
    assert loaded.buffers.state.tolist() == both.buffers.state.tolist()
    assert bit_equal(loaded.keys()[1, :, :40], half.keys()[0])
    assert bit_equal(loaded.values()[1, :, :40], half.values()[0])
    assert not loaded.buffers.v.codes[1, :, 2:].any()


@pytest.mark.parametrize("layout", ["per_channel", "per_token"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("length", [*LENGTHS, None])
def test_a_quantized_cache_goes_on_exactly(rng, tmp_path, layout, bits, length):
    cache = kv.QuantizedCache(layout, bits)
    if length is not None:
        cache.append(normal(rng, 2, 110, 7))
        cache.truncate(length)
    loaded = through(cache, tmp_path / "state")
    x = normal(rng, 2, 50, 7)
    for cut in (None, 20, 8):
        for each in (cache, loaded):
            each.append(x)
            if cut is not None:
                each.truncate(cut)
        assert (len(cache), cache.layout, cache.bits) == (len(loaded), loaded.layout, loaded.bits)
        assert bit_equal(cache.contiguous(), loaded.contiguous())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("make", [kv.ConcatCache, kv.InPlaceCache])
def test_caches_of_one_array_go_on_exactly(rng, tmp_path, make, axis, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = normal(rng, 3, 4, 5).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    cache = make(axis) if make is kv.ConcatCache else make(axis, "float32" if dtype == "float64" else dtype, 100)
    for cut in (None, 0, 2):  # a new cache, an empty one of known shape, one with room to spare
        if cut is not None:
            cache.append(x)
            cache.truncate(cut)
        loaded = through(cache, tmp_path / "state")
        assert (loaded.axis, loaded.dtype, loaded.shape) == (cache.axis, cache.dtype, cache.shape)
        for each in (cache, loaded):
            each.append(x)
        assert cache.view().tobytes() == loaded.view().tobytes()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(5,), (0, 3), (2, 7), (2, 3, 70, 5)])
def test_a_quantized_tensor_comes_back_as_it_was(rng, tmp_path, bits, shape):
    tensors = [kv.quantize_per_token(normal(rng, *shape), bits)]
    if len(shape) > 1:
        tensors += [kv.quantize_per_channel(normal(rng, *shape), bits, block) for block in (1, 4, 32, 10**6)]
    for tensor in tensors:
        loaded = through(tensor, tmp_path / "tensor")
        for name in ("codes", "lo", "scale"):
            assert bit_equal(getattr(tensor, name), getattr(loaded, name))
        for name in ("bits", "layout", "shape", "block_size"):
            assert getattr(tensor, name) == getattr(loaded, name)


def test_all_layers_of_a_model_are_in_one_file(rng, tmp_path):
    formats = kv.layer_formats(6)
    assert formats == ["int8", "int8", "int4", "int4", "int8", "int8"]
    caches = kv.KVCaches(6, [2, 2, 2, 1, 1, 1], [8, 8, 8, 16, 16, 16], k_format=formats, v_format=formats)
    for i, cache in enumerate(caches):
        caches.append(i, *data(rng, cache, 50))
    loaded = through(caches, tmp_path / "model")
    assert (len(loaded), loaded.length, loaded.nbytes) == (6, 50, caches.nbytes)
    q = [normal(rng, 1, 4, 1, cache.spec.head_dim) for cache in caches]
    for i in range(6):
        same(caches[i], loaded[i], q[i])
        k, v = data(rng, caches[i], 1)
        assert bit_equal(caches.step(i, q[i], k, v), loaded.step(i, q[i], k, v))
    for each in (caches, loaded):
        each.truncate(30)
    for one, two in zip(caches, loaded, strict=True):
        same(one, two)


# ---- a sequence of layers


def test_layers_are_cut_frozen_and_reset_together(rng):
    caches = kv.KVCaches(3, 1, 8, k_format="int8", v_format="int4")
    for i in range(3):
        caches.append(i, *data(rng, caches[i], 10 + i))
    assert [len(cache) for cache in caches] == [10, 11, 12]
    assert caches.length == 10
    with pytest.raises(ValueError, match="n must be from 0 to the length 10, got 11"):
        caches.truncate(11)
    assert [len(cache) for cache in caches] == [10, 11, 12]
    snapshot = caches.freeze()
    caches.truncate(4)
    assert [len(cache) for cache in caches] == [4, 4, 4]
    again = snapshot.unfreeze()
    assert [len(cache) for cache in again] == [10, 11, 12]
    assert again.freeze(consume=True).nbytes == snapshot.nbytes
    assert again.length == 0
    caches.reserve(100)
    assert min(cache.capacity for cache in caches) >= 100
    caches.reset()
    assert (caches.length, len(caches[1:]), repr(caches)) == (0, 2, "KVCaches(3 layers, length=0, nbytes=0)")
    assert caches.nbytes_allocated >= caches.nbytes == 0


@pytest.mark.parametrize(
    ("layer", "error", "got"),
    [
        (2, IndexError, "from 0 to 1, for 2 layers, got 2"),
        (-1, IndexError, "from 0 to 1, for 2 layers, got -1"),
        (True, TypeError, "an integer from 0 to 1, got True of type bool"),
        (1.0, TypeError, "an integer from 0 to 1, got 1.0 of type float"),
    ],
)
def test_a_layer_that_is_not_there_is_named(rng, layer, error, got):
    caches = kv.KVCaches(2, 1, 8)
    k, v = data(rng, caches[0], 3)
    for call in (caches.append, caches.step, caches.attend):
        with pytest.raises(error, match=f"layer must be {got}"):
            call(layer, *[k, k, v][: 3 if call == caches.step else 2 if call == caches.append else 1])
    assert [len(cache) for cache in caches] == [0, 0]
    caches.append(np.int64(1), k, v)
    assert caches[-1] is caches[1]
    for index, kind in ((2, IndexError), (-3, IndexError), (True, TypeError)):
        with pytest.raises(kind, match=r"layer must be .*from -2 to 1"):
            caches[index]
    assert repr(caches).startswith("KVCaches(2 layers, length=0 (of the longest layer 3), nbytes=")
    assert repr(kv.KVCaches(1, 1, 8)) == "KVCaches(1 layer, length=0, nbytes=0)"


def test_rows_of_all_layers_are_chosen_together(rng):
    caches = kv.KVCaches(2, 1, [8, 16], k_format="int8", v_format="int4", batch_size=2)
    for i, cache in enumerate(caches):
        caches.append(i, *data(rng, cache, 350), lengths=[350, 345])
    twin = copy.deepcopy(caches)
    assert kv.nbytes(caches, twin) < 1.5 * caches.nbytes
    caches.repeat_interleave(2)
    caches.reorder([3, 0, 1, 2])
    caches.select(np.array([0, 1]))
    caches.truncate([341, 350])
    for cache in twin:
        cache.select([1, 0])
        cache.truncate([341, 350])
    for one, two in zip(caches, twin, strict=True):
        assert one.lengths == [341, 350]
        same(one, two)
    with pytest.raises(
        ValueError, match="n must be from 0 to the tokens that every layer has in the row, 341, got 342"
    ):
        caches.truncate([342, 0])
    caches[1].select([0])
    for change in (lambda: caches.select([0]), lambda: caches.reorder([0, 1]), lambda: caches.truncate([1, 1])):
        with pytest.raises(ValueError, match="the layers must have the same batch_size"):
            change()
    assert caches[0].lengths == [341, 350]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_layers": 0}, "num_layers must be a positive integer"),
        ({"num_layers": 10**20}, "num_layers must be at most"),
        ({"k_format": ["int8"]}, "k_format must have an entry for each of the 2 layers, got 1"),
        ({"head_dim": [8, 0]}, "head_dim must be a positive integer"),
        ({"v_format": ["int8", "int3"]}, "v_format must be one of"),
    ],
)
def test_arguments_of_layers_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        kv.KVCaches(**{"num_layers": 2, "num_kv_heads": 1, "head_dim": 8, **options})


def test_formats_of_few_layers_are_all_the_outer_one():
    assert kv.layer_formats(3) == ["int8"] * 3
    assert kv.layer_formats(3, "float16", "float32", 1) == ["float32", "float16", "float32"]
    assert kv.layer_formats(2, count=0) == ["int4"] * 2
    with pytest.raises(ValueError, match="inner must be one of"):
        kv.layer_formats(3, "int3")


# ---- what is in a file


def test_any_reader_of_safetensors_reads_a_file(rng, tmp_path):
    from safetensors import safe_open

    cache = new("int4", "int8", dim=5, v_dim=3)
    cache.append(*data(rng, cache, 78))
    cache.save(tmp_path / "state")
    with safe_open(tmp_path / "state", "np") as file:
        assert file.metadata()["format"] == "kvnumba"
        assert file.metadata()["version"] == "1"
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert_says(found, cache)


def assert_says(found, cache):
    """Assert that arrays of files, by the formulas of docs/file_format.md, are what *cache* holds."""
    for b, (length, _) in enumerate(cache.buffers.state.tolist()):
        for side, format, expected in (
            ("keys", cache.spec.k_format, cache.keys()),
            ("values", cache.spec.v_format, cache.values()),
        ):
            part = {
                name.removeprefix(f"layers.0.rows.{b}.{side}."): array
                for name, array in found.items()
                if name.startswith(f"layers.0.rows.{b}.{side}.")
            }
            assert bit_equal(decoded(part, format, side, length), expected[b, :, :length])


def decoded(part, format, side, length):
    """One row of keys or values, from its arrays: float32 [H, length, D]."""
    if format not in ("int8", "int4"):
        rows = part["rows"]
        return reference.from_bfloat16(rows.view(np.uint16)) if format == "bfloat16" else rows.astype(np.float32)
    numbers = part["codes"]
    if format == "int4":
        numbers = np.stack((numbers & 15, numbers >> 4), -1).reshape(*numbers.shape[:-1], -1)
    lo, scale = part["lo"], part["scale"]
    dim = part["sinks"].shape[2]
    lo, scale = (x[:, :, None] if side == "keys" else x[..., None] for x in (lo, scale))
    coded = lo + numbers[..., :dim].astype(np.float32) * scale
    coded = coded.reshape(len(coded), -1, dim)
    rest = [part["residual"]] if side == "keys" else []
    return np.concatenate([part["sinks"][:, :length], coded, *rest], 1)


@pairs
def test_k49_a_file_holds_nothing_that_was_removed(rng, tmp_path, k_format, v_format):
    cache, twin = new(k_format, v_format), new(k_format, v_format)
    k, v = data(rng, cache, 150)
    for each, length in ((cache, 150), (twin, 68)):
        each.append(k[:, :, :length], v[:, :, :length])
    cache.truncate(68)  # a deep cut: the float32 rows of its last block are gone
    for each, name in ((cache, "cut"), (twin, "never more")):
        each.save(tmp_path / name)
    assert (tmp_path / "cut").stat().st_size <= (tmp_path / "never more").stat().st_size
    cache.truncate(0)
    cache.save(tmp_path / "cut")
    header, body = parted((tmp_path / "cut").read_bytes())
    assert not any(body)
    assert '\\"lengths\\":[0,0]' in header.decode()


def parted(data):
    size = int.from_bytes(data[:8], "little") + 8
    return data[8:size], data[size:]


def test_a_constant_group_has_scale_1_in_a_file_and_goes_on_exactly(rng, tmp_path):
    from safetensors.numpy import load_file

    cache = new("int8", "int4", batch=1)
    k, v = data(rng, cache, 78)
    k[..., 5], v[:, :, 40] = 9, -0.5  # groups that are constant
    k[:, :, 4:36, 6] = np.arange(32) * 8  # 248 at most, so that 255 makes the scale 1
    k[:, :, 35, 6], v[0, 0, 41, :] = 255, 0
    v[0, 0, 41, 1] = 15
    cache.append(k, v)
    loaded = through(cache, tmp_path / "state")
    found = load_file(tmp_path / "state")
    assert (found["layers.0.rows.0.keys.scale"][..., 5:7] == 1).sum() == 9  # 2 blocks and 3 heads; 1 block more
    assert found["layers.0.rows.0.values.scale"][0, 36:38].tolist() == [1, 1]
    assert np.array_equal(loaded.buffers.k.params, cache.buffers.k.params[:, :, : loaded.buffers.k.params.shape[2]])
    assert np.array_equal(loaded.buffers.v.params, cache.buffers.v.params[:, :, : loaded.buffers.v.params.shape[2]])
    same(cache, loaded, normal(rng, 1, 3, 1, 33))


# ---- golden files


def golden_data(batch, heads, length, dim, step):
    """Numbers that every computer makes alike."""
    count = np.arange(batch * heads * length * dim).reshape(batch, heads, length, dim)
    return ((count * step % 61 - 30) / np.float32(8)).astype(np.float32)


def golden():
    """What the golden files hold, made anew."""
    made = {}
    for k_format, v_format in PAIRS:
        cache = new(k_format, v_format, dim=3, v_dim=2, heads=1, batch=2)
        cache.append(golden_data(2, 1, 41, 3, 7), golden_data(2, 1, 41, 2, 13))
        made[f"{k_format}-{v_format}"] = cache
    made["cut"] = new("int4", "int4", dim=4, v_dim=4, heads=1, batch=1)
    made["cut"].append(golden_data(1, 1, 70, 4, 7), golden_data(1, 1, 70, 4, 13))
    made["cut"].truncate(38)  # decoded keys in the residual, and no float32 rows of the block before
    made["window"] = kv.KVCache(1, 1, v_format="int4", window=1)
    made["window"].append(golden_data(1, 1, 700, 1, 7), golden_data(1, 1, 700, 1, 13))
    made["layers"] = kv.KVCaches(2, 1, 2, k_format=["int8", "float16"], v_format="int8")
    made["layers"].append(0, golden_data(1, 1, 5, 2, 7), golden_data(1, 1, 5, 2, 13))
    for layout, bits in (("per_channel", 8), ("per_token", 4)):
        made[f"codes-{layout}"] = kv.QuantizedCache(layout, bits)
        made[f"codes-{layout}"].append(golden_data(1, 2, 38, 3, 7)[0])
    for name, cache in (("concat", kv.ConcatCache(1)), ("in-place", kv.InPlaceCache(1, "bfloat16"))):
        cache.append(golden_data(1, 2, 4, 3, 7)[0])
        made[name] = cache
    made["tensor-per_channel"] = kv.quantize_per_channel(golden_data(1, 1, 5, 3, 7), 4, 4)
    made["tensor-per_token"] = kv.quantize_per_token(golden_data(1, 1, 5, 3, 7), 8)
    return made


def contents(value):
    """Arrays that say what an object holds."""
    if isinstance(value, kv.KVCaches):
        return [array for cache in value for array in contents(cache)]
    if isinstance(value, kv.KVCache):
        return [value.keys(), value.values(), value._buffers.state]
    if isinstance(value, kv.QuantizedTensor):
        return [value.codes, value.lo, value.scale, value.dequantize()]
    return [value.contiguous()]


@pytest.mark.parametrize("name", [path.stem for path in sorted(GOLDEN.glob("*.safetensors"))])
def test_files_of_version_1_load_for_ever(name, tmp_path):
    value, path = golden()[name], GOLDEN / f"{name}.safetensors"
    loaded = type(value).load(path)
    for one, two in zip(contents(value), contents(loaded), strict=True):
        assert bit_equal(one, two)
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    value.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_there_is_a_golden_file_of_each_kind():
    assert {path.stem for path in GOLDEN.glob("*.safetensors")} == set(golden())
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 60_000


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_golden_files_say_by_the_documented_formulas_what_was_saved(k_format, v_format):
    bytes_ = (GOLDEN / f"{k_format}-{v_format}.safetensors").read_bytes()
    header, body = parted(bytes_)
    dtypes = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8}
    table = json.loads(header)
    meta, found, end = table.pop("__metadata__"), {}, 0
    for name, entry in table.items():
        start, stop = entry["data_offsets"]
        assert start == end
        found[name] = np.frombuffer(body[start:stop], dtypes[entry["dtype"]]).reshape(entry["shape"])
        end = stop
    assert end == len(body)
    assert_says(found, golden()[f"{k_format}-{v_format}"])
    zeroed = bytes_[: len(bytes_) - len(body)].replace(meta["header_sum"].encode(), b"0" * 32, 1)
    for name, part in (("header_sum", zeroed), ("data_sum", body)):
        words = np.frombuffer(part + bytes(-len(part) % 4), "<u4").tolist()
        plain, weighted = sum(words), sum((i + 1) * word for i, word in enumerate(words))
        assert meta[name] == f"{plain % 2**64:016x}{weighted % 2**64:016x}"


# ---- files that are refused


def test_k43_the_file_says_the_settings(rng, tmp_path):
    cache = new("int4", "int4")
    cache.append(*data(rng, cache, 40))
    cache.save(tmp_path / "state")
    assert kv.KVCache.load(tmp_path / "state").spec == cache.spec


@pytest.mark.parametrize("version", [0, 2, 99])
def test_k43_another_version_is_refused_by_both_numbers(tmp_path, version):
    path = tmp_path / "state"
    new("int4", "int4").save(path)
    path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"%d"' % version, 1))
    with pytest.raises(ValueError, match=f"version {version} of the format, this package reads version 1"):
        kv.KVCache.load(path)


@pytest.mark.parametrize("loader", [kv.KVCache, kv.KVCaches, kv.QuantizedCache, kv.ConcatCache, kv.InPlaceCache])
def test_a_file_of_another_class_is_refused(loader):
    others = [path for path in GOLDEN.iterdir() if not isinstance(golden()[path.stem], loader)]
    for path in others:
        with pytest.raises(ValueError, match=rf"{loader.__name__}.save wrote.* it is a file of \w+; load it with"):
            loader.load(path)


@pytest.mark.parametrize("name", sorted(fuzz_files.caches()))
def test_k44_a_file_that_was_cut_or_has_more_bytes_is_refused(tmp_path, name):
    value = fuzz_files.caches()[name]
    data = fuzz_files.saved(value, tmp_path / "whole")
    header = int.from_bytes(data[:8], "little") + 8
    cuts = {0, 1, 7, 8, 9, 50, 100, header - 1, header, header + 1, len(data) // 2, len(data) - 1} - {len(data)}
    for damaged in [*(data[:n] for n in cuts), data + bytes(10), data + b"\n", b"\0" * len(data), b"x" * 1000]:
        assert fuzz_files.check(value, data, damaged, tmp_path / "damaged") == "refused"


def test_k44_each_flipped_bit_is_noticed(tmp_path):
    value = golden()["int4-int8"]
    data = (GOLDEN / "int4-int8.safetensors").read_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        assert fuzz_files.check(value, data, bytes(damaged), tmp_path / "damaged") == "refused", at


@pytest.mark.parametrize("length", [2**40, 2**63 - 1, 10**30, -1])
def test_k44_a_length_beyond_the_file_allocates_nothing(tmp_path, length):
    data = (GOLDEN / "int4-int8.safetensors").read_bytes().replace(b"[41,41]", b"[41,%d]" % length, 1)
    header, body = parted(data)
    header = header.rstrip()
    header += b" " * (-(len(header) + 8) % 64)
    sealed = fuzz_files.resealed(len(header).to_bytes(8, "little") + header + body)
    for damaged in (data, sealed):
        assert fuzz_files.check(golden()["int4-int8"], b"", damaged, tmp_path / "damaged") == "refused"


def test_damaged_files_never_crash_hang_or_load_as_something_else():
    results = fuzz_files.run(2000, seed=1)
    assert results["refused"] > 1500
    assert results["loaded"] > 20  # sums were made to fit, and the content is another one that is as good


@pytest.mark.parametrize("make", [kv.KVCache, kv.KVCaches, kv.QuantizedCache, kv.InPlaceCache, kv.QuantizedTensor])
def test_a_missing_file_is_an_oserror_that_names_it(tmp_path, make):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make.load(tmp_path / "nowhere")
    with pytest.raises(OSError, match="path must be that of a regular file"):
        make.load(tmp_path)
    for bad in (3, None, b"bytes"):
        with pytest.raises(TypeError, match="path must be a str or a path"):
            make.load(bad)


# ---- writing


@pytest.mark.parametrize("name", ["run.v2", "with space", "ključ-值", ".hidden", "a.safetensors", "x" * 200])
@pytest.mark.parametrize("kind", [str, Path])
def test_k46_a_name_is_taken_as_it_is(rng, tmp_path, name, kind):
    cache = kv.ConcatCache(0)
    for i in range(2):  # the second replaces the first
        cache.append(np.full(3, i))
        assert cache.save(kind(tmp_path / name)) is None
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert len(kv.ConcatCache.load(kind(tmp_path / name))) == 3 * (i + 1)


@pytest.mark.parametrize("fault", ["write", "fsync", "replace", "interrupt"])
def test_a_failed_save_leaves_the_old_file_and_no_other(rng, tmp_path, monkeypatch, fault):
    old = kv.ConcatCache(0)
    old.append(np.arange(5))
    old.save(tmp_path / "state")
    before = (tmp_path / "state").read_bytes()

    def fail(*_):
        raise KeyboardInterrupt if fault == "interrupt" else OSError(errno.ENOSPC, "no space left")

    owner, name = {"write": (storage._Writer, "put"), "interrupt": (storage._Writer, "finish")}.get(fault, (os, fault))
    monkeypatch.setattr(owner, name, fail)
    cache = new("int8", "int4")
    cache.append(*data(rng, cache, 40))
    with pytest.raises((OSError, KeyboardInterrupt)):
        cache.save(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="permissions and links of POSIX")
def test_permissions_and_links_are_those_of_the_old_file(tmp_path):
    cache = kv.ConcatCache(0)
    real, link = tmp_path / "real", tmp_path / "link"
    cache.save(real)
    plain = tmp_path / "plain"
    plain.touch()
    assert real.stat().st_mode == plain.stat().st_mode  # a new file has what the user's mask gives it
    real.chmod(0o640)
    link.symlink_to(real)
    cache.append(np.arange(3))
    cache.save(link)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert len(kv.ConcatCache.load(real)) == 3
    with pytest.raises(OSError, match="path must be that of a regular file"):
        cache.save("/dev/null")


def test_a_folder_that_is_not_there_is_not_made_and_the_path_given_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "none" / "state", "none/state"):
        with pytest.raises(FileNotFoundError) as caught:
            kv.ConcatCache(0).save(path)
        assert caught.value.filename == os.fspath(path)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        kv.ConcatCache(0).save("file/state")
    assert caught.value.filename == "file/state"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: holding(kv.ConcatCache(0), (1,) * 33), "shape must be a list of 1 to 32 integers, got 33"),
        (lambda: holding(kv.InPlaceCache(2), (1,) * 33), "shape must be a list of 3 to 32 integers, got 33"),
        (lambda: holding(kv.QuantizedCache(), (1,) * 40), "lead must be a list of 0 to 32 integers, got 38"),
        (lambda: holding(kv.QuantizedCache(), (0, 2**40 + 1, 1)), "length must be an integer from 0 to 1099511627776"),
        (lambda: kv.quantize_per_token(np.ones((1,) * 33)), "shape must be a list of 1 to 32 integers, got 33"),
        (lambda: kv.quantize_per_token(np.ones(5), block_size=2**63), "block_size must be an integer from 1 to"),
        (lambda: tensor_of(lo=np.nan), "lo must hold numbers that can be quantized"),
        (lambda: tensor_of(scale=-1), "scale must be above 0"),
        (lambda: tensor_of(scale=np.nan), "scale must be above 0"),
        (lambda: tensor_of(codes=255), "codes of rows of odd length must end in a nibble of 0"),
    ],
)
def test_what_a_file_cannot_hold_is_not_saved_and_is_not_called_damaged(tmp_path, make, words):
    with pytest.raises(ValueError, match=words) as error:
        make().save(tmp_path / "state")
    assert "damaged" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def holding(cache, shape):
    """*cache* after an append of this shape."""
    cache.append(np.ones(shape))
    return cache


def tensor_of(codes=0, lo=0, scale=1):
    """A tensor of one row of three numbers."""
    lo, scale = (np.full(1, x, np.float32) for x in (lo, scale))
    return kv.QuantizedTensor(np.full((1, 2), codes, np.uint8), lo, scale, 4, "per_token", (1, 3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lo": np.nan}, "lo must hold numbers that can be quantized"),
        ({"scale": -1}, "scale must be above 0"),
        ({"codes": 255}, "codes of rows of odd length must end in a nibble of 0"),
    ],
)
def test_a_tensor_that_quantization_cannot_make_is_damaged(tmp_path, monkeypatch, change, words):
    with monkeypatch.context() as patch:
        patch.setattr(kv.QuantizedTensor, "_check_content", lambda _: None)
        tensor_of(**change).save(tmp_path / "tensor")
    with pytest.raises(ValueError, match=f"it is damaged, {words}.*; save it again"):
        kv.QuantizedTensor.load(tmp_path / "tensor")


@pytest.mark.parametrize("path", ["a\0b", "a\ud800"])
def test_a_path_that_no_file_can_have_is_refused(path):
    if os.name != "posix" and "\0" not in path:
        pytest.skip("a name of Windows can have this")
    for each in (kv.ConcatCache(0).save, kv.ConcatCache.load):
        with pytest.raises(ValueError, match=r"path must be one that a file can have, .* got 'a"):
            each(path)


# ---- costs


def test_saving_and_loading_take_little_memory_beside_the_cache(rng, tmp_path, monkeypatch):
    import tracemalloc

    monkeypatch.setattr(buffers, "MAPPED", sys.maxsize)  # all memory comes from NumPy, as tracemalloc sees it
    cache = kv.KVCache(4, 64, k_format="int8", v_format="int4")
    for _ in range(8):
        cache.append(*data(rng, cache, 1024))
    through(cache, tmp_path / "state")
    tracemalloc.start()
    try:
        cache.save(tmp_path / "state")
        saving = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        loaded = kv.KVCache.load(tmp_path / "state")
        loading = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert saving < 0.5 * cache.nbytes + (2 << 20)
    assert loading < loaded.nbytes_allocated + 0.5 * cache.nbytes + (2 << 20)


def test_files_of_codes_need_compiled_code_and_say_so(tmp_path):
    code = """
import sys, numpy as np, kvnumba as kv
one = kv.ConcatCache(0); one.append(np.arange(3)); one.save(sys.argv[1])
assert len(kv.ConcatCache.load(sys.argv[1])) == 3
try:
    kv.KVCache(1, 4).save(sys.argv[1])
except RuntimeError as error:
    assert "NUMBA_DISABLE_JIT" in str(error)
else:
    sys.exit("must be refused")
"""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "state")], env=environment, check=True, timeout=120)
    assert len(kv.ConcatCache.load(tmp_path / "state")) == 3


if __name__ == "__main__":
    for title, content in golden().items():
        if not (GOLDEN / f"{title}.safetensors").exists():
            content.save(GOLDEN / f"{title}.safetensors")

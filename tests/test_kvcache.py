"""The state of ``KVCache`` against the reference cache, bit for bit."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from conftest import bit_equal, normal

import kvnumba as kv
from kvnumba.reference import ReferenceKVCache
from kvnumba.spec import BLOCK, FORMATS, SINK

#: Each format once as keys and once as values.
PAIRS = [("float32", "int4"), ("float16", "bfloat16"), ("bfloat16", "float16"), ("int8", "float32"), ("int4", "int8")]
pairs = pytest.mark.parametrize(("k_format", "v_format"), PAIRS)

SPLITS = {
    "one call": [200],
    "one by one": [1] * 200,
    "around blocks": [1, 3, 31, 32, 33, 64, 36],
    "empty calls between": [0, 4, 0, 32, 0, 100, 64],
    "sinks cut twice": [2, 1, 197],
}


def both(k_format, v_format, **options):
    """The cache and its reference, empty."""
    options = {"num_kv_heads": 2, "head_dim": 33, "v_head_dim": 17, "batch_size": 2, **options}
    options.update(k_format=k_format, v_format=v_format)
    return kv.KVCache(**options), ReferenceKVCache(**options)


def data(rng, cache, length):
    spec = cache.spec
    lead = (spec.batch_size, spec.num_kv_heads, length)
    return normal(rng, *lead, spec.head_dim), normal(rng, *lead, spec.v_head_dim)


def same_state(cache, reference):
    """Assert that lengths, keys and values are equal, the arrays bit for bit."""
    assert (len(cache), cache.length) == (len(reference), len(reference))
    assert bit_equal(cache.keys(), reference.keys())
    assert bit_equal(cache.values(), reference.values())


# ---- append


@pytest.mark.parametrize(("k_format", "v_format"), list(itertools.product(FORMATS, FORMATS)))
def test_state_equals_the_reference_for_every_pair_of_formats(rng, k_format, v_format):
    cache, reference = both(k_format, v_format)
    k, v = data(rng, cache, 78)
    for part in (slice(0, 3), slice(3, 40), slice(40, 41), slice(41, 78)):
        for each in (cache, reference):
            each.append(k[:, :, part], v[:, :, part])
        same_state(cache, reference)


@pairs
@pytest.mark.parametrize("split", SPLITS)
def test_state_does_not_depend_on_how_tokens_are_split_into_appends(rng, k_format, v_format, split):
    cache, reference = both(k_format, v_format)
    k, v = data(rng, cache, 200)
    reference.append(k, v)
    start = 0
    for count in SPLITS[split]:
        cache.append(k[:, :, start : start + count], v[:, :, start : start + count])
        start += count
    same_state(cache, reference)


@pairs
@pytest.mark.parametrize("dim", [1, 2, 3, 15, 16, 31, 32, 63, 64, 65, 80, 127, 128, 576])
def test_state_equals_the_reference_for_every_head_dim(rng, k_format, v_format, dim):
    cache, reference = both(k_format, v_format, head_dim=dim, v_head_dim=dim, batch_size=1)
    k, v = data(rng, cache, 70)
    for each in (cache, reference):
        each.append(k, v)
    same_state(cache, reference)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-3, 1e6, 1e30])
def test_codes_are_exact_for_every_order_of_magnitude(rng, format, scale):
    cache, reference = both(format, format)
    k, v = (x * np.float32(scale) for x in data(rng, cache, 70))
    for each in (cache, reference):
        each.append(k, v)
    same_state(cache, reference)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_codes_are_exact_where_quotients_fall_on_and_beside_a_half(rng, format):
    cache, reference = both(format, format, head_dim=32, v_head_dim=32)
    levels = 15 if format == "int4" else 255
    halves = rng.integers(0, 2 * levels + 1, (2, 2, 100, 32)).astype(np.float32) / 2
    halves[..., 0, :] = halves[..., 0] = 0
    halves[..., 1, :] = halves[..., 1] = levels
    x = np.clip(np.nextafter(halves, rng.choice([-1, 1, 1000], halves.shape).astype(np.float32) * levels), 0, levels)
    x = np.where(rng.random(x.shape) < 0.5, halves, x).astype(np.float32)
    for each in (cache, reference):
        each.append(x, x)
    same_state(cache, reference)


@pytest.mark.parametrize("format", ["float16", "bfloat16"])
def test_half_precision_rounds_to_nearest_even(format):
    # Every float32 pattern of the upper 17 bits, with low bits below, at and above a tie.
    high = np.arange(2**16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (high[:, None] | low).view(np.float32).reshape(1, 1, -1, 64)
    x = np.where(np.isfinite(x), x, np.float32(0))
    cache, reference = both(format, format, num_kv_heads=1, head_dim=64, v_head_dim=64, batch_size=1)
    for each in (cache, reference):
        each.append(x, x)
    same_state(cache, reference)


@pytest.mark.parametrize("format", ["float32", "float16", "bfloat16"])
def test_float_formats_keep_nan_and_infinity(format):
    cache, _ = both(format, format, num_kv_heads=1, head_dim=4, v_head_dim=4, batch_size=1)
    x = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32).reshape(1, 1, 1, 4)
    cache.append(x, x)
    for got in (cache.keys().ravel(), cache.values().ravel()):
        np.testing.assert_array_equal(got, x.ravel())
        assert np.signbit(got[3])


# ---- step


@pairs
@pytest.mark.parametrize("rows", [1, 5])
def test_step_is_append_then_attend(rng, k_format, v_format, rows):
    stepped, _ = both(k_format, v_format)
    apart, _ = both(k_format, v_format)
    k, v = data(rng, stepped, 80)
    q = normal(rng, 2, 4, 80, 33)
    for start in range(0, 80, rows):
        part = slice(start, start + rows)
        out = stepped.step(q[:, :, part], k[:, :, part], v[:, :, part])
        apart.append(k[:, :, part], v[:, :, part])
        assert bit_equal(out, apart.attend(q[:, :, part]))
    same_state(stepped, apart)


def test_step_takes_the_options_of_attend(rng):
    cache, other = both("int8", "int4")[0], both("int8", "int4")[0]
    k, v = data(rng, cache, 50)
    q, mask = normal(rng, 2, 4, 3, 33), rng.random(50) < 0.5
    options = {"causal": False, "sm_scale": 0.3, "mask": mask, "return_lse": True}
    got = cache.step(q, k, v, **options)
    other.append(k, v)
    for a, b in zip(got, other.attend(q, **options), strict=True):
        assert bit_equal(a, b)


# ---- truncate, reset


@pairs
@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 20, 35, 36, 37, 50, 67, 68, 69, 99, 100, 101, 150])
def test_truncate_then_append_equals_the_reference(rng, k_format, v_format, cut):
    cache, reference = both(k_format, v_format)
    k, v = data(rng, cache, 250)
    for each in (cache, reference):
        each.append(k[:, :, :150], v[:, :, :150])
        each.truncate(cut)
    same_state(cache, reference)
    for part in (slice(150, 151), slice(151, 190), slice(190, 250)):
        for each in (cache, reference):
            each.append(k[:, :, part], v[:, :, part])
        same_state(cache, reference)


@pairs
def test_any_order_of_appends_and_cuts_equals_the_reference(rng, k_format, v_format):
    cache, reference = both(k_format, v_format)
    for _ in range(150):
        if rng.random() < 0.6:
            k, v = data(rng, cache, int(rng.integers(0, 50)))
            for each in (cache, reference):
                each.append(k, v)
        else:
            back = int(min(len(cache), rng.integers(0, 60)))
            for each in (cache, reference):
                each.truncate(len(each) - back)
        same_state(cache, reference)


@pytest.mark.parametrize("n", [-1, 11, 1.5, "3", None, True])
def test_truncate_refuses_what_is_not_a_length_of_the_cache(rng, n):
    cache, _ = both("int8", "int4")
    k, v = data(rng, cache, 10)
    cache.append(k, v)
    with pytest.raises((ValueError, TypeError), match="n must"):
        cache.truncate(n)
    assert len(cache) == 10


def test_truncate_accepts_numpy_integers(rng):
    cache, _ = both("int8", "int4")
    cache.append(*data(rng, cache, 10))
    cache.truncate(np.int32(7))
    assert len(cache) == 7
    assert type(len(cache)) is int
    assert type(cache.length) is int


@pairs
def test_reset_leaves_a_cache_as_new(rng, k_format, v_format):
    cache, reference = both(k_format, v_format)
    cache.append(*data(rng, cache, 78))
    cache.reset()
    assert (len(cache), cache.keys().shape, cache.values().shape) == (0, (2, 2, 0, 33), (2, 2, 0, 17))
    k, v = data(rng, cache, 40)
    for each in (cache, reference):
        each.append(k, v)
    same_state(cache, reference)


# ---- freeze, unfreeze


@pairs
def test_a_snapshot_continues_as_the_cache_would_have(rng, k_format, v_format):
    cache, reference = both(k_format, v_format)
    k, v = data(rng, cache, 150)
    for each in (cache, reference):
        each.append(k[:, :, :70], v[:, :, :70])
    snapshot = cache.freeze()
    assert len(snapshot) == 70
    cache.append(-k, -v)
    cache.truncate(5)
    cache.reset()
    for _ in range(2):
        other = snapshot.unfreeze()
        same_state(other, reference)
        other.append(k[:, :, :70], v[:, :, :70])
    other = snapshot.unfreeze()
    for each in (other, reference):
        each.append(k[:, :, 70:], v[:, :, 70:])
    same_state(other, reference)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_snapshot_keeps_the_rows_that_an_exact_cut_needs(rng, format):
    cache, fresh = both(format, format)
    k, v = data(rng, cache, 70)
    cache.append(k, v)
    other = cache.freeze().unfreeze()
    other.truncate(50)
    fresh.append(k[:, :, :50], v[:, :, :50])
    same_state(other, fresh)


@pairs
def test_freeze_consume_moves_the_state_and_empties_the_cache(rng, k_format, v_format):
    cache, reference = both(k_format, v_format)
    k, v = data(rng, cache, 78)
    for each in (cache, reference):
        each.append(k, v)
    snapshot = cache.freeze(consume=True)
    assert len(cache) == 0
    same_state(snapshot.unfreeze(), reference)
    cache.append(k, v)
    same_state(cache, reference)


def test_a_snapshot_has_the_bytes_of_what_it_holds(rng):
    cache, _ = both("int8", "int4")
    cache.append(*data(rng, cache, 78))
    snapshot = cache.freeze()
    assert 0 < snapshot.nbytes <= cache.nbytes


# ---- capacity, sizes


@pairs
def test_growth_keeps_every_token(rng, k_format, v_format):
    cache, reference = both(k_format, v_format)
    capacities = set()
    for _ in range(60):
        k, v = data(rng, cache, int(rng.integers(1, 9)))
        for each in (cache, reference):
            each.append(k, v)
        capacities.add(cache.capacity)
        assert cache.capacity >= len(cache)
    same_state(cache, reference)
    assert len(capacities) <= 10


@pairs
def test_capacity_given_at_the_start_is_enough(rng, k_format, v_format):
    cache, _ = both(k_format, v_format, capacity=100)
    assert cache.capacity >= 100
    before = cache.capacity
    cache.append(*data(rng, cache, 100))
    assert cache.capacity == before


@pytest.mark.parametrize("format", FORMATS)
def test_nbytes_is_the_long_run_cost_plus_sinks_residual_and_kept_rows(format):
    dim, length, heads = 128, 4096, 2
    cache, _ = both(format, format, head_dim=dim, v_head_dim=dim, batch_size=1, capacity=length)
    tokens = np.zeros((1, heads, length, dim), np.float32)
    cache.append(tokens, tokens)
    assert len(cache) <= cache.capacity <= length + BLOCK
    # float32: 4 sinks of keys and of values, the residual, the rows of the last sealed block.
    fixed = heads * (2 * SINK + 2 * BLOCK) * dim * 4 if format in ("int8", "int4") else 0
    expected = cache.spec.bytes_per_token * length
    assert 0.97 * expected <= cache.nbytes <= 1.03 * expected + fixed


@pytest.mark.parametrize(("k_format", "v_format"), list(itertools.product(FORMATS, FORMATS)))
def test_repr_shows_formats_and_length(k_format, v_format):
    cache, _ = both(k_format, v_format)
    cache.append(*data(np.random.default_rng(0), cache, 3))
    text = repr(cache)
    assert k_format in text
    assert v_format in text
    assert "3" in text


def test_spec_is_that_of_the_arguments():
    cache, reference = both("int8", "int4")
    assert cache.spec == reference.spec


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be an integer from 1 to 1048576, got 0"),
        ({"head_dim": "8"}, TypeError, "head_dim must be an integer from 1 to 1048576, got '8' of type str"),
        ({"head_dim": np.ones(2)}, TypeError, "head_dim must be an integer"),
        ({"v_head_dim": 0.0}, TypeError, "v_head_dim must be an integer from 0 to 1048576, got 0.0"),
        ({"batch_size": True}, TypeError, "batch_size must be an integer"),
        ({"window": 2.5}, TypeError, "window must be an integer from 1 to 1099511627776, got 2.5"),
        (
            {"k_format": "int3"},
            ValueError,
            "k_format must be one of float32, float16, bfloat16, int8, int4, got",
        ),
        ({"v_format": 8}, TypeError, "v_format must be one of float32, float16, bfloat16, int8, int4, got 8"),
    ],
)
def test_the_numbers_of_a_spec_are_checked(options, error, words):
    with pytest.raises(error, match=words):
        kv.CacheSpec(**{"num_kv_heads": 2, "head_dim": 8, **options})


@pytest.mark.parametrize("options", [{"num_kv_heads": 2**20 + 1}, {"window": 2**40 + 1}])
def test_a_cache_that_no_file_could_hold_is_not_made(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be an integer from 1 to"):
        kv.KVCache(**{"num_kv_heads": 1, "head_dim": 1, **options})


def test_a_spec_without_rows_costs_as_many_bits_for_each_value_as_one_with_rows():
    one, none = (kv.CacheSpec(2, 8, v_head_dim=np.int64(4), k_format="int8", batch_size=n) for n in (3, 0))
    assert none.bits_per_value == one.bits_per_value == 8 * one.bytes_per_token / one.values_per_token
    assert (none.bytes_per_token, type(none.v_head_dim)) == (0, int)


def test_keys_and_values_are_fresh_arrays(rng):
    cache, reference = both("float32", "float32")
    k, v = data(rng, cache, 5)
    for each in (cache, reference):
        each.append(k, v)
    cache.keys()[...] = 0
    cache.values()[...] = 0
    same_state(cache, reference)


# ---- refusals


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_heads": 0},
        {"num_kv_heads": 1.5},
        {"head_dim": 0},
        {"v_head_dim": -1},
        {"batch_size": "2"},
        {"capacity": -1},
        {"k_format": "int3"},
        {"v_format": None},
        {"k_format": 8},
    ],
)
def test_arguments_of_the_class_are_checked(options):
    with pytest.raises((ValueError, TypeError), match=f"{next(iter(options))} must"):
        kv.KVCache(**{"num_kv_heads": 2, "head_dim": 8, **options})


@pairs
def test_a_refused_append_leaves_the_state_untouched(rng, k_format, v_format):
    cache, reference = both(k_format, v_format)
    k, v = data(rng, cache, 60)
    for each in (cache, reference):
        each.append(k, v)
    nan = v.copy()
    nan[1, 0, 30, 2] = np.nan
    refused = [(k, v[:, :, :-1]), (k[:1], v[:1]), (k[:, :1], v), (k[..., :-1], v), (k, v[..., 1:]), (k[0], v[0])]
    if v_format in ("int8", "int4"):
        refused.append((k, nan))
    for bad_k, bad_v in refused:
        with pytest.raises(ValueError, match="must"):
            cache.append(bad_k, bad_v)
        with pytest.raises(ValueError, match="must"):
            cache.step(normal(rng, 2, 4, 1, 33), bad_k, bad_v)
        same_state(cache, reference)
    for each in (cache, reference):
        each.append(k, v)
    same_state(cache, reference)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["k", "v"])
def test_codes_refuse_what_is_not_finite_and_name_its_place(rng, format, bad, side):
    cache, _ = both(format, format)
    arrays = dict(zip("kv", data(rng, cache, 40), strict=True))
    arrays[side][1, 0, 31, 7] = bad
    with pytest.raises(ValueError, match=rf"{side} must be finite.*\[1, 0, 31, 7\]"):
        cache.append(arrays["k"], arrays["v"])
    assert len(cache) == 0


def test_a_refused_query_leaves_step_without_effect(rng):
    cache, _ = both("int8", "int4")
    k, v = data(rng, cache, 3)
    for q in (normal(rng, 2, 3, 3, 33), normal(rng, 2, 4, 3, 32), normal(rng, 1, 4, 3, 33), normal(rng, 4, 3, 33)):
        with pytest.raises(ValueError, match="q must"):
            cache.step(q, k, v)
        assert len(cache) == 0
    with pytest.raises(ValueError, match="mask must"):
        cache.step(normal(rng, 2, 4, 3, 33), k, v, mask=np.ones((3, 4), bool))
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("k_format", "v_format", "side"),
    [("int4", "int8", "k"), ("int8", "int4", "v"), ("int8", "float32", "k"), ("float32", "int4", "v")],
)
@pytest.mark.parametrize("count", [5, 200])
def test_a_refused_append_changes_no_byte_of_the_buffers(rng, k_format, v_format, side, count):
    # 200 tokens are stored head by head: the heads before the bad one have been written when it is found.
    cache = kv.KVCache(3, 16, k_format=k_format, v_format=v_format, batch_size=2, capacity=400)
    k, v = (rng.standard_normal((2, 3, 101, 16)).astype(np.float32) for _ in range(2))
    cache.append(k, v)
    before = pickle.dumps(cache)
    bad = {name: rng.standard_normal((2, 3, count, 16)).astype(np.float32) for name in "kv"}
    bad[side][1, 2, count - 1, 15] = np.nan
    with pytest.raises(ValueError, match=rf"{side} must be finite .* got nan at \[1, 2, {count - 1}, 15\]"):
        cache.append(**bad)
    assert pickle.dumps(cache) == before


@pytest.mark.parametrize(("k_format", "v_format"), [("float32", "int4"), ("int4", "int8")])
def test_a_cache_of_no_rows_can_be_cut(k_format, v_format):
    cache = kv.KVCache(2, 16, k_format=k_format, v_format=v_format, batch_size=0)
    cache.append(np.ones((0, 2, 400, 16)), np.ones((0, 2, 400, 16)))
    cache.truncate(5)
    assert len(cache) == 5
    assert cache.keys().shape == (0, 2, 5, 16)

"""What users of other caches ran into, each with the numbers of its report. ``step`` is (max - min) / (levels - 1)."""

from __future__ import annotations

import ast
import copy
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from conftest import bit_equal, check_attend, normal

import kvnumba as kv
from kvnumba import reference
from kvnumba._jit import _PackageCache
from kvnumba.spec import BLOCK, SINK

FORMATS = ["float32", "int8", "int4"]
CODES = ["int8", "int4"]
LEVELS = {"int8": 255, "int4": 15}
#: Where the machine's own caches hold fewer decimals than the bound: two units in the last place.
ULPS = 2

formats = pytest.mark.parametrize("format", FORMATS)
codes = pytest.mark.parametrize("format", CODES)


def new(format, heads=1, dim=8, **options):
    return kv.KVCache(heads, dim, k_format=format, v_format=format, **options)


def filled(format, k, v):
    """A cache that was given k and v in one append."""
    batch, heads, _, dim = k.shape
    cache = new(format, heads, dim, batch_size=batch, v_head_dim=v.shape[3])
    cache.append(k, v)
    return cache


def ramp(count, dim=8, batch=1, heads=1):
    """Values of tokens 0, 1, 2, ...: all channels of token j are j, which codes hold exactly."""
    return np.broadcast_to(np.arange(count, dtype=np.float32)[:, None], (batch, heads, count, dim)).copy()


def assert_within_half_step(format, got, x, *, axis):
    """Assert that codes lose at most half a step of their group, and 2 ulp."""
    x = x.astype(np.float64)
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    step = (high - low) / LEVELS[format]
    slack = ULPS * np.spacing(np.maximum(np.abs(low), np.abs(high)).astype(np.float32))
    assert (np.abs(got - x) <= step / 2 * 1.001 + slack).all()


def blocks_of(x):
    """The sealed key blocks of all tokens x: [B, H, nblocks, 32, D]."""
    batch, heads, length, dim = x.shape
    count = max(length - SINK, 0) // BLOCK
    return x[:, :, SINK : SINK + count * BLOCK].reshape(batch, heads, count, BLOCK, dim)


def through_a_file(cache, folder):
    cache.save(folder / "state")
    return kv.KVCache.load(folder / "state")


def same(a, b):
    """Assert that two caches hold the same, bit for bit."""
    assert len(a) == len(b)
    assert bit_equal(a.keys(), b.keys())
    assert bit_equal(a.values(), b.values())


# ---- tokens and queries in their places


@formats
def test_k01_queries_are_the_last_positions_of_the_cache(format):
    cache = filled(format, np.zeros((1, 1, 8, 8)), ramp(8))
    np.testing.assert_allclose(cache.attend(np.ones((1, 1, 1, 8))), 3.5, atol=1e-6)
    cache = filled(format, np.zeros((1, 1, 5, 8)), ramp(5))
    cache.append(np.zeros((1, 1, 3, 8)), ramp(8)[:, :, 5:])
    out = cache.attend(np.ones((1, 1, 3, 8)))
    np.testing.assert_allclose(out[0, 0, :, 0], [2.5, 3.0, 3.5], atol=1e-6)


@formats
def test_k02_truncate_to_zero_leaves_nothing(format):
    tokens = np.arange(3, dtype=np.float32).reshape(1, 1, 3, 1)
    cache = filled(format, tokens, tokens)
    cache.truncate(0)
    assert (len(cache), cache.keys().shape[2]) == (0, 0)
    seven = np.full((1, 1, 1, 1), 7, np.float32)
    cache.append(seven, 2 * seven)
    assert (len(cache), cache.keys().item()) == (1, 7)
    assert cache.attend(np.ones((1, 1, 1, 1))).item() == 14
    cache.truncate(0)
    cache.truncate(0)
    assert len(cache) == 0


@codes
def test_k02_after_a_cut_to_zero_the_next_tokens_are_sinks(rng, format):
    k, v = normal(rng, 2, 1, 1, 4, 16)
    cache = filled(format, *normal(rng, 2, 1, 1, 50, 16))
    cache.truncate(0)
    cache.append(k, v)
    assert bit_equal(cache.keys(), k)
    assert bit_equal(cache.values(), v)


@formats
@pytest.mark.parametrize("keys", [1, 31, 32, 33, 300])
def test_k03_a_row_that_sees_no_key_is_zero_and_spoils_no_other(rng, format, keys):
    k, v, q = normal(rng, 1, 1, keys, 8), normal(rng, 1, 1, keys, 8), normal(rng, 1, 1, 3, 8)
    cache = filled(format, k, v)
    mask = np.ones((1, 1, 3, keys), bool)
    mask[0, 0, 1] = False
    for each in (mask, np.where(mask, np.float32(0), np.float32(-np.inf))):
        out = cache.attend(q, causal=False, mask=each)
        np.testing.assert_array_equal(out[0, 0, 1], 0)
        check_attend(cache, q, k, v, out, causal=False, mask=each)
    # The smallest float on a whole row swallows the scores: the mean of the values.
    lowest = np.where(mask, np.float32(0), np.finfo(np.float32).min)
    out = cache.attend(q, causal=False, mask=lowest)
    np.testing.assert_allclose(out[0, 0, 1], cache.values()[0, 0].mean(0), atol=1e-5)


@codes
def test_k04_rolling_back_into_the_last_sealed_block_is_exact(rng, format):
    k, v, q = normal(rng, 1, 2, 90, 64), normal(rng, 1, 2, 90, 64), normal(rng, 1, 4, 1, 64)
    cache = filled(format, *normal(rng, 2, 1, 2, 78, 64))
    cache.reset()
    cache.append(k[:, :, :78], v[:, :, :78])
    cache.truncate(50)
    fresh = filled(format, k[:, :, :50], v[:, :, :50])
    same(cache, fresh)
    assert bit_equal(cache.attend(q), fresh.attend(q))
    cache.append(k[:, :, 50:], v[:, :, 50:])
    same(cache, filled(format, k, v))
    cache.truncate(78)
    cache = filled(format, k[:, :, :50], v[:, :, :50])
    for _ in range(20):
        cache.append(*normal(rng, 2, 1, 2, 28, 64))
        cache.truncate(50)
        same(cache, fresh)
        assert bit_equal(cache.attend(q), fresh.attend(q))


@codes
def test_k04_a_deeper_cut_keeps_decoded_values(rng, format):
    k, v, q = normal(rng, 1, 2, 200, 64), normal(rng, 1, 2, 200, 64), normal(rng, 1, 4, 1, 64)
    cache = filled(format, k, v)
    before = cache.keys()[:, :, :50]
    cache.truncate(50)
    assert bit_equal(cache.keys(), before)
    assert bit_equal(cache.values(), filled(format, k[:, :, :50], v[:, :, :50]).values())
    new_k, new_v = normal(rng, 1, 2, 40, 64), normal(rng, 1, 2, 40, 64)
    cache.append(new_k, new_v)
    assert bit_equal(cache.keys()[:, :, :36], before[:, :, :36])
    old_step = np.ptp(k[:, :, 36:68], 2) / LEVELS[format]
    cut = np.concatenate([before[:, :, 36:], new_k], 2)[:, :, :BLOCK]
    new_step = np.ptp(cut, 2) / LEVELS[format]
    error = np.abs(cache.keys()[:, :, 36:50] - k[:, :, 36:50])
    assert (error <= ((old_step + new_step) / 2 * 1.001 + 1e-6)[:, :, None]).all()
    check_attend(cache, q, np.concatenate([k[:, :, :50], new_k], 2), np.concatenate([v[:, :, :50], new_v], 2))


@codes
def test_k05_tokens_that_arrive_one_by_one_are_quantized_by_blocks(rng, format):
    k, v = normal(rng, 1, 1, 200, 64), normal(rng, 1, 1, 200, 64)
    cache = filled(format, k[:, :, :32], v[:, :, :32])
    for t in range(32, 200):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        if t + 1 in (35, 36, 37, 100, 199):
            sealed = SINK + (t + 1 - SINK) // BLOCK * BLOCK
            exact = (cache.keys() == k[:, :, : t + 1]).all((0, 1, 3))
            assert exact[:SINK].all()
            assert exact[sealed:].all()
            assert not exact[SINK:sealed].any()
    keys, values = cache.keys(), cache.values()
    assert bit_equal(keys[:, :, [0, 1, 2, 3, 196, 197, 198, 199]], k[:, :, [0, 1, 2, 3, 196, 197, 198, 199]])
    assert np.mean(keys[:, :, 4:196] != k[:, :, 4:196]) >= 0.85
    assert_within_half_step(format, blocks_of(keys), blocks_of(k), axis=3)
    assert bit_equal(values[:, :, :4], v[:, :, :4])
    assert_within_half_step(format, values[:, :, 4:], v[:, :, 4:], axis=3)


@formats
@pytest.mark.parametrize("split", [[1, 3, 31, 32, 33, 64, 36], [1] * 200])
def test_k06_many_small_appends_leave_the_state_of_one_large(rng, format, split):
    k, v, q = normal(rng, 1, 2, 200, 32), normal(rng, 1, 2, 200, 32), normal(rng, 1, 4, 1, 32)
    whole, parts = filled(format, k, v), new(format, 2, 32)
    ends = np.cumsum(split)
    for start, end in zip(ends - split, ends, strict=True):
        parts.append(k[:, :, start:end], v[:, :, start:end])
    same(whole, parts)
    assert bit_equal(whole.attend(q), parts.attend(q))


def test_k06_rows_of_a_chunk_are_those_of_a_prefill(rng):
    k, v, q = normal(rng, 1, 2, 200, 32), normal(rng, 1, 2, 200, 32), normal(rng, 1, 4, 200, 32)
    whole = filled("float32", k, v).attend(q)
    cache, start = new("float32", 2, 32), 0
    for count in (1, 3, 31, 32, 33, 64, 36):
        part = slice(start, start + count)
        np.testing.assert_allclose(
            cache.step(q[:, :, part], k[:, :, part], v[:, :, part]), whole[:, :, part], atol=1e-5
        )
        start += count


# ---- quantization


def test_k08_a_large_offset_in_one_channel_does_not_spoil_the_rest(rng):
    k, v, q = normal(rng, 1, 1, 128, 64), normal(rng, 1, 1, 128, 64), normal(rng, 1, 1, 16, 64)
    k[..., 0] = 300 + 0.1 * k[..., 0]
    exact = reference.attention(q, k, v, causal=True)
    for format, least in (("int8", 0.999), ("int4", 0.99)):
        cache = filled(format, k, v)
        out = cache.attend(q)
        cosine = (out * exact).sum() / np.linalg.norm(out) / np.linalg.norm(exact)
        assert cosine >= least
        blocks = blocks_of(k)[..., 0]
        error = np.abs(blocks_of(cache.keys())[..., 0] - blocks)
        assert (error <= np.ptp(blocks, -1)[..., None] / LEVELS[format] / 2 + ULPS * np.spacing(np.float32(300))).all()


@codes
def test_k09_constant_groups_come_back_exactly(rng, format):
    k, v, q = normal(rng, 1, 1, 40, 16), normal(rng, 1, 1, 40, 16), normal(rng, 1, 1, 1, 16)
    k[..., [5, 6, 7, 8]] = [9.0, -9.0, 0.0, 100.0]
    v[:, :, 10], v[:, :, 11] = np.float32(0.01), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = filled(format, k, v)
        out = cache.attend(q)
    np.testing.assert_array_equal(cache.keys()[..., [5, 6, 7, 8]], k[..., [5, 6, 7, 8]])
    np.testing.assert_array_equal(cache.values()[:, :, [10, 11]], v[:, :, [10, 11]])
    check_attend(cache, q, k, v, out)


@formats
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "torch.bfloat16"])
def test_k10_half_precision_input_is_the_same_as_its_float32_copy(rng, format, dtype):
    arrays = [normal(rng, 1, heads, n, 16) for heads, n in ((2, 40), (2, 40), (4, 3))]
    if dtype == "torch.bfloat16":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        half = [torch.from_numpy(x).to(torch.bfloat16) for x in arrays]
        wide = [x.float().numpy() for x in half]
        dtype = "bfloat16"
    else:
        if dtype == "bfloat16":
            ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes")
            half = [x.astype(ml_dtypes.bfloat16) for x in arrays]
        else:
            half = [x.astype(dtype) for x in arrays]
        wide = [x.astype(np.float32) for x in half]
    cache, other = filled(format, *half[:2]), filled(format, *wide[:2])
    same(cache, other)
    out = cache.attend(half[2])
    expected = other.attend(wide[2])
    if out.dtype != np.float32:  # bfloat16 tensors give float32 where ml_dtypes is not installed
        assert out.dtype.name == dtype
        expected = expected.astype(out.dtype)
    assert bit_equal(out, expected)


@formats
def test_k11_input_of_any_strides_is_read_as_its_contiguous_copy(rng, format):
    k = normal(rng, 2, 5, 4, 16).transpose(0, 2, 1, 3)
    v = normal(rng, 2, 4, 5, 16)[..., ::-1]
    big = normal(rng, 2, 4, 80, 30)
    for keys, values in (
        (k, v),
        (big[:, :, ::2, 3:19], big[:, :, 1::2, 10:26]),
        (np.asfortranarray(v), np.asfortranarray(k)),
        (np.broadcast_to(normal(rng, 16), (2, 4, 40, 16)), big[:, :, 79:39:-1, ::-1][..., :16]),
    ):
        kept = keys.copy(), values.copy()
        q = np.broadcast_to(normal(rng, 16), (2, 4, 5, 16))
        cache = filled(format, keys, values)
        other = filled(format, np.ascontiguousarray(keys), np.ascontiguousarray(values))
        same(cache, other)
        for queries in (q, np.asfortranarray(normal(rng, 2, 8, 5, 16)), normal(rng, 2, 5, 4, 16).transpose(0, 2, 1, 3)):
            assert bit_equal(cache.attend(queries), other.attend(np.ascontiguousarray(queries)))
        assert bit_equal(keys.copy(), kept[0])
        assert bit_equal(values.copy(), kept[1])


@formats
@pytest.mark.parametrize(("num_heads", "kv_heads"), [(6, 2), (28, 4), (12, 12)])
@pytest.mark.parametrize("rows", [1, 7])
def test_k12_query_head_h_reads_kv_head_h_over_group(format, num_heads, kv_heads, rows):
    v = np.broadcast_to(np.arange(kv_heads, dtype=np.float32)[:, None, None], (1, kv_heads, 40, 8))
    cache = filled(format, np.zeros((1, kv_heads, 40, 8)), v)
    out = cache.attend(np.ones((1, num_heads, rows, 8)))
    expected = np.arange(num_heads) // (num_heads // kv_heads)
    np.testing.assert_allclose(out, np.broadcast_to(expected[:, None, None], out.shape), atol=1e-5)


@codes
@pytest.mark.parametrize("dim", [1, 2, 3, 15, 17, 33, 63, 65, 80, 96, 127])
def test_k13_odd_head_dims_keep_every_channel_apart(rng, format, dim):
    k, v, q = normal(rng, 1, 2, 70, dim), normal(rng, 1, 2, 70, dim), normal(rng, 1, 2, 1, dim)
    cache = filled(format, k, v)
    assert_within_half_step(format, blocks_of(cache.keys()), blocks_of(k), axis=3)
    assert_within_half_step(format, cache.values()[:, :, 4:], v[:, :, 4:], axis=3)
    check_attend(cache, q, k, v)
    changed = v.copy()
    changed[0, 0, 40, -1] = v[0, 0, 40].mean()  # inside the range, so lo and scale stay, unless it was an end of it
    values, others = cache.values(), filled(format, k, changed).values()
    different = np.argwhere(values != others)
    if np.ptp(changed[0, 0, 40]) == np.ptp(v[0, 0, 40]):
        assert all(list(place) == [0, 0, 40, dim - 1] for place in different)
    assert (different[:, :3] == [0, 0, 40]).all()


@formats
@pytest.mark.parametrize("kept", ["snapshot", "file"])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 35, 36, 37, 78])
def test_k15_what_was_kept_goes_on_exactly(rng, tmp_path, format, kept, length):
    k, v, q = normal(rng, 2, 3, 142, 80), normal(rng, 2, 3, 142, 80), normal(rng, 2, 3, 1, 80)
    cache = filled(format, k[:, :, :length], v[:, :, :length])
    other = cache.freeze().unfreeze() if kept == "snapshot" else through_a_file(cache, tmp_path)
    same(cache, other)
    assert bit_equal(cache.attend(q), other.attend(q))
    for each in (cache, other):
        each.append(k[:, :, length : length + 64], v[:, :, length : length + 64])
    same(cache, other)
    assert bit_equal(cache.attend(q), other.attend(q))


@formats
def test_k16_prefill_is_causal_for_codes_too(format):
    cache = filled(format, np.zeros((1, 1, 40, 8)), ramp(40))
    q = np.ones((1, 1, 40, 8), np.float32)
    rows = np.arange(40)[:, None] / 2
    np.testing.assert_allclose(cache.attend(q, causal=True)[0, 0], np.broadcast_to(rows, (40, 8)), atol=1e-5)
    np.testing.assert_allclose(cache.attend(q, causal=False), 19.5, atol=1e-5)


def test_k21_the_range_of_half_precision_does_not_limit_the_step(rng):
    k, v = normal(rng, 1, 1, 36, 8).astype(np.float16), normal(rng, 1, 1, 36, 8)
    clean = filled("int8", k, v).keys()
    k[0, 0, 10, 2], k[0, 0, 20, 2] = 65504, -65504
    cache = filled("int8", k, v)
    error = np.abs(cache.keys() - k.astype(np.float32))
    assert error[..., 2].max() <= 256.9
    others = [0, 1, 3, 4, 5, 6, 7]
    assert bit_equal(cache.keys()[..., others], clean[..., others])
    assert np.isfinite(cache.attend(np.full((1, 1, 1, 8), 0.01, np.float16))).all()

    v[0, 0, 30] = [-1, 0, 1, 2, 3, 4, 0.5, 125000]
    values = filled("int8", k, v).values()
    assert np.isfinite(values).all()
    assert np.abs(values[0, 0, 30] - v[0, 0, 30]).max() <= 245.2


@formats
@pytest.mark.parametrize("rows", [1, 4])
def test_k22_the_softmax_scale_is_used_and_zero_is_a_value(rng, format, rows):
    k, v, q = normal(rng, 1, 1, 70, 64), normal(rng, 1, 1, 70, 64), normal(rng, 1, 1, rows, 64)
    cache = filled(format, k, v)
    assert bit_equal(cache.attend(q), cache.attend(q, sm_scale=0.125))
    assert bit_equal(cache.attend(q, sm_scale=None), cache.attend(q))
    check_attend(cache, q, k, v, sm_scale=0.0)
    check_attend(cache, q, k, v, sm_scale=1.0)
    assert np.abs(cache.attend(q, sm_scale=0.0) - cache.attend(q)).max() > 0.01
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="sm_scale must"):
            cache.attend(q, sm_scale=bad)
    with pytest.raises(TypeError, match="sm_scale must"):
        cache.attend(q, sm_scale="1")


@formats
def test_k23_masks_are_read_by_their_dtype(format):
    cache = filled(format, np.zeros((1, 1, 4, 8)), ramp(4))
    q = np.ones((1, 1, 1, 8), np.float32)
    for mask in (np.array([True, True, False, False]), np.array([0, 0, -np.inf, -np.inf], np.float32)):
        for shape in ((4,), (1, 1, 1, 4), (1, 4)):
            np.testing.assert_allclose(cache.attend(q, mask=mask.reshape(shape)), 0.5, atol=1e-6)
    for dtype in (np.int64, np.uint8):
        with pytest.raises(TypeError, match="mask must be bool"):
            cache.attend(q, mask=np.array([1, 1, 0, 0], dtype))
    for shape in ((1, 1, 1, 5), (1, 1, 1, 3), (2, 1, 1, 4), (1, 1, 2, 4)):
        with pytest.raises(ValueError, match="mask must"):
            cache.attend(q, mask=np.ones(shape, bool))


@formats
def test_k24_one_sequence_or_head_does_not_disturb_another(rng, format):
    k, v, q = normal(rng, 3, 2, 78, 32), normal(rng, 3, 2, 78, 32), normal(rng, 3, 4, 2, 32)
    k[1] *= 1000
    v[1] *= 1000
    cache = filled(format, k, v)
    for b in (0, 2):
        alone = filled(format, k[b : b + 1], v[b : b + 1])
        assert bit_equal(cache.keys()[b : b + 1], alone.keys())
        assert bit_equal(cache.values()[b : b + 1], alone.values())
        assert bit_equal(cache.attend(q)[b : b + 1], alone.attend(q[b : b + 1]))
    k[0, 1] *= 1000
    v[0, 1] *= 1000
    cache, alone = filled(format, k[:1], v[:1]), filled(format, k[:1, :1], v[:1, :1])
    assert bit_equal(cache.keys()[:, :1], alone.keys())
    assert bit_equal(cache.values()[:, :1], alone.values())
    assert bit_equal(cache.attend(q[:1])[:, :2], alone.attend(q[:1, :2]))


# ---- what may not be seen


def test_k27_nan_in_a_hidden_position_does_not_matter(rng):
    k, v, q = normal(rng, 2, 1, 20, 8), normal(rng, 2, 1, 20, 8), normal(rng, 2, 1, 17, 8)
    k[0, :, :3] = v[0, :, :3] = np.nan  # left pads
    keep = np.ones((2, 1, 1, 20), bool)
    keep[0, ..., :3] = False
    out = filled("float32", k, v).attend(q, mask=keep)
    alone = filled("float32", k[:1, :, 3:], v[:1, :, 3:]).attend(q[:1])
    np.testing.assert_allclose(out[:1], alone, atol=1e-5)

    k, v, q = normal(rng, 1, 1, 10, 8), normal(rng, 1, 1, 10, 8), normal(rng, 1, 1, 10, 8)
    clean = filled("float32", k, v).attend(q)
    v[:, :, 9] = np.nan
    out = filled("float32", k, v).attend(q)
    np.testing.assert_allclose(out[:, :, :9], clean[:, :, :9], atol=1e-6)
    assert np.isnan(out[:, :, 9]).all()


@pytest.mark.parametrize("format", ["float32", "float16", "bfloat16"])
def test_k33_left_padded_rows_of_a_batch_are_those_of_each_alone(rng, format):
    lengths, longest = [3, 17, 32], 32
    k, v = normal(rng, 3, 2, longest + 5, 16), normal(rng, 3, 2, longest + 5, 16)
    q = normal(rng, 3, 4, longest + 5, 16)
    padding = longest - np.array(lengths)
    seen = (np.arange(longest + 5) >= padding[:, None])[:, None, None]  # [3, 1, 1, T]
    for row, pads in enumerate(padding):
        k[row, :, :pads] = v[row, :, :pads] = 1e4
    cache = new(format, 2, 16, batch_size=3)
    alone = [new(format, 2, 16) for _ in lengths]
    for part in [slice(0, longest), *(slice(longest + i, longest + i + 1) for i in range(5))]:
        out = cache.step(q[:, :, part], k[:, :, part], v[:, :, part], mask=seen[..., : part.stop])
        for row, pads in enumerate(padding):
            own = slice(row, row + 1), slice(None), slice(max(part.start, pads), part.stop)
            expected = alone[row].step(q[own], k[own], v[own])
            rows = own[2].start - part.start
            np.testing.assert_allclose(out[row : row + 1, :, rows:], expected, rtol=1e-5, atol=1e-5)
            assert not out[row, :, :rows].any()  # a pad sees nothing
    with pytest.raises(ValueError, match="k must have shape"):
        cache.append(k[:2, :, :1], v[:2, :, :1])
    assert len(cache) == longest + 5


# ---- growth, copies, snapshots


def test_k28_growth_keeps_heads_apart_and_what_was_returned_before(rng):
    cache, one = new("float32", 3, 5, batch_size=2), kv.InPlaceCache(axis=2)
    counts = rng.integers(1, 10, 200)
    x = np.arange(2 * 3 * counts.sum() * 5, dtype=np.float32).reshape(2, 3, -1, 5)
    end = 0
    for i, count in enumerate(counts):
        part = x[:, :, end : end + count]
        cache.append(part, -part)
        one.append(part)
        end += int(count)
        assert bit_equal(cache.keys(), x[:, :, :end])
        assert bit_equal(one.contiguous(), x[:, :, :end])
        if i == 0:
            old, n = cache.keys(), len(cache)
    assert bit_equal(cache.values(), -x)
    assert bit_equal(old, x[:, :, :n])
    assert n == counts[0]


@pytest.mark.parametrize("format", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_k29_the_cache_keeps_no_reference_to_the_callers_array(format):
    k, v = np.ones((1, 1, 3, 8), np.float32), np.ones((1, 1, 3, 8), np.float32)
    cache = new(format)
    for _ in range(2):  # the first append is the one that may keep the array
        k[:], v[:] = 1, 1
        cache.append(k, v)
        k[:], v[:] = 99, 99
    np.testing.assert_array_equal(cache.keys(), 1)
    np.testing.assert_array_equal(cache.values(), 1)
    cache.keys()[...] = 5
    np.testing.assert_array_equal(cache.keys(), 1)


@pytest.mark.parametrize("name", ["ConcatCache", "InPlaceCache"])
def test_k29_single_array_caches_keep_no_reference_either(name):
    cache, x = getattr(kv, name)(axis=2), np.ones((1, 1, 3, 8), np.float32)
    for _ in range(2):
        x[:] = 1
        cache.append(x)
        x[:] = 99
    np.testing.assert_array_equal(cache.contiguous(), 1)
    view = cache.view()
    assert not view.flags.writeable


@formats
def test_k30_a_snapshot_does_not_change_when_its_parent_goes_on(rng, format):
    k, v, q = normal(rng, 1, 2, 70, 16), normal(rng, 1, 2, 70, 16), normal(rng, 1, 2, 1, 16)
    cache = filled(format, k, v)
    snapshot, before = cache.freeze(), cache.attend(q)
    cache.append(*normal(rng, 2, 1, 2, 50, 16))
    cache.truncate(10)
    cache.reset()
    one, two = snapshot.unfreeze(), snapshot.unfreeze()
    two_k, two_v = normal(rng, 1, 2, 40, 16), normal(rng, 1, 2, 40, 16)
    two.append(two_k, two_v)
    one.append(*normal(rng, 2, 1, 2, 40, 16))
    kept = two.keys(), two.values()
    one.truncate(40)
    again = snapshot.unfreeze()
    assert len(again) == 70
    assert bit_equal(again.attend(q), before)
    assert bit_equal(two.keys(), kept[0])
    assert bit_equal(two.values(), kept[1])
    other = filled(format, k, v)
    other.append(two_k, two_v)
    same(two, other)


@formats
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_k64_copies_attend_alike_and_go_on_alone(rng, format, copied):
    k, v, q = normal(rng, 1, 2, 70, 16), normal(rng, 1, 2, 70, 16), normal(rng, 1, 2, 1, 16)
    cache = filled(format, k, v)
    before = cache.attend(q)  # after the kernels ran
    other = copied(cache)
    same(cache, other)
    assert bit_equal(other.attend(q), before)
    other.append(k, v)
    assert (len(cache), len(other)) == (70, 140)
    same(cache, filled(format, k, v))
    assert bit_equal(cache.attend(q), before)


def test_k64_a_spawned_process_attends_alike(rng):
    cache, q = filled("int4", *normal(rng, 2, 1, 2, 70, 16)), normal(rng, 1, 2, 1, 16)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert bit_equal(pool.apply(kv.KVCache.attend, (cache, q)), cache.attend(q))


@formats
def test_k32_reset_leaves_nothing(rng, format):
    cache = filled(format, *normal(rng, 2, 1, 2, 78, 16))
    cache.reset()
    assert (len(cache), cache.keys().shape[2], cache.values().shape[2]) == (0, 0, 0)
    k, v, q = normal(rng, 1, 2, 3, 16), normal(rng, 1, 2, 3, 16), normal(rng, 1, 2, 1, 16)
    cache.append(k, v)
    assert len(cache) == 3
    same(cache, filled(format, k, v))
    assert bit_equal(cache.attend(q), filled(format, k, v).attend(q))
    with pytest.raises(ValueError, match="k must"):
        cache.append(*normal(rng, 2, 1, 3, 3, 16))


# ---- numerics of softmax


@formats
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_k34_very_large_logits_of_either_sign(format, sign, rows):
    j = np.arange(64, dtype=np.float32)
    k = (sign * 240 + j / 1024).reshape(1, 1, 64, 1)  # logits -245760 + j or 245760 + j, exact in float32
    cache = filled(format, k, ramp(64, dim=4))
    q = np.full((1, 1, rows, 1), 1024, np.float32)
    out = cache.attend(q, sm_scale=1.0, causal=False)
    expected = reference.attention(q, cache.keys(), cache.values(), sm_scale=1.0)
    if format == "float32":
        assert expected[0, 0, 0, 0] == pytest.approx(62.418, abs=1e-3)
    # A logit this large is known to 2**-6 in float32; several such roundings move the mean by at most 0.05.
    np.testing.assert_allclose(out, expected, atol=0.05)


@formats
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("rows", [1, 3])
def test_k34_a_maximum_that_jumps_between_tiles(format, order, rows):
    logit = np.repeat(np.float32([-1e4, 1e4]), 200)[::order].reshape(1, 1, 400, 1)
    cache = filled(format, logit / 100, ramp(400, dim=4))
    out = cache.attend(np.full((1, 1, rows, 1), 100, np.float32), sm_scale=1.0, causal=False)
    # In the block that holds both, 1e4 is known to 2**-10 or so: one part in 500 for 28 of 200 weights.
    np.testing.assert_allclose(out, 299.5 if order == 1 else 99.5, atol=0.05)


# ---- input


@formats
def test_k35_a_mismatched_append_is_refused_and_changes_nothing(rng, format):
    k, v = normal(rng, 1, 2, 5, 64), normal(rng, 1, 2, 5, 64)
    cache = filled(format, k, v)

    def some(*shape):
        return normal(rng, *shape)

    for bad_k, bad_v in (
        (some(1, 3, 5, 64), some(1, 3, 5, 64)),
        (some(1, 2, 5, 32), some(1, 2, 5, 32)),
        (some(2, 2, 5, 64), some(2, 2, 5, 64)),
        (some(2, 5, 64), some(2, 5, 64)),
        (some(1, 2, 5, 64), some(1, 2, 4, 64)),
        (some(1, 2, 5, 63), some(1, 2, 5, 64)),
        (some(1, 2, 5, 64), some(1, 2, 5, 63)),
    ):
        with pytest.raises(ValueError, match=r"(k|v) (must|and v must) have"):
            cache.append(bad_k, bad_v)
        assert len(cache) == cache.keys().shape[2] == cache.values().shape[2] == 5
    cache.append(k, v)
    same(cache, filled(format, np.tile(k, (1, 1, 2, 1)), np.tile(v, (1, 1, 2, 1))))


@formats
def test_k38_axes_of_length_zero(rng, format):
    empty = np.zeros((1, 2, 0, 16), np.float32)
    cache = new(format, 2, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.append(empty, empty)
        assert len(cache) == 0
        out, lse = cache.attend(normal(rng, 1, 4, 3, 16), return_lse=True)
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -np.inf)
        k, v = normal(rng, 1, 2, 40, 16), normal(rng, 1, 2, 40, 16)
        cache.append(k, v)
        cache.append(empty, empty)
        same(cache, filled(format, k, v))
        assert cache.attend(normal(rng, 1, 4, 0, 16)).shape == (1, 4, 0, 16)
        assert len(new(format, 2, 16).freeze().unfreeze()) == 0
    assert kv.attention(*(np.zeros((0, 2, 3, 8), np.float32),) * 3).shape == (0, 2, 3, 8)
    none = new(format, 2, 16, batch_size=0)
    none.append(empty[:0], empty[:0])
    assert none.attend(np.zeros((0, 4, 3, 16), np.float32)).shape == (0, 4, 3, 16)
    with pytest.raises(ValueError, match="head_dim must be a positive integer"):
        kv.KVCache(2, 0)


@formats
def test_k39_read_only_mapped_and_unaligned_arrays(rng, format, tmp_path):
    arrays = {"k": normal(rng, 1, 2, 40, 16), "v": normal(rng, 1, 2, 40, 16), "q": normal(rng, 1, 4, 3, 16)}
    arrays["mask"] = rng.random((3, 40)) < 0.5

    def read_only(x):
        x = x.copy()
        x.setflags(write=False)
        return x

    def mapped(x):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.npy"
        np.save(path, x)
        return np.load(path, mmap_mode="r")

    def from_bytes(x):
        return np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape)

    def odd_offset(x):
        return np.frombuffer(b"?" + x.tobytes(), x.dtype, offset=1).reshape(x.shape)

    plain = filled(format, arrays["k"], arrays["v"])
    for kind in (read_only, mapped, from_bytes, odd_offset):
        k, v, q, mask = (kind(arrays[name]) for name in ("k", "v", "q", "mask"))
        cache = filled(format, k, v)
        same(cache, plain)
        for each in (mask, kind(np.where(arrays["mask"], np.float32(0), np.float32(-1)))):
            assert bit_equal(cache.attend(q, mask=each), plain.attend(arrays["q"], mask=np.array(each)))
        assert bit_equal(np.array(k), arrays["k"])


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_k41_array_subclasses_objects_and_other_dtypes(rng):
    cache, good = new("int8", 1, 4), np.ones((1, 1, 2, 4), np.float32)
    refused = [
        np.ma.array(good, mask=good > 0),
        np.matrix(np.ones((2, 4))),
        good.astype(object),
        good.astype(complex),
        good.astype(str),
        [[[[1, 2, 3, 4], [1, 2, 3]]]],
        "text",
        None,
        {"k": good},
    ]
    for bad in refused:
        for k, v in ((bad, good), (good, bad)):
            with pytest.raises((TypeError, ValueError), match="must be") as caught:
                cache.append(k, v)
            assert not type(caught.value).__module__.startswith("numba")
        with pytest.raises((TypeError, ValueError), match="must be") as caught:
            cache.attend(bad)
        assert len(cache) == 0
    for dtype in (np.int32, bool):
        cache.append(good.astype(dtype), good.astype(dtype))
    np.testing.assert_array_equal(cache.keys(), 1)
    cache.append(good.tolist(), good.tolist())
    assert len(cache) == 6


@pytest.mark.skipif("NUMBA_DISABLE_JIT" in os.environ, reason="nothing is compiled")
@formats
def test_k66_layouts_and_dtypes_of_the_input_compile_nothing_more(rng, format, monkeypatch):
    k, v, q, keep = normal(rng, 1, 2, 8, 16), normal(rng, 1, 2, 8, 16), normal(rng, 1, 4, 3, 16), rng.random(8) < 0.9
    cache = filled(format, k, v)
    cache.truncate(7)
    cache.append(k[:, :, :1], v[:, :, :1])
    for rows in (1, 3, 20):
        for mask in (None, np.zeros((1, 1, 1, len(cache)), np.float32)):
            cache.attend(np.ones((1, 4, rows, 16), np.float32), mask=mask)
    looked_for = []
    monkeypatch.setattr(_PackageCache, "load_overload", lambda self, *_: looked_for.append(self._name))
    read_only = k.copy()
    read_only.setflags(write=False)
    for layout in (k, np.asfortranarray(k), np.repeat(k, 2, 2)[:, :, ::2], k[..., ::-1], read_only):
        for dtype in ("float32", "float16", "float64", "int32", "bool"):
            cache.append(layout.astype(dtype, copy=False), v.astype(dtype))
            for rows in (1, 3, 20):
                queries = np.resize(q, (1, 4, rows, 16)).astype(dtype)
                cache.attend(queries)
                for kind in (bool, np.float32, np.float64):
                    cache.attend(np.asfortranarray(queries), mask=np.resize(keep, len(cache)).astype(kind))
            cache.truncate(8)
    assert looked_for == []


# ---- removed tokens


@pytest.mark.parametrize("k_format", FORMATS)
@pytest.mark.parametrize("v_format", FORMATS)
def test_k49_no_removed_token_is_in_files_and_pickles(rng, tmp_path, k_format, v_format):
    secret = np.float32(12345.678)
    k, v = normal(rng, 1, 1, 40, 16), normal(rng, 1, 1, 40, 16)
    k[:, :, 30:] = v[:, :, 30:] = secret
    cache = kv.KVCache(1, 16, k_format=k_format, v_format=v_format)
    cache.append(k, v)

    def copies():
        cache.save(tmp_path / "state")
        yield (tmp_path / "state").read_bytes()
        yield pickle.dumps(cache)
        yield pickle.dumps(cache.freeze())
        yield cache.keys().tobytes() + cache.values().tobytes()

    assert all(secret.tobytes() in bytes_ for bytes_ in copies())  # tokens 36 to 39 are in the residual
    cache.truncate(20)
    assert not any(secret.tobytes() in bytes_ for bytes_ in copies())


# ---- widths


def most_distinct(x, axis):
    """The most distinct values of any group along *axis*."""
    x = np.sort(x, axis)
    return int((np.diff(x, axis=axis) != 0).sum(axis).max()) + 1


@pytest.mark.parametrize(
    ("k_format", "v_format"), [("int4", "int4"), ("int8", "int8"), ("int8", "int4"), ("int4", "int8")]
)
def test_k50_each_side_obeys_its_own_width(rng, k_format, v_format):
    cache = kv.KVCache(1, 128, k_format=k_format, v_format=v_format)
    cache.append(*normal(rng, 2, 1, 1, 132, 128))
    for format, count in (
        (k_format, most_distinct(blocks_of(cache.keys()), 3)),
        (v_format, most_distinct(cache.values()[:, :, 4:], 3)),
    ):
        assert count <= 16 if format == "int4" else count > 16
    assert k_format in repr(cache)
    assert v_format in repr(cache)


@pytest.mark.parametrize("bits", [0, 1, 3, 5, 16, "4", None, True])
def test_k50_other_widths_are_refused(rng, bits):
    x = normal(rng, 1, 1, 40, 8)
    for call in (
        lambda: kv.quantize_per_token(x, bits=bits),
        lambda: kv.quantize_per_channel(x, bits=bits),
        lambda: kv.QuantizedCache(layout="per_channel", bits=bits),
    ):
        with pytest.raises((ValueError, TypeError), match="bits must"):
            call()
    with pytest.raises((ValueError, TypeError), match="k_format must"):
        kv.KVCache(1, 8, k_format=f"int{bits}" if bits != "4" else 4)


@codes
def test_k51_nan_is_refused_with_its_place_and_nothing_is_stored(rng, format):
    k, v = normal(rng, 1, 2, 40, 64), normal(rng, 1, 2, 40, 64)
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[0, 0, 10, 3], bad_v[0, 1, 20, 0] = np.nan, np.nan
    cache = new(format, 2, 64)
    with pytest.raises(ValueError, match=r"k must be finite.*nan at \[0, 0, 10, 3\]"):
        cache.append(bad_k, v)
    with pytest.raises(ValueError, match=r"v must be finite.*nan at \[0, 1, 20, 0\]"):
        cache.append(k, bad_v)
    assert len(cache) == 0
    cache.append(k, v)
    same(cache, filled(format, k, v))


@codes
@pytest.mark.parametrize(
    "token",
    [[0, 1.4e-45], [0, 3e-41, 6e-41, 1e-40], [1.0, np.nextafter(np.float32(1), np.float32(2))], [-1e-38, 1e-38]],
)
def test_k54_a_range_so_small_that_the_step_underflows(format, token):
    token = np.array(token, np.float32)
    x = np.broadcast_to(token, (1, 1, 37, token.size))
    cache = filled(format, x, x)
    back = cache.values()[0, 0, 36]
    assert np.isfinite(back).all()
    assert np.abs(back.astype(np.float64) - token).max() <= np.ptp(token.astype(np.float64))
    assert (np.diff(back) >= 0).all()
    assert np.isfinite(cache.attend(np.ones((1, 1, 1, token.size)))).all()


@codes
def test_k55_codes_are_unsigned_and_end_at_the_ends_of_the_range(rng, format):
    levels = LEVELS[format]
    whole = np.arange(levels + 1, dtype=np.float32)
    x = np.broadcast_to(whole, (1, 1, 6, levels + 1))
    assert bit_equal(filled(format, x, x).values()[0, 0, 5], whole)

    v = normal(rng, 1, 1, 10_004, 16)
    values = filled(format, np.zeros_like(v), v).values()[0, 0, 4:]
    v = v[0, 0, 4:]
    tokens = np.arange(10_000)
    np.testing.assert_array_equal(values[tokens, v.argmin(1)], v.min(1))
    np.testing.assert_allclose(values[tokens, v.argmax(1)], v.max(1), rtol=1e-5, atol=1e-6)


def test_k55_ties_round_away_from_zero_everywhere():
    token = np.array([0, 0.5, 1.5, 2.5, 3.5, 255], np.float32)
    rounded = [0, 1, 2, 3, 4, 255]
    x = np.broadcast_to(token, (1, 1, 5, 6))
    np.testing.assert_array_equal(filled("int8", x, x).values()[0, 0, 4], rounded)
    np.testing.assert_array_equal(kv.quantize_per_token(x, bits=8).dequantize()[0, 0, 0], rounded)
    # As a channel of a block: the same numbers along the tokens.
    block = np.concatenate([np.zeros(4), np.resize(token, 32)]).astype(np.float32).reshape(1, 1, 36, 1)
    np.testing.assert_array_equal(filled("int8", block, block).keys()[0, 0, 4:, 0], np.resize(rounded, 32))


@pytest.mark.skipif("NUMBA_DISABLE_JIT" in os.environ, reason="this is the run without compilation")
def test_k54_k55_hold_without_compilation():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "k54_a or k55_"]
    done = subprocess.run(command, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- shapes


@formats
@pytest.mark.parametrize(("dim", "v_dim"), [(24, 16), (192, 128)])
def test_k58_keys_and_values_of_different_size(rng, tmp_path, format, dim, v_dim):
    k, v, q = normal(rng, 1, 2, 78, dim), normal(rng, 1, 2, 78, v_dim), normal(rng, 1, 4, 2, dim)
    cache = filled(format, k, v)
    assert cache.attend(q).shape == (1, 4, 2, v_dim)
    check_attend(cache, q, k, v)
    cache.truncate(50)
    check_attend(cache, q, k[:, :, :50], v[:, :, :50])
    same(cache.freeze().unfreeze(), cache)
    same(through_a_file(cache, tmp_path), cache)
    cache.repeat_interleave(2)
    keys, values = cache.keys(), cache.values()
    cache.reorder([1, 0])
    assert bit_equal(cache.keys(), keys[::-1])
    assert bit_equal(cache.values(), values[::-1])


@formats
def test_k58_caches_of_different_shapes_side_by_side(rng, format):
    shapes = [(2, 256), (1, 512)]
    caches = [new(format, *shape) for shape in shapes]
    held = [[normal(rng, 1, heads, 40, dim) for _ in "kv"] for heads, dim in shapes]
    for part in (slice(0, 20), slice(20, 40)):
        for cache, (k, v) in zip(caches, held, strict=True):
            cache.append(k[:, :, part], v[:, :, part])
    for cache, (k, v), (_, dim) in zip(caches, held, shapes, strict=True):
        check_attend(cache, normal(rng, 1, 2, 1, dim), k, v)


@formats
@pytest.mark.parametrize(("num_heads", "kv_heads"), [(3, 2), (33, 2), (1, 2)])
def test_k59_head_counts_that_do_not_divide_are_refused(rng, format, num_heads, kv_heads):
    cache = filled(format, *normal(rng, 2, 1, kv_heads, 5, 8))
    with pytest.raises(ValueError, match=rf"multiple of num_kv_heads = {kv_heads}, got {num_heads} "):
        cache.attend(normal(rng, 1, num_heads, 1, 8))
    with pytest.raises(ValueError, match=r"q must have shape .*, got \[1, 2, 1, 7\]"):
        cache.attend(normal(rng, 1, 2, 1, 7))


# ---- long contexts, memory


def test_k69_growth_is_geometric():
    token = np.ones((1, 1, 1, 8), np.float32)
    one, cache = kv.InPlaceCache(axis=2), new("int8")
    capacities = [cache.capacity]
    for n in range(1, 4097):
        one.append(token)
        cache.append(token, token)
        if cache.capacity != capacities[-1]:
            capacities.append(cache.capacity)
        for each in (one, cache):
            assert n <= each.capacity <= 2 * n + SINK + BLOCK  # codes come in whole blocks
    assert one.reallocs <= 13
    assert len(capacities) <= 14
    assert sum(capacities[:-1]) <= 3 * 4096


@formats
@pytest.mark.parametrize("rows", [1, 3])
def test_k71_a_long_uniform_context_keeps_its_mean(format, rows):
    count = 70_000
    k, q = np.zeros((1, 1, count, 4), np.float32), np.ones((1, 1, rows, 4), np.float32)
    j = np.arange(count)
    for values, mean, bound in ((np.ones(count), 1.0, 1e-5), (j % 2 * 2, 1.0, 1e-4), (j % 7, 3.0, 1e-4)):
        v = np.broadcast_to(values.astype(np.float16)[:, None], (1, 1, count, 4))
        np.testing.assert_allclose(filled(format, k, v).attend(q, causal=False), mean, atol=bound)


@codes
def test_k72_a_range_that_grows_later_leaves_old_blocks_alone(format):
    t = np.arange(100, dtype=np.float32)
    k = 0.1 * np.sin(t[:, None] * 0.013 + np.arange(16)).astype(np.float32).reshape(1, 1, 100, 16)
    k[..., 0] = 2 * t
    cache, first = new(format, 1, 16), None
    for i in range(100):
        cache.append(k[:, :, i : i + 1], k[:, :, i : i + 1])
        if i == 35:
            first = cache.keys()[:, :, 4:36]
    error = np.abs(cache.keys()[..., 0] - k[..., 0]).max()
    assert error <= {"int8": 0.1216, "int4": 2.07}[format]
    assert bit_equal(cache.keys()[:, :, 4:36], first)


@codes
@pytest.mark.parametrize("cut", [2, 4, 36])
def test_k73_a_cut_inside_the_sinks_or_at_a_block_is_filled_as_new(rng, format, cut):
    k, v, q = normal(rng, 1, 2, 78, 16), normal(rng, 1, 2, 78, 16), normal(rng, 1, 4, 1, 16)
    more_k, more_v = normal(rng, 1, 2, 78, 16), normal(rng, 1, 2, 78, 16)
    cache = filled(format, k, v)
    cache.truncate(cut)
    cache.append(more_k, more_v)
    all_k = np.concatenate([k[:, :, :cut], more_k], 2)
    fresh = filled(format, all_k, np.concatenate([v[:, :, :cut], more_v], 2))
    assert bit_equal(cache.keys()[:, :, :4], all_k[:, :, :4])
    same(cache, fresh)
    assert bit_equal(cache.attend(q), fresh.attend(q))


@codes
@pytest.mark.parametrize("cut", [5, 35])
def test_k73_a_cut_inside_an_old_block_brings_decoded_values_back(rng, format, cut):
    k, v = normal(rng, 1, 2, 78, 16), normal(rng, 1, 2, 78, 16)
    cache = filled(format, k, v)
    before = cache.keys()[:, :, :cut]
    cache.truncate(cut)
    assert bit_equal(cache.keys(), before)
    assert bit_equal(cache.keys()[:, :, :4], k[:, :, :4])
    assert bit_equal(cache.values(), filled(format, k[:, :, :cut], v[:, :, :cut]).values())


# ---- the list of all cases

#: Numbers of the cases; those missing between them were never given out.
NUMBERS = (
    *range(1, 17), *range(18, 25), *range(27, 31), *range(32, 36), *range(37, 40), 41, 43, 44, *range(46, 52),
    54, 55, *range(57, 60), *range(62, 76),
)  # fmt: skip


def test_every_case_is_listed_with_tests_that_are_there():
    here = Path(__file__).parent
    rows = re.findall(
        r"^\| (K\d\d) \| (.+) \| ([A-M](?:, [A-M])*) \| (.+) \|$", (here / "cases.md").read_text("utf-8"), re.M
    )
    assert [row[0] for row in rows] == [f"K{n:02}" for n in NUMBERS]
    assert len(rows) == 62
    defined = {}
    for _, fault, _, cover in rows:
        assert len(fault) > 10
        for entry in cover.split("<br>"):
            file, name = re.fullmatch(r"`tests/(test_\w+\.py)::(test_\w+)`", entry).groups()
            if file not in defined:
                body = ast.parse((here / file).read_text("utf-8")).body
                defined[file] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
            assert name in defined[file], entry

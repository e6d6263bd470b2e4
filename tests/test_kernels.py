"""The compiled functions below the classes: the vector layer, the memory form, and use from a user's own @njit code."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

import kvnumba as kv
from kvnumba import kernels, reference
from kvnumba.buffers import LENGTH
from kvnumba.kernels.entry import entries_of
from kvnumba.simd import I8, LANES, microkernel


@microkernel
def _exp(e, x, count):
    with e.range(0, count, LANES) as i:
        e.store(e.exp(e.load(x, i, LANES)), x, i)


@microkernel
def _sum_each(e, x, out):
    for n in (1, 3, 8, 12, 16):
        total = e.sum_each([e.load(x, e.integer(LANES * i), LANES) for i in range(n)])
        e.store(total, out, e.integer(n * LANES))


@microkernel
def _dot_bytes(e, total, unsigned, signed):
    zero = e.integer(0)
    sums = e.dot_bytes(e.load(total, zero, LANES), e.load(unsigned, zero, 64), e.load(signed, zero, 64, item=I8))
    e.store(sums, total, zero)


@microkernel
def _round_trip_bfloat(e, x, bits, count):
    with e.range(0, count, LANES) as i:
        e.store(e.narrow_bfloat(e.load(x, i, LANES)), bits, i)
        e.store(e.widen_bfloat(e.load(bits, i, LANES)), x, i)


@microkernel
def _round_trip_half(e, x, bits, count):
    with e.range(0, count, LANES) as i:
        e.store(e.narrow_half(e.load(x, i, LANES)), bits, i)
        e.store(e.widen_half(e.load(bits, i, LANES)), x, i)


@njit
def run_exp(x):
    _exp(x, x.size)


@njit
def run_sum_each(x, out):
    _sum_each(x, out)


@njit
def run_dot_bytes(total, unsigned, signed):
    _dot_bytes(total, unsigned, signed)


@njit
def run_bfloat(x, bits):
    _round_trip_bfloat(x, bits, x.size)


@njit
def run_half(x, bits):
    _round_trip_half(x, bits, x.size)


def test_exp_is_within_2e7_of_the_true_value_and_exact_at_its_limits():
    x = np.linspace(-87.3, 88.0, 1 << 16, dtype=np.float32)
    y = x.copy()
    run_exp(y)
    assert np.abs(y / np.exp(x.astype(np.float64)) - 1).max() < 2e-7
    edges = np.zeros(16, np.float32)
    edges[:6] = [-np.inf, -1e30, -88, 0, -0.0, np.nan]
    run_exp(edges)
    assert edges[:5].tolist() == [0, 0, 0, 1, 1]
    assert np.isnan(edges[5])


def test_sum_each_sums_every_vector_into_its_own_lane():
    x = np.arange(256, dtype=np.float32) ** 2 % 97
    out = np.zeros(17 * 16, np.float32)
    run_sum_each(x, out)
    for n in (1, 3, 8, 12, 16):
        assert np.array_equal(out[n * 16 : n * 16 + n], x.reshape(16, 16).sum(1)[:n])  # integers: exact in any order


def test_dot_bytes_is_exact_at_the_extremes_of_both_types():
    rng = np.random.default_rng(0)
    unsigned = rng.integers(0, 256, 64).astype(np.uint8)
    signed = rng.integers(-128, 128, 64).astype(np.int8)
    unsigned[:4], signed[:4] = 255, -128
    unsigned[4:8], signed[4:8] = 255, 127
    total = np.arange(16, dtype=np.int32) * -1000
    expected = total + (unsigned.astype(np.int64) * signed).reshape(16, 4).sum(1)
    run_dot_bytes(total, unsigned, signed)
    assert np.array_equal(total, expected)


def test_float16_and_bfloat16_round_to_nearest_even_and_keep_nan_and_infinity():
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 1 << 32, 1 << 14, dtype=np.uint64).astype(np.uint32)
    patterns[:4] = [0x7F800001, 0x7FFFFFFF, 0xFF800000, 0x7F7FFFFF]  # quiet and loud NaN, -inf, the largest float32
    x = patterns.view(np.float32)
    bits = np.zeros(x.size, np.uint16)
    got = x.copy()
    run_half(got, bits)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    assert np.array_equal(got, expected, equal_nan=True)
    got = x.copy()
    run_bfloat(got, bits)
    assert np.array_equal(np.isnan(got), np.isnan(x))
    nearest = ((patterns.astype(np.uint64) + 0x7FFF + ((patterns >> 16) & 1)) >> 16).astype(np.uint32) << 16
    real = ~np.isnan(x)
    assert np.array_equal(got[real], nearest.view(np.float32)[real])


def filled(k_format, v_format, tokens=100, dim=40, v_dim=40, heads=2, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    cache = kv.KVCache(heads, dim, k_format=k_format, v_format=v_format, batch_size=batch, v_head_dim=v_dim)
    k = rng.standard_normal((batch, heads, tokens, dim), dtype=np.float32)
    v = rng.standard_normal((batch, heads, tokens, v_dim), dtype=np.float32)
    cache.append(k, v)
    return cache, k, v


@pytest.mark.parametrize("bits", [8, 4])
def test_memory_form_of_key_codes_is_the_documented_one(bits):
    cache, k, _ = filled(f"int{bits}", "float32", dim=22)
    store = cache.buffers.k
    for block in range(3):
        rows = k[:, :, 4 + 32 * block : 36 + 32 * block]
        codes, lo, scale = reference.quantize_group(rows, bits, axis=2)
        padded = np.zeros((2, 2, 32, 24), np.uint8)
        padded[..., :22] = codes
        grouped = padded.reshape(2, 2, 32, 6, 4).transpose(0, 1, 3, 2, 4)  # [B, H, group, token, channel]
        if bits == 4:
            grouped = grouped[:, :, :, :16] | (grouped[:, :, :, 16:] << 4)
        assert np.array_equal(store.codes[:, :, block], grouped.reshape(2, 2, -1))
        assert np.array_equal(store.params[:, :, block, 0, :22], lo.reshape(2, 2, 22))
        assert np.array_equal(store.params[:, :, block, 1, :22], scale.reshape(2, 2, 22))


@pytest.mark.parametrize("bits", [8, 4])
def test_memory_form_of_value_codes_is_the_documented_one(bits):
    cache, _, v = filled("float32", f"int{bits}", v_dim=40)
    store = cache.buffers.v
    codes, lo, scale = reference.quantize_group(v[:, :, 4:100], bits, axis=3)
    padded = np.zeros((2, 2, 96, 64), np.uint8)
    padded[..., :40] = codes
    mark = np.zeros_like(padded)  # padded channels are stored as code 0 where a vector of codes reaches over the end
    mark[..., :40] = 1
    grouped, inside = (a.reshape(2, 2, 24, 4, 64).transpose(0, 1, 2, 4, 3) for a in (padded, mark))
    stored = store.codes.reshape(2, 2, -1, 64 * bits // 2)[:, :, :24]
    if bits == 8:
        got = stored.reshape(2, 2, 24, 64, 4) ^ 128
    else:
        halves = stored.reshape(2, 2, 24, 2, 16, 4)
        got = np.concatenate([halves & 15, halves >> 4], axis=4).reshape(2, 2, 24, 64, 4) ^ 8
    assert np.array_equal(got[inside == 1], grouped[inside == 1])
    params = store.params.transpose(0, 1, 3, 2, 4).reshape(2, 2, 2, -1)
    assert np.array_equal(params[:, :, 0, :96], lo.reshape(2, 2, 96))
    assert np.array_equal(params[:, :, 1, :96], scale.reshape(2, 2, 96))


@pytest.mark.parametrize("format", kv.FORMATS)
def test_append_writes_nothing_outside_the_room_of_the_new_tokens(format):
    cache = kv.KVCache(2, 33, k_format=format, v_format=format, capacity=164)
    for array in (*cache.buffers.k, *cache.buffers.v):
        array.view(np.uint8)[...] = 0xA5
    rng = np.random.default_rng(0)
    for tokens in (1, 2, 5, 60, 1):
        before = [array.copy() for array in (*cache.buffers.k, *cache.buffers.v)]
        x = rng.standard_normal((1, 2, tokens, 33), dtype=np.float32)
        old = len(cache)
        cache.append(x, x)
        after = (*cache.buffers.k, *cache.buffers.v)
        for a, b in zip(before, after, strict=True):
            if a.shape[2] == cache.capacity:  # float rows
                assert a[:, :, :old].tobytes() == b[:, :, :old].tobytes()
                assert a[:, :, old + tokens :].tobytes() == b[:, :, old + tokens :].tobytes()
            elif a.shape[2] == 5:  # blocks of codes and parameters
                full_before, full_after = max(0, (old - 4) // 32), -(-max(0, old + tokens - 4) // 32)
                assert a[:, :, :full_before].tobytes() == b[:, :, :full_before].tobytes()
                assert a[:, :, full_after:].tobytes() == b[:, :, full_after:].tobytes()


@njit
def decode(buffers, queries, keys, values, outs, lse, scale):
    """A user's loop: append one token, attend, with no Python in between; the number of steps done."""
    for t in range(queries.shape[0]):
        if not kernels.append(buffers, keys[t], values[t]):
            return t
        kernels.attend(buffers, queries[t], outs[t], lse, scale, True, None)
    return queries.shape[0]


@pytest.mark.parametrize("formats", [("float32", "float32"), ("int8", "int4")])
def test_a_users_njit_loop_gives_what_the_class_gives_bit_for_bit(formats):
    rng = np.random.default_rng(1)
    steps, heads, group, dim = 80, 2, 3, 32
    q = rng.standard_normal((steps, 1, heads * group, 1, dim), dtype=np.float32)
    k, v = (rng.standard_normal((steps, 1, heads, 1, dim), dtype=np.float32) for _ in range(2))
    cache = kv.KVCache(heads, dim, k_format=formats[0], v_format=formats[1], capacity=64)
    twin = kv.KVCache(heads, dim, k_format=formats[0], v_format=formats[1])
    outs, lse = np.empty_like(q), np.empty((1, heads * group, 1), np.float32)
    done = decode(cache.buffers, q, k, v, outs, lse, dim**-0.5)
    assert done == cache.capacity < steps  # append says False when the room is used up, and nothing is written
    assert len(cache) == done == cache.buffers.state[0, LENGTH]
    expected = [twin.step(q[t], k[t], v[t]) for t in range(done)]
    assert outs[:done].tobytes() == np.stack(expected).tobytes()
    assert cache.keys().tobytes() == twin.keys().tobytes()
    assert cache.values().tobytes() == twin.values().tobytes()


def test_warmup_compiles_what_a_first_call_needs():
    kv.warmup(k_format="float32", v_format="float32")
    cache = kv.KVCache(2, 40, batch_size=2)
    entries = entries_of(type(cache.buffers.k), type(cache.buffers.v))
    entries = (entries.append, entries.few, entries.many)
    before = [list(entry.signatures) for entry in entries]
    assert all(before)
    for tokens in (1, 60):
        x = np.ones((2, 2, tokens, 40), np.float32)
        cache.step(x, x, x)
    assert before == [list(entry.signatures) for entry in entries]

"""Memory: what a cache is said to take, what it takes at most, and offsets beyond 32 bits."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import bit_equal, normal

import kvnumba as kv
from kvnumba import buffers, reference
from kvnumba.spec import BITS, SINK

STATUS = Path("/proc/self/status")

codes = pytest.mark.parametrize("format", ["int8", "int4"])


def traced_peak(work):
    """Bytes that NumPy held at most, beyond those of the start, while *work* ran."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def resident_peak(work):
    """Bytes of the process in memory at most, beyond those of the start, while *work* ran: compiled code included."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def status(name):
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(name + ":")]
    return int(line.split()[1]) * 1024


# ---- what is said


@pytest.mark.parametrize(
    ("format", "key_bytes", "value_bytes", "ratio"),
    [("int8", 666_624, 558_560, 3.42), ("int4", 406_528, 296_672, 5.96)],
)
def test_k68_bytes_of_4096_tokens_with_every_parameter_counted(format, key_bytes, value_bytes, ratio):
    length, dim, heads = 4096, 128, 2
    zeros = np.zeros((1, heads, length, dim), np.float32)
    plain = 2 * length * dim * 4
    for formats, expected in (
        ((format, format), key_bytes + value_bytes),
        ((format, "float32"), key_bytes + plain // 2),
        (("float32", format), plain // 2 + value_bytes),
    ):
        cache = kv.KVCache(heads, dim, k_format=formats[0], v_format=formats[1], capacity=length)
        cache.append(zeros, zeros)
        assert 0.97 * expected <= cache.nbytes / heads <= 1.03 * expected
        assert cache.nbytes <= cache.nbytes_allocated
    assert plain / (key_bytes + value_bytes) == pytest.approx(ratio, abs=0.005)


def test_k70_sizes_are_exact_python_integers():
    spec = kv.KVCache(np.int32(8), np.int32(128), k_format="int8", v_format="int8").spec
    assert type(spec.values_per_token) is int
    assert spec.values_per_token * 32_768 * 80 == 2 * 2_684_354_560
    cache = kv.KVCache(np.int32(1), np.int32(8), batch_size=np.int32(2), capacity=np.int32(40))
    assert [type(n) for n in (cache.nbytes, cache.nbytes_allocated, cache.capacity, len(cache))] == [int] * 4


# ---- what it takes


@pytest.mark.skipif(not STATUS.exists(), reason="the peak is read from /proc")
@codes
def test_k68_tokens_one_by_one_never_take_more_than_two_and_a_half_times_their_memory(format, monkeypatch):
    token = np.ones((1, 16, 1, 128), np.float32)
    cache = kv.KVCache(16, 128, k_format=format, v_format=format)
    cache.append(token, token)  # compiles

    def fill():
        cache.reset()
        for _ in range(4096):
            cache.append(token, token)

    # Spare room is asked for, and taken when it is written; what was given back before is of no use for it.
    kept = [np.ones(n << 20, np.uint8) for n in (31, 16, 8)]
    del kept
    slack = 2 << 20  # pages that Python and the allocator keep for later
    assert resident_peak(fill) <= 2.5 * cache.nbytes + slack
    assert cache.nbytes_allocated <= 2.5 * cache.nbytes
    monkeypatch.setattr(buffers, "MAPPED", sys.maxsize)  # all memory comes from NumPy, as tracemalloc sees it
    assert traced_peak(fill) <= 1.6 * cache.nbytes_allocated + slack


@pytest.mark.skipif(not STATUS.exists(), reason="the peak is read from /proc")
def test_k68_a_buffer_that_grows_in_place_takes_two_and_a_half_times_its_memory():
    token = np.ones((16, 1, 128), np.float32)
    cache = kv.InPlaceCache(axis=1)

    def fill():
        cache.reset()
        for _ in range(4096):
            cache.append(token)

    kept = [np.ones(n << 20, np.uint8) for n in (31, 16, 8)]
    del kept
    assert resident_peak(fill) <= 2.5 * cache.view().nbytes + (2 << 20)


@pytest.mark.skipif(not STATUS.exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(("format", "heads"), [("float32", 8), ("bfloat16", 16), ("int8", 32)])
def test_k68_layers_that_grow_in_turn_leave_nothing_behind(format, heads):
    layers, length = 8, 4096
    prompt, token = np.ones((1, heads, length, 128), np.float32), np.ones((1, heads, 1, 128), np.float32)

    def fill():
        caches = kv.KVCaches(layers, heads, 128, k_format=format, v_format=format)
        for layer in range(layers):
            caches[layer].append(prompt, prompt)
        for layer in range(layers):
            caches[layer].append(token, token)  # into twice the room
        return caches.nbytes

    fill()  # compiles
    kept = [np.ones(n << 20, np.uint8) for n in (31, 16, 8)]
    del kept
    sizes = []
    assert resident_peak(lambda: sizes.append(fill())) <= 1.4 * sizes[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_has_a_cache_of_its_own():
    cache = kv.KVCache(16, 128)
    zeros = np.zeros((1, 16, 400, 128), np.float32)
    cache.append(zeros, zeros)
    cache.append(zeros[:, :, :1], zeros[:, :, :1])  # grows into pages of its own
    assert cache.capacity == 800
    assert cache.buffers.k.rows.nbytes > buffers.MAPPED
    child = os.fork()
    if not child:
        cache.buffers.k.rows[...] = 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not cache.keys().any()


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("size", [2**62, 2**64, 2**72])
def test_more_than_any_machine_has_is_a_memory_error(size, spare):
    with pytest.raises(MemoryError):
        buffers.aligned((size,), np.uint8, spare)


def test_two_caches_that_grow_in_two_threads_are_right(rng):
    k, v = normal(rng, 2, 1, 16, 1700, 128)
    parts = [(0, 400), (400, 401), (401, 801), (801, 1700)]  # twice into pages of their own

    def grown(_):
        cache = kv.KVCache(16, 128, k_format="float32", v_format="float32")
        for first, last in parts:
            cache.append(k[:, :, first:last], v[:, :, first:last])
        return cache

    with ThreadPoolExecutor(2) as pool:
        for cache in pool.map(grown, range(6)):
            assert bit_equal(cache.keys(), k)
            assert bit_equal(cache.values(), v)


@pytest.mark.skipif(not STATUS.exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("k_format", "v_format"), [("int8", "int8"), ("int4", "int4"), ("float16", "bfloat16"), ("float32", "float32")]
)
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_k68_attend_makes_no_float32_copy_of_the_cache(rng, k_format, v_format, rows):
    heads, length, dim = 8, 4096, 128
    cache = kv.KVCache(heads, dim, k_format=k_format, v_format=v_format, capacity=length)
    q = normal(rng, 1, 2 * heads, rows, dim)
    cache.append(*normal(rng, 2, 1, heads, length, dim))
    cache.attend(q)  # compiles, and takes what a thread needs once
    few = length * dim * 4 * 2 * heads // 4
    assert traced_peak(lambda: cache.attend(q)) < few
    assert resident_peak(lambda: cache.attend(q)) < few


# ---- beyond 32 bits


#: Each format once as keys and once as values.
PAIRS = [("float32", "int4"), ("float16", "bfloat16"), ("bfloat16", "float16"), ("int8", "float32"), ("int4", "int8")]


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_k70_offsets_beyond_32_bits(rng, k_format, v_format, side):
    # Memory is taken for the pages that are written, a few of each head; the rest of the arrays exists by name only.
    bits, dim = BITS[k_format if side == "k" else v_format], 128
    bytes_per_head = 2**30 if bits <= 8 else 2**31  # the third head begins at twice that, float32 at element 2**30
    capacity = bytes_per_head * 8 // bits // dim
    dims = {"head_dim": dim, "v_head_dim": 1} if side == "k" else {"head_dim": 1, "v_head_dim": dim}
    cache = kv.KVCache(3, **dims, k_format=k_format, v_format=v_format, capacity=capacity)
    small = kv.KVCache(3, **dims, k_format=k_format, v_format=v_format)
    array = max((cache.buffers.k if side == "k" else cache.buffers.v), key=lambda array: array.nbytes)
    assert array.strides[1] * 2 >= 2**31
    assert array.strides[1] * 2 // array.itemsize >= 2**30
    k, v = normal(rng, 1, 3, 78, dims["head_dim"]), normal(rng, 1, 3, 78, dims["v_head_dim"])
    q = normal(rng, 1, 6, 2, dims["head_dim"])
    for each in (cache, small):
        each.append(k[:, :, :70], v[:, :, :70])
        each.truncate(60)
        each.append(k[:, :, 60:], v[:, :, 60:])
    assert bit_equal(cache.keys(), small.keys())
    assert bit_equal(cache.values(), small.values())
    for rows in (1, 2):
        assert bit_equal(cache.attend(q[:, :, :rows]), small.attend(q[:, :, :rows]))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_k70_a_token_past_element_two_to_the_31_reads_back_right(format):
    length, dim = 2**24, 128
    cache = kv.KVCache(1, dim, k_format=format, v_format=format, capacity=length + 64)
    cache.buffers.state[0] = length, (length - SINK) // 32  # as after as many tokens of zero, none of them written
    x = np.broadcast_to(np.arange(64, dtype=np.float32)[:, None], (1, 1, 64, dim))
    zeros = np.zeros_like(x)
    cache.append(zeros, x)
    assert len(cache) * dim > 2**31
    for rows in (1, 3, 20):
        q = np.ones((1, 2, rows, dim), np.float32)
        out = cache.attend(q, window=(15, 0))
        truth = reference.attention(q, zeros, x, causal=True, window=(15, 0))
        np.testing.assert_allclose(out, truth, atol=1e-5)
    cache.truncate(length + 40)
    np.testing.assert_allclose(cache.attend(q[:, :, :1], window=(0, 0)), 39, atol=1e-5)

"""Odd uses that must neither crash nor give a wrong result in silence."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvnumba as kv
from kvnumba import kernels, reference


def some(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def test_tokens_stored_by_compiled_code_count_at_once(rng):
    cache = kv.KVCache(2, 64, k_format="int8", v_format="int4", capacity=300)
    cache.append(some(rng, 1, 2, 10, 64), some(rng, 1, 2, 10, 64))
    assert kernels.append(cache.buffers, some(rng, 1, 2, 200, 64), some(rng, 1, 2, 200, 64))
    assert len(cache) == 210
    assert cache.keys().shape == cache.values().shape == (1, 2, 210, 64)
    with pytest.raises(ValueError, match="mask must be broadcastable"):
        cache.attend(some(rng, 1, 2, 1, 64), mask=np.zeros(10, np.float32))
    cache.append(some(rng, 1, 2, 200, 64), some(rng, 1, 2, 200, 64))  # grows
    assert len(cache) == 410 <= cache.capacity


@pytest.mark.parametrize("window", [(-1, sys.maxsize), (sys.maxsize, -1), (2**70, 2**70)])
def test_a_window_beyond_any_length_is_no_window(window, rng):
    q, k, v = some(rng, 1, 2, 20, 8), some(rng, 1, 2, 10, 8), some(rng, 1, 2, 10, 8)
    for causal in (True, False):
        plain = kv.attention(q, k, v, causal=causal)
        assert kv.attention(q, k, v, causal=causal, window=window).tobytes() == plain.tobytes()


def test_out_may_overlap_the_inputs(rng):
    q, k, v = some(rng, 1, 2, 12, 8), some(rng, 1, 2, 12, 8), some(rng, 1, 2, 12, 8)
    expected = kv.attention(q, k, v, causal=True)
    memory = np.zeros(2 * 12 * 8 + 8, np.float32)
    query, out = (memory[i : i + 192].reshape(1, 2, 12, 8) for i in (0, 8))
    query[...] = q
    assert np.array_equal(kv.attention(query, k, v, causal=True, out=out), expected)
    for same in (q, k, v):
        arrays = {"q": q.copy(), "k": k.copy(), "v": v.copy()}
        name = "q" if same is q else "k" if same is k else "v"
        assert np.array_equal(kv.attention(**arrays, causal=True, out=arrays[name]), expected)
    v[0, 0, 11, 3] = np.nan
    query = q.copy()
    expected = kv.attention(q, k, v, causal=True)
    assert np.array_equal(kv.attention(query, k, v, causal=True, out=query), expected, equal_nan=True)


def test_numpy_settings_of_the_caller_do_not_matter(rng):
    cache = kv.KVCache(2, 16, k_format="int8", v_format="int4")
    with np.errstate(all="raise"):
        out = cache.step(
            some(rng, 1, 2, 3, 16).astype(np.float16), some(rng, 1, 2, 3, 16), some(rng, 1, 2, 3, 16) * 1e-7
        )
        kv.quantize_per_channel(np.full((3000, 8), 1e-30, np.float32))
        kv.merge_attention([out, out], [np.full((1, 2, 3), -2000.0), np.zeros((1, 2, 3))])
    assert out.dtype == np.float16
    assert len(cache) == 3


MAKERS = [
    lambda: kv.KVCache(2, 16, k_format="int4", v_format="float16"),
    lambda: kv.InPlaceCache(),
    lambda: kv.ConcatCache(),
    lambda: kv.QuantizedCache("per_token", 8),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_cache_unpickled_from_read_only_buffers_goes_on(make, rng):
    cache, x = make(), some(rng, 1, 2, 40, 16)
    extra = (x,) if isinstance(cache, kv.KVCache) else ()
    cache.append(x, *extra)
    parts: list[pickle.PickleBuffer] = []
    data = pickle.dumps(cache, protocol=5, buffer_callback=parts.append)
    copy = pickle.loads(data, buffers=[bytes(part.raw()) for part in parts])
    for one in (cache, copy):
        one.append(x, *extra)
        one.truncate(70)
    read = (lambda c: c.keys()) if extra else (lambda c: c.contiguous())
    assert read(copy).tobytes() == read(cache).tobytes()


def test_a_nan_changes_no_bit_of_rows_that_do_not_see_it(rng):
    q, k, v = some(rng, 2, 4, 5, 24), some(rng, 2, 2, 70, 24), some(rng, 2, 2, 70, 24)
    clean = kv.attention(q, k, v, causal=True)
    v[0, 0, 67, 3] = np.nan  # queries 0 and 1 of batch row 0, KV head 0 do not see token 67
    out = kv.attention(q, k, v, causal=True)
    assert np.isnan(out[0, :2, 2:, 3]).all()
    assert out[1].tobytes() == clean[1].tobytes()
    assert out[0, 2:].tobytes() == clean[0, 2:].tobytes()
    expected = reference.attention(q, k, v, causal=True)
    assert np.abs(out[0, :2, :2] - expected[0, :2, :2]).max() < 1e-6


@pytest.mark.parametrize("causal", ["no", None, 1, 0.0])
def test_causal_must_be_a_truth_value(causal, rng):
    with pytest.raises(TypeError, match="causal must be True or False"):
        kv.attention(some(rng, 1, 1, 1, 4), some(rng, 1, 1, 1, 4), some(rng, 1, 1, 1, 4), causal=causal)


def test_slopes_must_be_finite_and_merged_integers_become_floats(rng):
    with pytest.raises(ValueError, match="alibi_slopes must hold finite numbers"):
        kv.attention(*(some(rng, 1, 1, 1, 4) for _ in range(3)), alibi_slopes=[-np.inf])
    out, _ = kv.merge_attention([np.ones((1, 1, 1, 2), int), np.full((1, 1, 1, 2), 2)], [np.zeros((1, 1, 1))] * 2)
    assert out.dtype == np.float32
    assert np.allclose(out, 1.5, atol=1e-6)


@pytest.mark.parametrize("make", [lambda n: kv.KVCache(1, 8, capacity=n), lambda n: kv.ConcatCache(axis=n),
                                  lambda n: kv.InPlaceCache(axis=n)])  # fmt: skip
@pytest.mark.parametrize("n", [2**62, 10**30])
def test_a_count_beyond_reason_is_refused_by_name(make, n):
    with pytest.raises(ValueError, match=r"(capacity|axis) must be an integer from 0 to"):
        make(n)


def test_the_vector_layer_is_right_on_a_generic_processor():
    """No FMA, no AVX, no dot product of bytes, no float16 conversion: the same tests, compiled for the oldest host."""
    tests = Path(__file__).with_name("test_kernels.py")
    names = "exp or sum_each or dot_bytes or float16 or memory_form"
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), "-k", names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

"""Softcap, window, ALiBi and sink logits: what changes scores beyond their scale, against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import normal

import kvnumba as kv
from kvnumba import reference
from kvnumba.functional import prepare, run, target
from kvnumba.spec import SINK

HEADS, GROUP, DIM = 2, 3, 24

OPTIONS = {
    "softcap": {"softcap": 5.0},
    "window on the left": {"window": (40, -1)},
    "window on both sides": {"window": (7, 3)},
    "window of itself": {"window": (0, 0)},
    "alibi": {"alibi_slopes": np.linspace(0.01, 0.5, HEADS * GROUP)},
    "sink logits": {"sink_logits": np.linspace(-3, 3, HEADS * GROUP)},
    "a head without sink logit": {"sink_logits": [-np.inf] * 5 + [1.0]},
    "all": {
        "softcap": 2.0,
        "window": (100, 20),
        "alibi_slopes": np.linspace(0.01, 0.1, HEADS * GROUP),
        "sink_logits": np.linspace(-1, 1, HEADS * GROUP),
    },
}


def filled(formats, tokens, rng):
    cache = kv.KVCache(HEADS, DIM, k_format=formats[0], v_format=formats[1], batch_size=2)
    k, v = (rng.standard_normal((2, HEADS, tokens, DIM), dtype=np.float32) for _ in range(2))
    cache.append(k, v)
    return cache


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("formats", [("float32", "float32"), ("int4", "int8")])
def test_every_option_means_what_the_reference_says(name, formats, rng):
    for tokens in (3, 36, 300):
        cache = filled(formats, tokens, rng)
        k, v = cache.keys(), cache.values()
        for queries in (1, 4, 50):
            for causal in (True, False):
                q = rng.standard_normal((2, HEADS * GROUP, queries, DIM), dtype=np.float32)
                out, lse = cache.attend(q, causal=causal, return_lse=True, **OPTIONS[name])
                expected, expected_lse = reference.attention(q, k, v, causal=causal, return_lse=True, **OPTIONS[name])
                # float32 sums of up to 300 terms; byte weights of codes are rounded to 2**-16 of the largest.
                bound = 2e-6 if formats[0] == "float32" else 3e-4
                assert np.abs(out - expected).max() < bound * max(1.0, np.abs(v).max())
                assert np.array_equal(np.isneginf(lse), np.isneginf(expected_lse))
                seen = ~np.isneginf(expected_lse)
                assert np.abs(lse[seen] - expected_lse[seen]).max(initial=0) < 3e-5 + bound


def test_options_that_say_nothing_change_no_bit(rng):
    cache = filled(("int8", "int4"), 200, rng)
    q = rng.standard_normal((2, HEADS * GROUP, 1, DIM), dtype=np.float32)
    plain = cache.attend(q)
    nothing = {"window": (-1, -1), "softcap": 0.0, "mask": np.ones((1, 1, 1, 200), bool)}
    assert cache.attend(q, **nothing).tobytes() == plain.tobytes()
    assert cache.attend(q, sink_logits=np.full(HEADS * GROUP, -np.inf)).tobytes() == plain.tobytes()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"softcap": -1.0}, ValueError, "softcap must be at least 0"),
        ({"softcap": np.nan}, ValueError, "softcap must be finite"),
        ({"softcap": "2"}, TypeError, "softcap must be a number"),
        ({"window": 5}, TypeError, "window must be None or a pair"),
        ({"window": (1, -2)}, ValueError, "window must be a pair of integers of at least -1"),
        ({"window": (1.5, 2)}, TypeError, "window must be"),
        ({"alibi_slopes": [1.0, 2.0]}, ValueError, r"alibi_slopes must have shape \[6\]"),
        ({"sink_logits": np.full(6, np.nan)}, ValueError, "sink_logits must hold finite numbers or -inf"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, error, message, rng):
    cache = filled(("float32", "float32"), 3, rng)
    with pytest.raises(error, match=message):
        cache.attend(np.zeros((2, HEADS * GROUP, 1, DIM), np.float32), **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_out_receives_the_result_whatever_its_strides(dtype, rng):
    cache = filled(("float32", "float32"), 20, rng)
    q = rng.standard_normal((2, HEADS * GROUP, 2, DIM)).astype(dtype)
    expected = cache.attend(q)
    for out in (np.empty_like(expected), np.empty((2, 2, HEADS * GROUP, DIM), dtype).transpose(0, 2, 1, 3)):
        assert cache.attend(q, out=out) is out
        assert np.array_equal(out, expected)
    with pytest.raises(ValueError, match="out must be"):
        cache.attend(q, out=np.empty((2, HEADS * GROUP, 1, DIM), dtype))


@pytest.mark.parametrize("format", ["float32", "int4"])
@pytest.mark.parametrize("window", [1, 20, 150])
def test_a_window_that_keeps_the_sinks_equals_the_mask_that_says_so(rng, format, window):
    # Tiles between the sinks and the window are not read.
    for length, queries in ((3, 1), (300, 1), (300, 37)):
        cache = kv.KVCache(2, 32, k_format=format, v_format=format)
        cache.append(normal(rng, 1, 2, length, 32), normal(rng, 1, 2, length, 32))
        q = normal(rng, 1, 4, queries, 32)
        position, key = np.arange(length - queries, length)[:, None], np.arange(length)
        mask = (key <= position) & ((key > position - window) | (key < SINK))
        request = prepare(cache.buffers, length, q, SINK, window=(window - 1, 0))
        got = run(target(cache.buffers), length, request)
        np.testing.assert_allclose(got, cache.attend(q, causal=False, mask=mask), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("format", ["float32", "int4"])
def test_tokens_dropped_between_sinks_and_window_count_in_the_distance_of_the_sinks(rng, format):
    cache = kv.KVCache(2, 32, k_format=format, v_format=format)
    cache.append(normal(rng, 1, 2, 300, 32), normal(rng, 1, 2, 300, 32))
    q, slopes = normal(rng, 1, 4, 1, 32), np.array([0.01, 0.02, 0.05, 0.1])
    request = prepare(cache.buffers, 300, q, SINK, 64, window=(99, 0), alibi_slopes=slopes)
    key = np.arange(300)
    distance = 299 - key + 64 * (key < SINK)
    bias = np.where((key > 199) | (key < SINK), -slopes[:, None] * distance, -np.inf)
    got = run(target(cache.buffers), 300, request)
    np.testing.assert_allclose(got, cache.attend(q, causal=False, mask=bias[None, :, None]), rtol=1e-5, atol=2e-5)

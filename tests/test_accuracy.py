"""What attention on codes adds to the error of quantization, and what float formats add to exact arithmetic.

Truth is float64 attention over the decoded cache; the error of quantization is its distance from float64 attention over
what was stored. Data: even, with one channel 100 times the rest, and from two layers of a model (`dump_model_kv`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvnumba as kv
from kvnumba import reference

MODEL = Path(__file__).parent / "data" / "model_kv.npz"
DATA = ["even", "outlier", "layer 0", "layer 29"]

#: Largest added error, of the rms of the quantization error.
BOUNDS = {"int8": 0.02, "int4": 0.10}


def arrays(data: str, queries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [1, H_q, queries, 64], k and v [1, H_kv, T, 64]."""
    if data.startswith("layer"):
        with np.load(MODEL) as stored:
            q, k, v = (stored[name + data.split()[1]].astype(np.float32) for name in "qkv")
        return q[:, :, -queries:], k, v
    rng = np.random.default_rng(8)
    q = rng.standard_normal((1, 12, queries, 64), dtype=np.float32)
    k, v = (rng.standard_normal((1, 3, 300, 64), dtype=np.float32) for _ in range(2))
    if data == "outlier":
        k[..., 11] *= 100
        v[..., 40] *= 100
        q[..., 11] *= np.float32(0.01)  # the channel takes part in the scores as any other, not alone
    return q, k, v


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return reference.attention(q, k, v, causal=True)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("queries", [1, 4])
def test_attention_on_codes_adds_little_to_the_error_of_quantization(data, format, queries):
    q, k, v = arrays(data, queries)
    cache = kv.KVCache(k.shape[1], 64, k_format=format, v_format=format)
    cache.append(k, v)
    true = exact(q, cache.keys(), cache.values())
    quantization = rms(true - exact(q, k, v))
    assert quantization > 0
    assert rms(cache.attend(q) - true) < BOUNDS[format] * quantization


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("format", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("queries", [1, 4])
def test_float_formats_err_at_most_twice_as_much_as_plain_numpy_in_float32(data, format, queries):
    q, k, v = arrays(data, queries)
    cache = kv.KVCache(k.shape[1], 64, k_format=format, v_format=format)
    cache.append(k, v)
    k, v = cache.keys(), cache.values()
    true = exact(q, k, v)
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat(group, 1).swapaxes(-1, -2) * np.float32(1 / 8)
    scores += np.triu(np.full(scores.shape[-2:], -np.inf, np.float32), k=k.shape[2] - queries + 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    plain = weights / weights.sum(-1, keepdims=True) @ v.repeat(group, 1)
    assert rms(cache.attend(q) - true) <= 2 * rms(plain - true)

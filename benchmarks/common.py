"""What the benchmarks share: seeded inputs, attention in plain NumPy, the formats."""

from __future__ import annotations

import numpy as np

import kvnumba as kv

#: Name of a pair of formats, as in the results, to (K format, V format).
FORMATS = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8": ("int8", "int8"),
    "int8-int4": ("int8", "int4"),
    "int4": ("int4", "int4"),
}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal float32 numbers, the same for the same shape and seed."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def numpy_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """softmax(q k^T / sqrt(D)) v by matrix products; the query heads that share a KV head go through one product.

    Parameters
    ----------
    q : [B, H_q, S, D]
        Queries of the last S positions; causal.
    k, v : [B, H_kv, T, D]
    dtype : type
        Precision of the whole calculation.
    """
    (batch, q_heads, new, dim), (kv_heads, tokens) = q.shape, k.shape[1:3]
    group = q_heads // kv_heads
    folded = q.astype(dtype, copy=False).reshape(batch, kv_heads, group * new, dim)
    scores = folded @ k.astype(dtype, copy=False).swapaxes(-1, -2)
    scores *= dtype(1 / np.sqrt(dim))
    if new > 1:
        hidden = np.triu(np.full((new, tokens), -np.inf, dtype), tokens - new + 1)
        scores.reshape(batch, kv_heads, group, new, tokens)[...] += hidden
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return (scores @ v.astype(dtype, copy=False)).reshape(batch, q_heads, new, v.shape[-1])


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def filled_cache(
    formats: str, tokens: int, kv_heads: int, dim: int, capacity: int = 0
) -> tuple[kv.KVCache, np.ndarray, np.ndarray]:
    """A cache of *tokens* tokens, and the keys and values [1, kv_heads, tokens, dim] that went into it."""
    k, v = normal(1, kv_heads, tokens, dim, seed=1), normal(1, kv_heads, tokens, dim, seed=2)
    k_format, v_format = FORMATS[formats]
    cache = kv.KVCache(kv_heads, dim, k_format=k_format, v_format=v_format, capacity=capacity)
    cache.append(k, v)
    return cache, k, v


def check_attend(cache: kv.KVCache, q: np.ndarray) -> None:
    """The cache attends to what it holds, so that no time is taken of a wrong answer.

    Weights of 8 bits, with which codes may be multiplied, are good for a tenth; float32 sums have their own rounding.
    """
    true = numpy_attention(q, cache.keys(), cache.values(), np.float64)
    error = rms(cache.attend(q) - true)
    codes = {cache.spec.k_format, cache.spec.v_format} & {"int8", "int4"}
    bound = (0.1 if codes else 1e-5) * rms(true)
    assert error <= bound, f"attend must agree with NumPy to {bound:.2g}, is off by {error:.2g}"

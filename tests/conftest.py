"""What several test files share: made-up data and the error that a result may have."""

from __future__ import annotations

import numpy as np
import pytest

from kvnumba import reference
from kvnumba.spec import BITS, BLOCK, CODE_FORMATS, SINK

#: Added error, as a part of the error that quantization causes by itself (both root mean square).
ADDED_ERROR = {"int8": 0.02, "int4": 0.10}


@pytest.fixture
def rng():
    return np.random.default_rng(20240607)


def normal(rng, *shape):
    """Standard normal float32 numbers."""
    return rng.standard_normal(shape, dtype=np.float32)


def bit_equal(a, b):
    """Whether two arrays have the same shape, dtype and bytes."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def rms(x):
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def plain_float32(q, k, v, *, causal=False, sm_scale=None, mask=None):
    """Attention as one would write it in float32 NumPy: the yardstick for rounding errors."""
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat(group, 1) for x in (k, v))
    sm_scale = np.float32(1 / np.sqrt(q.shape[-1]) if sm_scale is None else sm_scale)
    score = (q * sm_scale) @ k.swapaxes(-1, -2)
    rows, keys = score.shape[-2:]
    seen = np.tri(rows, keys, keys - rows, dtype=bool) if causal else np.ones((rows, keys), bool)
    if mask is not None and np.asarray(mask).dtype == bool:
        seen = seen & mask
    elif mask is not None:
        score = score + np.asarray(mask, np.float32)
    score = np.where(seen, score, np.float32(-np.inf))
    top = score.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(score - np.where(np.isfinite(top), top, np.float32(0)))
    total = weights.sum(-1, keepdims=True)
    return (weights / np.where(total > 0, total, np.float32(1))) @ v


def rounding_budget(truth, q, k, v, **options):
    """Largest error of a float32 result: twice that of plain float32 NumPy, plus 4 ulp of the largest value."""
    if truth.size == 0:
        return 0.0
    plain = np.abs(plain_float32(q, k, v, **options) - truth).max()
    floor = 4 * np.spacing(np.abs(v).max(initial=np.float32(0)).astype(np.float32))
    return 2 * float(plain) + float(floor)


def output_rounding(truth, dtype):
    """Half a unit in the last place of the largest element in the output's dtype; 0 for float32 and float64."""
    eps = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(np.dtype(dtype).name, 0.0)
    return eps * float(np.abs(truth).max(initial=0.0))


def largest_errors(spec, q, keys, values):
    """Bounds of the errors of attention of one row of a batch: of its output, and of its lse.

    q : [H_q, S, D]; keys, values : [H, T, D] and [H, T, Dv], as stored.

    A score is a float32 sum of D products. Codes add the rounding of their weights to integers of 16 bits: half a
    32639th of the largest weight q * scale for each of D channels, times half the largest code; and for values half a
    65535th of the largest weight p * scale, p <= 1, for each token, times half the largest code.
    """
    q, keys, values = (np.abs(q, dtype=np.float64), *(x.astype(np.float64) for x in (keys, values)))
    tokens, dim = keys.shape[1:]
    score, added = 0.0, 0.0
    if tokens:
        products = q.max((0, 1), initial=0) @ np.abs(keys).max((0, 1))
        score = (dim + 4) * 2.0**-24 * products / np.sqrt(dim)
    if spec.k_format in CODE_FORMATS and tokens > SINK:
        score += np.sqrt(dim) * q.max(initial=0) * np.ptp(keys[:, SINK:], 1).max() / (4 * 32639)
    if spec.v_format in CODE_FORMATS and tokens > SINK:
        added = tokens * np.ptp(values[:, SINK:], 2).max() / (4 * 65535)
    rounding = (tokens + 8) * 2.0**-23
    return (np.expm1(2 * score) + rounding) * np.abs(values).max(initial=0) + added, score + rounding


def half_steps(x, format, axis):
    """Uniform random errors within half a step of the group of each element of x [B, H, T, D]; sinks have none."""
    if format not in CODE_FORMATS:
        return np.zeros(x.shape)
    rng, error = np.random.default_rng(7), np.zeros(x.shape)
    size, axis = (BLOCK, 3) if axis == "token" else (1, 4)  # keys share a step over the tokens of a block
    end = SINK + (x.shape[2] - SINK) // size * size
    if end <= SINK:
        return error
    coded = x[:, :, SINK:end].astype(np.float64)
    groups = coded.reshape(*x.shape[:2], -1, size, x.shape[3])
    step = np.ptp(groups, axis, keepdims=True) / (2 ** BITS[format] - 1)
    error[:, :, SINK:end] = (step * rng.uniform(-0.5, 0.5, groups.shape)).reshape(coded.shape)
    return error


def check_attend(cache, q, k, v, out=None, **options):
    """Compare ``cache.attend(q)`` with float64 attention over what the cache holds.

    k and v are what was appended. The largest error is bounded by rounding; sides that hold codes may add a part of
    the error that half a step in each of their elements causes, root mean square over all elements.
    """
    options.setdefault("causal", True)
    out = cache.attend(q, **options) if out is None else out
    q64 = np.asarray(q).astype(np.float64)
    keys, values, spec = cache.keys(), cache.values(), cache.spec
    truth = reference.attention(q64, keys, values, **options)
    assert out.shape == truth.shape
    assert out.dtype == np.asarray(q).dtype
    error = np.asarray(out).astype(np.float64) - truth
    assert np.isfinite(error).all()
    rounding = rounding_budget(truth, q64, keys, values, **options) + output_rounding(truth, out.dtype)
    if spec.k_format not in CODE_FORMATS and spec.v_format not in CODE_FORMATS:
        assert np.abs(error).max(initial=0) <= rounding
        return
    allowed = rounding
    if spec.k_format in CODE_FORMATS:
        moved = keys + half_steps(np.asarray(k), spec.k_format, "token")
        allowed += ADDED_ERROR[spec.k_format] * rms(truth - reference.attention(q64, moved, values, **options))
    if spec.v_format in CODE_FORMATS:
        moved = values + half_steps(np.asarray(v), spec.v_format, "channel")
        allowed += ADDED_ERROR[spec.v_format] * rms(truth - reference.attention(q64, keys, moved, **options))
    assert rms(error) <= allowed

"""Codes are those of the division, bit for bit, however small or large the numbers and however near to ties."""

from __future__ import annotations

import numpy as np
import pytest

import kvnumba as kv
from kvnumba import reference


def numbers(kind: str, shape: tuple[int, ...], size: float, rng: np.random.Generator) -> np.ndarray:
    """float32 numbers: of one size, on a grid that makes ties, or subnormal."""
    if kind == "ties":
        return (rng.integers(0, 256, shape) * 0.5).astype(np.float32)
    if kind == "eighths":
        return (np.round(rng.standard_normal(shape) * 8) / 8).astype(np.float32)
    if kind == "subnormal":
        return (rng.standard_normal(shape) * 1e-43).astype(np.float32)
    return (rng.standard_normal(shape) * size).astype(np.float32)


@pytest.mark.parametrize("kind", ["size", "ties", "eighths", "subnormal"])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_codes_are_those_of_the_division_over_80_orders_of_magnitude(kind, format):
    rng = np.random.default_rng(5)
    for power in range(-44, 37, 2):
        dim, tokens = int(rng.integers(1, 140)), int(rng.integers(1, 140))
        x = numbers(kind, (1, 2, tokens, dim), 10.0**power, rng)
        cache = kv.KVCache(2, dim, k_format=format, v_format=format)
        twin = reference.ReferenceKVCache(2, dim, k_format=format, v_format=format)
        at = 0
        while at < tokens:
            n = int(rng.integers(1, 40))
            for one in (cache, twin):
                one.append(x[:, :, at : at + n], x[:, :, at : at + n])
            at += n
        assert cache.keys().tobytes() == twin.keys().tobytes()
        assert cache.values().tobytes() == twin.values().tobytes()

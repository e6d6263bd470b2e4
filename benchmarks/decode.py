"""Cost of a decode, storing and attending: the seed's `bench_decode` and `bench_fused_decode`."""

from __future__ import annotations

import numpy as np

import kvnumba as kv

from .common import FORMATS, normal, numpy_attention, rms

HEADS, DIM = 8, 128


class Decode:
    """`tokens` steps of append and NumPy attention; only how the keys and values are kept and read differs.

    As in the seed one cache serves as keys and as values, and the attention is the same for all. `inplace-view` reads
    the valid region where it lies, `inplace-contiguous` copies it first.
    """

    params = ([256, 512, 1024, 2048], ["concat", "inplace-view", "inplace-contiguous"])
    param_names = ("tokens", "strategy")
    number = 1
    repeat = (1, 5, 10.0)
    warmup_time = 0
    timeout = 180

    def setup(self, tokens: int, strategy: str) -> None:
        self.q, self.step = normal(1, HEADS, 1, DIM, seed=7), normal(1, HEADS, 1, DIM, seed=1)
        out = self.decode(3, strategy)
        # All keys and values are the same row, so that every query gets this row.
        assert rms(out - self.step) <= 1e-6

    def decode(self, tokens: int, strategy: str) -> np.ndarray:
        cache = kv.ConcatCache(axis=2) if strategy == "concat" else kv.InPlaceCache(axis=2)
        for _ in range(tokens):
            cache.append(self.step)
            past = cache.contiguous() if strategy == "inplace-contiguous" else cache.view()
            out = numpy_attention(self.q, past, past)
        return out

    def time_decode(self, tokens: int, strategy: str) -> None:
        self.decode(tokens, strategy)


class FusedDecode:
    """`tokens` steps of one layer, either `KVCache.step` or two `ConcatCache` and `attention` over what they hold."""

    params = ([256, 512, 1024, 2048], ["concat", *FORMATS])
    param_names = ("tokens", "strategy")
    number = 1
    repeat = (1, 5, 10.0)
    warmup_time = 0
    timeout = 180

    def setup(self, tokens: int, strategy: str) -> None:
        self.q = normal(1, HEADS, 1, DIM, seed=7)
        self.k, self.v = normal(1, HEADS, 1, DIM, seed=1), normal(1, HEADS, 1, DIM, seed=2)
        out = self.decode(80, strategy)  # long enough for sealed blocks
        # All values are the same row, so that every query gets this row, within half a step of the format.
        step = {"int8": np.ptp(self.v) / 255, "int8-int4": np.ptp(self.v) / 15, "int4": np.ptp(self.v) / 15}
        half = step.get(strategy, np.abs(self.v).max() * 2.0**-7) / 2
        assert np.abs(out - self.v).max() <= 1.05 * half  # attention adds a part of its own

    def decode(self, tokens: int, strategy: str) -> np.ndarray:
        if strategy == "concat":
            keys, values = kv.ConcatCache(axis=2), kv.ConcatCache(axis=2)
            for _ in range(tokens):
                keys.append(self.k)
                values.append(self.v)
                out = kv.attention(self.q, keys.view(), values.view())
            return out
        k_format, v_format = FORMATS[strategy]
        cache = kv.KVCache(HEADS, DIM, k_format=k_format, v_format=v_format)
        for _ in range(tokens):
            out = cache.step(self.q, self.k, self.v)
        return out

    def time_decode(self, tokens: int, strategy: str) -> None:
        self.decode(tokens, strategy)

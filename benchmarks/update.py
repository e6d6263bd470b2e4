"""Cost of storing tokens one at a time, with no attention: the seed's `bench_update`.

`concat` copies the whole past for every token, `inplace` writes behind it and doubles the room when it is used up.
"""

from __future__ import annotations

import numpy as np

import kvnumba as kv

from .common import FORMATS, normal

HEADS, DIM = 8, 128


def numpy_concat(step: np.ndarray, tokens: int) -> np.ndarray:
    past = step[:, :, :0]
    for _ in range(tokens):
        past = np.concatenate([past, step], axis=2)
    return past


def growing(cache: kv.ConcatCache | kv.InPlaceCache, step: np.ndarray, tokens: int) -> np.ndarray:
    for _ in range(tokens):
        cache.append(step)
    return cache.view()


class Update:
    """One decode of `tokens` single-token appends to an empty cache [1, 8, tokens, 128]."""

    params = ([256, 512, 1024, 2048, 4096], ["numpy-concat", "concat", "inplace"])
    param_names = ("tokens", "strategy")
    number = 1
    repeat = (1, 5, 10.0)
    warmup_time = 0  # compiled in setup
    timeout = 180

    def setup(self, tokens: int, strategy: str) -> None:
        self.step = normal(1, HEADS, 1, DIM)
        few = self.decode(5, strategy)
        np.testing.assert_array_equal(few, np.repeat(self.step, 5, axis=2))

    def decode(self, tokens: int, strategy: str) -> np.ndarray:
        if strategy == "numpy-concat":
            return numpy_concat(self.step, tokens)
        return growing(kv.ConcatCache(axis=2) if strategy == "concat" else kv.InPlaceCache(axis=2), self.step, tokens)

    def time_decode(self, tokens: int, strategy: str) -> None:
        self.decode(tokens, strategy)


class UpdateReallocs:
    """How often the room was enlarged in one decode."""

    params = ([256, 512, 1024, 2048, 4096],)
    param_names = ("tokens",)
    unit = "reallocations"

    def track_reallocs(self, tokens: int) -> int:
        cache = kv.InPlaceCache(axis=2)
        growing(cache, normal(1, 1, 1, 4), tokens)
        return cache.reallocs


class UpdateKVCache:
    """One decode of `tokens` single-token appends of keys and values to an empty `KVCache`, by format."""

    params = ([256, 1024, 4096], list(FORMATS), ["grown", "preallocated"])
    param_names = ("tokens", "formats", "room")
    number = 1
    repeat = (1, 10, 10.0)
    warmup_time = 0

    def setup(self, tokens: int, formats: str, room: str) -> None:
        self.k, self.v = normal(1, HEADS, 1, DIM, seed=1), normal(1, HEADS, 1, DIM, seed=2)
        cache = self.decode(80, formats, room)  # sealed blocks and a residual
        assert len(cache) == 80
        # A channel that is constant within its block is stored as it is, in every format but the 16-bit ones.
        error = np.abs(cache.keys() - self.k).max()
        assert error <= np.abs(self.k).max() * 2.0**-8, error

    def decode(self, tokens: int, formats: str, room: str) -> kv.KVCache:
        k_format, v_format = FORMATS[formats]
        capacity = tokens if room == "preallocated" else 0
        cache = kv.KVCache(HEADS, DIM, k_format=k_format, v_format=v_format, capacity=capacity)
        for _ in range(tokens):
            cache.append(self.k, self.v)
        return cache

    def time_decode(self, tokens: int, formats: str, room: str) -> None:
        self.decode(tokens, formats, room)

"""Cost of what changes a cache besides storing tokens: cuts, rows, files, rows of different length, windows."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import kvnumba as kv

from .common import FORMATS, normal

BATCH, HEADS, DIM = 4, 8, 128


def filled(formats: str, tokens: int) -> kv.KVCache:
    """A cache of *tokens* tokens in each of four rows."""
    k_format, v_format = FORMATS[formats]
    cache = kv.KVCache(HEADS, DIM, k_format=k_format, v_format=v_format, batch_size=BATCH)
    k, v = normal(BATCH, HEADS, tokens, DIM, seed=1), normal(BATCH, HEADS, tokens, DIM, seed=2)
    cache.append(k, v)
    return cache


class State:
    """Changes of a cache of `tokens` tokens, four rows, 8 heads of 128 channels."""

    params = ([256, 4096], ["float32", "int8", "int4"])
    param_names = ("tokens", "formats")
    warmup_time = 0

    def setup(self, tokens: int, formats: str) -> None:
        self.cache = filled(formats, tokens)
        self.token = normal(BATCH, HEADS, 1, DIM, seed=3)
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "cache"
        keys = self.cache.keys()
        for method in (self.time_append_then_truncate, self.time_reorder, self.time_save, self.time_load):
            method(tokens, formats)
        self.time_select_and_repeat(tokens, formats)
        self.time_reorder(tokens, formats)  # and back
        np.testing.assert_array_equal(self.cache.keys(), keys)
        np.testing.assert_array_equal(kv.KVCache.load(self.path).values()[::-1], self.cache.values())

    def teardown(self, tokens: int, formats: str) -> None:
        self.folder.cleanup()

    def time_append_then_truncate(self, tokens: int, formats: str) -> None:
        """A guess of one token that is taken back."""
        self.cache.append(self.token, self.token)
        self.cache.truncate(tokens)

    def time_reorder(self, tokens: int, formats: str) -> None:
        self.cache.reorder([3, 2, 1, 0])

    def time_select_and_repeat(self, tokens: int, formats: str) -> None:
        """One row, four times: on a cache of its own."""
        cache = self.cache.freeze().unfreeze()
        cache.select([1])
        cache.repeat_interleave(BATCH)

    def time_save(self, tokens: int, formats: str) -> None:
        self.cache.save(self.path)

    def time_load(self, tokens: int, formats: str) -> None:
        kv.KVCache.load(self.path)

    def track_file_bytes(self, tokens: int, formats: str) -> int:
        return self.path.stat().st_size

    track_file_bytes.unit = "bytes"


class Rows:
    """One step of four rows of which each holds another number of tokens."""

    params = ([256, 4096], ["float32", "int4"])
    param_names = ("tokens", "formats")
    warmup_time = 0

    def setup(self, tokens: int, formats: str) -> None:
        self.cache = filled(formats, tokens)
        self.cache.truncate([tokens - 30 * b for b in range(BATCH)])
        self.q, self.token = normal(BATCH, 4 * HEADS, 1, DIM, seed=4), normal(BATCH, HEADS, 1, DIM, seed=3)
        out = self.cache.attend(self.q)
        self.cache.truncate(self.cache.lengths)
        np.testing.assert_array_equal(self.cache.attend(self.q), out)
        self.time_step(tokens, formats)

    def time_step(self, tokens: int, formats: str) -> None:
        self.cache.step(self.q, self.token, self.token, lengths=[1, 1, 0, 1])
        self.cache.truncate([tokens - 30 * b for b in range(BATCH)])


class Window:
    """One token through a window of 1,024 that is full."""

    params = (["float32", "int8", "int4"],)
    param_names = ("formats",)
    warmup_time = 0

    def setup(self, formats: str) -> None:
        k_format, v_format = FORMATS[formats]
        self.cache = kv.KVCache(HEADS, DIM, k_format=k_format, v_format=v_format, window=1024)
        self.token = normal(1, HEADS, 1, DIM, seed=3)
        self.q = normal(1, 4 * HEADS, 1, DIM, seed=4)
        self.cache.append(normal(1, HEADS, 2000, DIM, seed=1), normal(1, HEADS, 2000, DIM, seed=2))
        for _ in range(200):  # a step at which tokens are dropped, too
            self.time_step(formats)
        assert len(self.cache) == 2200
        assert self.cache.keys().shape[2] < 1024 + 512

    def time_step(self, formats: str) -> None:
        self.cache.step(self.q, self.token, self.token)


class Layers:
    """A token of all eight layers of a model at once, and its cut."""

    params = (["float32", "int4"],)
    param_names = ("formats",)
    warmup_time = 0

    def setup(self, formats: str) -> None:
        k_format, v_format = FORMATS[formats]
        self.caches = kv.KVCaches(8, HEADS, DIM, k_format=k_format, v_format=v_format)
        self.q, self.token = normal(1, 4 * HEADS, 1, DIM, seed=4), normal(1, HEADS, 1, DIM, seed=3)
        for layer in range(8):
            self.caches.append(layer, *(normal(1, HEADS, 512, DIM, seed=s) for s in (1, 2)))
        self.time_step(formats)
        assert self.caches.length == 512

    def time_step(self, formats: str) -> None:
        for layer in range(8):
            self.caches.step(layer, self.q, self.token, self.token)
        self.caches.truncate(512)

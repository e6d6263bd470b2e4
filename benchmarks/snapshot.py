"""Cost of a snapshot, once and not for every token: the seed's `bench_resume_snapshot`."""

from __future__ import annotations

import numpy as np

from .common import FORMATS, filled_cache

HEADS, DIM = 8, 128


class Snapshot:
    """`freeze` and `unfreeze` of a cache of `tokens` tokens, and the bytes a snapshot holds."""

    params = ([256, 1024, 4096], list(FORMATS))
    param_names = ("tokens", "formats")
    warmup_time = 0

    def setup(self, tokens: int, formats: str) -> None:
        self.cache, self.k, self.v = filled_cache(formats, tokens, HEADS, DIM)
        self.snapshot = self.cache.freeze()
        again = self.snapshot.unfreeze()
        np.testing.assert_array_equal(again.keys(), self.cache.keys())
        np.testing.assert_array_equal(again.values(), self.cache.values())

    def time_freeze(self, tokens: int, formats: str) -> None:
        self.cache.freeze()

    def time_unfreeze(self, tokens: int, formats: str) -> None:
        self.snapshot.unfreeze()

    def track_bytes(self, tokens: int, formats: str) -> int:
        return self.snapshot.nbytes

    track_bytes.unit = "bytes"


class SnapshotBaseline:
    """Two NumPy copies of [1, 8, tokens, 128] float32: what a snapshot of a plain cache costs at least."""

    params = ([256, 1024, 4096],)
    param_names = ("tokens",)

    def setup(self, tokens: int) -> None:
        _, self.k, self.v = filled_cache("float32", tokens, HEADS, DIM)

    def time_copy(self, tokens: int) -> None:
        self.k.copy()
        self.v.copy()

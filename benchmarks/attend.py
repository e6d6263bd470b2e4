"""Cost, traffic and error of one attention step over a cache that is already filled."""

from __future__ import annotations

import time

import numpy as np

from .common import FORMATS, check_attend, filled_cache, normal, numpy_attention, rms

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
TOKENS = [512, 2048, 8192, 32768]


class Attend:
    """One query per head over `tokens` tokens: 32 query heads, 8 KV heads, 128 channels."""

    params = (TOKENS, list(FORMATS))
    param_names = ("tokens", "formats")
    warmup_time = 0.1
    timeout = 180

    def setup(self, tokens: int, formats: str) -> None:
        self.cache, self.k, self.v = filled_cache(formats, tokens, KV_HEADS, DIM, capacity=tokens)
        self.q = normal(1, Q_HEADS, 1, DIM, seed=3)
        self.out = np.empty_like(self.q)
        check_attend(self.cache, self.q)

    def time_attend(self, tokens: int, formats: str) -> None:
        self.cache.attend(self.q, out=self.out)

    def track_float32_bytes_per_second(self, tokens: int, formats: str) -> float:
        """Bytes of the same cache in float32, over the time of a step: above the memory bandwidth, codes pay off."""
        seconds = []
        deadline = time.perf_counter() + 0.5
        while len(seconds) < 5 or (time.perf_counter() < deadline and len(seconds) < 200):
            start = time.perf_counter()
            self.cache.attend(self.q, out=self.out)
            seconds.append(time.perf_counter() - start)
        return (self.k.nbytes + self.v.nbytes) / float(np.median(seconds))

    track_float32_bytes_per_second.unit = "bytes/s"

    def track_bits_per_value(self, tokens: int, formats: str) -> float:
        """Bits held per stored number, with sinks, residual and padding at this length."""
        return 8 * self.cache.nbytes / (self.k.size + self.v.size)

    track_bits_per_value.unit = "bits"

    def track_error_of_format(self, tokens: int, formats: str) -> float:
        """Error of exact attention over the stored numbers against exact attention over the original ones, relative."""
        true = numpy_attention(self.q, self.k, self.v, np.float64)
        return rms(self.stored() - true) / rms(true)

    track_error_of_format.unit = "relative rms"

    def track_added_error(self, tokens: int, formats: str) -> float:
        """Error of `attend` against exact attention over the stored numbers, relative."""
        stored = self.stored()
        return rms(self.cache.attend(self.q) - stored) / rms(stored)

    track_added_error.unit = "relative rms"

    def stored(self) -> np.ndarray:
        return numpy_attention(self.q, self.cache.keys(), self.cache.values(), np.float64)


class AttendBaseline:
    """The same step by matrix products of NumPy over float32 arrays."""

    params = (TOKENS,)
    param_names = ("tokens",)

    def setup(self, tokens: int) -> None:
        _, self.k, self.v = filled_cache("float32", tokens, KV_HEADS, DIM)
        self.q = normal(1, Q_HEADS, 1, DIM, seed=3)

    def time_numpy(self, tokens: int) -> None:
        numpy_attention(self.q, self.k, self.v)

"""Arrays to codes and back, nibbles, and partial results of attention put together."""

from __future__ import annotations

import time

import numpy as np

import kvnumba as kv

from .common import normal

SHAPE = (8, 4096, 128)


class Quantize:
    """An array [8, 4096, 128] of float32, 16 MB, to codes and back."""

    params = (["per_channel", "per_token"], [8, 4])
    param_names = ("layout", "bits")
    warmup_time = 0

    def setup(self, layout: str, bits: int) -> None:
        self.x = normal(*SHAPE)
        self.quantize = kv.quantize_per_channel if layout == "per_channel" else kv.quantize_per_token
        self.tensor = self.quantize(self.x, bits)
        self.out = np.empty(SHAPE, np.float32)
        error = np.abs(self.tensor.dequantize(out=self.out) - self.x).max()
        assert error <= self.tensor.scale.max() * 0.5001

    def time_quantize(self, layout: str, bits: int) -> None:
        self.quantize(self.x, bits)

    def time_dequantize(self, layout: str, bits: int) -> None:
        self.tensor.dequantize(out=self.out)

    def track_gb_per_s(self, layout: str, bits: int) -> float:
        """Bytes of float32 that are quantized in a second."""
        times = []
        for _ in range(5):
            start = time.perf_counter()
            self.quantize(self.x, bits)
            times.append(time.perf_counter() - start)
        return self.x.nbytes / min(times) / 1e9

    track_gb_per_s.unit = "GB/s"

    def track_bits_per_value(self, layout: str, bits: int) -> float:
        return self.tensor.bits_per_value

    track_bits_per_value.unit = "bits"

    def track_rms_error(self, layout: str, bits: int) -> float:
        return self.tensor.error(self.x).rms

    track_rms_error.unit = "of standard normal values"


class Nibbles:
    """16 million codes of 4 bits, two to a byte and back."""

    warmup_time = 0

    def setup(self) -> None:
        self.codes = np.random.default_rng(0).integers(0, 16, (1 << 14, 1 << 10), np.uint8)
        self.packed = kv.pack_nibbles(self.codes)
        np.testing.assert_array_equal(kv.unpack_nibbles(self.packed, self.codes.shape[-1]), self.codes)

    def time_pack(self) -> None:
        kv.pack_nibbles(self.codes)

    def time_unpack(self) -> None:
        kv.unpack_nibbles(self.packed, self.codes.shape[-1])


class Attention:
    """Attention over plain arrays: a prompt of 256 tokens, 8 query heads, 2 KV heads, 64 channels."""

    warmup_time = 0

    def setup(self) -> None:
        self.q = normal(1, 8, 256, 64)
        self.k, self.v = normal(1, 2, 256, 64, seed=1), normal(1, 2, 256, 64, seed=2)
        halves = [
            kv.attention(self.q, self.k[:, :, part], self.v[:, :, part], return_lse=True)
            for part in (slice(0, 128), slice(128, 256))
        ]
        self.outs, self.lses = zip(*halves)
        out, _ = kv.merge_attention(self.outs, self.lses)
        np.testing.assert_allclose(out, kv.attention(self.q, self.k, self.v), atol=1e-5)
        self.time_prompt()

    def time_prompt(self) -> None:
        kv.attention(self.q, self.k, self.v, causal=True)

    def time_merge(self) -> None:
        kv.merge_attention(self.outs, self.lses)


class Codes:
    """`QuantizedCache`: 32 tokens appended to 4,096, and all of them decoded."""

    params = (["per_channel", "per_token"], [8, 4])
    param_names = ("layout", "bits")
    warmup_time = 0

    def setup(self, layout: str, bits: int) -> None:
        self.cache = kv.QuantizedCache(layout, bits)
        self.cache.append(normal(1, 8, 4096, 128))
        self.chunk = normal(1, 8, 32, 128, seed=1)
        self.time_append_then_truncate(layout, bits)
        assert self.cache.contiguous().shape == (1, 8, 4096, 128)

    def time_append_then_truncate(self, layout: str, bits: int) -> None:
        self.cache.append(self.chunk)
        self.cache.truncate(4096)

    def time_contiguous(self, layout: str, bits: int) -> None:
        self.cache.contiguous()

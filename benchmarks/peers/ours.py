"""This package, in every pair of formats."""

from __future__ import annotations

import kvnumba as kv

from ..common import FORMATS
from .work import Entry, Runner, Work


def entries(work: Work) -> list[Entry]:
    kv.set_num_threads(work.threads)
    return [
        Entry(f"kvnumba {name}", bits(*pair), lambda pair=pair: build(work, *pair)) for name, pair in FORMATS.items()
    ]


def bits(k_format: str, v_format: str) -> int:
    """Bits of the narrower format, which decides the error."""
    return min({"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}[x] for x in (k_format, v_format))


def build(work: Work, k_format: str, v_format: str) -> Runner:
    caches = []
    for _ in range(work.layers):
        capacity = work.tokens + 64
        cache = kv.KVCache(work.kv_heads, work.dim, k_format=k_format, v_format=v_format, capacity=capacity)
        cache.append(work.k[:, :, : work.past], work.v[:, :, : work.past])
        caches.append(cache)

    def restore() -> None:
        for cache in caches:
            cache.truncate(work.past)

    return Runner([lambda cache=cache: cache.step(*work.step) for cache in caches], restore=restore)

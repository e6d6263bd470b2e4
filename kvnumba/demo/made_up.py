"""The measurements of ``measure.py`` where there is no model: keys, values and queries come from a random generator.

The shapes are those of SmolLM2-135M. Keys have channels of unequal size and offset, as the keys of real models do;
all the same, what is measured here says nothing about the quality of generated text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from kvnumba.demo.measure import Advance, Row
from kvnumba.demo.model import Caches, Floats, attend_as_streamed, new_caches

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64


def caches(k_format: str, v_format: str, capacity: int, cache_class: Any = None) -> list[Any]:
    """Empty caches of all layers."""
    return new_caches(LAYERS, KV_HEADS, HEAD_DIM, k_format, v_format, capacity, cache_class)


def tokens(count: int, seed: int) -> tuple[Floats, Floats, Floats]:
    """Made-up q [1, 9, count, 64], k and v [1, 3, count, 64], float32."""
    channels = np.random.default_rng(7)  # the same channels stand out in every call
    size = np.exp(channels.normal(0, 0.5, (KV_HEADS, 1, HEAD_DIM)))
    size[:, :, :2] *= 8
    offset = channels.normal(0, 1, (KV_HEADS, 1, HEAD_DIM)) * size
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((1, HEADS, count, HEAD_DIM))
    k = rng.standard_normal((1, KV_HEADS, count, HEAD_DIM)) * size + offset
    v = rng.standard_normal((1, KV_HEADS, count, HEAD_DIM))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def measure_error(rows: Sequence[Row], window: int, chunk: int, advance: Advance, cache_class: Any = None) -> None:
    """Set ``output_error`` of every row, over *window* tokens of one layer, and ``nbytes`` as for all layers.

    The error is rms(difference to the output of the first row) / rms(that output).
    """
    streams = [caches(*row.pair, window, cache_class)[0] for row in rows]
    squares = np.zeros(len(rows))
    reference = 0.0
    for start in range(0, window, chunk):
        q, k, v = tokens(min(chunk, window - start), seed=start)
        outs = [attend_as_streamed(stream, q, k, v).astype(np.float64) for stream in streams]
        squares += [np.square(out - outs[0]).sum() for out in outs]
        reference += np.square(outs[0]).sum()
        advance(q.shape[2])
    for row, stream, square in zip(rows, streams, squares, strict=True):
        row.output_error = float(np.sqrt(square / reference))
        row.nbytes = LAYERS * stream.nbytes
        row.bits_per_value = stream.spec.bits_per_value


@cache
def one_token() -> tuple[Floats, Floats, Floats]:
    """The same made-up token for every step: q, k, v as ``tokens`` gives them."""
    return tokens(1, seed=1)


def step(stream: Caches) -> None:
    """One decode step of nothing but attention: every layer appends a token and attends."""
    q, k, v = one_token()
    for layer in stream:
        layer.append(k, v)
        layer.attend(q, causal=True)

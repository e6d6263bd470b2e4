"""What a cache format costs and saves, measured on a model: quality, bytes, time.

All formats run in lock-step over the same tokens, as streams of one ``Model.forward``. They share the weights and
differ in their caches only, and no more than one chunk of reference scores is alive at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvnumba.demo import PAIRS
from kvnumba.demo.model import Caches, Floats, Model, attend_as_streamed
from kvnumba.demo.text import Text
from kvnumba.spec import Sized

#: Called with the number of units done since the last call.
Advance = Callable[[int], None]
#: ``new_caches(k_format, v_format, capacity)``: empty caches, one per layer.
NewCaches = Callable[[str, str, int], Caches]

#: Tokens whose scores are held at once, for each format: 128 x 49,152 x 4 bytes = 25 MB.
CHUNK = 128


@dataclass
class Quality:
    """Sums over predicted tokens, for one pair of formats.

    Attributes
    ----------
    count : int
        Tokens predicted.
    loss : float
        Sum of ``-log p(token)``.
    divergence : float
        Sum of ``KL(p of float32 || p)``.
    same_top : int
        Tokens for which the most likely token is that of float32.
    """

    count: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    same_top: int = 0

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss / self.count))

    @property
    def kl(self) -> float:
        return self.divergence / self.count

    @property
    def agreement(self) -> float:
        return self.same_top / self.count


@dataclass
class Row:
    """What is known of one pair of formats; the fields fill up as the demo goes on."""

    pair: tuple[str, str]
    quality: Quality = field(default_factory=Quality)
    bits_per_value: float = 0.0
    nbytes: int = 0  # all layers, with the tokens of one window
    step_ms: dict[int, float] = field(default_factory=dict)  # tokens in the cache -> ms per token
    cache_ms: dict[int, float] = field(default_factory=dict)  # of which spent in append and attend
    output_error: float = 0.0  # of attention, relative to float32: see made_up.py


def sample_text() -> str:
    """Prose that every Python has: the topics of ``help()``, in sorted order, joined by newlines."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def windows(text: Text, starts: Sequence[int], length: int) -> list[NDArray[np.int64]]:
    """Windows of *length* tokens of ``sample_text``, int64 each, at the token numbers *starts*."""
    tokens = text.encode(sample_text())
    return [tokens[start : start + length] for start in starts]


def log_softmax(scores: Floats) -> Floats:
    """Log of the softmax over the last axis; *scores* is overwritten and returned."""
    scores -= scores.max(axis=-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True, dtype=np.float32))
    return scores


def compare(logs: Floats, targets: NDArray[np.int64], rows: Sequence[Row]) -> None:
    """Add to ``rows[i].quality`` what ``logs[i]`` [S, V], log-probabilities, say of *targets* [S]."""
    reference, best = np.exp(logs[0]), logs[0].argmax(axis=-1)
    for row, log in zip(rows, logs, strict=True):
        quality = row.quality
        quality.count += len(targets)
        quality.loss -= float(log[np.arange(len(targets)), targets].sum(dtype=np.float64))
        quality.divergence += float(np.einsum("sv,sv->s", reference, logs[0] - log).sum(dtype=np.float64))
        quality.same_top += int((log.argmax(axis=-1) == best).sum())


def measure_quality(
    model: Model, tokens: NDArray[np.int64], rows: Sequence[Row], advance: Advance, cache_class: Any = None
) -> None:
    """Perplexity and KL divergence of every row over one window of text.

    Every query sees the cache as it is when its own token has just arrived: blocks sealed by then as codes, the
    residual in float32 (``attend_as_streamed``). The window starts with empty caches, and each of its tokens
    but the first is predicted. Also sets ``bits_per_value`` and ``nbytes``, with the window in the caches.

    Parameters
    ----------
    model : Model
    tokens : int64 array [n]
    rows : list of Row
        The first is the reference.
    advance : callable
        Called with the number of tokens just done.
    cache_class : type, optional
        What to use in place of ``kvnumba.KVCache``.
    """
    streams = [model.new_caches(*row.pair, len(tokens), cache_class) for row in rows]
    for start in range(0, len(tokens), CHUNK):
        hidden = model.forward(tokens[start : start + CHUNK], streams, attend_as_streamed)
        targets = tokens[start + 1 : start + 1 + CHUNK]
        if len(targets):
            compare(log_softmax(model.logits(hidden[:, : len(targets)])), targets, rows)
        advance(len(hidden[0]))
    for row, caches in zip(rows, streams, strict=True):
        row.nbytes = sum(cache.nbytes for cache in caches)
        row.bits_per_value = caches[0].spec.bits_per_value


class Timed(Sized):
    """A cache that adds up the seconds spent in it."""

    seconds = 0.0

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return len(self.cache)

    def append(self, k: Floats, v: Floats) -> None:
        start = time.perf_counter()
        self.cache.append(k, v)
        Timed.seconds += time.perf_counter() - start

    def attend(self, q: Floats, causal: bool) -> Floats:
        start = time.perf_counter()
        out: Floats = self.cache.attend(q, causal=causal)
        Timed.seconds += time.perf_counter() - start
        return out


def fill(caches: Caches, length: int, seed: int = 0) -> None:
    """Append made-up keys and values, the same for every layer, until the caches hold *length* tokens."""
    count = length - len(caches[0])
    spec = caches[0].spec
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((1, spec.num_kv_heads, count, spec.head_dim), dtype=np.float32)
    v = rng.standard_normal((1, spec.num_kv_heads, count, spec.v_head_dim), dtype=np.float32)
    for cache in caches:
        cache.append(k, v)


def measure_time(
    rows: Sequence[Row],
    new_caches: NewCaches,
    step: Callable[[Caches], object],
    lengths: Sequence[int],
    repeats: int,
    advance: Advance,
) -> None:
    """Milliseconds per token of every row with each of *lengths* tokens in the cache, the new one included.

    The caches are filled with made-up numbers: how long a step takes does not depend on them. After each step the
    caches are truncated again. The formats take turns, so that a slow moment of the machine meets all of them.

    Parameters
    ----------
    rows : list of Row
        Gets ``step_ms`` and ``cache_ms``: medians of *repeats*.
    new_caches : callable
        ``new_caches(k_format, v_format, capacity)``: empty caches of all layers.
    step : callable
        ``step(caches)``: one whole step of one token.
    advance : callable
        Called with 1 after every step; there are ``len(rows) * len(lengths) * (repeats + 1)``.
    """
    streams = [new_caches(*row.pair, max(lengths)) for row in rows]
    for length in sorted(lengths):
        times: list[list[tuple[float, float]]] = [[] for _ in rows]
        for caches in streams:
            fill(caches, length - 1)
        for _ in range(repeats + 1):
            for caches, samples in zip(streams, times, strict=True):
                samples.append(time_step(step, caches))
                advance(1)
        for row, samples in zip(rows, times, strict=True):  # the first round warmed up
            row.step_ms[length], row.cache_ms[length] = (float(ms) for ms in np.median(samples[1:], axis=0))


def time_step(step: Callable[[Caches], object], caches: Caches) -> tuple[float, float]:
    """One step, undone afterwards: milliseconds in all, and of these in the caches."""
    length = len(caches[0])
    Timed.seconds = 0.0
    start = time.perf_counter()
    step([Timed(cache) for cache in caches])
    elapsed = time.perf_counter() - start
    for cache in caches:
        cache.truncate(length)
    return 1e3 * elapsed, 1e3 * Timed.seconds


def new_rows() -> list[Row]:
    """One empty row for each pair of formats."""
    return [Row(pair) for pair in PAIRS]

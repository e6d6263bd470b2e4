"""The work that all peers do, and what a peer has to give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..common import normal, numpy_attention, rms

#: Largest error, relative rms, of a right answer: by bits of a stored number.
RIGHT = {32: 1e-5, 16: 0.02, 8: 0.1, 4: 0.5}


@dataclass(frozen=True)
class Work:
    """Store the last tokens and attend to all: one token for a decode step, all of them for a prompt.

    Attributes
    ----------
    q_heads, kv_heads, dim, tokens : int
        Tokens count the new ones.
    threads : int
    layers : int
        Caches of the same content that a step goes round.
    prompt : bool
        All tokens are new; causal.
    """

    q_heads: int
    kv_heads: int
    dim: int
    tokens: int
    threads: int = 1
    layers: int = 1
    prompt: bool = False

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def new(self) -> int:
        """New tokens, S."""
        return self.tokens if self.prompt else 1

    @property
    def past(self) -> int:
        """Tokens that are in the cache before the work."""
        return self.tokens - self.new

    @cached_property
    def q(self) -> np.ndarray:
        """float32 [1, H_q, S, D]"""
        return normal(1, self.q_heads, self.new, self.dim, seed=3)

    @cached_property
    def k(self) -> np.ndarray:
        """float32 [1, H_kv, T, D], the new tokens last."""
        return normal(1, self.kv_heads, self.tokens, self.dim, seed=1)

    @cached_property
    def v(self) -> np.ndarray:
        """float32 [1, H_kv, T, D], the new tokens last."""
        return normal(1, self.kv_heads, self.tokens, self.dim, seed=2)

    @cached_property
    def step(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, and k and v of the new tokens, contiguous."""
        return self.q, *(np.ascontiguousarray(x[:, :, self.past :]) for x in (self.k, self.v))

    @cached_property
    def expected(self) -> np.ndarray:
        """float64 [1, H_q, S, D], from float64 arithmetic."""
        return by_heads(self.q, self.k, self.v, np.float64)

    @property
    def float32_bytes(self) -> int:
        """Bytes of the keys and values in float32."""
        return 4 * 2 * self.kv_heads * self.tokens * self.dim

    @property
    def flops(self) -> float:
        """Additions and multiplications of the two products, those of masked scores left out."""
        return 4 * self.q_heads * self.dim * self.new * (self.past + (self.new + 1) / 2)


class Runner(NamedTuple):
    """A peer with filled caches.

    Attributes
    ----------
    steps : list of callables
        The work, on each layer's cache.
    read : callable
        What a step returned, as an array that has the numbers of [1, H_q, S, D].
    restore : callable
        Undo what the steps have added to the caches. Not timed.
    """

    steps: list[Callable[[], Any]]
    read: Callable[[Any], np.ndarray] = np.asarray
    restore: Callable[[], None] = lambda: None


class Entry(NamedTuple):
    """One row of the table: its name, the bits of a stored number, how to get a runner."""

    name: str
    bits: int
    build: Callable[[], Runner]


class Errors(NamedTuple):
    """Of an output against float64: the largest, the rms, the rms relative to the rms of the right answer."""

    largest: float
    rms: float
    relative: float


def by_heads(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """`numpy_attention`, one KV head after the other, so that the scores of a prompt fit in memory."""
    group = q.shape[1] // k.shape[1]
    heads = (
        numpy_attention(q[:, group * h : group * (h + 1)], k[:, h : h + 1], v[:, h : h + 1], dtype)
        for h in range(k.shape[1])
    )
    return np.concatenate(list(heads), axis=1)


def errors(work: Work, runner: Runner) -> Errors:
    """Of every layer's output, the worst."""
    runner.restore()
    worst = Errors(0.0, 0.0, 0.0)
    for step in runner.steps:
        out = np.asarray(runner.read(step()), np.float64).reshape(work.expected.shape)
        difference = out - work.expected
        size = rms(difference)
        found = Errors(float(np.abs(difference).max()), size, size / rms(work.expected))
        worst = found if not found.relative <= worst.relative else worst  # NaN is the worst of all
    return worst

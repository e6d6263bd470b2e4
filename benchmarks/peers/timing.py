"""Calls in turns, so that a slow moment of the machine meets all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from .work import Runner, Work

#: Least rounds of one layer, of many (where a sample is the mean of all); seconds of a turn beyond its first call.
ROUNDS, ROUNDS_OF_MANY, TURN = 5, 3, 0.01


def sample(runner: Runner) -> float:
    """Seconds of a step: one pass round all layers, over their number."""
    start = time.perf_counter()
    for step in runner.steps:
        step()
    return (time.perf_counter() - start) / len(runner.steps)


def turn(work: Work, runner: Runner) -> list[float]:
    """Seconds of steps in a row.

    One layer is *hot*: a step that does not count brings its cache near. Many layers, and prompts, come round once.
    """
    runner.restore()
    if work.layers > 1 or work.prompt:
        return [sample(runner)]
    expected = sample(runner)
    calls = min(work.tokens // 64, int(TURN / expected))  # steps lengthen some caches: by 1 in 64 at most
    return [sample(runner) for _ in range(max(calls, 1))]


def in_turns(work: Work, runners: Mapping[str, Runner], seconds: float) -> dict[str, np.ndarray]:
    """Samples of each runner, from rounds that take *seconds* for each on average."""
    found: dict[str, list[float]] = {name: [] for name in runners}
    deadline = time.perf_counter() + seconds * len(runners)
    least, rounds = ROUNDS if work.layers == 1 else ROUNDS_OF_MANY, 0
    while rounds < least or time.perf_counter() < deadline:
        for name, runner in runners.items():
            found[name] += turn(work, runner)
        rounds += 1
    return {name: np.array(samples) for name, samples in found.items()}

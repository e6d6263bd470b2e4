"""What the machine can do at most: bytes read from memory and float32 multiply-adds, both in one second."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np

from kvnumba.simd import LANES, Emitter, Float, Integer, Pointer, microkernel

#: Independent accumulators: enough to hide the latency of a multiply-add on two units, few enough for 32 registers.
CHAINS = 24
#: Vectors that each stream reads in one pass.
VECTORS = 8


class Limits(NamedTuple):
    """Of all threads together: bytes per second by number of streams a thread, multiply-adds as flops per second."""

    one_stream: float
    four_streams: float
    flops: float

    @property
    def bandwidth(self) -> float:
        return max(self.one_stream, self.four_streams)


def _reader(streams: int) -> Callable[..., Any]:
    """A micro-kernel that sums *count* floats of *x*, from as many places at once as there are streams."""

    @microkernel
    def read(e: Emitter, x: Pointer, start: Integer, count: Integer) -> Float:
        pass_ = LANES * VECTORS
        sums = [e.variable(e.zeros()) for _ in range(VECTORS)]
        part = count // streams
        with e.range(0, part, pass_) as i:
            for s in range(streams):
                for u, total in enumerate(sums):
                    total.set(total.get() + e.load(x, start + part * s + i + LANES * u, LANES))
        return e.reduce_add(_together(sums))

    return read


def _together(sums: list[Any]) -> Any:
    """The sum of vectors in variables."""
    total = sums[0].get()
    for other in sums[1:]:
        total = total + other.get()
    return total


_read_one, _read_four = _reader(1), _reader(4)


@microkernel
def _multiply_add(e: Emitter, times: Integer) -> Float:
    """*times* passes of CHAINS vector multiply-adds that do not wait for each other."""
    sums = [e.variable(e.full(i)) for i in range(CHAINS)]
    factor, term = e.full(0.999), e.full(0.001)
    with e.range(0, times):
        for total in sums:
            total.set(e.fma(total.get(), factor, term))
    return e.reduce_add(_together(sums))


@numba.njit(nogil=True)
def read_one(x: np.ndarray, start: int, count: int) -> float:
    return _read_one(x, start, count)


@numba.njit(nogil=True)
def read_four(x: np.ndarray, start: int, count: int) -> float:
    return _read_four(x, start, count)


@numba.njit(nogil=True)
def multiply_add(times: int) -> float:
    return _multiply_add(times)


def shortest(work: Callable[[int], object], threads: int, seconds: float) -> float:
    """Seconds of the fastest of many rounds in which each thread calls *work* with its number."""
    best = np.inf
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            start = time.perf_counter()
            if threads == 1:
                work(0)
            else:
                list(pool.map(work, range(threads)))
            best = min(best, time.perf_counter() - start)
    return float(best)


def _read_part(read: Callable[..., float], x: Any, part: int, thread: int) -> float:
    """What a thread does for the bandwidth: it reads its part of *x*."""
    return read(x, thread * part, part)


def limits(threads: int = 1, seconds: float = 1.0) -> Limits:
    """Measure them, a third of *seconds* each, on 256 MB that the threads share out."""
    x = np.ones(1 << 26, np.float32)
    part = x.size // threads // (4 * LANES * VECTORS) * (4 * LANES * VECTORS)
    assert read_one(x, 0, 4096) == read_four(x, 0, 4096) == 4096
    bandwidth = [
        threads * part * x.itemsize / shortest(partial(_read_part, read, x, part), threads, seconds / 3)
        for read in (read_one, read_four)
    ]
    times = 1 << 18
    flops = threads * times * 2 * LANES * CHAINS / shortest(lambda _: multiply_add(times), threads, seconds / 3)
    return Limits(bandwidth[0], bandwidth[1], flops)


class Others:
    """CPUs that other processes keep busy, on average since this was made; NaN where the system does not tell."""

    def __init__(self) -> None:
        self.start = time.perf_counter(), used_by_others()

    def cpus(self) -> float:
        seconds, used = self.start
        return max(used_by_others() - used, 0.0) / (time.perf_counter() - seconds) if used == used else used


def used_by_others() -> float:
    """CPU seconds of all other processes since the system began."""
    info = Path("/proc/stat")
    if not info.exists():
        return float("nan")
    user, nice, system, _, _, *interrupts = map(int, info.read_text(encoding="utf-8").split("\n")[0].split()[1:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - time.process_time()


def processor() -> str:
    """Name of the processor, as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

"""Build what is installed, check it, time it in turns."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvnumba as kv
from kvnumba.machine import Limits, Others, limits, processor

from .report import numbers, print_table
from .timing import in_turns
from .work import Entry, Errors, Runner, Work, errors

PACKAGES = ("numba", "numpy", "torch", "onnxruntime", "openvino", "tract", "transformers")


def installed(work: Work, names: Sequence[str], skipped: dict[str, str]) -> list[Entry]:
    """What the modules *names* can run; *skipped* gets those that are not installed."""
    found = []
    for name in names:
        try:
            found += importlib.import_module(f".{name}", __package__).entries(work)
        except ImportError as error:
            skipped[name] = f"not installed ({error})"
    return found


def room(work: Work, entry: Entry) -> str:
    """Why the caches of *entry* have no room in memory; empty where they have.

    Counted are the keys and values in float32, another cache for the filling, and the caches twice: some peers make new
    ones at each step. Half of what is free is left alone.
    """
    info = Path("/proc/meminfo")
    if not info.exists():
        return ""
    lines = info.read_text(encoding="utf-8").splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    needed = work.float32_bytes * (3 + 2 * work.layers * entry.bits // 32)
    return f"needs {2 * needed / 1e9:.1f} GB free, has {free / 1e9:.1f}" if 2 * needed > free else ""


def take(work: Work, waiting: list[Entry], skipped: dict[str, str]) -> dict[str, tuple[Entry, Runner, Errors]]:
    """Runners of as many of *waiting* as have room together; their first steps have been compared with float64.

    They leave *waiting*, and so does what cannot be built or run, into *skipped*.
    """
    found: dict[str, tuple[Entry, Runner, Errors]] = {}
    while waiting:
        reason = room(work, waiting[0])
        if reason and found:
            break
        entry = waiting.pop(0)
        if not reason:
            try:
                runner = entry.build()
                found[entry.name] = entry, runner, errors(work, runner)
            except Exception as error:  # of many packages, and any of them may refuse a version, a shape, a processor
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:150]
        if reason:
            skipped[entry.name] = reason
    return found


def run(work: Work, limit: Limits, names: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """Rows of all that is installed, printed as a table with what was skipped and why.

    All take turns, or, where memory is short, as many at once as have room.
    """
    skipped: dict[str, str] = {}
    waiting = installed(work, names, skipped)
    rows, busy = [], [0.0]
    while waiting:
        built = take(work, waiting, skipped)
        others = Others()
        samples = in_turns(work, {name: runner for name, (_, runner, _) in built.items()}, seconds)
        busy.append(others.cpus())
        rows += [numbers(work, entry, samples[name], error, limit) for name, (entry, _, error) in built.items()]
        del built
        gc.collect()
    print_table(work, rows)
    print(f"other processes kept {max(busy):.2f} CPUs busy; measure again if that is much")
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    return [{**row, "others_cpus": max(busy)} for row in rows]


def facts(threads: int) -> dict[str, Any]:
    """The machine and the versions."""
    versions = {"kvnumba": kv.__version__}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"processor": processor(), "threads": threads, "versions": versions}


def best(a: Limits, b: Limits) -> Limits:
    return Limits(*np.maximum(a, b).tolist())


def run_all(works: Sequence[Work], names: Sequence[str], seconds: float) -> dict[str, Any]:
    """All of *works*, one after the other; the limits are the best of those measured before each."""
    first = works[0]
    rows = []
    limit = limits(first.threads)
    for work in works:
        limit = best(limit, limits(work.threads, 0.3))
        print(
            f"\n{limit.one_stream / 1e9:.1f} GB/s read by one stream a thread, {limit.four_streams / 1e9:.1f} by four"
            f" (BW is the higher), {limit.flops / 1e9:.0f} float32 GFLOP/s (FMA)"
        )
        rows += run(work, limit, names, seconds)
    shape = {"q_heads": first.q_heads, "kv_heads": first.kv_heads, "dim": first.dim}
    machine = {**facts(first.threads), **{f"{name}_per_second": x for name, x in limit._asdict().items()}}
    return {"machine": machine, **shape, "rows": rows}

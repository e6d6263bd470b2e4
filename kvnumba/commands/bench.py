"""``kvnumba bench``: what this machine can do, and the time of a step by format and length."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

import kvnumba as kv
from kvnumba.commands import CommandError, in_folder, print_json
from kvnumba.commands.warmup import pairs_of

#: Shape of the layer that is timed: query heads, KV heads, channels.
SHAPE = (32, 8, 128)
#: Signs of a plot in the terminal, by series: as many as there are pairs of formats.
SIGNS = "ox+*#@%&abcdefghijklmnpqrstu"


def bench(formats: str, lengths: str, threads: int, seconds: float, plot: Path | None, as_json: bool) -> None:
    """Measure bandwidth, multiply-adds and steps; print a table and a plot, or JSON; draw a file if asked to."""
    pairs = pairs_of(formats)
    try:
        tokens = sorted({int(n) for n in lengths.split(",")})
    except ValueError:
        tokens = []
    if not tokens or tokens[0] < 1:
        raise CommandError(f"--lengths must be positive numbers with commas between, got {lengths!r}", 2)
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise CommandError(f"--plot must be a file that ends in .png or .svg, got {plot}", 2)
    drawing = _drawing() if plot is not None and in_folder(plot) else None
    result = measured(pairs, tokens, threads, seconds)
    if drawing is not None:
        draw(drawing, result, plot)
    if as_json:
        print_json(result)
        return
    from kvnumba.commands.progress import rows, table

    table({name: result[name] for name in ("processor", "threads", "bandwidth_gb_per_s", "gflop_per_s")})
    rows("milliseconds of a step: one token, 32 query heads, 8 KV heads, 128 channels", result["rows"])
    print(terminal_plot(result["rows"]))


def measured(pairs: list[tuple[str, str]], lengths: list[int], threads: int, seconds: float) -> dict[str, Any]:
    """Limits of the machine, and a row for each pair and length; all take turns."""
    from kvnumba.commands.progress import bar
    from kvnumba.machine import limits, processor

    kv.set_num_threads(threads)
    found = limits(threads, seconds)
    q_heads, kv_heads, dim = SHAPE
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, q_heads, 1, dim), dtype=np.float32)
    rows = []
    with bar("steps", len(lengths) * len(pairs)) as advance:
        for length in lengths:
            k, v = rng.standard_normal((2, 1, kv_heads, length, dim), dtype=np.float32)
            caches = []
            for k_format, v_format in pairs:
                cache = kv.KVCache(kv_heads, dim, k_format=k_format, v_format=v_format, capacity=length)
                cache.append(k, v)
                caches.append(cache)
            times = _in_turns(caches, q, seconds)
            for (k_format, v_format), cache, taken in zip(pairs, caches, times, strict=True):
                least = 1e3 * cache.nbytes / found.bandwidth
                rows.append(
                    {"format": f"{k_format}/{v_format}", "tokens": length, "milliseconds": 1e3 * taken,
                     "at_bandwidth": least, "of_bandwidth": least / (1e3 * taken)}
                )  # fmt: skip
                advance(1)
    return {
        "processor": processor(), "threads": threads, "bandwidth_gb_per_s": found.bandwidth / 1e9,
        "gflop_per_s": found.flops / 1e9, "rows": rows,
    }  # fmt: skip


def _in_turns(caches: list[kv.KVCache], q: Any, seconds: float) -> list[float]:
    """Median seconds of a step of each, from rounds that take *seconds* in all."""
    taken: list[list[float]] = [[] for _ in caches]
    deadline = time.perf_counter() + seconds
    while len(taken[0]) < 4 or time.perf_counter() < deadline:
        for cache, found in zip(caches, taken, strict=True):
            start = time.perf_counter()
            cache.attend(q)
            found.append(time.perf_counter() - start)
    return [float(np.median(found[1:])) for found in taken]  # the first may compile


def terminal_plot(rows: list[dict[str, Any]], width: int = 60, height: int = 14) -> str:
    """Time against tokens, both logarithmic, as text; a sign goes to the nearest free place of its line."""
    names = list(dict.fromkeys(row["format"] for row in rows))
    x = np.log([row["tokens"] for row in rows])
    y = np.log([row["milliseconds"] for row in rows])
    grid = [[" "] * width for _ in range(height)]
    for row, a, b in zip(rows, x, y, strict=True):
        column = 0 if np.ptp(x) == 0 else round((width - 1) * (a - x.min()) / np.ptp(x))
        line = 0 if np.ptp(y) == 0 else round((height - 1) * (b - y.min()) / np.ptp(y))
        places = grid[height - 1 - line]
        free = min((i for i in range(width) if places[i] == " "), key=lambda i: abs(i - column), default=column)
        places[free] = SIGNS[names.index(row["format"]) % len(SIGNS)]
    tokens = [row["tokens"] for row in rows]
    legend = "   ".join(f"{SIGNS[i % len(SIGNS)]} {name}" for i, name in enumerate(names))
    times = [row["milliseconds"] for row in rows]
    lines = [f"{max(times):9.3g} ms |" + "".join(grid[0])]
    lines += [" " * 13 + "|" + "".join(line) for line in grid[1:-1]]
    lines += [f"{min(times):9.3g} ms |" + "".join(grid[-1]), " " * 13 + "+" + "-" * width]
    left, right = f"{min(tokens):,}", f"{max(tokens):,} tokens"
    return "\n".join([*lines, " " * 14 + left + right.rjust(width - len(left)), legend])


def _drawing() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise CommandError("--plot needs the package matplotlib; pip install matplotlib", 2) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw(pyplot: Any, result: dict[str, Any], path: Path | None) -> None:
    """Time of a step against tokens; dashed: the time it takes to read the cache once."""
    from matplotlib.ticker import LogLocator

    q_heads, kv_heads, dim = SHAPE
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name in dict.fromkeys(row["format"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["format"] == name]
        tokens = [row["tokens"] for row in rows]
        (line,) = axes.loglog(tokens, [row["milliseconds"] for row in rows], "o-", label=name)
        axes.loglog(tokens, [row["at_bandwidth"] for row in rows], "--", color=line.get_color())
    axes.plot([], [], "--", color="gray", label=f"reading it once at {result['bandwidth_gb_per_s']:.1f} GB/s")
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set(xlabel="tokens in the cache", ylabel="milliseconds of a step")
    threads = "1 thread" if result["threads"] == 1 else f"{result['threads']} threads"
    axes.set_title(f"One token: {q_heads} query heads, {kv_heads} KV heads, {dim} channels, {threads}", fontsize=10)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)

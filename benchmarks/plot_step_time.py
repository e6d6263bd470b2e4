"""Times one attention step per format against the tokens in the cache, and draws the result.

``python -m benchmarks.plot_step_time`` writes ``docs/images/step_time.json`` and ``docs/images/step_time.svg``
(or what ``--json`` and ``--image`` name), in one to two minutes once everything is compiled. One thread;
32 query heads, 8 KV heads, 128 channels. The limit of each format is the time to read its cache once at the memory
bandwidth that the same run measures. A short cache fits into the processor's own caches and may be faster than that.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

import kvnumba as kv
from kvnumba.machine import limits, processor

from .common import FORMATS, check_attend, filled_cache, normal

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
TOKENS = [256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
DRAWN = ["float32", "float16", "int8", "int4"]
IMAGES = Path(__file__).parents[1] / "docs" / "images"


def samples(function: Callable[[], Any], seconds: float, least: int = 7) -> np.ndarray:
    """Seconds of each call of *function*, for *seconds* and *least* calls, after two calls that do not count."""
    function()
    function()
    found: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(found) < least or time.perf_counter() < deadline:
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return np.array(found)


def measure(tokens: list[int], seconds: float) -> dict[str, Any]:
    """Median and best seconds of a step for each drawn format and each number of tokens."""
    q = normal(1, Q_HEADS, 1, DIM, seed=3)
    out = np.empty_like(q)
    steps = []
    bandwidth = [limits(seconds=seconds).bandwidth]
    for count in tokens:
        for formats in DRAWN:
            cache, _, _ = filled_cache(formats, count, KV_HEADS, DIM, capacity=count)
            check_attend(cache, q)
            found = samples(lambda cache=cache: cache.attend(q, out=out), seconds)
            read = count * kv.CacheSpec(KV_HEADS, DIM, DIM, *FORMATS[formats]).bytes_per_token
            steps.append(
                {
                    "format": formats,
                    "tokens": count,
                    "median_seconds": float(np.median(found)),
                    "best_seconds": float(found.min()),
                    "calls": len(found),
                    "bytes": read,
                }
            )
            print(f"{formats:>9} {count:>6} tokens: {1e6 * steps[-1]['median_seconds']:10.1f} us", flush=True)
    bandwidth.append(limits(seconds=seconds).bandwidth)
    return {
        "kvnumba": kv.__version__,
        "numba": numba.__version__,
        "processor": processor(),
        "q_heads": Q_HEADS,
        "kv_heads": KV_HEADS,
        "dim": DIM,
        "threads": 1,
        "read_bytes_per_second": max(bandwidth),
        "steps": steps,
    }


def draw(result: dict[str, Any], image: Path) -> None:
    """One line per format, and its limit dashed in the same colour."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvnumba"  # the same numbers make the same file
    import matplotlib.pyplot as plt

    bandwidth = result["read_bytes_per_second"]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for index, formats in enumerate(DRAWN):
        steps = [step for step in result["steps"] if step["format"] == formats]
        count = [step["tokens"] for step in steps]
        axes.plot(count, [1e3 * step["median_seconds"] for step in steps], "o-", color=f"C{index}", label=formats)
        axes.plot(count, [1e3 * step["bytes"] / bandwidth for step in steps], "--", color=f"C{index}", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({step["tokens"] for step in result["steps"]}))
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("milliseconds per attention step")
    axes.plot([], [], "--", color="gray", linewidth=1, label=f"reading it once at {bandwidth / 1e9:.0f} GB/s")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.set_title(f"{Q_HEADS} query heads, {KV_HEADS} KV heads, {DIM} channels, one thread", fontsize=10)
    figure.savefig(image, metadata={"Date": None} if image.suffix == ".svg" else None, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=IMAGES / "step_time.json", help="file of the numbers")
    parser.add_argument("--image", type=Path, default=IMAGES / "step_time.svg", help="file of the drawing, SVG or PNG")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths of the cache")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time for each point")
    parser.add_argument("--draw-only", action="store_true", help="draw the numbers that the file already holds")
    args = parser.parse_args()
    for file in (args.json, args.image):
        file.parent.mkdir(parents=True, exist_ok=True)
    if not args.draw_only:
        args.json.write_text(json.dumps(measure(args.tokens, args.seconds), indent=1) + "\n", encoding="utf-8")
    draw(json.loads(args.json.read_text(encoding="utf-8")), args.image)


if __name__ == "__main__":
    main()

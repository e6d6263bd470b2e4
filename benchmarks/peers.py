"""One decode step and one prompt, this package and the peers that are installed, in one run.

``python -m benchmarks.peers`` prints a table of milliseconds and ratios; one thread each; every output is checked
against float64. Peers: ``torch.nn.functional.scaled_dot_product_attention`` and plain NumPy. The calls take turns, so
that a slow moment of the machine meets all of them; the figures are medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .common import filled_cache, normal, numpy_attention
from .plot_step_time import total

Q_HEADS, KV_HEADS, DIM = 32, 8, 128

Call = Callable[[], np.ndarray]


def torch_step(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, Call]:
    """Torch's attention over preallocated float32 keys and values; nothing where torch is not installed."""
    try:
        import torch
    except ModuleNotFoundError:
        return {}
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    attention = torch.nn.functional.scaled_dot_product_attention
    tq, tk, tv = (torch.from_numpy(x) for x in (q, k, v))
    folded = tq.view(1, KV_HEADS, Q_HEADS // KV_HEADS, DIM)
    return {
        "torch sdpa": lambda: attention(tq, tk, tv, enable_gqa=True).numpy(),
        "torch sdpa, heads folded": lambda: attention(folded, tk, tv).numpy().reshape(q.shape),
    }


def ours(formats: str, tokens: int, q: np.ndarray) -> Call:
    cache, _, _ = filled_cache(formats, tokens, KV_HEADS, DIM)
    return lambda: cache.attend(q)


def bandwidth() -> float:
    """Bytes a second that one thread reads from 256 MB."""
    data = np.ones(1 << 26, np.float32)
    total(data)
    best = np.inf
    for _ in range(5):
        start = time.perf_counter()
        total(data)
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def medians(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median seconds of each call; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for name in calls:
        calls[name]()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - start)
    return {name: float(np.median(times)) for name, times in found.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    limit = bandwidth()
    print(f"read bandwidth of one thread: {limit / 1e9:.1f} GB/s (BW)")
    for tokens in options.tokens:
        q = normal(1, Q_HEADS, 1, DIM)
        k, v = normal(1, KV_HEADS, tokens, DIM, seed=1), normal(1, KV_HEADS, tokens, DIM, seed=2)
        calls: dict[str, Call] = {name: ours(name, tokens, q) for name in ("float32", "float16", "int8", "int4")}
        calls["NumPy"] = lambda q=q, k=k, v=v: numpy_attention(q, k, v)  # type: ignore[misc]
        calls |= torch_step(q, k, v)
        report(tokens, calls, medians(calls, options.rounds), numpy_attention(q, k, v, np.float64), k.nbytes * 2, limit)


def report(
    tokens: int, calls: dict[str, Call], seconds: dict[str, float], expected: np.ndarray, size: int, limit: float
) -> None:
    """Print one table: time, float32 bytes a second in units of the bandwidth, times our float32, largest error."""
    print(f"\n{tokens} tokens, H_q {Q_HEADS}, H_kv {KV_HEADS}, D {DIM}, one thread")
    print(f"{'':26}{'ms':>9}{'BW':>7}{'times float32':>15}{'largest error':>15}")
    for name, call in calls.items():
        error: Any = np.abs(call() - expected).max()
        print(
            f"{name:26}{seconds[name] * 1e3:9.3f}{size / seconds[name] / limit:7.2f}"
            f"{seconds['float32'] / seconds[name]:15.2f}{error:15.1e}"
        )


if __name__ == "__main__":
    main()

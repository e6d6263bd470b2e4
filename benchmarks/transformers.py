"""A model of Hugging Face transformers on this cache and on the library's own: ``python -m benchmarks.transformers``.

The model is the demo's, SmolLM2-135M, with float32 weights. At each length the caches are filled with random keys and
values, since the time of a step does not depend on them; then all take turns, one token each, and medians are given.
"cache" is the time of a token spent in ``update`` and in the attention function, of all layers. "peak" is how much the
resident memory of the process rises at most while a cache is filled and makes two steps. Perplexity is over the text of
the demo, in pieces, so that the model reads what is stored.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = [512, 2048, 8000]
#: Formats of ours, and backend and bits of the library's ``QuantizedCache``.
OURS = {
    "float32": ("float32", "float32"), "float16": ("float16", "float16"), "int8": ("int8", "int8"),
    "int8-int4": ("int8", "int4"), "int4": ("int4", "int4"),
}  # fmt: skip
QUANTIZED = {"quanto int4": ("quanto", 4), "hqq int8": ("hqq", 8), "hqq int4": ("hqq", 4)}


class Clock:
    """Adds up the time spent in the functions it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


class Contestant:
    """One cache, and the attention that goes with it."""

    def __init__(self, name: str, model: Any, attention: str, make: Callable[[], Any]) -> None:
        self.name, self.model, self.attention, self.make = name, model, attention, make
        self.cache: Any = None

    def fill(self, length: int) -> None:
        """A new cache of *length* tokens, the same random keys and values for everyone."""
        import torch

        self.cache = self.make()
        config = self.model.config
        draw = torch.Generator().manual_seed(0)
        shape = (1, config.num_key_value_heads, length, config.head_dim)
        for layer in range(config.num_hidden_layers):
            k, v = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
            self.cache.update(k, v, layer)

    def step(self, clock: Clock) -> float:
        """Seconds of one token; those in cache and attention are added to *clock*."""
        import torch

        self.model.set_attn_implementation(self.attention)
        self.cache.update = clock.timed(type(self.cache).update.__get__(self.cache))
        with timed_attention(self.attention, clock), torch.no_grad():
            start = time.perf_counter()
            self.model(torch.tensor([[100]]), cache=self.cache)
            return time.perf_counter() - start


@contextmanager
def timed_attention(name: str, clock: Clock) -> Any:
    from transformers import AttentionInterface

    plain = AttentionInterface()[name]
    AttentionInterface.register(name, clock.timed(plain))
    try:
        yield
    finally:
        AttentionInterface.register(name, plain)


def contestants(model: Any, formats: list[str]) -> list[Contestant]:
    from transformers import DynamicCache
    from transformers.cache_utils import QuantizedCache

    from kvnumba.integrations.transformers import KVNumbaCache

    config = model.config
    found = [Contestant("DynamicCache", model, "sdpa", lambda: DynamicCache(config=config))]
    for name, (backend, bits) in QUANTIZED.items():
        options = {"nbits": bits, **({"axis_key": 1, "axis_value": 1} if backend == "hqq" else {})}
        make = lambda backend=backend, options=options: QuantizedCache(backend, config, **options)  # noqa: E731
        try:
            make()
        except ImportError as error:
            print(f"skipped {name}: {str(error).splitlines()[0]}")
            continue
        found.append(Contestant(name, model, "sdpa", make))
    for name in formats:
        k, v = OURS[name]
        make = lambda k=k, v=v: KVNumbaCache(config, k_format=k, v_format=v)  # noqa: E731
        found.append(Contestant(f"kvnumba {name}", model, "kvnumba", make))
    return found


def peak_bytes(one: Contestant, length: int) -> int | None:
    """Most bytes that the process needed beyond those before the cache was made; None where that is not known."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None

    def kilobytes(field: str) -> int:
        return int(status.read_text().partition(f"{field}:")[2].split()[0])

    one.fill(64)  # what is loaded and compiled once does not count
    one.step(Clock())
    one.cache = None
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # else what was freed before is taken first, and does not show
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    except OSError:
        return None
    before = kilobytes("VmRSS")
    one.fill(length)
    for _ in range(2):
        one.step(Clock())
    one.cache = None
    return 1024 * (kilobytes("VmHWM") - before)


def perplexity(one: Contestant, tokens: np.ndarray, piece: int) -> float:
    """Of *tokens*, read *piece* at a time."""
    import torch

    one.model.set_attn_implementation(one.attention)
    cache, ids, total = one.make(), torch.from_numpy(tokens)[None], 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, piece):
            stop = min(start + piece, len(tokens) - 1)
            logits = one.model(ids[:, start:stop], cache=cache).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, start + 1 : stop + 1], reduction="sum"))
    return float(np.exp(total / (len(tokens) - 1)))


def measure(found: list[Contestant], length: int, steps: int) -> list[dict[str, Any]]:
    """One row for each contestant, with *length* tokens in its cache."""
    peaks = [peak_bytes(one, length) for one in found]
    whole: list[list[float]] = [[] for _ in found]
    cache: list[list[float]] = [[] for _ in found]
    for one in found:
        one.fill(length)
    for _ in range(steps + 1):
        for one, a, b in zip(found, whole, cache, strict=True):
            clock = Clock()
            a.append(one.step(clock))
            b.append(clock.seconds)
    rows = []
    for one, peak, a, b in zip(found, peaks, whole, cache, strict=True):
        one.cache = None
        row = {"name": one.name, "length": length, "milliseconds": 1e3 * float(np.median(a[1:]))}
        rows.append(row | {"cache_milliseconds": 1e3 * float(np.median(b[1:])), "peak_bytes": peak})
    gc.collect()
    return rows


def print_rows(rows: list[dict[str, Any]], qualities: dict[str, float]) -> None:
    first = rows[0]["milliseconds"]
    print(f"\n{rows[0]['length']:,} tokens in the cache")
    print(f"{'':20}{'ms/token':>10}{'speed':>8}{'cache ms':>10}{'peak MB':>9}{'perplexity':>12}")
    for row in rows:
        peak = f"{row['peak_bytes'] / 1e6:9.0f}" if row["peak_bytes"] is not None else f"{'':9}"
        quality = f"{qualities[row['name']]:12.3f}" if row["name"] in qualities else ""
        speed = first / row["milliseconds"]
        print(
            f"{row['name']:20}{row['milliseconds']:10.1f}{speed:8.2f}{row['cache_milliseconds']:10.2f}{peak}{quality}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens in the caches")
    parser.add_argument("--steps", type=int, default=15, help="tokens of each contestant at each length")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--formats", nargs="+", choices=OURS, default=list(OURS), help="ours")
    parser.add_argument("--text", type=int, default=1024, help="tokens of text for the perplexity; 0: none")
    parser.add_argument("--piece", type=int, default=32, help="tokens of text at a time")
    parser.add_argument("--json", type=Path, help="file of the numbers to write")
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    import kvnumba as kv
    from kvnumba.demo.measure import windows
    from kvnumba.demo.model import read_model
    from kvnumba.demo.text import read_text
    from kvnumba.demo.weights import find_weights

    warnings.simplefilter("ignore", FutureWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = find_weights(lambda done, total: None)
    torch.set_num_threads(args.threads)
    kv.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    found = contestants(model, args.formats)
    qualities = {}
    if args.text:
        (tokens,) = windows(read_text(read_model(path)[1]), [0], args.text)
        qualities = {one.name: perplexity(one, tokens, args.piece) for one in found}
    rows = []
    for length in args.lengths:
        part = measure(found, length, args.steps)
        print_rows(part, qualities)
        rows += part
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "rows": rows, "perplexity": qualities}, indent=1))


if __name__ == "__main__":
    main()

"""Tokens per second of a whole model, this package beside llama.cpp: ``python -m benchmarks.end_to_end``.

The model is the demo's, SmolLM2-135M, from one GGUF file. Ours is the demo's forward pass in NumPy with float32
weights; its caches are filled with random keys and values, since the time of a step does not depend on them. llama.cpp
(``llama-cpp-python``, if installed) reads the weights as the file has them; its caches are filled by a prompt of random
tokens. All formats take turns; figures are medians. A step is one token from its number to the scores of the next one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from threadpoolctl import threadpool_limits

import kvnumba as kv
from kvnumba.demo import measure as demo
from kvnumba.demo.model import Model, read_model, times
from kvnumba.demo.weights import find_weights
from kvnumba.machine import limits, processor

from .peers.timing import sample
from .peers.work import Runner

CONTEXTS = [512, 2048, 8160]
#: Our formats, keys and values alike, and llama.cpp's: its numbers for the types of a cache.
OURS = ("float32", "int8", "int4")
LLAMA_CPP = {"f16": 1, "q8_0": 8, "q4_0": 2}


class Ours:
    """The demo's model with caches of one format."""

    def __init__(self, model: Model, form: str, longest: int) -> None:
        self.name = f"kvnumba {form}"
        self.model = model
        self.caches = model.new_caches(form, form, longest)

    def reach(self, context: int) -> None:
        """All but one of *context* tokens, which the step will add."""
        demo.fill(self.caches, context - 1)

    def step(self, threads: int) -> tuple[float, float]:
        """Milliseconds of one token, and those spent in the caches."""
        kv.set_num_threads(threads)
        with threadpool_limits(threads, user_api="blas"):
            return demo.time_step(self.next_token, self.caches)

    def next_token(self, caches: Any) -> Any:
        return self.model.logits(self.model.forward(np.array([1]), [caches]))


class LlamaCpp:
    """llama.cpp with a cache of one type.

    A second instance fills the cache: one with weights as the file has them. The default rearranges them for the matrix
    unit of some processors, which is faster for one token but has been seen to end the process at more than one.
    """

    def __init__(self, path: Path, kind: str, longest: int) -> None:
        self.name = f"llama.cpp {kind}"
        self.model, self.filler = (llama_cpp(path, kind, longest, rearrange) for rearrange in (True, False))
        self.tokens = np.random.default_rng(0).integers(100, 40_000, longest).tolist()

    def reach(self, context: int) -> None:
        """All but one of *context* tokens, which the step will add."""
        from llama_cpp import llama_cpp as api

        self.filler.eval(self.tokens[self.filler.n_tokens : context - 1])
        source, target = self.filler._ctx.ctx, self.model._ctx.ctx
        size = api.llama_state_seq_get_size(source, 0)
        state = (ctypes.c_uint8 * size)()
        api.llama_state_seq_get_data(source, state, size, 0)
        assert api.llama_state_seq_set_data(target, state, size, 0) == size
        self.model.n_tokens = context - 1

    def step(self, threads: int) -> tuple[float, float]:
        """Milliseconds of one token; what of it goes to the cache is not known."""
        from llama_cpp import llama_cpp as api

        context, length = self.model._ctx.ctx, self.model.n_tokens
        api.llama_set_n_threads(context, threads, threads)
        start = time.perf_counter()
        self.model.eval([self.tokens[length]])
        elapsed = time.perf_counter() - start
        api.llama_memory_seq_rm(api.llama_get_memory(context), 0, length, -1)
        self.model.n_tokens = length
        return 1e3 * elapsed, float("nan")


def llama_cpp(path: Path, kind: str, longest: int, rearrange: bool) -> Any:
    """An instance with room for *longest* tokens; whether it may rearrange weights is no option of its class."""
    from llama_cpp import Llama
    from llama_cpp import llama_cpp as api

    parameters = api.llama_model_default_params()
    parameters.use_extra_bufts = rearrange
    options = {"type_k": LLAMA_CPP[kind], "type_v": LLAMA_CPP[kind], "flash_attn": True, "n_batch": 512}
    with mock.patch.object(api, "llama_model_default_params", return_value=parameters):
        return Llama(str(path), n_ctx=longest, n_threads=1, n_threads_batch=2, verbose=False, **options)


def contestants(path: Path, model: Model, longest: int, kinds: Sequence[str]) -> list[Any]:
    found: list[Any] = [Ours(model, form, longest) for form in OURS]
    try:
        found += [LlamaCpp(path, kind, longest) for kind in kinds]
    except ModuleNotFoundError as error:
        print(f"skipped llama.cpp: not installed ({error})")
    return found


def measure(found: list[Any], context: int, threads: int, steps: int) -> list[dict[str, Any]]:
    """One row for each contestant, with *context* tokens in its cache."""
    samples: list[list[tuple[float, float]]] = [[] for _ in found]
    for _ in range(steps + 1):
        for one, taken in zip(found, samples, strict=True):
            taken.append(one.step(threads))
    rows = []
    for one, taken in zip(found, samples, strict=True):
        whole, cache = np.median(taken[1:], axis=0)  # the first round warmed up
        row = {"name": one.name, "context": context, "threads": threads, "milliseconds": float(whole)}
        row["tokens_per_second"] = 1e3 / float(whole)
        row["cache_milliseconds"] = None if np.isnan(cache) else float(cache)
        rows.append(row)
    return rows


def products(model: Model) -> dict[str, tuple[int, Callable[[], Any]]]:
    """The matrix products of a token, all layers of one kind together: bytes of the weights, and the call."""
    weights: dict[str, list[np.ndarray]] = {
        name: [getattr(layer, name) for layer in model.weights.layers]
        for name in ("qkv", "attn_output", "gate_up", "ffn_down")
    }
    weights["output"] = [model.weights.output]
    inputs = {
        matrix.shape[1]: np.ones((1, matrix.shape[1]), np.float32) for some in weights.values() for matrix in some
    }

    def call(some: list[np.ndarray]) -> None:
        for matrix in some:
            times(inputs[matrix.shape[1]], matrix)

    return {name: (sum(m.nbytes for m in some), lambda some=some: call(some)) for name, some in weights.items()}


def weigh(model: Model, threads: int, rounds: int) -> list[dict[str, Any]]:
    """Bytes and median milliseconds of the matrix products of one token, by kind; one after another, as in a step."""
    calls = products(model)
    taken = {name: [] for name in calls}
    with threadpool_limits(threads, user_api="blas"):
        for _ in range(rounds):
            for name, (_, call) in calls.items():
                taken[name].append(sample(Runner([call])))
    return [
        {"name": name, "threads": threads, "bytes": size, "milliseconds": 1e3 * float(np.median(taken[name]))}
        for name, (size, _) in calls.items()
    ]


def print_rows(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(f"\n{first['context']:,} tokens of context, {first['threads']} thread{'s' * (first['threads'] > 1)}")
    print(f"{'':20}{'tokens/s':>10}{'ms':>9}{'in the caches':>15}{'the rest':>10}")
    for row in rows:
        cache = row["cache_milliseconds"]
        parts = f"{cache:15.2f}{row['milliseconds'] - cache:10.2f}" if cache is not None else ""
        print(f"{row['name']:20}{row['tokens_per_second']:10.1f}{row['milliseconds']:9.2f}{parts}", flush=True)


def print_products(rows: list[dict[str, Any]], bandwidth: float) -> None:
    threads = rows[0]["threads"]
    print(f"\nmatrix products of one token, {threads} thread{'s' * (threads > 1)}; BW {bandwidth / 1e9:.1f} GB/s")
    print(f"{'':20}{'MB':>10}{'ms':>9}{'GB/s':>15}")
    size, milliseconds = (sum(row[name] for row in rows) for name in ("bytes", "milliseconds"))
    for row in [*rows, {"name": "all", "bytes": size, "milliseconds": milliseconds}]:
        speed = row["bytes"] / row["milliseconds"] / 1e6
        print(f"{row['name']:20}{row['bytes'] / 1e6:10.1f}{row['milliseconds']:9.2f}{speed:15.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="tokens in the caches")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=15, help="tokens of each contestant at each length")
    parser.add_argument("--llama-cpp", nargs="*", choices=LLAMA_CPP, default=list(LLAMA_CPP), help="its cache types")
    parser.add_argument("--model", type=Path, help="a GGUF file of architecture llama in place of the demo's")
    parser.add_argument("--json", type=Path, help="file of the numbers to write")
    args = parser.parse_args()
    path = args.model or find_weights(lambda done, total: None)
    model, _ = read_model(path)
    found = contestants(path, model, max(args.contexts), args.llama_cpp)
    rows, weights, bandwidths = [], [], {}
    for threads in args.threads:
        bandwidths[threads] = limits(threads, 0.6).bandwidth
        weights += (some := weigh(model, threads, args.steps))
        print_products(some, bandwidths[threads])
    for context in sorted(args.contexts):
        for one in found:
            one.reach(context)
            print(f"{one.name}: the cache holds {context - 1:,} tokens", flush=True)
        for threads in args.threads:
            rows += (some := measure(found, context, threads, args.steps))
            print_rows(some)
    if args.json:
        result = {"processor": processor(), "model": path.name, "read_bytes_per_second": bandwidths}
        result |= {"products": weights, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

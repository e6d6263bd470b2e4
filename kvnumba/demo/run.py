"""The demo from start to end: weights, text, quality, bytes, time."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvnumba._jit import cache_folder
from kvnumba.demo import PAIRS, DemoError, NoWeights, made_up, pair_name
from kvnumba.demo.measure import CHUNK, Row, measure_quality, measure_time, new_rows, windows
from kvnumba.demo.model import Model, generate, read_model
from kvnumba.demo.show import COST, ERROR, QUALITY, Screen, cost_table, time_table
from kvnumba.demo.text import Text, read_text
from kvnumba.demo.weights import find_weights
from kvnumba.spec import FORMATS
from kvnumba.warm import warmup


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    starts: tuple[int, ...]  # windows of text begin at these tokens
    window: int  # tokens of a window
    lengths: tuple[int, ...]  # tokens in the cache when a step is timed
    repeats: int  # timed steps per format and length


#: Pairs that another process compiles meanwhile: about half of the work, and they share the kernels of int8 keys.
ELSEWHERE = [("int8", "int8"), ("int8", "int4")]

FULL = Plan(starts=(0, 40_960), window=2_048, lengths=(512, 2_048, 8_192), repeats=9)
QUICK = Plan(starts=(0,), window=384, lengths=(512, 2_048, 8_192), repeats=3)


def parse_pair(name: str) -> tuple[str, str]:
    """The formats of keys and values that *name* stands for: ``int4``, or ``int8/int4``."""
    k_format, _, v_format = name.partition("/")
    pair = k_format, v_format or k_format
    if not set(pair) <= set(FORMATS):
        raise DemoError(f"--format must be one of {', '.join(FORMATS)}, or two of them as K/V, got {name}")
    return pair


def run(
    prompt: str,
    tokens: int,
    pair: tuple[str, str],
    model: Path | None = None,
    quick: bool = False,
    screen: Screen | None = None,
) -> dict[str, Any]:
    """Run the demo, and return what it showed: numbers by name, formats as a list.

    Parameters
    ----------
    prompt : str
        What the model is asked.
    tokens : int
        Maximum number of tokens in the answer.
    pair : (str, str)
        Formats of keys and values while it answers.
    model : Path, optional
        A GGUF file in place of SmolLM2-135M-Instruct.
    quick : bool
        Measure less, to end in about a minute once compiled.

    Raises
    ------
    DemoError
        Where the model file cannot be used.
    """
    screen = screen or Screen()
    plan = QUICK if quick else FULL
    other = compile_elsewhere(ELSEWHERE)
    try:
        path = model or fetch(screen)
    except NoWeights as error:
        rows = without_model(screen, plan, str(error), other)
        return {"made_up": True, "reason": str(error), "tokens": plan.window, "formats": told(rows)}
    loaded, text = load(screen, path)
    c = loaded.config
    heads = f"{c.head_count} query heads, {c.head_count_kv} KV heads, head dim {c.head_dim}"
    screen.say(f"{path.name}: {c.block_count} layers, {heads}")
    compile_kernels(screen, other)
    given = answer(screen, loaded, text, prompt, tokens, pair)
    rows = new_rows()
    quality(screen, loaded, text, rows, plan)
    timing(screen, loaded, rows, plan)
    measured = {"windows": len(plan.starts), "tokens": min(plan.window, c.context_length)}
    return {"made_up": False, "model": path.name, "answer": given, **measured, "formats": told(rows)}


def told(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of all tables, as numbers by name; times by tokens in the cache."""
    return [
        {
            "keys": row.pair[0],
            "values": row.pair[1],
            **({"perplexity": row.quality.perplexity, "kl": row.quality.kl, "same_top_token": row.quality.agreement}
               if row.quality.count else {"output_error": row.output_error}),
            "nbytes": row.nbytes,
            "bits_per_value": row.bits_per_value,
            "step_ms": row.step_ms,
            "cache_ms": row.cache_ms,
        }
        for row in rows
    ]  # fmt: skip


def one_thread() -> Any:
    """Context in which NumPy's matrix products use one thread.

    The products of one decode step are small and limited by memory. Shared between threads they gain little on an
    idle machine, and on a busy one each of them waits for the slowest thread.
    """
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, user_api="blas")


def fetch(screen: Screen) -> Path:
    """The model file, downloaded if need be."""
    with screen.bar("model file") as bar:
        path = find_weights(bar.to)
        bar.to(1, 1)
    return path


def load(screen: Screen, path: Path) -> tuple[Model, Text]:
    """Weights and vocabulary of a GGUF file."""
    with screen.bar("loading the model") as bar:
        model, reader = read_model(path, bar.to)
        return model, read_text(reader)


def compile_elsewhere(pairs: Sequence[tuple[str, str]]) -> subprocess.Popen[bytes] | None:
    """Compile the kernels of *pairs* in another process, into the folder where this one will find them."""
    if cache_folder() is None:
        return None
    calls = "".join(f"kvnumba.warmup(k_format={k!r}, v_format={v!r});" for k, v in pairs)
    # Not from the current folder, which may hold another kvnumba: a clone, for instance.
    code = f"import sys; sys.path[:] = [place for place in sys.path if place]; import kvnumba; {calls}"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


def compile_kernels(screen: Screen, other: subprocess.Popen[bytes] | None) -> None:
    """Compile every kernel that the demo needs, so that no measurement includes it."""
    with screen.bar("compiling the kernels (once; kept on disk)", len(PAIRS)) as bar:
        for pair in PAIRS:
            if pair not in ELSEWHERE:
                warmup(k_format=pair[0], v_format=pair[1])
                bar.advance(1)
        if other is not None:
            other.wait()
        for k_format, v_format in ELSEWHERE:
            warmup(k_format=k_format, v_format=v_format)
            bar.advance(1)


def answer(screen: Screen, model: Model, text: Text, prompt: str, count: int, pair: tuple[str, str]) -> dict[str, Any]:
    """Show the model's answer to *prompt* as it is generated, then tokens a second; return these."""
    asked = text.encode(text.chat(prompt))
    if not 0 < len(asked) < model.config.context_length:
        raise DemoError(f"--prompt must have 1 to {model.config.context_length - 1} tokens, got {len(asked)}")
    caches = model.new_caches(*pair, len(asked) + count)
    start = time.perf_counter()
    with screen.bar("prefill", len(asked)) as bar:
        for at in range(0, len(asked), CHUNK):
            hidden = model.forward(asked[at : at + CHUNK], [caches])
            bar.advance(hidden.shape[1])
    prefilled = time.perf_counter()
    screen.say(f"\n> {prompt}", style="bold")
    pieces = []
    with one_thread():
        for piece in text.stream(generate(model, hidden, caches, count, text.ends)):
            screen.stream(piece)
            pieces.append(piece)
    given = len(pieces)
    seconds = time.perf_counter() - prefilled
    screen.say(
        f"\n\n{pair_name(*pair)} cache: {given} tokens, {given / seconds:.1f} tokens/s "
        f"(prompt: {len(asked)} tokens, {len(asked) / (prefilled - start):.0f} tokens/s)\n",
        style="dim",
    )
    return {
        "prompt": prompt, "text": "".join(pieces), "keys": pair[0], "values": pair[1], "tokens": given,
        "tokens_per_second": given / seconds, "prompt_tokens": len(asked),
        "prompt_tokens_per_second": len(asked) / (prefilled - start),
    }  # fmt: skip


def quality(screen: Screen, model: Model, text: Text, rows: list[Row], plan: Plan) -> None:
    """Measure and show perplexity, KL divergence and bytes."""
    length = min(plan.window, model.config.context_length)
    samples = windows(text, plan.starts, length)
    with screen.bar("perplexity", sum(len(sample) for sample in samples)) as bar:
        for sample in samples:
            measure_quality(model, sample, rows, bar.advance)
    starts = " and ".join(f"{start:,}" for start in plan.starts)
    caption = (
        f"Text: {len(samples)} x {length:,} tokens of pydoc_data.topics (Python {platform.python_version()}), "
        f"from token {starts}. Change, KL (mean, nats) and top token against float32. "
        f"Cache: all layers, {length:,} tokens."
    )
    if plan is QUICK:
        caption += f" Quick: {length:,} tokens are too few to rank the formats by quality; the full demo takes "
        caption += f"{len(FULL.starts)} windows of {FULL.window:,}."
    screen.console.print(cost_table("What a cache format costs and saves", caption, rows, QUALITY))
    screen.console.print(cost_table("", "", rows, COST))


def timing(screen: Screen, model: Model, rows: list[Row], plan: Plan) -> None:
    """Measure and show milliseconds per token."""
    with one_thread(), screen.bar("time per token", len(rows) * len(plan.lengths) * (plan.repeats + 1)) as bar:
        measure_time(
            rows,
            model.new_caches,
            lambda caches: model.logits(model.forward(np.array([1]), [caches])),
            plan.lengths,
            plan.repeats,
            bar.advance,
        )
    caption = (
        "In brackets: of these in the caches (append and attend, all layers); the rest is the model in NumPy. "
        f"One thread. Medians of {plan.repeats} decode steps; the caches were filled with made-up keys and values."
    )
    if plan is QUICK:
        caption += f" Quick: the full demo takes {FULL.repeats}."
    screen.console.print(time_table("Milliseconds per token, by tokens in the cache", caption, rows))


def without_model(screen: Screen, plan: Plan, why: str, other: subprocess.Popen[bytes] | None) -> list[Row]:
    """The same tables on made-up keys and values, and the reason for it."""
    screen.say(f"No model file: {why}.", style="bold red")
    screen.say("What follows uses MADE-UP keys and values; no language model is run.", style="bold red")
    screen.say("With a network the demo downloads its model once; `--model FILE.gguf` runs one that is here.\n")
    rows = new_rows()
    compile_kernels(screen, other)
    with screen.bar("error (made-up data)", plan.window) as bar:
        made_up.measure_error(rows, plan.window, CHUNK, bar.advance)
    caption = (
        f"Made-up keys, values and queries, {plan.window:,} tokens, the shapes of SmolLM2-135M. Error: rms, against "
        "float32. There is no perplexity without a model."
    )
    screen.console.print(cost_table("MADE-UP DATA: what a cache format costs and saves", caption, rows, ERROR + COST))
    with screen.bar("time (made-up data)", len(rows) * len(plan.lengths) * (plan.repeats + 1)) as bar:
        measure_time(rows, made_up.caches, made_up.step, plan.lengths, plan.repeats, bar.advance)
    caption = f"Append and attend of {made_up.LAYERS} layers (in brackets: without the Python loop). "
    caption += f"One thread. Medians of {plan.repeats} steps."
    screen.console.print(time_table("MADE-UP DATA: milliseconds per token, by tokens in the cache", caption, rows))
    return rows

"""The table of one piece of work, and the numbers for the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvnumba.machine import Limits

from .work import RIGHT, Entry, Errors, Work


def numbers(work: Work, entry: Entry, samples: np.ndarray, errors: Errors, limits: Limits) -> dict[str, Any]:
    """One row of the table, as written to the file."""
    seconds = float(np.median(samples))
    return {
        "work": "prompt" if work.prompt else "step",
        "tokens": work.tokens,
        "layers": work.layers,
        "name": entry.name,
        "bits": entry.bits,
        "seconds": seconds,
        "best_seconds": float(samples.min()),
        "samples": len(samples),
        "float32_bytes_per_second": work.float32_bytes / seconds,
        "of_bandwidth": work.float32_bytes / seconds / limits.bandwidth,
        "of_flops": work.flops / seconds / limits.flops,
        "largest_error": errors.largest,
        "rms_error": errors.rms,
        "relative_error": errors.relative,
        "right": bool(errors.relative <= RIGHT[entry.bits]),
    }


def is_peer(row: dict[str, Any]) -> bool:
    return not row["name"].startswith("kvnumba")


def fastest_peer(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest row of another package whose answer is right."""
    return min((row for row in rows if is_peer(row) and row["right"]), key=lambda row: row["seconds"], default=None)


def title(work: Work) -> str:
    threads = f"{work.threads} thread{'s' * (work.threads > 1)}"
    shape = f"{work.q_heads} query heads, {work.kv_heads} KV heads, {work.dim} channels, {threads}"
    if work.prompt:
        return f"a causal prompt of {work.tokens:,} tokens; {shape}"
    layers = "one layer again and again" if work.layers == 1 else f"round {work.layers} layers"
    return f"a step at {work.tokens:,} tokens, {layers}; {shape}"


def print_table(work: Work, rows: Sequence[dict[str, Any]]) -> None:
    """Time, limit, ratio to the fastest peer (above 1 is faster than it), errors."""
    best = fastest_peer(rows)
    fraction, unit = ("of_flops", "FMA") if work.prompt else ("of_bandwidth", "BW")
    print(f"\n{title(work)}")
    print(f"{'':33}{'ms':>9}{unit:>7}{'times fastest peer':>20}{'largest error':>15}{'rms error':>11}")
    for row in rows:
        ratio = f"{best['seconds'] / row['seconds']:.2f}" if best else "-"
        print(
            f"{row['name']:33}{1e3 * row['seconds']:9.3f}{row[fraction]:7.2f}{ratio:>20}"
            f"{row['largest_error']:15.1e}{row['rms_error']:11.1e}{'' if row['right'] else '   WRONG'}",
            flush=True,
        )

"""Draw a run: float32 bytes per second against length, this package beside the fastest peer of as many bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import fastest_peer, is_peer

#: Bits of a stored number, and which of our formats stands for them.
DRAWN = {32: "kvnumba float32", 16: "kvnumba float16", 8: "kvnumba int8", 4: "kvnumba int4"}


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel for each number of layers, then one for prompts."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvnumba"  # the same numbers make the same file
    import matplotlib.pyplot as plt

    steps = [row for row in result["rows"] if row["work"] == "step"]
    prompts = [row for row in result["rows"] if row["work"] == "prompt"]
    layers = sorted({row["layers"] for row in steps})
    count = len(layers) + bool(prompts)
    figure, panels = plt.subplots(1, count, figsize=(1 + 4 * count, 4.6), layout="constrained", squeeze=False)
    for axes, number in zip(panels[0], layers):
        axes.sharey(panels[0][0])
        draw_steps(axes, [row for row in steps if row["layers"] == number])
        axes.set_title("one layer again and again" if number == 1 else f"round {number} layers", fontsize=10)
    if prompts:
        draw_prompt(panels[0][-1], prompts)
    if layers:
        panels[0][0].set_ylabel("float32 bytes per second / read bandwidth")
        lines = panels[0][0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=len(DRAWN), frameon=False, fontsize=8)
    machine = result["machine"]
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    heads = f"{result['q_heads']} query heads, {result['kv_heads']} KV heads, {result['dim']} channels"
    figure.suptitle(f"{heads}, {threads}", fontsize=10)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def draw_steps(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Ours as lines, the fastest right peer of as many bits dashed in the same colour."""
    tokens = sorted({row["tokens"] for row in rows})
    for index, (bits, name) in enumerate(DRAWN.items()):
        ours = [row for row in rows if row["name"] == name]
        peers = [fastest_peer([r for r in rows if r["tokens"] == n and r["bits"] == bits]) for n in tokens]
        axes.plot(*points(ours), "o-", color=f"C{index}", label=name)
        axes.plot(*points([r for r in peers if r]), "x--", color=f"C{index}", label=f"fastest peer, {bits} bits")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(tokens)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("tokens in the cache")
    axes.grid(alpha=0.3)


def points(rows: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    return [row["tokens"] for row in rows], [row["of_bandwidth"] for row in rows]


def draw_prompt(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Bars of the longest prompt, the fastest on top."""
    longest = max(row["tokens"] for row in rows)
    shown = sorted((r for r in rows if r["tokens"] == longest and r["right"]), key=lambda row: row["of_flops"])
    colours = ["silver" if is_peer(row) else "C0" for row in shown]
    axes.barh([row["name"] for row in shown], [row["of_flops"] for row in shown], color=colours)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("flops / float32 multiply-add peak")
    axes.set_title(f"a causal prompt of {longest:,} tokens", fontsize=10)

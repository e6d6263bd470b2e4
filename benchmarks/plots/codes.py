"""What codes look like: one block of keys with its codes and their error, and how often each code occurs.

``python -m benchmarks.plots.codes`` takes keys and values of the demo's model (``tests/data/model_kv.npz``, which
``python -m tests.dump_model_kv`` made) and writes ``docs/images/block.svg``, ``docs/images/code_counts.svg`` and, with
what the two show as numbers, ``docs/images/codes.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import kvnumba as kv
from kvnumba.spec import BLOCK, SINK

from .style import IMAGES, pyplot, write

DATA = Path(__file__).parents[2] / "tests" / "data" / "model_kv.npz"
LAYER, HEAD, BITS = 29, 1, 4
#: What shares parameters: a channel over the block, as for keys here, or a token, as for values.
GROUPINGS = {"per_channel": "one group a channel", "per_token": "one group a token"}


def coded(x: np.ndarray, layout: str, bits: int) -> kv.QuantizedTensor:
    return kv.quantize_per_channel(x, bits) if layout == "per_channel" else kv.quantize_per_token(x, bits)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def first_block(arrays: Any) -> np.ndarray:
    """Keys of the first sealed block of one head: float32 [32, D]."""
    return np.asarray(arrays[f"k{LAYER}"][0, HEAD, SINK : SINK + BLOCK], np.float32)


def error_of(block: np.ndarray, layout: str) -> np.ndarray:
    return coded(block, layout, BITS).dequantize() - block


def block_numbers(block: np.ndarray) -> dict[str, Any]:
    """What the picture of the block shows."""
    return {
        "layer": LAYER,
        "head": HEAD,
        "bits": BITS,
        "first_token": SINK,
        "tokens": BLOCK,
        "rms_of_keys": rms(block),
        "rms_of_error": {layout: rms(error_of(block, layout)) for layout in GROUPINGS},
    }


def draw_block(block: np.ndarray, image: Path) -> None:
    """Its numbers, then codes and errors of both groupings."""
    plt = pyplot()
    largest, worst = np.abs(block).max(), max(np.abs(error_of(block, layout)).max() for layout in GROUPINGS)
    figure, rows = plt.subplots(2, 3, figsize=(10, 4.6), layout="constrained", sharex=True, sharey=True)
    for (layout, words), axes in zip(GROUPINGS.items(), rows, strict=True):
        codes, error = coded(block, layout, BITS).unpacked(), error_of(block, layout)
        for axis, picture, low, high, colours, title in (
            (axes[0], block, -largest, largest, "RdBu", f"keys, rms {rms(block):.2f}"),
            (axes[1], codes, 0, 2**BITS - 1, "viridis", f"int{BITS} codes, {words}"),
            (axes[2], error, -worst, worst, "RdBu", f"error, rms {rms(error):.3f}"),
        ):
            shown = axis.imshow(picture, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="none")
            axis.set_title(title, fontsize=10)
            figure.colorbar(shown, ax=axis, pad=0.01)
        axes[0].set_ylabel("token of the block")
    for axis in rows[1]:
        axis.set_xlabel("channel")
    write(figure, image)


def shares(x: np.ndarray, layout: str, bits: int) -> list[float]:
    """The share of each code, over the sealed blocks of *x* [1, H, T, D]."""
    sealed = (x.shape[2] - SINK) // BLOCK * BLOCK
    codes = coded(x[:, :, SINK : SINK + sealed].astype(np.float32), layout, bits).unpacked()
    return [round(float(n), 6) for n in np.bincount(codes.ravel(), minlength=2**bits) / codes.size]


def count(arrays: Any) -> dict[str, dict[str, list[float]]]:
    """`shares` of every head, by what is coded and by layer."""
    layers = sorted(int(name[1:]) for name in arrays if name.startswith("k"))
    return {
        f"int{bits} codes of {what}": {
            f"layer {layer}": shares(arrays[f"{what[0]}{layer}"], layout, bits) for layer in layers
        }
        for bits in (4, 8)
        for what, layout in (("keys", "per_channel"), ("values", "per_token"))
    }


def draw_counts(counts: dict[str, dict[str, list[float]]], image: Path) -> None:
    """A panel for each width of codes, of keys and of values."""
    plt = pyplot()
    figure, panels = plt.subplots(2, 2, figsize=(9, 5), layout="constrained")
    for axes, (title, by_layer) in zip(panels.flat, counts.items(), strict=True):
        for index, (layer, share) in enumerate(by_layer.items()):
            edges = np.arange(len(share) + 1) - 0.5
            axes.stairs(100 * np.array(share), edges, fill=not index, alpha=1 if index else 0.5, label=layer)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("code")
        axes.set_ylabel("per cent")
        axes.set_yscale("log" if len(share) > 16 else "linear")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    write(figure, image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where to write")
    args = parser.parse_args()
    with np.load(DATA) as file:
        block, counts = first_block(file), count(file)
    draw_block(block, args.folder / "block.svg")
    draw_counts(counts, args.folder / "code_counts.svg")
    result = {"data": "tests/data/model_kv.npz", "block": block_numbers(block), "counts": counts}
    (args.folder / "codes.json").write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

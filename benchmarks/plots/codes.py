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


def draw_block(arrays: Any, image: Path) -> dict[str, Any]:
    """The first sealed block of one head: numbers, then codes and errors of both groupings."""
    plt = pyplot()
    block = arrays[f"k{LAYER}"][0, HEAD, SINK : SINK + BLOCK].astype(np.float32)  # [32, D]
    both = {layout: coded(block, layout, BITS) for layout in GROUPINGS}
    errors = {layout: tensor.dequantize() - block for layout, tensor in both.items()}
    largest, worst = np.abs(block).max(), max(np.abs(error).max() for error in errors.values())

    figure, rows = plt.subplots(2, 3, figsize=(10, 4.6), layout="constrained", sharex=True, sharey=True)
    for (layout, words), axes in zip(GROUPINGS.items(), rows, strict=True):
        for axis, picture, limits, colours, title in (
            (axes[0], block, (-largest, largest), "RdBu", f"keys, rms {rms(block):.2f}"),
            (axes[1], both[layout].unpacked(), (0, 2**BITS - 1), "viridis", f"int{BITS} codes, {words}"),
            (axes[2], errors[layout], (-worst, worst), "RdBu", f"error, rms {rms(errors[layout]):.3f}"),
        ):
            shown = axis.imshow(
                picture, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", interpolation="none"
            )
            axis.set_title(title, fontsize=10)
            figure.colorbar(shown, ax=axis, pad=0.01)
        axes[0].set_ylabel("token of the block")
    for axis in rows[1]:
        axis.set_xlabel("channel")
    write(figure, image)
    return {
        "layer": LAYER,
        "head": HEAD,
        "bits": BITS,
        "tokens": [SINK, SINK + BLOCK],
        "rms_of_keys": rms(block),
        "rms_of_error": {layout: rms(error) for layout, error in errors.items()},
        "largest_error": {layout: float(np.abs(error).max()) for layout, error in errors.items()},
    }


def draw_counts(arrays: Any, image: Path) -> dict[str, Any]:
    """The share of each code, of all heads of the first and the last layer at hand."""
    plt = pyplot()
    layers = sorted(int(name[1:]) for name in arrays if name.startswith("k"))
    figure, panels = plt.subplots(2, 2, figsize=(9, 5), layout="constrained")
    shares: dict[str, Any] = {}
    for row, bits in zip(panels, (4, 8), strict=True):
        for axes, (name, letter, layout) in zip(
            row, (("keys", "k", "per_channel"), ("values", "v", "per_token")), strict=True
        ):
            for index, layer in enumerate(layers):
                x = arrays[f"{letter}{layer}"].astype(np.float32)[:, :, SINK:]
                whole = x[:, :, : x.shape[2] // BLOCK * BLOCK]  # sealed blocks only
                codes = coded(whole, layout, bits).unpacked()
                share = np.bincount(codes.ravel(), minlength=2**bits) / codes.size
                shares[f"{name} int{bits} layer {layer}"] = [round(float(part), 6) for part in share]
                edges = np.arange(2**bits + 1) - 0.5
                axes.stairs(100 * share, edges, fill=not index, alpha=1 if index else 0.5, label=f"layer {layer}")
            axes.set_title(f"int{bits} codes of {name}", fontsize=10)
            axes.set_xlabel("code")
            axes.set_ylabel("per cent")
            axes.set_yscale("log" if bits == 8 else "linear")
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
    write(figure, image)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where to write")
    args = parser.parse_args()
    with np.load(DATA) as file:
        arrays = dict(file)
    result = {"data": "tests/data/model_kv.npz", "block": draw_block(arrays, args.folder / "block.svg")}
    result["counts"] = draw_counts(arrays, args.folder / "code_counts.svg")
    (args.folder / "codes.json").write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

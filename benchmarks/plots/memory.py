"""Bytes of a model's caches against the tokens in them, by format.

``python -m benchmarks.plots.memory`` computes them from `kvnumba.CacheSpec` and writes ``docs/images/memory.json`` and
``docs/images/memory.svg``: 32 layers, 8 KV heads, 128 channels, or what ``--layers``, ``--kv-heads`` and ``--dim`` say.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import kvnumba as kv

from ..common import FORMATS
from .style import IMAGES, pyplot, write

DRAWN = ["float32", "float16", "int8", "int8-int4", "int4"]
TOKENS = [2**n for n in range(10, 18)]


def compute(layers: int, kv_heads: int, dim: int) -> dict[str, Any]:
    """Bytes of the stored tokens in the long run: without sinks, residual and spare capacity."""
    lines = []
    for name in DRAWN:
        k_format, v_format = FORMATS[name]
        per_token = layers * kv.CacheSpec(kv_heads, dim, k_format=k_format, v_format=v_format).bytes_per_token
        lines.append({"formats": name, "bytes_per_token": per_token, "bytes": [n * per_token for n in TOKENS]})
    return {"layers": layers, "kv_heads": kv_heads, "dim": dim, "tokens": TOKENS, "lines": lines}


def draw(result: dict[str, Any], image: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for index, line in enumerate(result["lines"]):
        name = line["formats"].replace("-", "/")
        label = f"{name}, {line['bytes_per_token'] / 1024:,.1f} KiB a token"
        axes.plot(result["tokens"], [n / 2**30 for n in line["bytes"]], "o-", color=f"C{index}", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(result["tokens"])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("tokens in the caches")
    axes.set_ylabel("GiB, all layers")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    shape = f"{result['layers']} layers, {result['kv_heads']} KV heads, {result['dim']} channels"
    axes.set_title(f"{shape}, one sequence", fontsize=10)
    write(figure, image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128, help="channels of a head")
    parser.add_argument("--json", type=Path, default=IMAGES / "memory.json", help="file of the numbers")
    parser.add_argument("--image", type=Path, default=IMAGES / "memory.svg", help="file of the drawing, SVG or PNG")
    args = parser.parse_args()
    result = compute(args.layers, args.kv_heads, args.dim)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result, args.image)


if __name__ == "__main__":
    main()

"""What each pair of formats costs in quality, measured on the demo's model, against the bits of a stored number.

``python -m benchmarks.plots.quality`` measures as ``kvnumba demo`` does, with three more pairs, and writes
``docs/images/quality.json`` and ``docs/images/quality.svg``. It needs the extras ``bench`` and ``demo``, the model
file of the demo, and some minutes. The results do not depend on the machine's speed; they do depend on the text, which
comes with Python.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import kvnumba as kv

from .style import IMAGES, pyplot, write

#: The first is what the others are compared with.
PAIRS = [
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("int8", "int8"),
    ("int4", "int8"),
    ("int8", "int4"),
    ("int4", "int4"),
]


def measure() -> dict[str, Any]:
    """Perplexity, KL divergence, bytes of every pair, over the windows of text of the whole demo."""
    from kvnumba.demo import pair_name
    from kvnumba.demo.measure import Row, measure_quality, windows
    from kvnumba.demo.model import read_model
    from kvnumba.demo.run import FULL
    from kvnumba.demo.text import read_text
    from kvnumba.demo.weights import find_weights

    path = find_weights(lambda done, total: None)
    model, reader = read_model(path)
    rows = [Row(pair) for pair in PAIRS]
    samples = windows(read_text(reader), FULL.starts, FULL.window)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        print(f"{done} of {sum(map(len, samples))} tokens", flush=True)

    for sample in samples:
        measure_quality(model, sample, rows, advance)
    return {
        "kvnumba": kv.__version__,
        "made_by": "python -m benchmarks.plots.quality",
        "model": path.name,
        "text": "pydoc_data.topics",
        "python": platform.python_version(),
        "window_starts": list(FULL.starts),
        "window_tokens": FULL.window,
        "rows": [
            {
                "formats": pair_name(*row.pair),
                "k_format": row.pair[0],
                "v_format": row.pair[1],
                "bits_per_value": row.bits_per_value,
                "cache_bytes": row.nbytes,
                "perplexity": row.quality.perplexity,
                "kl": row.quality.kl,
                "same_top_token": row.quality.agreement,
            }
            for row in rows
        ],
    }


def draw(result: dict[str, Any], image: Path) -> None:
    """Two panels over the same bits: rise of perplexity in per cent, and KL divergence."""
    plt = pyplot()
    first, *rows = result["rows"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for index, row in enumerate(rows):
        bits = row["bits_per_value"]
        rise = 100 * (row["perplexity"] / first["perplexity"] - 1)
        for axes, y in ((left, rise), (right, row["kl"])):
            axes.plot(bits, y, "o", color=f"C{index}", label=f"{row['formats']}, {bits:g} bits")
    left.axhline(0, color="gray", linewidth=1)
    left.set_ylabel("perplexity above float32, per cent")
    right.set_ylabel("KL divergence from float32, nats")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlim(4, 17)
        axes.set_xlabel("bits per stored number, parameters included")
        axes.grid(alpha=0.3)
    left.legend(frameon=False, fontsize=9)
    windows = f"{len(result['window_starts'])} x {result['window_tokens']:,} tokens"
    figure.suptitle(f"{result['model'].partition('.')[0]}, {windows}, all layers in one format", fontsize=10)
    write(figure, image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=IMAGES / "quality.json", help="file of the numbers")
    parser.add_argument("--image", type=Path, default=IMAGES / "quality.svg", help="file of the drawing, SVG or PNG")
    parser.add_argument("--draw-only", action="store_true", help="draw the numbers that the file already holds")
    args = parser.parse_args()
    if not args.draw_only:
        args.json.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    draw(json.loads(args.json.read_text(encoding="utf-8")), args.image)


if __name__ == "__main__":
    main()

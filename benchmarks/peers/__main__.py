"""``python -m benchmarks.peers``: read the options, set the threads of every library, then run."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from .. import THREADS
from . import PEERS
from . import __doc__ as about


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(about or "").partition(":")[0])
    parser.add_argument("--shape", type=int, nargs=3, default=[32, 8, 128], metavar=("H_Q", "H_KV", "D"))
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[256, 2048, 8192], help="lengths of the cache of a step"
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[1], help="caches that a step goes round: 1 is hot, 32 is a model"
    )
    parser.add_argument("--prefill", type=int, nargs="*", default=[], metavar="N", help="lengths of causal prompts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each row, on average")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="run these only")
    parser.add_argument("--json", type=Path, help="file of the numbers to write")
    parser.add_argument("--plot", type=Path, help="picture to draw, PNG or SVG; needs matplotlib")
    parser.add_argument("--draw-only", action="store_true", help="draw the numbers that the file --json already holds")
    return parser.parse_args()


def main() -> None:
    args = options()
    for name in THREADS:  # read when the libraries are imported, so this must come before them
        os.environ[name] = str(args.threads)
    import json

    if args.draw_only:
        result = json.loads(args.json.read_text(encoding="utf-8"))
    else:
        from .run import run_all
        from .work import Work

        works = [Work(*args.shape, n, args.threads, layers) for layers in args.layers for n in args.tokens]
        works += [Work(*args.shape, n, args.threads, prompt=True) for n in args.prefill]
        result = run_all(works, args.peers, args.seconds)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        from .plot import draw

        draw(result, args.plot)


if __name__ == "__main__":
    main()

"""The drawings of ``docs/attention_on_codes.md``: boxes, words and arrows as SVG, on white for dark pages too.

``python -m benchmarks.plots.drawings`` writes ``pieces.svg``, ``key_block.svg``, ``value_block.svg`` and ``lanes.svg``
into ``docs/images``.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

from .style import IMAGES

INK, FAINT = "#1f2328", "#6e7781"
FLOAT, CODES, PARAMETERS, QUERY, RESULT = "#cfe3f7", "#fde3b5", "#d8efd3", "#e9d8f4", "#f6d5d5"
WIDTH = 560


class Drawing:
    """An SVG image that grows by `box`, `text` and `arrow`; lengths are pixels."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, label: str = "", size: int = 14) -> None:
        """A filled rectangle with *label* in its middle, a line for each line of it."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{INK}"/>')
        lines = label.split("\n") if label else []
        for i, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + size * (0.35 + 1.2 * (i - (len(lines) - 1) / 2)), line, "middle", size)

    def text(self, x: float, y: float, words: str, anchor: str = "start", size: int = 14, colour: str = INK) -> None:
        look = f'text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {look}>{escape(words)}</text>')

    def grid(self, x: float, y: float, columns: int, rows: int, cell: float, fill: str) -> None:
        """*columns* times *rows* squares."""
        for i in range(columns):
            for j in range(rows):
                self.box(x + i * cell, y + j * cell, cell, cell, fill)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        line = f'x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"'
        self.parts.append(f'<line {line} stroke="{INK}" stroke-width="1.5" marker-end="url(#head)"/>')

    def write(self, path: Path) -> None:
        head = '<marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height}" '
            f'viewBox="0 0 {WIDTH} {self.height}" role="img" font-family="sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f'<defs>{head}<path d="M0,0 L6,3 L0,6 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{self.height}" rx="6" fill="#ffffff"/>',
            *self.parts,
            "</svg>",
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"wrote {path}")


def pieces() -> Drawing:
    """The tokens of a cache, what each piece is, and the states that are merged."""
    d = Drawing("The tokens of a cache in pieces: sinks, sealed blocks, residual. One state for each, merged.", 330)
    d.text(20, 28, "tokens")
    spans = [(20, 70, "0 .. 3", "sinks"), (90, 130, "4 .. 35", "block 0"), (220, 130, "36 .. 67", "block 1")]
    for x, w, numbers, name in [*spans, (350, 190, "68 .. length - 1", "residual")]:
        d.text(x + w / 2, 56, numbers, "middle", 13, FAINT)
        d.text(x + w / 2, 76, name, "middle", 13)
    for y, kind in ((88, "keys"), (140, "values")):
        d.box(20, y, 70, 44, FLOAT, f"{kind}\nfloat32", 12)
        for x in (90, 220):
            d.box(x, y, 130, 44, CODES, f"{kind}: codes,\nlo, scale", 12)
        fill, label = (FLOAT, "keys: float32") if kind == "keys" else (CODES, "values: codes, lo, scale")
        d.box(350, y, 190, 44, fill, label, 12)
    for x in (55, 155, 285, 445):
        d.arrow(x, 186, x, 210)
        d.box(x - 45, 214, 90, 30, QUERY, "m, l, acc", 13)
        d.arrow(x, 244, 280 + (x - 280) * 0.2, 276)
    d.box(170, 280, 220, 34, RESULT, "merged: out = acc / l", 14)
    return d


def key_block() -> Drawing:
    """Scores of 32 tokens from one block of key codes."""
    d = Drawing("Scores of a block of keys: one sum for all tokens, one product with codes for each.", 350)
    d.text(20, 28, "once for a query and a block")
    for x, label, fill in ((20, "q", QUERY), (150, "scale", PARAMETERS), (310, "q", QUERY), (440, "lo", PARAMETERS)):
        d.text(x + 50, 52, label, "middle", 13)
        d.grid(x, 58, 5, 1, 20, fill)
    d.text(135, 73, "×", "middle", 16)
    d.text(425, 74, "·", "middle", 20)
    d.arrow(130, 82, 130, 104)
    d.arrow(425, 82, 425, 104)
    d.grid(80, 110, 5, 1, 20, QUERY)
    d.text(195, 125, "weights: D numbers,")
    d.text(195, 143, "rounded to 16 bits")
    d.box(405, 110, 40, 20, QUERY)
    d.text(460, 125, "one number")
    d.text(20, 185, "for each token of the block")
    d.grid(80, 200, 5, 6, 20, CODES)
    d.text(70, 215, "token 0", "end", 12, FAINT)
    d.text(70, 235, "1", "end", 12, FAINT)
    d.text(70, 315, "31", "end", 12, FAINT)
    d.text(130, 340, "codes, D channels", "middle", 13)
    d.text(215, 265, "· weights  +  the number  =", size=15)
    d.grid(415, 200, 1, 6, 20, RESULT)
    d.text(450, 255, "32 scores,")
    d.text(450, 275, "then × sm_scale")
    return d


def value_block() -> Drawing:
    """What a tile of value codes adds to the output."""
    d = Drawing("A tile of values: one sum for all channels, one product with codes for each.", 330)
    d.text(20, 28, "once for a query and a tile")
    d.text(50, 52, "p", "middle", 13)
    d.grid(40, 58, 1, 6, 20, QUERY)
    d.text(75, 122, "×", "middle", 16)
    d.text(100, 52, "scale", "middle", 13)
    d.grid(90, 58, 1, 6, 20, PARAMETERS)
    d.text(130, 122, "=", "middle", 16)
    d.text(160, 52, "weights", "middle", 13)
    d.grid(150, 58, 1, 6, 20, QUERY)
    d.text(330, 52, "p", "middle", 13)
    d.grid(320, 58, 1, 6, 20, QUERY)
    d.text(355, 122, "·", "middle", 20)
    d.text(380, 52, "lo", "middle", 13)
    d.grid(370, 58, 1, 6, 20, PARAMETERS)
    d.text(408, 122, "=", "middle", 16)
    d.box(425, 108, 40, 20, QUERY)
    d.text(475, 123, "one number")
    d.text(20, 215, "for each channel")
    d.grid(40, 228, 7, 4, 20, CODES)
    d.text(30, 243, "0", "end", 12, FAINT)
    d.text(110, 324, "codes of the tokens, D channels", "middle", 13)
    d.text(195, 255, "weights · codes", size=15)
    d.text(195, 275, "+  the number  =", size=15)
    d.grid(330, 250, 7, 1, 20, RESULT)
    d.text(330, 292, "added to acc: D channels")
    return d


def lanes() -> Drawing:
    """One instruction on a vector of int8 key codes."""
    d = Drawing("One multiply-add of bytes: four channels are added to the scores of 16 tokens.", 292)
    d.text(20, 26, "64 bytes of key codes: 16 tokens × 4 channels")
    d.text(20, 112, "64 bytes of weights: the same 4 channels in each lane")
    for i in range(5):
        x = 20 + 106 * i
        last = i == 4
        token = 15 if last else i
        if i == 3:
            for y in (62, 148, 236):
                d.text(x + 50, y, "...", "middle", 18)
            continue
        for c in range(4):
            d.box(x + 25 * c, 38, 25, 38, CODES, f"t{token}\nc{c}", 11)
            d.box(x + 25 * c, 124, 25, 38, QUERY, f"w{c}", 11)
            d.arrow(x + 25 * c + 12, 164, x + 50 + 6 * (c - 1.5), 208)
        d.box(x, 212, 100, 36, RESULT, f"score of t{token}", 12)
    d.text(20, 274, "16 sums of 32 bits: one score a lane, and no sum across lanes")
    return d


DRAWINGS = (pieces, key_block, value_block, lanes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where to write")
    folder = parser.parse_args().folder
    for draw in DRAWINGS:
        draw().write(folder / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main()

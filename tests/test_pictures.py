"""The pictures and tables of the documentation show the numbers that lie beside them."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import kvnumba as kv

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"


@pytest.fixture
def plots(monkeypatch):
    """``plots(name)``: a module of `benchmarks.plots`."""
    monkeypatch.syspath_prepend(str(ROOT))
    for name in ("MKL", "NUMBA", "OMP", "OPENBLAS", "RAYON"):
        monkeypatch.setenv(f"{name}_NUM_THREADS", "1")  # what `benchmarks` would set for good
    yield lambda name: importlib.import_module(f"benchmarks.plots.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


def read(name):
    return json.loads((IMAGES / f"{name}.json").read_text(encoding="utf-8"))


def test_the_numbers_of_the_memory_plot_are_those_of_cache_spec(plots):
    assert plots("memory").compute(32, 8, 128) == read("memory")


def test_the_drawings_are_those_that_their_script_makes(plots, tmp_path):
    for draw in plots("drawings").DRAWINGS:
        name = f"{draw.__name__}.svg"
        draw().write(tmp_path / name)
        assert (tmp_path / name).read_bytes() == (IMAGES / name).read_bytes(), name


def test_the_numbers_of_the_pictures_of_codes_are_those_of_the_model(plots):
    codes, written = plots("codes"), read("codes")
    with np.load(codes.DATA) as file:
        block, counts = codes.first_block(file), codes.count(file)
    found = codes.block_numbers(block)
    assert found.pop("rms_of_error") == pytest.approx(written["block"].pop("rms_of_error"))
    assert found == pytest.approx(written["block"])
    assert counts == written["counts"]


@pytest.mark.plots
@pytest.mark.parametrize("name", ["memory", "codes", "quality"])
def test_a_picture_can_be_drawn_again(plots, name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib (extra bench)")
    arguments = {
        "memory": ["--json", str(tmp_path / "memory.json"), "--image", str(tmp_path / "memory.svg")],
        "codes": ["--folder", str(tmp_path)],
        "quality": ["--draw-only", "--image", str(tmp_path / "quality.svg")],
    }
    monkeypatch.setattr(sys, "argv", [name, *arguments[name]])
    plots(name).main()
    pictures = list(tmp_path.glob("*.svg"))
    assert pictures
    assert all((IMAGES / picture.name).exists() for picture in pictures)


def table_of(page, head):
    """The rows of the table of *page* whose first cell of the head is *head*, as cells."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_table_of_the_formats_has_the_numbers_that_were_measured():
    quality = {row["formats"]: row for row in read("quality")["rows"]}
    steps = {
        row["name"].removeprefix("kvnumba ").replace("-", "/"): 1e3 * row["seconds"]
        for row in read("peers")["rows"]
        if row["name"].startswith("kvnumba ") and (row["work"], row["tokens"], row["layers"]) == ("step", 8192, 1)
    }
    reference = quality["float32"]["perplexity"]
    rows = table_of("choosing.md", "keys / values")
    assert len(rows) == len(quality)
    for formats, size, bits, smaller, ms, perplexity, kl, top in rows:
        name = formats.replace(" ", "")
        k_format, v_format = (name.split("/") * 2)[:2]
        spec, row = kv.CacheSpec(8, 128, k_format=k_format, v_format=v_format), quality[name]
        assert float(size.replace(",", "")) == spec.bytes_per_token
        assert float(bits) == spec.bits_per_value
        assert smaller == f"{32 / spec.bits_per_value:.2f}"
        if name in steps:
            assert ms == f"{steps[name]:.2f}"
        else:
            assert ms == "not measured"
        change = f"{100 * (row['perplexity'] / reference - 1):+.2f} %".replace("-0.00", "+0.00")
        assert perplexity == (f"{reference:.3f}" if name == "float32" else change)
        decimals = len(re.sub(r"^\d+\.?", "", kl))
        assert float(kl) == round(row["kl"], decimals)
        assert float(top.removesuffix(" %")) == round(100 * row["same_top_token"], 1)

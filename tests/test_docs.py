"""The documentation is true: its Python runs, its commands exist, its pages are listed."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvnumba as kv
from kvnumba import graph, kernels

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: ``<!-- needs: torch transformers -->`` in a page: packages without which its Python is skipped.
NEEDS = re.compile(r"<!-- needs: ([\w ]+) -->")
#: Markers of pytest, most of them names of packages.
MARKERS = re.findall(r'^    "(\w+): ', PYPROJECT, re.MULTILINE)
#: What a command line hands to the shell.
JOINTS = ("&&", "||", "|", ";")


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The blocks of *page* in *language*, each with the number of lines before it."""
    text = page.read_text(encoding="utf-8")
    return [(text[: found.start(2)].count("\n"), found[2]) for found in BLOCK.finditer(text) if found[1] == language]


def needs(page: Path) -> list[str]:
    found = NEEDS.search(page.read_text(encoding="utf-8"))
    return found[1].split() if found else []


def program(page: Path) -> str:
    """The Python of *page* as one program, at the lines where it stands, so that errors name them."""
    lines: list[str] = []
    for before, block in blocks(page, "python"):
        lines += [""] * (before - len(lines)) + block.splitlines()
    return "\n".join(lines) + "\n"


def of_pages(language: str) -> pytest.MarkDecorator:
    """One test for each page with blocks in *language*, marked by the packages that its Python needs."""
    pages = []
    for page in PAGES:
        if blocks(page, language):
            marks = [getattr(pytest.mark, name) for name in needs(page) if name in MARKERS and language == "python"]
            pages.append(pytest.param(page, id=page.stem, marks=marks))
    return pytest.mark.parametrize("page", pages)


@pytest.fixture
def threads():
    """What a page sets for the whole process, set back."""
    before = kv.get_num_threads()
    yield
    kv.set_num_threads(before)


@of_pages("python")
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, threads):
    missing = [name for name in needs(page) if find_spec(name) is None]
    if missing:
        pytest.skip(f"{page.name} needs {' and '.join(missing)}")
    script = tmp_path / f"page_{page.stem}.py"
    script.write_text(program(page), encoding="utf-8")
    monkeypatch.chdir(tmp_path)  # what a page writes stays there
    runpy.run_path(str(script))


def commands(page: Path) -> list[list[str]]:
    """The commands of the shell blocks of *page*, as words, without variables set before them."""
    found = []
    for _, block in blocks(page, "sh"):
        for line in re.sub(r"\$\(.*?\)", "X", block.replace("\\\n", " ")).splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = next((i for i, word in enumerate(words) if word in JOINTS), len(words))
                command = [word for word in words[:end] if not re.fullmatch(r"[A-Z_]+=.*", word)]
                found += [command] if command else []
                words = words[end + 1 :]
    return found


def help_of(*words: str) -> str:
    """What ``kvnumba WORDS --help`` prints; a command that does not exist fails."""
    code = "from kvnumba.cli import main; main()"
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--help"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"kvnumba {' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def module_exists(dotted: str) -> bool:
    file = ROOT.joinpath(*dotted.split("."))
    return file.with_suffix(".py").exists() or (file / "__main__.py").exists()


def wrong(words: list[str]) -> str | None:
    """What does not exist of one command of this repository; None if all does, or if it is another's command."""
    if words[0] == "kvnumba":
        subcommand = [word for word in words[1:2] if not word.startswith("-")]
        told = help_of(*subcommand)
        options = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
        return next((option for option in options if option not in told), None)
    if words[:2] == ["python", "-m"] and words[2].partition(".")[0] in ("benchmarks", "tests"):
        return None if module_exists(words[2]) else words[2]
    if words[0] == "python" and words[1].endswith(".py"):
        return None if (ROOT / words[1]).exists() else words[1]
    if words[:2] == ["pip", "install"]:
        extras = ",".join(re.findall(r"\.\[([\w,]+)\]", " ".join(words))).split(",")
        return next((name for name in extras if name and f"\n{name} = [" not in PYPROJECT), None)
    return None


@of_pages("sh")
def test_the_commands_of_a_page_exist(page):
    if find_spec("typer") is None and any(words[0] == "kvnumba" for words in commands(page)):
        pytest.skip("the command line needs typer")
    assert {" ".join(words): wrong(words) for words in commands(page) if wrong(words)} == {}


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES if page.parent == DOCS])
def test_a_page_is_in_the_table_and_in_the_tree_of_the_index(page):
    if page.stem != "index":
        index = (DOCS / "index.md").read_text(encoding="utf-8")
        assert f"]({page.name})" in index, f"docs/index.md must have a line for {page.name} in one of its tables"
        assert f"\n{page.stem}\n" in index, f"docs/index.md must name {page.stem} in one of its toctrees"


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_the_links_of_a_page_lead_to_files(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    names = [f"kvnumba.{name}" for name in kv.__all__ if not name.startswith("__")]
    names += [f"kvnumba.kernels.{name}" for name in kernels.__all__]
    names += [f"kvnumba.graph.{name}" for name in graph.__all__]
    for module in ("graph.nnef", "integrations.transformers"):  # read, not imported: they need their extras
        source = (ROOT / "kvnumba" / module.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
        listed = re.search(r"__all__ = (\[.*?\])", source, re.DOTALL)
        names += [f"kvnumba.{module}.{name}" for name in ast.literal_eval(listed[1])]
    assert [name for name in names if not re.search(rf":: {re.escape(name)}$", text, re.MULTILINE)] == []

"""The Python blocks of the documentation run, page by page, as one program each."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(ROOT.glob("docs/*.md"))

#: Packages that the blocks of a page need besides those of the tests.
NEEDS = {"transformers": ("torch", "transformers")}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def program(page: Path) -> str:
    """The Python blocks of *page*, each at the lines where it stands, so that errors name them."""
    text = page.read_text(encoding="utf-8")
    kept = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first = text[: block.start(1)].count("\n")
        lines = block[1].splitlines()
        kept[first : first + len(lines)] = lines
    return "\n".join(kept)


def marks(page: Path) -> list[pytest.MarkDecorator]:
    return [getattr(pytest.mark, name) for name in NEEDS.get(page.stem, ()) if name in ("transformers", "onnx")]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=marks(page)) for page in PAGES if BLOCK.search(page.read_text("utf-8"))],
)
def test_the_python_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    missing = [name for name in NEEDS.get(page.stem, ()) if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    script = tmp_path / f"page_{page.stem}.py"
    script.write_text(program(page), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

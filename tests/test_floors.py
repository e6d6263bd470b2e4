"""Imports go down only: every file of the package stands on a floor and imports from its own or a lower one."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import kvnumba
from kvnumba._jit import SOURCES

PACKAGE = Path(kvnumba.__file__).parent

# Patterns of file names; `*` also crosses folders. A new file is added here in the same commit.
FLOORS: dict[int, tuple[str, ...]] = {
    0: ("_jit.py", "_version.py", "reference.py", "simd.py", "spec.py"),
    1: ("buffers.py", "checks.py", "kernels/packing.py", "kernels/places.py"),
    2: (
        "kernels/ahead.py",
        "kernels/codes.py",
        "kernels/decode.py",
        "kernels/encode.py",
        "kernels/interchange.py",
        "kernels/panels.py",
        "kernels/quantize.py",
        "kernels/rows.py",
        "kernels/softmax.py",
        "kernels/states.py",
        "kernels/tiles.py",
    ),
    3: ("kernels/append.py", "kernels/attention*.py"),
    4: (
        "functional.py",
        "cache.py",
        "container.py",
        "growing.py",
        "interchange.py",
        "kernels/__init__.py",
        "machine.py",
        "kernels/entry.py",
        "quantization/*",
        "snapshot.py",
        "storage.py",
        "threads.py",
        "uncompiled.py",
        "warm.py",
        "window.py",
    ),
    5: ("__init__.py", "__main__.py", "cli.py", "commands/*", "demo/*", "graph/*", "integrations/*"),
}

# Write path and read path: two roads that meet only in buffers.py and below.
WRITE_PATH = ("kernels/append.py",)
READ_PATH = ("kernels/attention*.py",)

# What `import kvnumba` must leave alone.
HEAVY = ("gguf", "onnx", "rich", "tokenizers", "torch", "transformers", "typer")
HEAVY += tuple(f"kvnumba.{name}" for name in ("cli", "commands", "demo", "graph", "integrations", "reference"))


def listed(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(file, pattern) for pattern in patterns)


def floor_of(file: str) -> int | None:
    """Floor of a file named relative to the package, or None if the table does not list it."""
    return next((floor for floor, patterns in FLOORS.items() if listed(file, patterns)), None)


def module_file(root: Path, dotted: str) -> str | None:
    """File, relative to *root*, of the module ``kvnumba.<dotted>``; None if there is none."""
    base = root.joinpath(*dotted.split(".")) if dotted else root
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path.relative_to(root).as_posix()
    return None


def imported_files(root: Path, file: str) -> set[str]:
    """Files of the package that *file* imports, anywhere in its text."""
    package = file.split("/")[:-1]  # folders above the file, for relative imports
    found: set[str | None] = set()
    for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {module_file(root, ".".join(name[1:])) for name in names if name[0] == "kvnumba"}
        elif isinstance(node, ast.ImportFrom):
            source = node.module.split(".") if node.module else []
            if node.level:
                source = package[: len(package) - node.level + 1] + source
            elif source[0] == "kvnumba":
                source = source[1:]
            else:
                continue
            for alias in node.names:  # `from package import name`: the module `name` if there is one, else the package
                found.add(module_file(root, ".".join([*source, alias.name])) or module_file(root, ".".join(source)))
    return {name for name in found if name is not None and name != file}


def faults(root: Path) -> list[str]:
    """Every breach of the floor table below *root*, as sentences."""
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    said = [f"{file} must stand on a floor: add it to FLOORS" for file in files if floor_of(file) is None]
    for file in files:
        for other in sorted(imported_files(root, file)):
            here, there = floor_of(file), floor_of(other)
            if here is not None and there is not None and there > here:
                said.append(f"{file} (floor {here}) must not import {other} (floor {there})")
            for one, two in ((WRITE_PATH, READ_PATH), (READ_PATH, WRITE_PATH)):
                if listed(file, one) and listed(other, two):
                    said.append(f"{file} must not import {other}: write path and read path meet in buffers.py only")
    return said


def test_every_file_stands_on_a_floor_and_imports_only_downwards() -> None:
    assert not faults(PACKAGE), "\n".join(faults(PACKAGE))


def test_the_stamp_of_compiled_code_covers_all_that_it_is_made_of() -> None:
    """An edit outside ``_jit.SOURCES`` leaves compiled code valid: compiled functions and their imports lie inside."""
    compiles = re.compile(r"\bcache=True\b|\bregister_jitable\b|@intrinsic\b|_jit import .*\b(exact|sums|inner)\b")
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    made_of = {file for file in files if compiles.search((PACKAGE / file).read_text(encoding="utf-8"))}
    assert {"_jit.py", "kernels/append.py"} <= made_of
    while further := set().union(*(imported_files(PACKAGE, file) for file in made_of)) - made_of:
        made_of |= further
    assert sorted(file for file in made_of if file.split("/")[0] not in SOURCES) == []


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("spec.py", "from kvnumba.cache import KVCache", "spec.py (floor 0) must not import cache.py (floor 4)"),
        ("checks.py", "from . import cache", "checks.py (floor 1) must not import cache.py (floor 4)"),
        ("checks.py", "import kvnumba", "checks.py (floor 1) must not import __init__.py (floor 5)"),
        ("checks.py", "def f():\n    import kvnumba.cache", "must not import cache.py"),
        ("kernels/append.py", "from .attention import attend", "write path and read path"),
        ("kernels/attention.py", "from ..kernels import append", "write path and read path"),
        ("kernels/packing.py", "from ..cache import KVCache", "kernels/packing.py (floor 1) must not import cache.py"),
        ("elsewhere.py", "import os", "elsewhere.py must stand on a floor"),
    ],
)
def test_each_breach_of_the_table_is_named(tmp_path: Path, file: str, line: str, words: str) -> None:
    for name in ("__init__.py", "spec.py", "checks.py", "cache.py", "kernels/append.py", "kernels/attention.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / file).write_text(line + "\n", encoding="utf-8")
    assert any(words in fault for fault in faults(tmp_path)), faults(tmp_path)


def test_imports_downwards_and_within_a_floor_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "spec.py").touch()
    (tmp_path / "buffers.py").write_text("from kvnumba.spec import BLOCK\n", encoding="utf-8")
    (tmp_path / "kernels/attention.py").write_text("from . import decode\nfrom .. import buffers\n", encoding="utf-8")
    (tmp_path / "kernels/decode.py").write_text("import numpy\nfrom kvnumba import spec\n", encoding="utf-8")
    assert faults(tmp_path) == []
    assert imported_files(tmp_path, "kernels/attention.py") == {"kernels/decode.py", "buffers.py"}


def test_import_kvnumba_leaves_frameworks_the_demo_and_the_slow_reference_alone() -> None:
    code = f"import sys, kvnumba; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []

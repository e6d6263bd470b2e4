"""The package as a whole: what it costs to import, where it runs, and what its README says."""

from __future__ import annotations

import glob
import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

import kvnumba as kv

PACKAGE = Path(kv.__file__).parent
ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

# Appends 77 tokens in three parts and attends with the last query; prints what a user would see of it.
# Arguments: K format, V format, file for the arrays.
SESSION = """
import sys
import numpy as np
import kvnumba as kv

k_format, v_format, file = sys.argv[1:]
rng = np.random.default_rng(18)
k, v = (rng.standard_normal((1, 2, 77, 64), dtype=np.float32) for _ in range(2))
q = rng.standard_normal((1, 4, 1, 64), dtype=np.float32)
cache = kv.KVCache(2, 64, k_format=k_format, v_format=v_format)
for start, stop in ((0, 40), (40, 41), (41, 77)):
    cache.append(k[:, :, start:stop], v[:, :, start:stop])
out = cache.attend(q)
np.savez(file, q=q, k=k, v=v, keys=cache.keys(), values=cache.values(), out=out)
"""


def run(code: str, *arguments: object, cwd: Path | str | None = None, **changes: str | None) -> str:
    """Run *code* in a fresh process and return what it wrote to stderr; a change to None unsets a variable."""
    env = {**os.environ, **{name: value for name, value in changes.items() if value is not None}}
    for name in [name for name, value in changes.items() if value is None]:
        env.pop(name, None)
    command = [sys.executable, "-W", "always", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def exact_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(q k^T / sqrt(D)) v in float64; one query per head sees every key."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def assert_right(file: Path) -> None:
    """The session's numbers are right.

    What `attend` adds to the error is at most a tenth of the error that int4 codes themselves make, and half as much
    again because the arrays are small. Plus the rounding of float32 sums of 77 terms.
    """
    with np.load(file) as found:
        stored = exact_attention(found["q"], found["keys"], found["values"])
        true = exact_attention(found["q"], found["k"], found["v"])
        bound = 0.15 * rms(stored - true) + 77 * np.finfo(np.float32).eps * rms(true)
        assert rms(found["out"] - stored) <= bound


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with compiled code of one session, `cache/`, and that session's arrays, `first.npz`."""
    folder = tmp_path_factory.mktemp("warm")
    run(SESSION, "int8", "int4", folder / "first.npz", NUMBA_CACHE_DIR=str(folder / "cache"))
    return folder


def test_version_is_that_of_the_installed_package() -> None:
    assert kv.__version__ == metadata.version("kvnumba")
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z0-9.+]*)", kv.__version__)


def test_package_declares_its_types() -> None:
    assert resources.files("kvnumba").joinpath("py.typed").is_file()


def test_import_adds_less_than_300_ms_to_import_numba() -> None:
    code = """
import numba, numpy, sys, time
start = time.perf_counter()
import kvnumba
sys.stderr.write(str(time.perf_counter() - start))
"""
    run(code)  # writes the byte code
    seconds = [float(run(code)) for _ in range(5)]
    assert min(seconds) < 0.3, seconds


def test_import_compiles_nothing() -> None:
    code = """
import importlib, json, pkgutil, sys
import kvnumba, kvnumba.kernels
from numba.core.dispatcher import Dispatcher
modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(kvnumba.kernels.__path__, "kvnumba.kernels.")]
found = {id(x): x for module in [kvnumba, kvnumba.kernels, *modules] for x in vars(module).values()}
dispatchers = [x for x in found.values() if isinstance(x, Dispatcher)]
json.dump([len(dispatchers), [x.__name__ for x in dispatchers if x.signatures]], sys.stderr)
"""
    count, compiled = json.loads(run(code))
    assert count > 0
    assert compiled == []


def test_works_with_at_most_one_warning_where_nothing_is_writable(tmp_path: Path) -> None:
    copy = tmp_path / "site" / "kvnumba"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc"))
    folders = [copy, *(path for path in copy.rglob("*") if path.is_dir())]
    for folder in folders:  # root may write anywhere, but not below a file
        (folder / "__pycache__").touch()
        folder.chmod(0o555)
    try:
        # /dev/null/home cannot be made, not even by root
        places = dict.fromkeys(("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA", "APPDATA"))
        code = f"import sys; sys.path.insert(0, {str(copy.parent)!r})\n{SESSION}\n"
        code += f"assert kv.__file__.startswith({str(copy)!r}), kv.__file__\n"
        file = tmp_path / "out.npz"
        said = run(code, "int8", "int4", file, cwd="/", HOME="/dev/null/home", USERPROFILE="/dev/null/home", **places)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert said.count("Warning:") <= 1, said
    assert_right(file)


def test_works_again_after_files_of_the_compiled_code_were_cut(warm: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(warm / "cache", cache)
    # Functions that are called from Python: parts of others are not looked up again.
    (cut,), (damaged,) = (list(cache.rglob(f"*.{name}-*.nbi")) for name in ("append_tokens", "attend_few"))
    cut.write_bytes(b"")
    data = list(damaged.parent.glob(glob.escape(damaged.name.removesuffix(".nbi")) + ".*.nbc"))
    assert data, "the index must have compiled code beside it"
    for file in data:
        file.write_bytes(file.read_bytes()[:100])
    for name in ("second.npz", "third.npz"):
        run(SESSION, "int8", "int4", tmp_path / name, NUMBA_CACHE_DIR=str(cache))
        with np.load(warm / "first.npz") as first, np.load(tmp_path / name) as again:
            np.testing.assert_array_equal(first["out"], again["out"])
    assert cut.stat().st_size > 0, "a damaged index must be written anew"
    assert all(file.stat().st_size > 100 for file in data), "damaged code must be written anew"


def test_k74_eight_processes_that_begin_at_once_with_nothing_compiled_all_work(tmp_path: Path) -> None:
    code = """
import sys
import numpy as np
import kvnumba as kv

x = np.random.default_rng(74).standard_normal((1, 2, 40, 16), dtype=np.float32)
cache = kv.KVCache(2, 16)
cache.append(x, x)
codes = kv.quantize_per_token(x).codes.astype(np.float32)
np.save(sys.argv[1], np.concatenate([cache.buffers.k.rows[:, :, :40], codes], -1))
"""
    for _ in range(2):  # nothing compiled, then all compiled by whoever was first
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        commands = [[sys.executable, "-c", code, str(tmp_path / f"{i}.npy")] for i in range(8)]
        started = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for command in commands]
        said = [process.communicate(timeout=1200)[1] for process in started]
        assert [process.returncode for process in started] == [0] * 8, said
        assert len({(tmp_path / f"{i}.npy").read_bytes() for i in range(8)}) == 1


def test_a_newer_version_never_runs_compiled_code_of_an_older_one(tmp_path: Path) -> None:
    copy = tmp_path / "site" / "kvnumba"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc"))
    code = f"""
import sys
sys.path.insert(0, {str(copy.parent)!r})
import numpy as np
import kvnumba as kv
assert kv.__file__.startswith({str(copy)!r}), kv.__file__
sys.stderr.write(str(kv.quantize_per_token(np.float32([[0, 1.5, 15]]), bits=4).codes.tolist()))
"""

    def codes() -> list[list[int]]:
        return json.loads(run(code, NUMBA_CACHE_DIR=str(tmp_path / "cache"), PYTHONDONTWRITEBYTECODE="1"))

    packed = [[0x20, 0x0F]]  # 0, 2 and 15
    assert codes() == packed
    compiled = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.nb[ci]")}
    assert compiled
    for file in copy.rglob("*.py"):  # as after an install of the same version
        os.utime(file, (1, 1))
    assert codes() == packed
    assert compiled == {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.nb[ci]")}
    called = copy / "kernels" / "quantize.py"  # the rounding is in a function that the entry point calls
    source = called.read_text(encoding="utf-8")
    assert source.count("np.float32(0.5)") == 1
    called.write_text(source.replace("np.float32(0.5)", "np.float32(0.6)"), encoding="utf-8")
    os.utime(called, (1, 1))  # neither its size nor its time tell
    assert codes() == [[0x10, 0x0F]]


def readme_table() -> dict[str, list[str]]:
    """Rows of the README's table of bytes per token: name -> cells."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+) \|$", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {f"{k} {v}": cells.split(" | ") for k, v, cells in rows}


def test_readme_table_of_bytes_per_token_is_what_cachespec_says() -> None:
    table = readme_table()
    assert len(table) >= 5
    largest = kv.CacheSpec(8, 128, 128).bytes_per_token
    for formats, cells in table.items():
        k_format, v_format = formats.split()
        spec = kv.CacheSpec(8, 128, 128, k_format, v_format)
        expected = [f"{spec.bytes_per_token:,.0f}", f"{spec.bits_per_value:g}", f"{largest / spec.bytes_per_token:.2f}"]
        assert cells == expected, formats


def test_readme_example_runs(warm: Path) -> None:
    (code,) = re.findall(r"```python\n(.+?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    code += "\nassert out.shape == (1, 32, 1, 128) and len(cache) == 500"
    run(code, NUMBA_CACHE_DIR=str(warm / "cache"))


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example_runs(example: str, warm: Path) -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    run(code, ROOT / "examples" / example, NUMBA_CACHE_DIR=str(warm / "cache"))


WITHOUT_COMPILATION = {
    "a decoded token": (
        "cache = kv.KVCache(1, 16, k_format='int4', v_format='int8'); cache.append(x, x);"
        "assert (cache.attend(x[:, :, :1]) == 1).all()"
    ),
    "layers are taken": (
        "layers = kv.KVCaches(2, 1, 16, window=[None, 64]); layers.append(0, x, x); layers.append(1, x, x);"
        "old = layers.freeze(consume=True).unfreeze();"
        "assert [one.keys().shape[2] for one in (*layers, *old)] == [0, 0, 5, 5]"
    ),
    "codes": (
        "cache = kv.QuantizedCache(); cache.append(x); cache.reset(); cache.append(x);"
        "assert (cache.contiguous() == 1).all()"
    ),
}


@pytest.mark.parametrize("what", WITHOUT_COMPILATION)
def test_works_without_compilation(what):
    code = "import numpy as np, kvnumba as kv; x = np.ones((1, 1, 5, 16), np.float32);" + WITHOUT_COMPILATION[what]
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def classes_with_a_length() -> list[type]:
    """Every class of the package that says how long it is, but tuples, tensors and protocols."""
    found = set()
    for module in pkgutil.walk_packages(kv.__path__, "kvnumba."):
        if module.name.endswith("__main__"):
            continue
        try:
            names = vars(importlib.import_module(module.name)).values()
        except ImportError:  # an extra that is not installed
            continue
        found |= {one for one in names if isinstance(one, type) and one.__module__.startswith("kvnumba")}
    other = {name for one in found for name in one.__mro__ if name.__name__ == "Tensor"} | {tuple}
    return sorted(
        (
            one
            for one in found
            if hasattr(one, "__len__") and not issubclass(one, tuple(other)) and Protocol not in one.__bases__
        ),
        key=lambda one: f"{one.__module__}.{one.__name__}",
    )


def test_what_has_a_length_is_true_while_it_is_empty() -> None:  # `cache = cache or KVCache(...)` keeps the user's
    classes = classes_with_a_length()
    assert {kv.KVCache, kv.WindowedKVCache, kv.KVCaches, kv.InPlaceCache, kv.Snapshot} <= set(classes)
    for one in classes:
        assert bool(object.__new__(one)) is True, one


def test_an_empty_cache_and_its_snapshot_are_true() -> None:
    made = [kv.KVCache(1, 8), kv.KVCache(1, 8, window=64), kv.KVCaches(1, 1, 8), kv.ConcatCache(), kv.InPlaceCache()]
    made += [kv.QuantizedCache(), kv.KVCache(1, 8, batch_size=0)]
    for cache in made:
        assert bool(cache) is bool(cache.freeze()) is True, cache
        assert (cache or None) is cache

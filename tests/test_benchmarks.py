"""Benchmarks measure what they say: everything is compiled in `setup`, where the results are checked too."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import kvnumba as kv
from kvnumba._jit import _PackageCache

ROOT = Path(__file__).parents[1]
#: Parameters of each class that is timed: the fewest tokens, and a strategy of each kind of compiled code.
TIMED = {
    "update.Update": [(256, "numpy-concat"), (256, "concat"), (256, "inplace")],
    "update.UpdateKVCache": [(256, "float32", "grown"), (256, "int8-int4", "grown"), (256, "int4", "preallocated")],
    "decode.Decode": [(256, "concat"), (256, "inplace-view"), (256, "inplace-contiguous")],
    "decode.FusedDecode": [(256, "concat"), (256, "float32"), (256, "int8"), (256, "int4")],
    "snapshot.Snapshot": [(256, "float32"), (256, "int8")],
    "attend.Attend": [(512, "float32"), (512, "int8"), (512, "int4")],
}


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    for name in ("MKL", "NUMBA", "OMP", "OPENBLAS", "RAYON"):
        monkeypatch.setenv(f"{name}_NUM_THREADS", "1")  # what `benchmarks` would set for good

    def make(name):
        module, _, cls = name.partition(".")
        return getattr(importlib.import_module(f"benchmarks.{module}"), cls)()

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


@pytest.mark.parametrize(("name", "params"), [(name, params) for name in TIMED for params in TIMED[name]])
def test_k75_nothing_is_compiled_or_loaded_while_time_is_taken(name, params, benchmark, monkeypatch):
    one = benchmark(name)
    one.setup(*params)
    looked_for = []
    monkeypatch.setattr(_PackageCache, "load_overload", lambda self, *_: looked_for.append(self._name))
    methods = [getattr(one, method) for method in dir(one) if method.startswith("time_")]
    assert methods
    for method in methods:
        method(*params)
    assert looked_for == []


@pytest.mark.parametrize("name", ["decode.FusedDecode", "attend.Attend"])
def test_k75_a_wrong_result_is_noticed_in_setup(name, benchmark, monkeypatch):
    for method in ("attend", "step"):
        right = getattr(kv.KVCache, method)
        monkeypatch.setattr(
            kv.KVCache, method, lambda *given, right=right, **options: right(*given, **options) * np.float32(1.5)
        )
    with pytest.raises(AssertionError):
        benchmark(name).setup(*TIMED[name][1])

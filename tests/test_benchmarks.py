"""Benchmarks measure what they say: everything is compiled in `setup`, where the results are checked too."""

import importlib
import re
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
    "state.State": [(256, "float32"), (256, "int4")],
    "state.Rows": [(256, "int4")],
    "state.Window": [("int4",)],
    "state.Layers": [("int4",)],
    "arrays.Quantize": [("per_channel", 4), ("per_token", 8)],
    "arrays.Nibbles": [()],
    "arrays.Attention": [()],
    "arrays.Codes": [("per_channel", 8), ("per_token", 4)],
    "attend.Attend": [(512, "float32"), (512, "int8"), (512, "int4")],
}


#: Public names without a benchmark, and why.
NOT_MEASURED = {
    "FORMATS": "a constant", "CacheSpec": "a handful of numbers", "__version__": "a constant",
    "Snapshot": "made by freeze",
    "WindowedKVCache": "made by KVCache(window=...)", "QuantizedTensor": "made by quantize_per_channel",
    "QuantizationError": "made by QuantizedTensor.error", "layer_formats": "a list of words", "nbytes": "a sum",
    "get_num_threads": "a number", "set_num_threads": "a number", "warmup": "compile.py measures what it does",
}  # fmt: skip


def test_every_public_operation_has_a_benchmark():
    text = "".join(path.read_text("utf-8") for path in ROOT.glob("benchmarks/*.py"))
    missing = [name for name in kv.__all__ if name not in NOT_MEASURED and not re.search(rf"kv\.{name}\b", text)]
    methods = [
        name for name in vars(kv.KVCache)
        if not name.startswith("_") and callable(getattr(kv.KVCache, name)) and f".{name}(" not in text
    ]  # fmt: skip
    assert (missing, sorted(methods)) == ([], ["reserve", "reset"])  # both only make or drop arrays
    assert set(NOT_MEASURED) <= set(kv.__all__)


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

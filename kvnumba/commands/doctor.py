"""``kvnumba doctor``: what this machine and installation are, and whether they work."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np

import kvnumba as kv
from kvnumba._jit import COMPILED, cache_folder
from kvnumba.commands import CommandError, print_json

#: Features of processors that the kernels make use of.
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vnni", "avxvnni", "neon", "dotprod")
PACKAGES = (
    "kvnumba", "numba", "numpy", "llvmlite", "torch", "transformers", "onnx", "onnxruntime", "nnef", "safetensors",
)  # fmt: skip


def doctor(as_json: bool) -> None:
    """Print versions, processor, threads, where compiled code is kept, and the result of a self-test."""
    told = examined()
    if as_json:
        print_json(told)
    else:
        from kvnumba.commands.progress import table

        table(told)
    if told["self_test"] != "passed":
        raise CommandError(f"the self-test must pass, got: {told['self_test']}")


def examined() -> dict[str, Any]:
    """All that is printed, by name."""
    features = llvmlite.binding.get_host_cpu_features()
    folder = cache_folder()
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": [f"{name} {version}" for name in PACKAGES if (version := _version(name))],
        "processor": os.environ.get("NUMBA_CPU_NAME") or llvmlite.binding.get_host_cpu_name(),
        "features": [name for name in FEATURES if features.get(name)],
        "threads": kv.get_num_threads(),
        "compiled": COMPILED,
        "compiled_code_in": folder,
        "writable": folder is not None and os.access(_there(Path(folder)), os.W_OK),
        "self_test": self_test() or "passed",
    }


def self_test() -> str | None:
    """What is wrong with a small cache of codes beside float64; None if nothing is."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, h, n, 16), dtype=np.float32) for h, n in ((4, 1), (2, 70), (2, 70)))
    for form, limit in (("float32", 1e-5), ("int8", 0.02), ("int4", 0.3)):
        try:
            cache = kv.KVCache(2, 16, k_format=form, v_format=form)
            cache.append(k, v)
            out = cache.attend(q)
        except Exception as error:
            return f"{form}: {type(error).__name__}: {error}"
        score = (q.astype(np.float64) @ k.repeat(2, 1).swapaxes(-1, -2)) / 4
        weights = np.exp(score - score.max(-1, keepdims=True))
        exact = weights / weights.sum(-1, keepdims=True) @ v.repeat(2, 1)
        off = float(np.abs(out - exact).max())
        if not off < limit:
            return f"{form}: attention is off by {off:.3g}, more than {limit}"
    return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _there(path: Path) -> Path:
    """*path*, or the first folder above it that exists."""
    return next(one for one in (path, *path.parents) if one.exists())

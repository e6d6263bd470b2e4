"""Cost before the first answer: import, and compilation with an empty and with a full folder of compiled code."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import numpy as np

from .common import FORMATS

IMPORT = """
import numba, numpy, time
start = time.perf_counter()
import kvnumba
print(time.perf_counter() - start)
"""

FIRST_STEP = """
import sys, time
import numpy as np
import kvnumba as kv
k_format, v_format = sys.argv[1:]
k = np.ones((1, 2, 40, 64), np.float32)
start = time.perf_counter()
cache = kv.KVCache(2, 64, k_format=k_format, v_format=v_format)
cache.append(k, k)
out = cache.step(k[:, :, :1], k[:, :, :1], k[:, :, :1])
print(time.perf_counter() - start)
assert np.allclose(out, 1, atol=0.02), out
"""


def seconds(code: str, *arguments: str, folder: str | None = None) -> float:
    """What *code* prints in a fresh process that keeps compiled code in *folder*."""
    env = os.environ if folder is None else {**os.environ, "NUMBA_CACHE_DIR": folder}
    command = [sys.executable, "-c", code, *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout)


def track_import() -> float:
    """Seconds that `import kvnumba` adds to `import numba, numpy`; median of 5 processes after one."""
    return float(np.median([seconds(IMPORT) for _ in range(6)][1:]))


track_import.unit = "seconds"


class FirstStep:
    """Seconds from the import to the first answer: a prompt of 40 tokens and one step."""

    params = (list(FORMATS),)
    param_names = ("formats",)
    unit = "seconds"
    timeout = 300

    def track_cold(self, formats: str) -> float:
        """Nothing compiled yet."""
        with tempfile.TemporaryDirectory() as folder:
            return seconds(FIRST_STEP, *FORMATS[formats], folder=folder)

    def track_warm(self, formats: str) -> float:
        """Everything found on disk."""
        with tempfile.TemporaryDirectory() as folder:
            seconds(FIRST_STEP, *FORMATS[formats], folder=folder)
            return min(seconds(FIRST_STEP, *FORMATS[formats], folder=folder) for _ in range(3))

"""Nothing is read or written beside an array: pages that may not be touched, and Numba's own check of every index."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("at_the_edge.py")
#: Each format once as keys and once as values.
PAIRS = [("float32", "int4"), ("float16", "bfloat16"), ("bfloat16", "float16"), ("int8", "float32"), ("int4", "int8")]


def run(*arguments, **environment):
    command = [sys.executable, "-X", "faulthandler", str(SCRIPT), *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected as Linux does it")
@pytest.mark.parametrize("where", ["end", "start"])
@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_k67_no_page_beside_an_array_is_touched(where, k_format, v_format):
    run(where, k_format, v_format)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected as Linux does it")
@pytest.mark.parametrize(("k_format", "v_format"), [("float16", "int4")])
def test_k67_no_index_is_out_of_bounds(tmp_path, k_format, v_format):
    run("end", k_format, v_format, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(tmp_path))

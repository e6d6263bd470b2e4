"""Benchmarks run in one thread, the peers included, unless the environment says otherwise."""

import os

for _name in ("MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # read when NumPy and Numba are imported, so this must come first

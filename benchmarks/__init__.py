"""Benchmarks run in one thread, the peers included, unless the environment says otherwise."""

import os

#: Each library reads its own when it is imported.
THREADS = ("MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")

for _name in THREADS:
    os.environ.setdefault(_name, "1")  # before NumPy and Numba are imported, so this must come first

"""Appends and attention over arrays beside which no memory may be touched; ends with a crash where one is overrun.

``python at_the_edge.py end int4 int8`` puts the last byte of every array before such a page, ``start`` the first
behind one; two formats name a pair.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np

import kvnumba as kv
from kvnumba import buffers

LENGTHS = (1, 2, 31, 32, 33, 36, 63, 64, 65, 127, 128, 129)
DIMS = (1, 7, 8, 9, 80)
NO_ACCESS = 0

_plain = buffers.aligned
_libc = ctypes.CDLL(None, use_errno=True)


def beside(where, shape, dtype, spare=False):
    """Zeros that end, or start, where a page begins, or ends, that may not be touched; for `buffers.aligned`."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    inner = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, inner + 2 * mmap.PAGESIZE), np.uint8)
    for page in (0, mmap.PAGESIZE + inner):
        if _libc.mprotect(ctypes.c_void_p(memory.ctypes.data + page), mmap.PAGESIZE, NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
    begin = mmap.PAGESIZE + (inner - size if where == "end" else 0)
    return memory[begin : begin + size].view(dtype).reshape(shape)


def run(where, k_format, v_format):
    """Every length and head dim, with what is stored and what is given beside such pages, and once elsewhere."""
    rng = np.random.default_rng(67)

    def given(x):
        placed = beside(where, x.shape, x.dtype)
        placed[...] = x
        return placed

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    for dim in DIMS:
        for length in LENGTHS:
            options = {"k_format": k_format, "v_format": v_format, "v_head_dim": DIMS[-1 - DIMS.index(dim)]}
            k, v = normal(1, 2, length, dim), normal(1, 2, length, options["v_head_dim"])
            results = []
            for place, take in ((_plain, np.array), (lambda *a: beside(where, *a), given)):
                buffers.aligned = place
                cache = kv.KVCache(2, dim, capacity=length, **options)
                cache.append(take(k[:, :, :1]), take(v[:, :, :1]))
                cache.append(take(k[:, :, 1:]), take(v[:, :, 1:]))
                found = [cache.keys(), cache.values()]
                for rows in (1, 3, 20):
                    rng = np.random.default_rng(length)
                    q, hidden = normal(1, 4, rows, dim), rng.random((1, 1, rows, length)) < 0.3
                    hidden[..., 0, :] = True
                    found.append(cache.attend(take(q)))
                    found.append(cache.attend(take(q), causal=False, mask=take(~hidden)))
                    assert not found[-1][:, :, 0].any()
                cache.truncate(length // 2)
                found.append(cache.keys())
                results.append([x.tobytes() for x in found])
            assert results[0] == results[1]


if __name__ == "__main__":
    run(*sys.argv[1:])

"""A whole decode loop inside one ``@njit`` function: storing and attending with no Python in between.

``cache.buffers`` is a named tuple of arrays that compiled code can take. ``kernels.append`` writes into it and returns
False when the capacity is used up; only the class enlarges it, so the room is reserved beforehand.
"""

from __future__ import annotations

import numpy as np
from numba import njit

import kvnumba as kv
from kvnumba import kernels

STEPS, Q_HEADS, KV_HEADS, DIM = 100, 8, 2, 64


@njit
def decode(buffers, q, k, v, out):  # type: ignore[no-untyped-def]
    """Append and attend, one token at a time.

    Parameters
    ----------
    buffers : named tuple
        Of a cache with room for all tokens, modified in place.
    q, out : float32 [STEPS, 1, Q_HEADS, 1, DIM]
        Queries, one token in each entry; `out` is overwritten.
    k, v : float32 [STEPS, 1, KV_HEADS, 1, DIM]

    Returns
    -------
    int
        Number of tokens done: fewer than asked for when the capacity is used up.
    """
    lse = np.empty((1, q.shape[2], 1), np.float32)
    sm_scale = np.float32(1 / np.sqrt(q.shape[4]))
    for step in range(q.shape[0]):
        if not kernels.append(buffers, k[step], v[step]):
            return step
        kernels.attend(buffers, q[step], out[step], lse, sm_scale, True, None)  # causal, no mask
    return q.shape[0]


def main() -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((STEPS, 1, Q_HEADS, 1, DIM), dtype=np.float32)
    k, v = rng.standard_normal((2, STEPS, 1, KV_HEADS, 1, DIM), dtype=np.float32)
    out = np.empty_like(q)

    cache = kv.KVCache(KV_HEADS, DIM, k_format="int8", v_format="int4", capacity=STEPS)
    done = decode(cache.buffers, q, k, v, out)

    check = kv.KVCache(KV_HEADS, DIM, k_format="int8", v_format="int4")
    expected = np.stack([check.step(q[step], k[step], v[step]) for step in range(STEPS)])
    np.testing.assert_array_equal(out, expected)
    print(f"{done} tokens in one compiled function; the same bits as {STEPS} calls of step()")


if __name__ == "__main__":
    main()

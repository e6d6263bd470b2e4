"""A whole decode loop inside one ``@njit`` function: storing and attending with no Python in between.

``cache.buffers`` is a named tuple of arrays that compiled code can take. ``kernels.append`` writes into it, and returns
False when the capacity is used up. Only the class makes room: ``cache.reserve`` puts larger arrays in the place of
``cache.buffers``, and the loop goes on with these.
"""

from __future__ import annotations

import numpy as np
from numba import njit

import kvnumba as kv
from kvnumba import kernels

STEPS, Q_HEADS, KV_HEADS, DIM = 100, 8, 2, 64


@njit
def decode(buffers, first, q, k, v, out):  # type: ignore[no-untyped-def]
    """Append and attend, one token at a time, until all are done or the capacity is used up.

    Parameters
    ----------
    buffers : named tuple
        Of the cache, modified in place.
    first : int
        Tokens already done.
    q, out : float32 [STEPS, 1, Q_HEADS, 1, DIM]
        Queries, one token in each entry; `out` is overwritten from `first` on.
    k, v : float32 [STEPS, 1, KV_HEADS, 1, DIM]

    Returns
    -------
    int
        Tokens done.
    """
    lse = np.empty((1, q.shape[2], 1), np.float32)
    sm_scale = np.float32(1 / np.sqrt(q.shape[4]))
    for step in range(first, q.shape[0]):
        if not kernels.append(buffers, k[step], v[step]):
            return step
        kernels.attend(buffers, q[step], out[step], lse, sm_scale, True, None)  # causal, no mask
    return q.shape[0]


def main() -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((STEPS, 1, Q_HEADS, 1, DIM), dtype=np.float32)
    k, v = rng.standard_normal((2, STEPS, 1, KV_HEADS, 1, DIM), dtype=np.float32)
    out = np.empty_like(q)

    cache = kv.KVCache(KV_HEADS, DIM, k_format="int8", v_format="int4", capacity=32)
    done = decode(cache.buffers, 0, q, k, v, out)
    while done < STEPS:
        cache.reserve(2 * cache.capacity)
        done = decode(cache.buffers, done, q, k, v, out)  # the new buffers, not the old ones
    assert len(cache) == STEPS

    check = kv.KVCache(KV_HEADS, DIM, k_format="int8", v_format="int4")
    expected = np.stack([check.step(q[step], k[step], v[step]) for step in range(STEPS)])
    np.testing.assert_array_equal(out, expected)
    print(f"{done} tokens in a compiled loop, capacity {cache.capacity}; the same bits as {STEPS} calls of step()")


if __name__ == "__main__":
    main()

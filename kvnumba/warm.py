"""Compiling ahead of the first token."""

from __future__ import annotations

import numpy as np

from kvnumba._jit import COMPILED
from kvnumba.cache import KVCache


def warmup(*, k_format: str = "float32", v_format: str = "float32", prompt: bool = True) -> None:
    """Compile what a cache of these formats needs, so that the first token does not wait for it.

    The result is kept on disk where that is possible, so another process need not compile again.

    Parameters
    ----------
    k_format, v_format : str
        As of `KVCache`.
    prompt : bool
        Also the kernels for many queries at once.
    """
    if not COMPILED:
        return
    cache = KVCache(1, 16, k_format=k_format, v_format=v_format)
    token = np.zeros((1, 1, 1, 16), np.float32)
    cache.step(token, token, token)
    cache.truncate(0)
    if prompt:
        tokens = np.zeros((1, 1, 40, 16), np.float32)
        cache.step(tokens, tokens, tokens)

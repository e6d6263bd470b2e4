"""Matrix products of NumPy over float32 arrays with room for the new tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..common import numpy_attention
from .work import Entry, Runner, Work, by_heads


def entries(work: Work) -> list[Entry]:
    return [Entry("NumPy float32", 32, lambda: build(work))]


def build(work: Work) -> Runner:
    q, k_new, v_new = work.step
    attention: Any = by_heads if work.prompt else numpy_attention

    def layer() -> Any:
        k, v = work.k.copy(), work.v.copy()

        def step() -> np.ndarray:
            k[:, :, work.past :] = k_new
            v[:, :, work.past :] = v_new
            return attention(q, k, v)

        return step

    return Runner([layer() for _ in range(work.layers)])

"""The operators of NNEF that run without a state, in NumPy, and the attention of tract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import kvnumba as kv

Array = npt.NDArray[Any]


def sdpa(
    q: Array, k: Array, v: Array, mask: Any = 0.0, scale: float = 0.0, datum_type: str = "f32",
    acc_datum_type: str = "f32", is_causal: bool = False,
) -> Array:  # fmt: skip
    """``tract_transformers_sdpa``: *mask* is added to the scores, *scale* is 1/sqrt(D) if 0."""
    options: dict[str, Any] = {"sm_scale": scale or None, "causal": bool(is_causal)}
    if np.ndim(mask):
        options["mask"] = mask
    return kv.attention(q, k, v, **options)


def _matmul(A: Array, B: Array, transposeA: bool = False, transposeB: bool = False) -> Array:
    a = A.swapaxes(-1, -2) if transposeA else A
    b = B.swapaxes(-1, -2) if transposeB else B
    return np.matmul(a, b)


def _reshape(input: Array, shape: list[int], axis_start: int = 0, axis_count: int = -1) -> Array:
    stop = input.ndim if axis_count == -1 else axis_start + axis_count
    middle = [input.shape[axis_start + i] if n == 0 else n for i, n in enumerate(shape)]
    return input.reshape([*input.shape[:axis_start], *middle, *input.shape[stop:]])


def _transpose(input: Array, axes: list[int]) -> Array:
    return input.transpose([*axes, *range(len(axes), input.ndim)])


def _softmax(x: Array, axes: list[int]) -> Array:
    weights = np.exp(x - x.max(axis=tuple(axes), keepdims=True))
    total: Array = weights / weights.sum(axis=tuple(axes), keepdims=True)
    return total


def _unsqueeze(input: Array, axes: list[int]) -> Array:
    return np.expand_dims(input, tuple(axes))


def _leading(function: Callable[[Any, Any], Any]) -> Callable[..., Array]:
    """A binary operator with the broadcasting of NNEF: axes are matched from the first."""

    def apply(x: Any, y: Any) -> Array:
        x, y = np.asarray(x), np.asarray(y)
        rank = max(x.ndim, y.ndim)
        if x.ndim:
            x = x.reshape(x.shape + (1,) * (rank - x.ndim))
        if y.ndim:
            y = y.reshape(y.shape + (1,) * (rank - y.ndim))
        made: Array = function(x, y)
        return made.astype(np.result_type(x if x.ndim else y, y if y.ndim else x), copy=False)

    return apply


#: Operators by name: functions of their inputs and attributes.
OPERATORS: dict[str, Callable[..., Any]] = {
    "add": _leading(np.add),
    "concat": lambda values, axis: np.concatenate(values, axis),
    "copy": lambda x: x,
    "div": _leading(np.divide),
    "matmul": _matmul,
    "mul": _leading(np.multiply),
    "neg": lambda x: -x,
    "reshape": _reshape,
    "softmax": _softmax,
    "squeeze": lambda input, axes: np.squeeze(input, tuple(axes)),
    "sub": _leading(np.subtract),
    "tract_transformers_sdpa": sdpa,
    "transpose": _transpose,
    "unsqueeze": _unsqueeze,
    "variable": lambda **attributes: None,  # the session has the tensor
}

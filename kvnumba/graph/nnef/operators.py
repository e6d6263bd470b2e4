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
        x, y = _same_type(x, y)
        rank = max(x.ndim, y.ndim)
        if x.ndim:
            x = x.reshape(x.shape + (1,) * (rank - x.ndim))
        if y.ndim:
            y = y.reshape(y.shape + (1,) * (rank - y.ndim))
        made: Array = function(x, y)
        return made

    return apply


def _same_type(x: Any, y: Any) -> tuple[Array, Array]:
    """Both operands in one element type: a constant takes that of the other, of two tensors the wider one counts."""
    if type(x) in (bool, int, float):
        x = np.asarray(x, np.float32 if type(y) in (bool, int, float) else y.dtype)
    if type(y) in (bool, int, float):
        y = np.asarray(y, x.dtype)
    common = np.result_type(x.dtype, y.dtype)
    if len({dtype.kind == "f" for dtype in (x.dtype, y.dtype, common)}) > 1:
        raise ValueError(f"x and y must have one element type, or one that holds both, got {x.dtype} and {y.dtype}")
    return x.astype(common, copy=False), y.astype(common, copy=False)


def _divide(x: Array, y: Array) -> Array:
    """The quotient; of integers it is cut towards zero."""
    return (x - np.fmod(x, y)) // y if x.dtype.kind in "iu" else np.divide(x, y)


#: Operators by name: functions of their inputs and attributes.
OPERATORS: dict[str, Callable[..., Any]] = {
    "add": _leading(np.add),
    "concat": lambda values, axis: np.concatenate(values, axis),
    "copy": lambda x: x,
    "div": _leading(_divide),
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

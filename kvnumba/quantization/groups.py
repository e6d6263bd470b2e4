"""Groups of an array: blocks of numbers along one axis, and the kernels that each kind of them is made for."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvnumba.kernels.quantize import dequantize_blocks, dequantize_rows, quantize_blocks, quantize_rows

Codes = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

#: Where groups run unless one says otherwise: along the tokens for each channel, along the channels for each token.
AXES = {"per_channel": -2, "per_token": -1}


def rows(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """*array* [..., d] as [n, d], over the same memory."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


class Groups(NamedTuple):
    """Blocks of numbers along an axis of an array of *shape*, each with parameters of its own."""

    shape: tuple[int, ...]
    axis: int  #: counted from the end: -1 is the last one
    block: int | None  #: numbers of a group; the last group may be short; None: all of the axis, which parameters lack

    @property
    def parameters(self) -> tuple[int, ...]:
        """Shape of ``lo`` and ``scale``."""
        at = len(self.shape) + self.axis
        count = () if self.block is None else (-(-self.shape[at] // self.block),)
        return (*self.shape[:at], *count, *self.shape[at + 1 :])

    def encode(self, x: FloatArray, levels: int, codes: Codes, lo: FloatArray, scale: FloatArray) -> None:
        """Overwrite *codes*, one a byte, *lo* and *scale* from *x*; all in C order and of the shapes above."""
        if not x.size:
            return
        before, after, block = self._sizes()
        if after == 1:
            x, codes, lo, scale = _reshaped((before, -1), x, codes, lo, scale)
            quantize_rows(x, block, levels, codes, lo, scale)
        else:
            x, codes, lo, scale = _reshaped((before, -1, after), x, codes, lo, scale)
            quantize_blocks(x, block, levels, codes, lo, scale)

    def decode(self, codes: Codes, lo: FloatArray, scale: FloatArray, out: FloatArray) -> None:
        """Overwrite *out* with the values of *codes*, one a byte; all in C order and of the shapes above."""
        if not out.size:
            return
        before, after, block = self._sizes()
        if after == 1:
            codes, lo, scale, out = _reshaped((before, -1), codes, lo, scale, out)
            dequantize_rows(codes, block, lo, scale, out)
        else:
            codes, lo, scale, out = _reshaped((before, -1, after), codes, lo, scale, out)
            dequantize_blocks(codes, block, lo, scale, out)

    def _sizes(self) -> tuple[int, int, int]:
        """Product of the axes before, product of those after, and numbers of a group, of an array with any."""
        at = len(self.shape) + self.axis
        n = self.shape[at]
        return math.prod(self.shape[:at]), math.prod(self.shape[at + 1 :]), min(self.block or n, n)


def _reshaped(shape: tuple[int, ...], *arrays: npt.NDArray[Any]) -> Any:
    """All of *arrays* in that shape, over the same memory."""
    return (array.reshape(shape) for array in arrays)

"""Codes of 4 bits, two to a byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvnumba import checks
from kvnumba.kernels.packing import pack_nibbles_rows, unpack_nibbles_rows
from kvnumba.quantization.groups import rows

Codes = npt.NDArray[np.uint8]


def pack_nibbles(codes: Any, out: Codes | None = None) -> Codes:
    """Pack *codes* [..., n], integers from 0 to 15, into uint8 [..., ceil(n / 2)].

    Even index in the low nibble; an odd end is padded with 0.

    Parameters
    ----------
    codes : array_like of int
    out : uint8 ndarray, optional
        Where to; it may share memory with *codes*.

    Raises
    ------
    TypeError
        Not integers.
    ValueError
        A code outside 0..15; no axes; *out* of another shape or read-only. *out* is unchanged.
    """
    array = _bytes("codes", codes, 15)
    shape = (*array.shape[:-1], (array.shape[-1] + 1) // 2)
    packed = _target(out, shape, array)
    if array.size:
        pack_nibbles_rows(rows(array), rows(packed))
    return _delivered(packed, out)


def unpack_nibbles(packed: Any, n: int, out: Codes | None = None) -> Codes:
    """Return the *n* codes of each row of *packed* [..., ceil(n / 2)] as uint8 [..., n].

    Parameters
    ----------
    packed : array_like of int
    n : int
    out : uint8 ndarray, optional
        Where to; it may share memory with *packed*.

    Raises
    ------
    TypeError
        Not integers.
    ValueError
        Rows of another length; values outside 0..255; no axes; *out* of another shape or read-only. *out* is unchanged.
    """
    n = checks.count("n", n)
    array = _bytes("packed", packed, 255)
    if array.shape[-1] != (n + 1) // 2:
        raise ValueError(
            f"packed must have rows of {(n + 1) // 2} bytes to hold n = {n} codes, got shape {list(array.shape)}"
        )
    codes = _target(out, (*array.shape[:-1], n), array)
    if codes.size:
        unpack_nibbles_rows(rows(array), rows(codes))
    return _delivered(codes, out)


def plain(array: Codes) -> Codes:
    """*array* in C order, aligned and writeable, copied only where needed: the type that kernels are compiled for."""
    return np.require(array, np.uint8, ["C", "A", "W"])


def _target(out: Codes | None, shape: tuple[int, ...], source: Codes) -> Codes:
    """*out* where a kernel may write into it while it reads *source*, else a fresh array."""
    if out is not None:
        if not isinstance(out, np.ndarray) or out.dtype != np.uint8:
            came = f"dtype {out.dtype}" if isinstance(out, np.ndarray) else type(out).__name__
            raise TypeError(f"out must be an array of uint8, got {came}")
        checks.output("out", out, shape, out.dtype)
        if out.flags.carray and not np.may_share_memory(out, source):
            return out
    return np.empty(shape, np.uint8)


def _delivered(made: Codes, out: Codes | None) -> Codes:
    if out is None or out is made:
        return made
    out[...] = made
    return out


def _bytes(name: str, x: Any, top: int) -> Codes:
    """*x* as plain uint8 in C order after a check that it holds integers 0..top."""
    array = checks.numbers(name, x)
    if array.size == 0 and array.dtype == np.float64:  # an empty list
        array = array.astype(np.uint8)
    if array.dtype.kind not in "iub":
        raise TypeError(f"{name} must hold integers from 0 to {top}, got {array.dtype}")
    if array.ndim == 0:
        raise ValueError(f"{name} must have at least one axis, got a single number")
    if array.size and (array.max() > top or array.min() < 0):
        place = np.unravel_index(int(((array < 0) | (array > top)).argmax()), array.shape)
        raise ValueError(
            f"{name} must hold integers from 0 to {top}, got {int(array[place])} at {[int(i) for i in place]}"
        )
    return plain(array.astype(np.uint8, copy=False))

"""Arrays to codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvnumba import checks
from kvnumba.kernels.packing import pack_nibbles_rows
from kvnumba.quantization.groups import Groups, rows
from kvnumba.quantization.tensor import QuantizedTensor
from kvnumba.spec import BLOCK, row_bytes


def quantize_per_channel(
    x: Any, bits: int = 4, block_size: int | None = BLOCK, axis: int = -2, out: QuantizedTensor | None = None
) -> QuantizedTensor:
    """Quantize *x* [..., S, D] with one group for each channel of each block of tokens.

    The error of a value is at most half its group's scale, and what rounding ``lo + code * scale`` to float32 adds
    (where the scale underflows, at most the range of the group); a constant group is exact.

    Parameters
    ----------
    x : array_like, [..., S, D]
        Any float type, integers or bool, any strides; taken as float32.
    bits : int
        4 or 8.
    block_size : int or None
        Tokens of a block, counted from token 0; the last block may be short. None: all tokens are one block.
    axis : int
        Axis of the tokens: blocks are cut along it, and every place of the other axes is a channel.
    out : QuantizedTensor, optional
        A tensor of the same shape and settings that is overwritten and returned, instead of a new one.

    Returns
    -------
    QuantizedTensor
        ``lo`` and ``scale`` have the shape of *x* with ceil(S / block_size) in the place of S.

    Raises
    ------
    TypeError
        Arguments of a wrong kind.
    ValueError
        Fewer than two axes (one is enough for an *axis* of -1 or 0); no channels; NaN, infinity or a magnitude above
        half the range of float32; *out* of another shape, other settings, or read-only. *out* is unchanged.
    """
    bits = checks.bits(bits)
    if block_size is not None:
        block_size = checks.positive_int("block_size", block_size)
    array = _numbers(x, "[..., S, D]", axis, -2)
    at = checks.axis_of("axis", axis, array.shape)
    block = block_size or max(array.shape[at], 1)
    return _quantized(array, bits, "per_channel", Groups(array.shape, at, block), out)


def quantize_per_token(
    x: Any, bits: int = 8, block_size: int | None = None, axis: int = -1, out: QuantizedTensor | None = None
) -> QuantizedTensor:
    """Quantize *x* [..., D] with one group for each token, its D channels, or one for each *block_size* of them.

    The error of a value is at most half its group's scale, and what rounding ``lo + code * scale`` to float32 adds
    (where the scale underflows, at most the range of the group); a constant group is exact.

    Parameters
    ----------
    x : array_like, [..., D]
        Any float type, integers or bool, any strides; taken as float32.
    bits : int
        4 or 8.
    block_size : int or None
        Channels of a group (elsewhere called group size), the last one may be short. None: all channels.
    axis : int
        Axis of the channels: groups lie along it.
    out : QuantizedTensor, optional
        A tensor of the same shape and settings that is overwritten and returned, instead of a new one.

    Returns
    -------
    QuantizedTensor
        ``lo`` and ``scale`` have the shape of *x* without *axis*, or with ceil(D / block_size) in its place.

    Raises
    ------
    TypeError
        Arguments of a wrong kind.
    ValueError
        No axes; no channels; NaN, infinity or a magnitude above half the range of float32; *out* of another shape,
        other settings, or read-only. *out* is unchanged.
    """
    bits = checks.bits(bits)
    if block_size is not None:
        block_size = checks.positive_int("block_size", block_size)
    array = _numbers(x, "[..., D]", axis, -1)
    at = checks.axis_of("axis", axis, array.shape)
    if block_size is None and not array.shape[at]:
        raise ValueError(f"x must have at least one channel along axis {axis}, got shape {list(array.shape)}")
    return _quantized(array, bits, "per_token", Groups(array.shape, at, block_size), out)


def _numbers(x: Any, names: str, axis: Any, usual: int) -> Any:
    """*x* as an array, after a check of its axes."""
    array = checks.numbers("x", x)
    needed = -usual if isinstance(axis, (int, np.integer)) and axis == usual else 1
    if array.ndim < needed or array.shape[-1] == 0:
        raise ValueError(f"x must have shape {names} with at least one channel, got {list(array.shape)}")
    return array


def _quantized(array: Any, bits: int, layout: str, groups: Groups, out: QuantizedTensor | None) -> QuantizedTensor:
    """*array* as codes, in *out* if that is given."""
    if out is not None:
        _check_out(out, bits, layout, groups)
    array = checks.as_float32(array)
    checks.finite("x", array)
    if out is None:
        packed = np.empty((*array.shape[:-1], row_bytes(array.shape[-1], bits)), np.uint8)
        lo, scale = (np.empty(groups.parameters, np.float32) for _ in range(2))
        out = QuantizedTensor(packed, lo, scale, bits, layout, array.shape, groups.block, groups.axis)
    codes = out.codes if bits == 8 else np.empty(array.shape, np.uint8)
    groups.encode(array, 2**bits - 1, codes, out.lo, out.scale)
    if bits == 4 and array.size:
        pack_nibbles_rows(rows(codes), rows(out.codes))
    return out


def _check_out(out: Any, bits: int, layout: str, groups: Groups) -> None:
    """Raise unless *out* has these settings and arrays that can be written."""
    if not isinstance(out, QuantizedTensor):
        raise TypeError(f"out must be a QuantizedTensor, got {type(out).__name__}")
    names = ("shape", "bits", "layout", "block_size", "axis")
    for name, wanted in zip(names, (groups.shape, bits, layout, groups.block, groups.axis)):
        if getattr(out, name) != wanted:
            raise ValueError(f"out must have {name} = {wanted}, got {getattr(out, name)}")
    if not all(part.flags.carray for part in (out.codes, out.lo, out.scale)):
        raise ValueError("out must have writeable arrays in C order, got others; make it with quantize_* or load")

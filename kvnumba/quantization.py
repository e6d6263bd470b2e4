"""Quantized arrays: groups of numbers as unsigned codes with one ``lo`` and one ``scale`` for each group.

value = lo + code * scale. The definition of a group is in ``kvnumba.kernels.quantize``; rows of codes are kept in the
interchange form: 8 bits, one code a byte; 4 bits, even index in the low nibble and an odd length padded with 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvnumba import checks, storage
from kvnumba.kernels.packing import pack_nibbles_rows, unpack_nibbles_rows
from kvnumba.kernels.quantize import dequantize_blocks, dequantize_rows, quantize_blocks, quantize_rows
from kvnumba.spec import BLOCK, row_bytes

Codes = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]


class QuantizationError(NamedTuple):
    """How far quantized values are from the original ones."""

    max: float  #: largest absolute difference
    rms: float  #: root of the mean square difference
    snr_db: float  #: signal-to-noise ratio in decibels; infinite where nothing was lost


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor:
    """An array of *shape* [..., S, D] (or [D]) as codes.

    Attributes
    ----------
    codes : uint8 [..., S, row_bytes]
        Interchange form, row_bytes = ceil(D * bits / 8).
    lo, scale : float32
        One for each group: [..., ceil(S / block_size), D] for "per_channel", [..., S] for "per_token".
    bits : int
        4 or 8.
    layout : str
        "per_channel" or "per_token".
    shape : tuple of int
        Shape of the array that was quantized.
    block_size : int or None
        Tokens of a group for "per_channel", counted from token 0; the last group may be short. None for "per_token".

    Raises
    ------
    TypeError, ValueError
        If the parts do not belong together.
    """

    codes: Codes
    lo: FloatArray
    scale: FloatArray
    bits: int
    layout: str
    shape: tuple[int, ...]
    block_size: int | None = None

    def __post_init__(self) -> None:
        checks.bits(self.bits)
        if checks.layout(self.layout) == "per_channel":
            block, needed = checks.positive_int("block_size", self.block_size), 2
        elif self.block_size is None:
            block, needed = 0, 1
        else:
            raise ValueError(f'block_size must be None for the layout "per_token", got {self.block_size}')
        if len(self.shape) < needed or self.shape[-1] < 1 or min(self.shape) < 0:
            raise ValueError(f"shape must have {needed} or more axes and at least one channel, got {self.shape}")
        packed, groups = _part_shapes(self.shape, self.bits, block)
        _part("codes", self.codes, np.uint8, packed)
        _part("lo", self.lo, np.float32, groups)
        _part("scale", self.scale, np.float32, groups)

    def save(self, path: Any) -> None:
        """Write codes and parameters to a file that `load` reads; *path* as for `KVCache.save`."""
        settings = {
            "bits": int(self.bits),
            "layout": str(self.layout),
            "shape": [int(n) for n in self.shape],
            "block_size": None if self.block_size is None else int(self.block_size),
        }
        arrays = (np.ascontiguousarray(array) for array in (self.codes, self.lo, self.scale))
        storage.write(path, "QuantizedTensor", settings, _plan(settings), arrays)

    @classmethod
    def load(cls, path: Any) -> QuantizedTensor:
        """What `save` wrote; OSError and ValueError as of `KVCache.load`."""
        with storage.reading(path, "QuantizedTensor", _plan) as (settings, fill):
            packed, groups, _ = (part.shape for part in _plan(settings))
            codes, lo, scale = np.empty(packed, np.uint8), np.empty(groups, np.float32), np.empty(groups, np.float32)
            for array in (codes, lo, scale):
                fill(array)
        return cls(codes, lo, scale, **{**settings, "shape": tuple(settings["shape"])})

    def unpacked(self) -> Codes:
        """Return the codes as uint8 of the full shape, one a byte, in a fresh array."""
        if self.bits == 8:
            return self.codes.copy()
        return unpack_nibbles(self.codes, self.shape[-1])

    def dequantize(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return the values, float32 of the full shape, in a fresh array or in *out*.

        Parameters
        ----------
        out : ndarray, optional
            Writeable, of the full shape and any float dtype: float16, bfloat16, float32 or float64.

        Raises
        ------
        TypeError, ValueError
            *out* is no such array; it is unchanged.
        """
        if out is None:
            return self._decoded(np.empty(self.shape, np.float32))
        _output(out, self.shape)
        if out.dtype == np.float32 and out.flags.carray:
            return self._decoded(out)
        with np.errstate(all="ignore"):  # values beyond a narrower type become infinite
            out[...] = self._decoded(np.empty(self.shape, np.float32))
        return out

    def error(self, x: Any) -> QuantizationError:
        """Return how far the values are from *x*, the array that was quantized, computed in float64."""
        array = checks.numbers("x", x)
        if array.shape != self.shape:
            raise ValueError(f"x must have shape {list(self.shape)} as the tensor, got {list(array.shape)}")
        exact = array.astype(np.float64)
        difference = self.dequantize() - exact
        noise, signal = (float(np.square(part).sum()) for part in (difference, exact))
        rms = math.sqrt(noise / max(exact.size, 1))
        snr = math.inf if noise == 0 else -math.inf if signal == 0 else 10 * math.log10(signal / noise)
        return QuantizationError(float(np.abs(difference).max(initial=0)), rms, snr)

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        """Values at *index*, as ``dequantize()[index]`` gives them; only the groups they are in are decoded.

        Integers, slices and an ellipsis, one for each axis at most.
        """
        places = _basic_index(index, self.shape)
        if len(self.shape) == 1:
            return self.dequantize()[places[0]]
        *lead, tokens, channels = places
        lead = [slice(n, n + 1) if isinstance(n, int) else n for n in lead]
        span = range(self.shape[-2])[tokens] if isinstance(tokens, slice) else range(tokens, tokens + 1)
        first, last = (min(span), max(span) + 1) if len(span) else (0, 0)
        if self.block_size is not None:
            first -= first % self.block_size
            groups = slice(first // self.block_size, -(-last // self.block_size))
        else:
            groups = slice(first, last)
        token_at, group_at = (*lead, slice(first, last)), (*lead, groups)
        codes = np.ascontiguousarray(self.codes[token_at])
        lo, scale = (np.ascontiguousarray(part[group_at]) for part in (self.lo, self.scale))
        shape = (*codes.shape[:-1], self.shape[-1])
        values = QuantizedTensor(codes, lo, scale, self.bits, self.layout, shape, self.block_size).dequantize()
        rows = [n - first for n in span]
        at = rows[0] if isinstance(tokens, int) else rows
        kept = (*(0 if isinstance(n, int) else slice(None) for n in places[:-2]), Ellipsis)
        return values[..., at, :][kept][..., channels]

    def _decoded(self, out: FloatArray) -> FloatArray:
        """The values in *out*, float32 in C order."""
        if out.size == 0:
            return out
        codes = _plain(self.codes) if self.bits == 8 else self.unpacked()
        lo, scale = checks.as_float32(self.lo), checks.as_float32(self.scale)
        if self.block_size is None:
            dequantize_rows(_rows(codes), lo.reshape(-1), scale.reshape(-1), _rows(out))
        else:
            block = min(self.block_size, self.shape[-2])
            dequantize_blocks(_heads(codes), block, _heads(lo), _heads(scale), _heads(out))
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of codes and parameters."""
        return self.codes.nbytes + self.lo.nbytes + self.scale.nbytes

    @property
    def bits_per_value(self) -> float:
        """Bits that one number costs, parameters included; 0 for an empty array."""
        size = 1
        for n in self.shape:
            size *= n
        return 8 * self.nbytes / size if size else 0.0

    def __repr__(self) -> str:
        block = "" if self.block_size is None else f", block_size={self.block_size}"
        return (
            f"QuantizedTensor(shape={self.shape}, bits={self.bits}, layout={self.layout!r}{block}: "
            f"{self.nbytes} bytes, {self.bits_per_value:.2f} bits per value)"
        )


def quantize_per_channel(x: Any, bits: int = 4, block_size: int = BLOCK) -> QuantizedTensor:
    """Quantize *x* [..., S, D] with one group for each channel of each block of tokens.

    The error of a value is at most half its group's scale, and what rounding ``lo + code * scale`` to float32 adds
    (where the scale underflows, at most the range of the group); a constant group is exact.

    Parameters
    ----------
    x : array_like, [..., S, D]
        Any float type, integers or bool, any strides; taken as float32.
    bits : int
        4 or 8.
    block_size : int
        Tokens of a block, counted from token 0; the last block may be short.

    Raises
    ------
    TypeError
        Arguments of a wrong kind.
    ValueError
        Fewer than two axes; no channels; NaN, infinity or a magnitude above half the range of float32.
    """
    bits = checks.bits(bits)
    block = checks.positive_int("block_size", block_size)
    array = _input(x, "[..., S, D]", 2)
    *heads, S, D = array.shape
    lo = np.empty((*heads, -(-S // block), D), np.float32)
    scale = np.empty_like(lo)
    codes = np.empty(array.shape, np.uint8)
    if array.size:
        quantize_blocks(_heads(array), min(block, S), 2**bits - 1, _heads(codes), _heads(lo), _heads(scale))
    return QuantizedTensor(_packed(codes, bits), lo, scale, bits, "per_channel", array.shape, block)


def quantize_per_token(x: Any, bits: int = 8) -> QuantizedTensor:
    """Quantize *x* [..., D] with one group for each token: its D channels.

    The error of a value is at most half its group's scale, and what rounding ``lo + code * scale`` to float32 adds
    (where the scale underflows, at most the range of the group); a constant group is exact.

    Parameters
    ----------
    x : array_like, [..., D]
        Any float type, integers or bool, any strides; taken as float32.
    bits : int
        4 or 8.

    Raises
    ------
    TypeError
        Arguments of a wrong kind.
    ValueError
        No axes; no channels; NaN, infinity or a magnitude above half the range of float32.
    """
    bits = checks.bits(bits)
    array = _input(x, "[..., D]", 1)
    lo = np.empty(array.shape[:-1], np.float32)
    scale = np.empty_like(lo)
    codes = np.empty(array.shape, np.uint8)
    if array.size:
        quantize_rows(_rows(array), 2**bits - 1, _rows(codes), lo.reshape(-1), scale.reshape(-1))
    return QuantizedTensor(_packed(codes, bits), lo, scale, bits, "per_token", array.shape)


def pack_nibbles(codes: Any) -> Codes:
    """Pack *codes* [..., n], integers from 0 to 15, into uint8 [..., ceil(n / 2)].

    Even index in the low nibble; an odd end is padded with 0.

    Raises
    ------
    TypeError
        Not integers.
    ValueError
        A code outside 0..15; no axes.
    """
    array = _bytes("codes", codes, 15)
    packed = np.empty((*array.shape[:-1], (array.shape[-1] + 1) // 2), np.uint8)
    if array.size:
        pack_nibbles_rows(_rows(array), _rows(packed))
    return packed


def unpack_nibbles(packed: Any, n: int) -> Codes:
    """Return the *n* codes of each row of *packed* [..., ceil(n / 2)] as uint8 [..., n].

    Raises
    ------
    TypeError
        Not integers.
    ValueError
        Rows of another length; values outside 0..255; no axes.
    """
    n = checks.count("n", n)
    array = _bytes("packed", packed, 255)
    if array.shape[-1] != (n + 1) // 2:
        raise ValueError(
            f"packed must have rows of {(n + 1) // 2} bytes to hold n = {n} codes, got shape {list(array.shape)}"
        )
    codes = np.empty((*array.shape[:-1], n), np.uint8)
    if codes.size:
        unpack_nibbles_rows(_rows(array), _rows(codes))
    return codes


def _output(out: Any, shape: tuple[int, ...]) -> None:
    """Raise unless *out* can take the values of a tensor of *shape*."""
    if not isinstance(out, np.ndarray) or out.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        came = f"dtype {out.dtype}" if isinstance(out, np.ndarray) else type(out).__name__
        raise TypeError(f"out must be an array of float16, bfloat16, float32 or float64, got {came}")
    if out.shape != shape or not out.flags.writeable:
        came = "a read-only array" if out.shape == shape else str(list(out.shape))
        raise ValueError(f"out must be writeable and have shape {list(shape)}, got {came}")


def _basic_index(index: Any, shape: tuple[int, ...]) -> list[Any]:
    """*index* with an integer from 0, or a slice, for each axis."""
    given = list(index) if isinstance(index, tuple) else [index]
    if any(one is Ellipsis for one in given):
        at = next(i for i, one in enumerate(given) if one is Ellipsis)
        given[at : at + 1] = [slice(None)] * (len(shape) - len(given) + 1)
    given += [slice(None)] * (len(shape) - len(given))
    if len(given) != len(shape):
        raise IndexError(f"index must have at most {len(shape)} entries, got {len(given)}")
    places: list[Any] = []
    for axis, (one, n) in enumerate(zip(given, shape)):
        if isinstance(one, slice):
            places.append(one)
        elif isinstance(one, (int, np.integer)) and not isinstance(one, bool):
            if not -n <= one < n:
                raise IndexError(f"index must be from {-n} to {n - 1} for axis {axis}, got {one}")
            places.append(int(one) % n)
        else:
            raise TypeError(f"index must hold integers, slices and one ellipsis, got {type(one).__name__}")
    return places


def _input(x: Any, names: str, axes: int) -> FloatArray:
    array = checks.numbers("x", x)
    if array.ndim < axes or array.shape[-1] == 0:
        raise ValueError(f"x must have shape {names} with at least one channel, got {list(array.shape)}")
    array = checks.as_float32(array)
    checks.finite("x", array)
    return array


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
    return _plain(array.astype(np.uint8, copy=False))


def _plain(array: Codes) -> Codes:
    """*array* in C order, aligned and writeable, copied only where needed: the type that kernels are compiled for."""
    return np.require(array, np.uint8, ["C", "A", "W"])


def _packed(codes: Codes, bits: int) -> Codes:
    return codes if bits == 8 else pack_nibbles(codes)


def _rows(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """*array* [..., d] as [n, d], over the same memory."""
    return array.reshape(-1, array.shape[-1])


def _heads(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """*array* [..., S, D] as [h, S, D], over the same memory."""
    return array.reshape(-1, *array.shape[-2:])


def _part_shapes(shape: tuple[int, ...], bits: int, block: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the codes and of the parameters; *block* is 0 for groups of one token."""
    groups = (*shape[:-2], -(-shape[-2] // block), shape[-1]) if block else shape[:-1]
    return (*shape[:-1], row_bytes(shape[-1], bits)), tuple(groups)


def _plan(settings: storage.Settings) -> list[storage.Part]:
    """The arrays that a file of a QuantizedTensor holds."""
    storage.keys_of("its settings", settings, ("bits", "layout", "shape", "block_size"))
    bits = storage.integer("bits", settings["bits"], 4, 8)
    per_channel = storage.word("layout", settings["layout"], ("per_channel", "per_token")) == "per_channel"
    shape = storage.shape_of("shape", settings["shape"], 2 if per_channel else 1)
    if bits not in (4, 8) or shape[-1] < 1 or (settings["block_size"] is None) == per_channel:
        raise storage.fault("bits, layout, shape and block_size must be those of a QuantizedTensor")
    block = storage.integer("block_size", settings["block_size"], 1, 1 << 62) if per_channel else 0
    packed, groups = _part_shapes(shape, bits, block)
    return [
        storage.Part("codes", "U8", packed),
        storage.Part("lo", "F32", groups),
        storage.Part("scale", "F32", groups),
    ]


def _part(name: str, array: Any, dtype: type, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        came = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} must be an array of {np.dtype(dtype).name}, got {came}")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}")

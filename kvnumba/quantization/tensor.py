"""A quantized array: its codes and parameters, its values, a part of them, and its file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvnumba import checks, interchange, storage
from kvnumba.quantization.groups import AXES, Codes, FloatArray, Groups
from kvnumba.quantization.nibbles import plain, unpack_nibbles
from kvnumba.spec import row_bytes


class QuantizationError(NamedTuple):
    """How far quantized values are from the original ones."""

    max: float  #: largest absolute difference
    rms: float  #: root of the mean square difference
    snr_db: float  #: signal-to-noise ratio in decibels; infinite where nothing was lost


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor:
    """An array of *shape* as codes.

    Attributes
    ----------
    codes : uint8 [..., S, row_bytes]
        Interchange form, row_bytes = ceil(D * bits / 8) for a last axis of D.
    lo, scale : float32
        One for each group: *shape* with the number of groups in the place of *axis*, or without it if *block_size* is
        None. [..., ceil(S / block_size), D] for "per_channel" along its usual axis, [..., S] for "per_token".
    bits : int
        4 or 8.
    layout : str
        "per_channel" or "per_token".
    shape : tuple of int
        Shape of the array that was quantized.
    block_size : int or None
        Numbers of a group, counted from 0 along *axis*; the last group may be short. None, for "per_token" only: all.
    axis : int
        Axis along which groups lie, kept as counted from the end: -2 for "per_channel" and -1 for "per_token" unless
        said otherwise.

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
    axis: int = None  # type: ignore[assignment]  # the usual one of the layout, set below

    def __post_init__(self) -> None:
        checks.bits(self.bits)
        usual = AXES[checks.layout(self.layout)]
        object.__setattr__(self, "shape", _shape(self.shape))  # the class is frozen
        if self.block_size is not None or self.layout == "per_channel":
            checks.positive_int("block_size", self.block_size)
        needed = -usual if self.axis is None else 1
        if len(self.shape) < needed or self.shape[-1] < 1:
            raise ValueError(f"shape must have {needed} or more axes and at least one channel, got {self.shape}")
        axis = checks.axis_of("axis", usual if self.axis is None else self.axis, self.shape)
        if self.block_size is None and not self.shape[axis]:
            raise ValueError(f"shape must have at least one channel along axis {axis}, got {self.shape}")
        object.__setattr__(self, "axis", axis)
        _part("codes", self.codes, np.uint8, (*self.shape[:-1], row_bytes(self.shape[-1], self.bits)))
        _part("lo", self.lo, np.float32, self._groups.parameters)
        _part("scale", self.scale, np.float32, self._groups.parameters)

    @property
    def _groups(self) -> Groups:
        """Which numbers share parameters."""
        return Groups(self.shape, self.axis, self.block_size)

    def save(self, path: Any) -> None:
        """Write codes and parameters to a file that `load` reads; *path* as for `KVCache.save`.

        Raises
        ------
        OSError
            As of `KVCache.save`.
        ValueError
            A part that no quantized array has, as NaN among *scale*. Nothing is written.
        """
        settings = settings_of(self.bits, self.layout, self.shape, self.block_size, self.axis)
        self._check_content()
        arrays = (np.ascontiguousarray(array) for array in (self.codes, self.lo, self.scale))
        storage.write(path, "QuantizedTensor", settings, plan(settings), arrays)

    @classmethod
    def load(cls, path: Any) -> QuantizedTensor:
        """What `save` wrote; OSError and ValueError as of `KVCache.load`."""
        with storage.reading(path, "QuantizedTensor", plan) as (settings, fill):
            packed, groups, _ = (part.shape for part in plan(settings))
            codes, lo, scale = np.empty(packed, np.uint8), np.empty(groups, np.float32), np.empty(groups, np.float32)
            for array in (codes, lo, scale):
                fill(array)
            tensor = cls(codes, lo, scale, **settings)
            tensor._check_content()
        return tensor

    def _check_content(self) -> None:
        """Raise unless codes and parameters are such as files hold."""
        interchange.check_groups(self.bits, self.lo, self.scale)
        if self.bits == 4 and self.shape[-1] % 2 and (self.codes[..., -1] > 15).any():
            raise storage.fault("codes of rows of odd length must end in a nibble of 0")

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
        if out is not None:
            _output(out, self.shape)
        if out is not None and out.dtype == np.float32 and out.flags.carray:
            values = out
        else:
            values = np.empty(self.shape, np.float32)
        self._decode(self._groups, self.codes, self.lo, self.scale, values)
        if out is None or out is values:
            return values
        with np.errstate(all="ignore"):  # values beyond a narrower type become infinite
            out[...] = values
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
        last = len(self.shape) - 1
        wanted = [range(n)[at] if isinstance(at, slice) else range(at, at + 1) for at, n in zip(places, self.shape)]
        # Every axis as a slice: the packed one as a whole, that of the groups from where a group begins.
        covers = [_slice(span) for span in wanted]
        covers[last] = slice(0, self.shape[last])
        axis = last + 1 + self.axis
        groups: list[slice] = covers.copy()
        if self.block_size is None:
            del groups[axis]
        else:
            first, end = (min(wanted[axis]), max(wanted[axis]) + 1) if wanted[axis] else (0, 0)
            groups[axis] = slice(first // self.block_size, -(-end // self.block_size))
            covers[axis] = slice(groups[axis].start * self.block_size, end)
            if axis == last:
                covers[last], groups[last] = slice(0, self.shape[last]), slice(None)
        codes = np.ascontiguousarray(self.codes[tuple(covers[:last])])
        lo, scale = (np.ascontiguousarray(part[tuple(groups)]) for part in (self.lo, self.scale))
        shape = (*codes.shape[:-1], self.shape[-1])
        values = np.empty(shape, np.float32)
        self._decode(Groups(shape, self.axis, self.block_size), codes, lo, scale, values)
        if axis != last and self.block_size is not None:
            values = values.take([n - covers[axis].start for n in wanted[axis]], axis)
        kept = [0 if isinstance(at, int) else slice(None) for at in places[:-1]]
        return values[tuple(kept)][..., places[-1]]

    def _decode(self, groups: Groups, codes: Codes, lo: FloatArray, scale: FloatArray, out: FloatArray) -> None:
        """The values of *codes* into *out*, float32 in C order."""
        plain_codes = plain(codes) if self.bits == 8 else unpack_nibbles(codes, groups.shape[-1])
        groups.decode(plain_codes, checks.as_float32(lo), checks.as_float32(scale), out)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and parameters."""
        return self.codes.nbytes + self.lo.nbytes + self.scale.nbytes

    @property
    def bits_per_value(self) -> float:
        """Bits that one number costs, parameters included; 0 for an empty array."""
        size = math.prod(self.shape)
        return 8 * self.nbytes / size if size else 0.0

    def __repr__(self) -> str:
        block = "" if self.block_size is None else f", block_size={self.block_size}"
        block += "" if self.axis == AXES[self.layout] else f", axis={self.axis}"
        return (
            f"QuantizedTensor(shape={self.shape}, bits={self.bits}, layout={self.layout!r}{block}: "
            f"{self.nbytes} bytes, {self.bits_per_value:.2f} bits per value)"
        )


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


def _slice(span: range) -> slice:
    """The slice that takes the numbers of *span*."""
    if not span:
        return slice(0, 0)
    return slice(span.start, span.stop if span.stop >= 0 else None, span.step)


def settings_of(bits: int, layout: str, shape: Sequence[int], block_size: int | None, axis: int) -> storage.Settings:
    """What a file of a `QuantizedTensor` says of it; the axis only if it is not the usual one of the layout."""
    block = None if block_size is None else int(block_size)
    said = {"bits": int(bits), "layout": str(layout), "shape": [int(n) for n in shape], "block_size": block}
    return said if axis == AXES[layout] else {**said, "axis": int(axis)}


def plan(settings: storage.Settings) -> list[storage.Part]:
    """The arrays that a file of a `QuantizedTensor` holds."""
    names = ["bits", "layout", "shape", "block_size"]
    if isinstance(settings, dict) and "axis" in settings:
        names.append("axis")
    storage.keys_of("its settings", settings, names)
    bits = storage.integer("bits", settings["bits"], 4, 8)
    layout = storage.word("layout", settings["layout"], tuple(AXES))
    axis = settings.get("axis", AXES[layout])
    shape = storage.shape_of("shape", settings["shape"], 1 if "axis" in settings else -axis)
    storage.integer("axis", axis, -len(shape), -1)
    block = settings["block_size"]
    if block is not None:
        storage.integer("block_size", block, 1, 1 << 62)
    doubled = "axis" in settings and axis == AXES[layout]  # one form for one content
    empty = shape[-1] < 1 or (block is None and not shape[axis])
    if bits not in (4, 8) or empty or doubled or (block is None and layout == "per_channel"):
        raise storage.fault("bits, layout, shape, block_size and axis must be those of a QuantizedTensor")
    parameters = Groups(shape, axis, block).parameters
    return [
        storage.Part("codes", "U8", (*shape[:-1], row_bytes(shape[-1], bits))),
        storage.Part("lo", "F32", parameters),
        storage.Part("scale", "F32", parameters),
    ]


def _shape(value: Any) -> tuple[int, ...]:
    """*value* as a tuple, after a check that it is one of integers."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"shape must be a tuple of integers, got {value!r} of type {type(value).__name__}")
    return tuple(checks.count(f"shape[{i}]", n) for i, n in enumerate(value))


def _part(name: str, array: Any, dtype: type, shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        came = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} must be an array of {np.dtype(dtype).name}, got {came}")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}")

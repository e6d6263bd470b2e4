"""The door: every value that comes from a user is checked here, before any state changes.

Each function returns the value in the one form that the kernels are compiled for, or raises ``TypeError`` (a kind
of thing that cannot be meant) or ``ValueError`` (the right kind of thing with a wrong size or number). A message says
the name, what was expected, what came, and the remedy where there is one.

Arrays may come as NumPy arrays of any strides, byte order and alignment, read-only or not, as anything with
``__array__``, as PyTorch tensors on the CPU, or as nested lists of numbers. Element types: float16, float32, float64,
bfloat16, and integers and bool, which are converted to float32. Conversion rounds to nearest; a float64 value beyond
the range of float32 becomes infinite.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvnumba.spec import FORMATS, QUANTIZABLE

FloatArray = npt.NDArray[np.float32]

#: Axes of an array at most, whatever the version of NumPy.
MAX_AXES = 32

_ndarray = np.ndarray
#: In C order, aligned, writeable: to Numba any other array is another type, and would compile every kernel anew.
_PLAIN: list[Literal["C", "A", "W"]] = ["C", "A", "W"]
_FLOAT32 = np.dtype(np.float32)
#: Keys further away than any cache is long; distances up to it cannot overflow.
_FAR = 1 << 40
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Mask(NamedTuple):
    """A mask as the kernels take it: element (b, h, i, j) is ``array.reshape(-1)[b*sb + h*sh + i*ss + j*st]``."""

    array: npt.NDArray[Any]
    """[b|1, h|1, S|1, T|1], C order: float32 to add to the scores, or uint8 with 0 where the key is hidden."""
    strides: tuple[int, int, int, int]
    """(sb, sh, ss, st) in elements, 0 along a broadcast axis."""


# ---- arrays


def tokens(name: str, x: Any, shape: tuple[int | None, ...], names: str) -> FloatArray:
    """Return *x* as float32 in C order, aligned and writeable, without a copy where it already is.

    Parameters
    ----------
    name : str
        What the message calls *x*.
    x : array_like
        Any float type, integers or bool.
    shape : tuple of int or None
        The shape that is needed; None for an axis of any length.
    names : str
        The axes in words, as in ``"[batch, num_kv_heads, S, head_dim]"``.

    Raises
    ------
    TypeError
        Masked, matrix, object, complex or text arrays; tensors that are not in CPU memory.
    ValueError
        Another shape; lists of unequal length.
    """
    if type(x) is _ndarray and x.dtype is _FLOAT32 and x.flags.carray:  # as on every decoded token
        got = x.shape
        if len(got) == len(shape) == 4 and got[0] == shape[0] and got[1] == shape[1] and got[3] == shape[3]:
            if shape[2] is None or shape[2] == got[2]:
                return x
    array = numbers(name, x)
    if not _fits(array.shape, shape):
        raise ValueError(_shape_message(name, array.shape, shape, names))
    return as_float32(array)


def finite(name: str, x: FloatArray) -> None:
    """Raise ValueError with the position of the first element of *x* that cannot be quantized.

    NaN, infinity, and anything above ``QUANTIZABLE`` in magnitude. *x* is float32 in C order.
    """
    flat = x.reshape(-1)
    if flat.size > 8192:  # one pass with nothing written: a sum of squares is finite only if every element is
        with np.errstate(all="ignore"):
            if math.isfinite(flat.dot(flat)):
                return
    good = np.abs(flat) <= QUANTIZABLE
    if not good.all():
        place = int(good.argmin())
        position = [int(i) for i in np.unravel_index(place, x.shape)]
        rule = f"at most {QUANTIZABLE:.5g} in magnitude" if np.isfinite(flat[place]) else "finite"
        raise ValueError(f"{name} must be {rule} to be quantized, got {flat[place]} at {position}")


def query(q: Any, batch: int, num_kv_heads: int, head_dim: int) -> tuple[FloatArray, np.dtype[Any]]:
    """Return *q* as ``tokens`` does, and the dtype of the output that belongs to it.

    The output dtype is that of *q*: float16, float32, float64 or bfloat16; float32 for integers and bool, float64 for
    wider floats. A bfloat16 tensor of PyTorch gives ``ml_dtypes.bfloat16`` where that package is there, else float32.

    Raises
    ------
    TypeError, ValueError
        As ``tokens``; the number of query heads must be a multiple of *num_kv_heads*.
    """
    ready = type(q) is _ndarray and q.dtype is _FLOAT32 and q.flags.carray
    array = q if ready else numbers("q", q)
    shape = array.shape
    if len(shape) != 4 or shape[0] != batch or shape[3] != head_dim:
        names = "[batch, num_q_heads, S, head_dim]"
        expected = (batch, shape[1] if len(shape) == 4 else None, None, head_dim)
        raise ValueError(_shape_message("q", shape, expected, names))
    if shape[1] == 0 or shape[1] % num_kv_heads:
        raise ValueError(
            f"q must have a number of heads that is a multiple of num_kv_heads = {num_kv_heads}, got {shape[1]} "
            f"heads in shape {list(shape)} = [batch, num_q_heads, S, head_dim]"
        )
    return (array, _FLOAT32) if ready else (as_float32(array), _output_dtype(q, array))


def mask(mask: Any, batch: int, num_q_heads: int, S: int, T: int) -> Mask | None:
    """Return *mask* in the form of ``Mask``, or None for None. Broadcast axes are never written out.

    Parameters
    ----------
    mask : array_like or None
        Broadcastable to [batch, num_q_heads, S, T]; missing axes in front are added. bool: True keeps the key. Float:
        added to the scores; ``-inf`` hides the key. float64 values below the range of float32 become ``-inf``.

    Raises
    ------
    TypeError
        Integers, which could be meant either way.
    ValueError
        A shape that does not broadcast; NaN or ``+inf`` in a float mask.
    """
    if mask is None:
        return None
    array = numbers("mask", mask)
    if array.dtype.kind in "iu":
        raise TypeError(
            f"mask must be bool (True keeps the key) or float (added to the scores), got {array.dtype}; "
            "use mask.astype(bool) if 1 keeps the key"
        )
    full = (batch, num_q_heads, S, T)
    shape = array.shape
    padded = (1,) * (4 - len(shape)) + shape
    if len(padded) != 4 or any(n != 1 and n != m for n, m in zip(padded, full, strict=True)):
        raise ValueError(
            f"mask must be broadcastable to {list(full)} = [batch, num_q_heads, S, length], got {list(shape)}"
        )
    array = _without_repeats(array.reshape(padded) if len(shape) < 4 else array)
    if array.dtype.kind == "b":
        array = np.require(array, np.bool_, _PLAIN).view(np.uint8)
    else:
        array = as_float32(array)
        _additive(array)
    strides, step = [0, 0, 0, 0], 1
    for axis in (3, 2, 1, 0):
        n = array.shape[axis]
        strides[axis] = step if n > 1 else 0
        step *= n
    return Mask(array, (strides[0], strides[1], strides[2], strides[3]))


def same_length(name: str, x: npt.NDArray[Any], other: str, y: npt.NDArray[Any], axis: int = 2) -> None:
    """Raise ValueError if *x* and *y* hold different numbers of tokens along *axis*."""
    if x.shape[axis] != y.shape[axis]:
        raise ValueError(
            f"{name} and {other} must have the same number of tokens, got {x.shape[axis]} in {name} of shape "
            f"{list(x.shape)} and {y.shape[axis]} in {other} of shape {list(y.shape)}"
        )


def numbers(name: str, x: Any) -> npt.NDArray[Any]:
    """Return *x* as a plain NumPy array of bool, integers or floats: its own shape, and its own memory if possible.

    Raises
    ------
    TypeError, ValueError
        As ``tokens``, but for the shape. A bfloat16 tensor of PyTorch comes back as float32.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must be a plain array, got a masked array, whose mask would be lost; "
            f"use {name}.filled(value) or the mask argument of attend"
        )
    if isinstance(x, np.matrix):
        raise TypeError(f"{name} must be a plain array, got numpy.matrix; use numpy.asarray({name})")
    if type(x).__module__.partition(".")[0] == "torch" and hasattr(x, "device"):
        return _from_torch(name, x)
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise ValueError(f"{name} must be an array of numbers, got nested lists of unequal length ({error})") from None
    except Exception as error:
        raise TypeError(f"{name} must be an array of numbers, got {_kind(x)} ({error})") from error
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        came = f"{_kind(x)} that makes an array of {array.dtype}" if array is not x else f"dtype {array.dtype}"
        raise TypeError(f"{name} must be float16, bfloat16, float32, float64, an integer type or bool, got {came}")
    return array


def as_float32(array: npt.NDArray[Any]) -> FloatArray:
    """Return the result of ``numbers`` as float32 in C order, aligned and writeable, copied only where needed."""
    if array.dtype == _FLOAT32:
        return np.require(array, _FLOAT32, _PLAIN)
    with np.errstate(all="ignore"):
        return np.require(array.astype(_FLOAT32, order="C"), _FLOAT32, _PLAIN)


def bfloat16() -> np.dtype[Any] | None:
    """Return the NumPy dtype of bfloat16 from the package ml_dtypes, or None where that is not installed."""
    if "ml_dtypes" not in sys.modules:
        try:
            import ml_dtypes  # noqa: F401
        except ImportError:
            return None
    dtype: np.dtype[Any] = np.dtype(sys.modules["ml_dtypes"].bfloat16)
    return dtype


# ---- counts and words


def scale(sm_scale: Any, head_dim: int) -> float:
    """Return the softmax scale: 1/sqrt(head_dim) for None. 0.0 is a value like any other.

    Raises
    ------
    TypeError
        Not a real number.
    ValueError
        NaN, infinite, or beyond the range of float32.
    """
    return 1.0 / math.sqrt(head_dim) if sm_scale is None else real("sm_scale", sm_scale, "a number or None")


def real(name: str, value: Any, wanted: str = "a number") -> float:
    """Return *value* as float: a finite real number in the range of float32; else TypeError or ValueError."""
    if type(value) is not float and (
        isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating))
    ):
        raise TypeError(f"{name} must be {wanted}, got {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _FLOAT32_MAX:
        raise ValueError(f"{name} must be finite and in the range of float32, got {value}")
    return number


def softcap(value: Any) -> float:
    """Return the softcap as float: 0 for none; TypeError or ValueError unless it is a finite number >= 0."""
    number = real("softcap", value)
    if number < 0:
        raise ValueError(f"softcap must be at least 0 (0 for none), got {value}")
    return number


def window(value: Any) -> tuple[int, int]:
    """Return (left, right) as integers of at least -1, which stands for no limit."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"window must be None or a pair (left, right), got {_kind(value)}")
    left, right = (_integer("window", side, "a pair of integers of at least -1") for side in value)
    if left < -1 or right < -1:
        raise ValueError(f"window must be a pair of integers of at least -1 (-1 for no limit), got {tuple(value)}")
    return min(left, _FAR), min(right, _FAR)


def per_head(name: str, x: Any, num_q_heads: int, lowest: float = -math.inf) -> FloatArray:
    """Return *x*, one number for each query head, as float32, none below *lowest* and none infinite but ``-inf``."""
    array = as_float32(numbers(name, x))
    if array.shape != (num_q_heads,):
        raise ValueError(f"{name} must have shape [{num_q_heads}] = [num_q_heads], got {list(array.shape)}")
    good = (array >= np.float32(lowest)) & (array < np.inf)
    if not good.all():
        wanted = "finite numbers or -inf" if lowest == -math.inf else f"finite numbers of at least {lowest:g}"
        raise ValueError(f"{name} must hold {wanted}, got {array[~good][0]}")
    return array


def output(name: str, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise unless *out* is a writeable array of this shape and dtype."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{name} must be a numpy.ndarray, got {_kind(out)}")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} of shape {list(shape)}, got {out.dtype} of shape {list(out.shape)}")
    if not out.flags.writeable:
        raise ValueError(f"{name} must be writeable, got a read-only array")


def format(name: str, value: Any) -> str:
    """Return *value* if it is one of ``spec.FORMATS``; else TypeError or ValueError."""
    return _one_of(name, value, FORMATS)


def layout(value: Any) -> str:
    """Return *value* if it is "per_channel" or "per_token"; else TypeError or ValueError."""
    return _one_of("layout", value, ("per_channel", "per_token"))


def bits(value: Any) -> int:
    """Return 4 or 8; TypeError for anything that is not an integer, ValueError for another width."""
    number = _integer("bits", value, "4 or 8")
    if number not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {number}")
    return number


def flag(name: str, value: Any) -> bool:
    """Return *value* if it is a bool of Python or NumPy; else TypeError."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {_kind(value)}")
    return bool(value)


def positive_int(name: str, value: Any) -> int:
    """Return *value* as int if it is an integer above 0 (of Python or NumPy, not bool)."""
    number = _integer(name, value, "a positive integer")
    if number <= 0:
        raise ValueError(f"{name} must be a positive integer, got {number}")
    return number


def count(name: str, value: Any) -> int:
    """Return *value* as int if it is an integer of at least 0 (of Python or NumPy, not bool)."""
    number = _integer(name, value, "an integer of at least 0")
    if number < 0:
        raise ValueError(f"{name} must be an integer of at least 0, got {number}")
    if number > _FAR:
        raise ValueError(f"{name} must be an integer from 0 to {_FAR}, got {number}")
    return number


def layer(value: Any, num_layers: int, lowest: int = 0) -> int:
    """Return *value* as int if there is such a layer, counted from 0; else TypeError or IndexError."""
    number = _integer("layer", value, f"an integer from {lowest} to {num_layers - 1}")
    if not lowest <= number < num_layers:
        raise IndexError(f"layer must be from {lowest} to {num_layers - 1}, for {num_layers} layers, got {number}")
    return number


def axis(value: Any) -> int:
    """Return *value* as int if it can be the number of an axis, counted from 0."""
    number = count("axis", value)
    if number >= MAX_AXES:
        raise ValueError(f"axis must be an integer from 0 to {MAX_AXES - 1}, got {number}")
    return number


def axis_of(name: str, value: Any, shape: Sequence[int]) -> int:
    """Return *value* as an axis of an array of *shape*, counted from the end: -1 is the last one."""
    axes = len(shape)
    number = _integer(name, value, "an integer, the number of an axis")
    if not -axes <= number < axes:
        raise ValueError(f"{name} must be an integer from {-axes} to {axes - 1} for shape {list(shape)}, got {number}")
    return number if number < 0 else number - axes


def length(name: str, n: Any, current: int) -> int:
    """Return *n* as int if a cache of *current* tokens can be cut to it: 0 <= n <= current."""
    number = _integer(name, n, f"an integer from 0 to the length {current}")
    if not 0 <= number <= current:
        raise ValueError(f"{name} must be from 0 to the length {current}, got {number}")
    return number


def rows(name: str, idx: Any, batch: int) -> list[int]:
    """Return *idx* as a list if it is a sequence of integers that name rows of a batch: 0 to batch - 1."""
    wanted = f"rows of the batch, from 0 to {batch - 1}" if batch else "no rows, for the batch has none"
    listed = _integers(name, idx, wanted)
    for i, row in enumerate(listed):
        if not 0 <= row < batch:
            raise ValueError(f"{name} must hold {wanted}, got {row} at [{i}]")
    return listed


def per_row(name: str, value: Any, highest: Sequence[int], word: str) -> list[int]:
    """Return *value* as a list if it holds one integer for each row of the batch, from 0 to *highest* of the row.

    *word* says what the largest number is: "the length of the row".
    """
    listed = _integers(name, value, "one number of tokens for each row")
    if len(listed) != len(highest):
        raise ValueError(f"{name} must have shape [{len(highest)}] = [batch], got [{len(listed)}]")
    for b, (number, most) in enumerate(zip(listed, highest)):
        if not 0 <= number <= most:
            raise ValueError(f"{name} must be from 0 to {word}, {most}, got {number} at [{b}]")
    return listed


# ---- parts of the functions above


def _integers(name: str, value: Any, meaning: str) -> list[int]:
    """A list of the integers of *value*, a sequence or array with one axis."""
    try:
        array = np.asarray(value)
    except Exception as error:
        raise TypeError(f"{name} must be a sequence of integers: {meaning}; got {_kind(value)} ({error})") from error
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis: {meaning}; got shape {list(array.shape)}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers: {meaning}; got {array.dtype}")
    return [int(number) for number in array]


def _fits(got: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(got) == len(expected) and all(n is None or m == n for m, n in zip(got, expected, strict=True))


def _shape_message(name: str, got: Sequence[int], expected: Sequence[int | None], names: str) -> str:
    words = names.strip("[]").split(", ")
    wanted = ", ".join(word if n is None else str(n) for n, word in zip(expected, words, strict=True))
    message = f"{name} must have shape [{wanted}] = {names}, got {list(got)}"
    if len(got) == 4 == len(expected):
        swapped = (got[0], got[2], got[1], got[3])
        if all(n is None or m == n for m, n in zip(swapped, expected, strict=True)):
            message += f"; if it is [batch, S, heads, channels], pass {name}.transpose(0, 2, 1, 3)"
    return message


def _from_torch(name: str, x: Any) -> npt.NDArray[Any]:
    if x.device.type != "cpu":
        raise TypeError(f"{name} must be in CPU memory, got a tensor on device {x.device}; pass {name}.cpu()")
    try:
        x = x.detach()
        array = np.asarray((x.float() if _is_torch_bfloat16(x) else x).resolve_conj().resolve_neg().numpy())
    except Exception as error:
        raise TypeError(f"{name} must be a dense tensor of numbers, got dtype {x.dtype} ({error})") from error
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be float16, bfloat16, float32, float64, an integer type or bool, got {x.dtype}")
    return array


def _is_torch_bfloat16(x: Any) -> bool:
    return str(getattr(x, "dtype", "")) == "torch.bfloat16"


def _output_dtype(q: Any, array: npt.NDArray[Any]) -> np.dtype[Any]:
    if array is not q and _is_torch_bfloat16(q):
        return bfloat16() or _FLOAT32
    if array.dtype.name in ("float16", "float32", "float64", "bfloat16"):
        dtype: np.dtype[Any] = array.dtype.newbyteorder("=")
        return dtype
    return np.dtype(np.float64) if array.dtype.kind == "f" else _FLOAT32


def _without_repeats(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Cut axes that only repeat one element (stride 0) to length 1."""
    axes = zip(array.shape, array.strides, strict=True)
    return array[tuple(slice(0, 1) if n > 1 and step == 0 else slice(None) for n, step in axes)]


def _additive(array: FloatArray) -> None:
    if array.size and not array.max() < np.inf:
        flat = array.reshape(-1)
        place = int((~(flat < np.inf)).argmax())
        position = [int(i) for i in np.unravel_index(place, array.shape)]
        raise ValueError(
            f"mask must hold finite numbers or -inf, got {flat[place]} at {position} (axes of length 1 are broadcast)"
        )


def _integer(name: str, value: Any, wanted: str) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be {wanted}, got {_kind(value)}")
    return int(value)


def _one_of(name: str, value: Any, allowed: Sequence[str]) -> str:
    listed = ", ".join(f'"{word}"' for word in allowed)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {listed}, got {_kind(value)}")
    if value not in allowed:
        raise ValueError(f"{name} must be one of {listed}, got {value!r}")
    return str(value)


def _kind(value: Any) -> str:
    """A short name of what came: the value itself if it is small, and its type."""
    if value is None:
        return "None"
    if isinstance(value, (bool, int, float, complex, str, np.generic)):
        return f"{value!r} of type {type(value).__name__}"
    return f"an object of type {type(value).__name__}"

"""Sizes and formats: what a cache is made of, in numbers, before any array exists."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np

#: Tokens of a sequence that stay float32 at its start (attention sinks).
SINK = 4
#: Tokens that share the quantization parameters of one key channel.
BLOCK = 32

Format = Literal["float32", "float16", "bfloat16", "int8", "int4"]
FORMATS: tuple[str, ...] = get_args(Format)
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
#: Formats whose elements are codes with ``lo`` and ``scale``.
CODE_FORMATS = ("int8", "int4")

#: Largest number of heads, channels or rows, and of tokens: what files say too, so that every cache can be saved.
MOST, LONGEST = 1 << 20, 1 << 40

#: Largest magnitude that can be quantized: half the range of float32, so that the range of any group is finite.
QUANTIZABLE = np.float32(np.finfo(np.float32).max / 2)

#: Bytes of one group's parameters: ``lo`` and ``scale``, float32 each.
GROUP_BYTES = 8


class Sized:
    """What has a length is true also where that is 0: ``cache or other`` is *cache* while it is empty."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class CacheSpec:
    """The fixed numbers of one layer's key/value cache.

    Attributes
    ----------
    num_kv_heads, head_dim, v_head_dim : int
        Heads of keys and values; channels of a key; channels of a value, as many as of a key if 0.
    k_format, v_format : str
        One of ``FORMATS``.
    batch_size : int
        Rows that advance together.
    window : int or None
        Newest tokens that stay, beside the sinks; None: all.

    Raises
    ------
    TypeError, ValueError
        If a number is none, or not from 1 (0 for ``v_head_dim`` and ``batch_size``) to 2**20 (2**40 for ``window``), or
        a format is another word.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    k_format: str = "float32"
    v_format: str = "float32"
    batch_size: int = 1
    window: int | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "num_kv_heads": _integer("num_kv_heads", self.num_kv_heads, 1, MOST),
            "head_dim": _integer("head_dim", self.head_dim, 1, MOST),
            "v_head_dim": _integer("v_head_dim", self.v_head_dim, 0, MOST) or int(self.head_dim),
            "k_format": _format("k_format", self.k_format),
            "v_format": _format("v_format", self.v_format),
            "batch_size": _integer("batch_size", self.batch_size, 0, MOST),
            "window": None if self.window is None else _integer("window", self.window, 1, LONGEST),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # the class is frozen

    @property
    def values_per_token(self) -> int:
        """Numbers stored for one token of the whole batch: keys and values, all heads."""
        return self.batch_size * self.num_kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one further token costs in the long run, parameters included.

        A key block of 32 tokens carries ``lo`` and ``scale`` for each channel, a value token carries one pair.
        The sinks, the residual and spare capacity do not grow with the length and are not counted.
        """
        return self.batch_size * self.num_kv_heads * self._bytes_of_one

    @property
    def bits_per_value(self) -> float:
        """Bits that one stored number costs in the long run, parameters included."""
        return 8 * self._bytes_of_one / (self.head_dim + self.v_head_dim)

    @property
    def _bytes_of_one(self) -> float:
        """`bytes_per_token` of one head of one row."""
        return key_bytes(self.k_format, self.head_dim) + value_bytes(self.v_format, self.v_head_dim)


def row_bytes(dim: int, bits: int) -> int:
    """Bytes of one packed row of *dim* codes in the interchange form: ``ceil(dim * bits / 8)``."""
    return (dim * bits + 7) // 8


def key_bytes(format: str, dim: int) -> float:
    """Bytes of one key of one head, in the long run."""
    params = GROUP_BYTES * dim / BLOCK if format in CODE_FORMATS else 0.0
    return row_bytes(dim, BITS[format]) + params


def value_bytes(format: str, dim: int) -> float:
    """Bytes of one value of one head, in the long run."""
    return row_bytes(dim, BITS[format]) + (GROUP_BYTES if format in CODE_FORMATS else 0)


# Beside those of `checks`, which stands on this file.


def _integer(name: str, value: Any, lowest: int, highest: int) -> int:
    wanted = f"{name} must be an integer from {lowest} to {highest}, got"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{wanted} {value!r} of type {type(value).__name__}")
    number = int(value)
    if not lowest <= number <= highest:
        raise ValueError(f"{wanted} {number}")
    return number


def _format(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in FORMATS:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name} must be one of {', '.join(FORMATS)}, got {value!r}")
    return value

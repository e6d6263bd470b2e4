"""Nibbles: two 4-bit codes in a byte, in the interchange form.

Even index in the low nibble, odd index in the high nibble; a row of odd length ends in a high nibble of 0.
All arrays in C order; outputs are overwritten entirely.
"""

from __future__ import annotations

import numpy as np

from kvnumba._jit import exact


@exact
def pack_nibbles_rows(codes, packed):
    """Pack each row of codes.

    Parameters
    ----------
    codes : uint8 [n, d]
        0..15.
    packed : uint8 [n, (d + 1) // 2]
        Overwritten.
    """
    n, d = codes.shape
    for i in range(n):
        for j in range(d // 2):
            packed[i, j] = codes[i, 2 * j] | np.uint8(codes[i, 2 * j + 1] << np.uint8(4))
        if d % 2:
            packed[i, d // 2] = codes[i, d - 1]


@exact
def unpack_nibbles_rows(packed, codes):
    """Unpack each row of bytes: the inverse of ``pack_nibbles_rows``.

    Parameters
    ----------
    packed : uint8 [n, (d + 1) // 2]
    codes : uint8 [n, d]
        Overwritten.
    """
    n, d = codes.shape
    for i in range(n):
        for j in range(d // 2):
            pair = packed[i, j]
            codes[i, 2 * j] = pair & np.uint8(15)
            codes[i, 2 * j + 1] = pair >> np.uint8(4)
        if d % 2:
            codes[i, d - 1] = packed[i, d // 2] & np.uint8(15)

"""Codes: the definition of a quantized group, and its inverse.

With ``levels = 2**bits - 1``, ``lo`` and ``hi`` the smallest and largest element of a group, all in float32::

    scale = (hi - lo) / levels, or 1 where that is not > 0 (a constant group, or one whose scale underflows)
    code  = (x - lo) / scale rounded half away from zero, at most levels
    value = lo + code * scale, the product rounded before the sum

Elements must be finite and at most ``spec.QUANTIZABLE`` in magnitude, so that ``hi - lo`` is finite; the caller
checks. A ``lo`` of zero is always +0. All arrays in C order; outputs are overwritten entirely.
"""

from __future__ import annotations

import numpy as np

from kvnumba._jit import exact


@exact
def group_scale(lo, hi, levels):
    """Return the scale of a group from its smallest and largest element, all float32."""
    scale = (hi - lo) / levels
    if not scale > np.float32(0):
        scale = np.float32(1)
    return scale


@exact
def code_of(x, lo, scale, levels):
    """Return the code of *x*, as int32: float32 *x*, *lo* and *scale* of its group, int32 *levels*."""
    quotient = (x - lo) / scale
    # Adding 0.5 first would itself round: 0.49999997 + 0.5 is 1 in float32. The fraction is exact.
    whole = np.int32(quotient)
    if quotient - np.float32(whole) >= np.float32(0.5):
        whole = np.int32(whole + np.int32(1))
    return min(whole, levels)


@exact
def row_range(bits):
    """Return the smallest and largest of float32 numbers, each as the int32 that has the same bits.

    Parameters
    ----------
    bits : int32 [d]
        The numbers, finite, seen as int32. With the lower 31 bits of negative ones inverted, integers are in the order
        of the floats, and integer minima are compiled to vectors where IEEE minima are not.
    """
    low = np.int32(0x7FFFFFFF)
    high = np.int32(-0x7FFFFFFF)
    for j in range(bits.shape[0]):
        key = np.int32(bits[j] ^ ((bits[j] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        low = min(low, key)
        high = max(high, key)
    low = np.int32(low ^ ((low >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    high = np.int32(high ^ ((high >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return low, high


@exact
def quantize_rows(x, block, levels, codes, lo, scale):
    """Quantize with one group for each block of numbers of a row; the last block may be short.

    Parameters
    ----------
    x : float32 [n, d]
    block : int
        Numbers of a group, counted from the start of the row.
    levels : int
        15 or 255, the largest code.
    codes : uint8 [n, d]
        Overwritten, one code a byte for either width.
    lo, scale : float32 [n, ceil(d / block)]
        Overwritten.
    """
    n, d = x.shape
    bits = x.view(np.int32)
    lo_bits = lo.view(np.int32)
    scale_bits = scale.view(np.int32)
    top = np.int32(levels)
    for i in range(n):
        for b in range(lo.shape[1]):
            first = b * block
            last = min(first + block, d)
            lo_bits[i, b], scale_bits[i, b] = row_range(bits[i, first:last])
            a = lo[i, b] + np.float32(0)  # -0 becomes +0
            s = group_scale(a, scale[i, b], np.float32(levels))
            lo[i, b] = a
            scale[i, b] = s
            numbers, out = x[i, first:last], codes[i, first:last]
            for j in range(numbers.shape[0]):
                out[j] = code_of(numbers[j], a, s, top)


@exact
def quantize_blocks(x, block, levels, codes, lo, scale):
    """Quantize with one group for each channel of each block of tokens; the last block may be short.

    Parameters
    ----------
    x : float32 [h, S, D]
    block : int
        Tokens of a block, counted from token 0.
    levels : int
        15 or 255, the largest code.
    codes : uint8 [h, S, D]
        Overwritten, one code a byte for either width.
    lo, scale : float32 [h, ceil(S / block), D]
        Overwritten.
    """
    heads, S, D = x.shape
    top = np.int32(levels)
    levels_f = np.float32(levels)
    for h in range(heads):
        for b in range(lo.shape[1]):
            first = b * block
            last = min(first + block, S)
            low = lo[h, b]
            high = scale[h, b]  # holds the largest elements until they are known
            low[:] = x[h, first]
            high[:] = x[h, first]
            for t in range(first + 1, last):
                row = x[h, t]
                for c in range(D):
                    low[c] = row[c] if row[c] < low[c] else low[c]
                    high[c] = row[c] if row[c] > high[c] else high[c]
            for c in range(D):
                low[c] = low[c] + np.float32(0)  # -0 becomes +0
                high[c] = group_scale(low[c], high[c], levels_f)
            for t in range(first, last):
                row = x[h, t]
                out = codes[h, t]
                for c in range(D):
                    out[c] = code_of(row[c], low[c], high[c], top)


@exact
def dequantize_rows(codes, block, lo, scale, out):
    """Decode rows with one group for each block of their numbers.

    Parameters
    ----------
    codes : uint8 [n, d]
    block : int
    lo, scale : float32 [n, ceil(d / block)]
    out : float32 [n, d]
        Overwritten.
    """
    n, d = codes.shape
    for i in range(n):
        for b in range(lo.shape[1]):
            first = b * block
            last = min(first + block, d)
            a, s, row, row_out = lo[i, b], scale[i, b], codes[i, first:last], out[i, first:last]
            for j in range(row.shape[0]):
                row_out[j] = a + np.float32(row[j]) * s


@exact
def dequantize_blocks(codes, block, lo, scale, out):
    """Decode blocks of tokens with one group for each channel.

    Parameters
    ----------
    codes : uint8 [h, S, D]
    block : int
    lo, scale : float32 [h, ceil(S / block), D]
    out : float32 [h, S, D]
        Overwritten.
    """
    heads, S, D = codes.shape
    for h in range(heads):
        for t in range(S):
            b = t // block
            row, row_lo, row_scale, row_out = codes[h, t], lo[h, b], scale[h, b], out[h, t]
            for c in range(D):
                row_out[c] = row_lo[c] + np.float32(row[c]) * row_scale[c]

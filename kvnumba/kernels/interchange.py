"""Codes between the memory form and the interchange form, and the sums that guard files.

The interchange form holds one row of packed codes a token: 8 bits, one code a byte; 4 bits, the even channel in the
low nibble. Rows are taken here in words, as wide as the memory form is: ``W`` channels, D padded to a multiple of 4 for
keys and of 32 for values. ``docs/memory_layout.md`` draws the memory form. All arrays in C order.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from kvnumba._jit import exact, inner
from kvnumba.simd import I8, I16, I32, Value, microkernel
from kvnumba.spec import BLOCK

_HALF = BLOCK // 2
_BYTES_32, _WORDS_16 = ir.VectorType(I8, 32), ir.VectorType(I16, _HALF)


@exact
def keys_from_rows_8(rows, codes):
    """rows uint32 [n * 32, W / 4] to key codes uint32 [n, W / 4 * 32]."""
    for block in range(codes.shape[0]):
        for g in range(rows.shape[1]):
            for t in range(BLOCK):
                codes[block, g * BLOCK + t] = rows[block * BLOCK + t, g]


@exact
def rows_from_keys_8(codes, rows):
    """Key codes uint32 [n, W / 4 * 32] to rows uint32 [n * 32, W / 4]."""
    for block in range(codes.shape[0]):
        for g in range(rows.shape[1]):
            for t in range(BLOCK):
                rows[block * BLOCK + t, g] = codes[block, g * BLOCK + t]


@microkernel
def _keys_4(e, rows, codes, groups, blocks):
    """Rows of two bytes a group of 4 channels, as words of 16 bits, to blocks of *groups* vectors of codes."""
    with e.range(0, blocks * groups) as at:
        block = at // groups
        row = block * BLOCK * groups + at - block * groups
        halves = []
        for first in (0, _HALF):
            pairs = e.zeros(I16)
            for t in range(_HALF):
                pair = e.load(rows, row + (groups * (first + t)))
                pairs = Value(e.builder, e.builder.insert_element(pairs.ir, pair.ir, ir.Constant(I32, t)))
            pairs = e.bitcast(pairs, _BYTES_32)
            halves.append(e.shuffle(pairs & 15, pairs >> 4, [i // 2 + i % 2 * 32 for i in range(64)]))
        e.store(halves[0] | halves[1] << 4, codes, at * 64)


@microkernel
def _rows_of_keys_4(e, codes, rows, groups, blocks):
    """The inverse of `_keys_4`."""
    with e.range(0, blocks * groups) as at:
        block = at // groups
        row = block * BLOCK * groups + at - block * groups
        both = e.load(codes, at * 64, 64)
        for first, half in ((0, both & 15), (_HALF, both >> 4)):
            even, odd = (e.shuffle(half, None, list(range(i, 64, 2))) for i in (0, 1))
            pairs = e.bitcast(even | odd << 4, _WORDS_16)
            for t in range(_HALF):
                pair = Value(e.builder, e.builder.extract_element(pairs.ir, ir.Constant(I32, t)))
                e.store(pair, rows, row + (groups * (first + t)))


@exact
def keys_from_rows_4(rows, codes):
    """rows uint16 [n * 32, W / 4] to key codes uint8 [n, W / 4 * 64]."""
    _keys_4(rows, codes, rows.shape[1], codes.shape[0])


@exact
def rows_from_keys_4(codes, rows):
    """Key codes uint8 [n, W / 4 * 64] to rows uint16 [n * 32, W / 4]."""
    _rows_of_keys_4(codes, rows, rows.shape[1], codes.shape[0])


@exact
def values_from_rows_8(rows, codes):
    """rows uint8 [n * 4, W] to value codes uint32 [n, W]."""
    for group in range(codes.shape[0]):
        one, two, three, four = rows[4 * group], rows[4 * group + 1], rows[4 * group + 2], rows[4 * group + 3]
        to = codes[group]
        for c in range(rows.shape[1]):
            to[c] = _word(one[c], two[c], three[c], four[c]) ^ np.uint32(0x80808080)


@exact
def rows_from_values_8(codes, rows):
    """Value codes uint32 [n, W] to rows uint8 [n * 4, W]."""
    for group in range(codes.shape[0]):
        for j in range(4):
            to, words, shift = rows[4 * group + j], codes[group], np.uint32(8 * j)
            for c in range(rows.shape[1]):
                to[c] = np.uint8(words[c] >> shift) ^ np.uint8(128)


@microkernel
def _values_4(e, rows, codes, width, groups):
    """Rows of *width* bytes, 16 bytes of each of four tokens at a time, to vectors of codes."""
    with e.range(0, groups * width, 16) as at:
        group = at // width
        start = group * 4 * width + at - group * width
        tokens = []
        for j in range(4):
            row = e.load(rows, start + width * j, 16)
            low, high = row & 15, row >> 4
            near, far = (e.shuffle(low, high, [i // 2 + i % 2 * 16 + 8 * k for i in range(16)]) for k in (0, 1))
            tokens.append((near | far << 4) ^ 0x88)
        e.store(e.shuffle(e.join(tokens), None, [i // 4 + i % 4 * 16 for i in range(64)]), codes, at * 4)


@microkernel
def _rows_of_values_4(e, codes, rows, width, groups):
    """The inverse of `_values_4`."""
    with e.range(0, groups * width, 16) as at:
        group = at // width
        start = group * 4 * width + at - group * width
        both = e.load(codes, at * 4, 64) ^ 0x88
        for j in range(4):
            token = e.shuffle(both, None, list(range(j, 64, 4)))
            low, high = token & 15, token >> 4
            even, odd = (e.shuffle(low, high, list(range(i, 32, 2))) for i in (0, 1))
            e.store(even | odd << 4, rows, start + width * j)


@exact
def values_from_rows_4(rows, codes):
    """rows uint8 [n * 4, W / 2] to value codes uint8 [n, W / 2 * 4]."""
    _values_4(rows, codes, rows.shape[1], codes.shape[0])


@exact
def rows_from_values_4(codes, rows):
    """Value codes uint8 [n, W / 2 * 4] to rows uint8 [n * 4, W / 2]."""
    _rows_of_values_4(codes, rows, rows.shape[1], codes.shape[0])


@inner
def _word(one, two, three, four):
    """Four bytes as a word, the first one lowest."""
    low = np.uint32(one) | np.uint32(two) << np.uint32(8)
    return low | np.uint32(three) << np.uint32(16) | np.uint32(four) << np.uint32(24)


@exact
def add_words(words, first, sums):
    """Add words to the two sums of a file, modulo 2**64.

    Parameters
    ----------
    words : uint32 [n]
    first : int
        Number of the first of them, counted from 0.
    sums : uint64 [2]
        The sum of all words, and the sum of each word times its number counted from 1; updated.
    """
    plain, weighted = np.uint64(0), np.uint64(0)
    for i in range(words.shape[0]):
        word = np.uint64(words[i])
        plain += word
        weighted += word * np.uint64(i + 1)
    sums[0] += plain
    sums[1] += weighted + plain * np.uint64(first)

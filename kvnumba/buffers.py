"""The memory map: every array of a cache, and where a token lives in it.

A cache is a `KVBuffers`: two stores and a state. A store is a NamedTuple of arrays; its class says the format, so that
compiled code chooses its path by type. B is the batch size, H the number of KV heads, D the head dimension.

Float stores hold rows ``[B, H, capacity, D]``. Code stores hold the first ``SINK`` tokens as float32 and the rest in
blocks of ``BLOCK`` tokens: token t >= SINK is token ``(t - SINK) % BLOCK`` of block ``(t - SINK) // BLOCK``.

Key codes of one block, ``C = ceil(D / 4)`` groups of 4 channels:

* int8: ``[C][32 tokens][4 channels]``, one unsigned code a byte;
* int4: ``[C][16][4 channels]``: the low nibble of byte (c, i, j) is the code of token i, the high one of token i + 16.

So one vector of 64 bytes holds 16 tokens x 4 channels, and a dot product of bytes leaves 16 scores in 16 lanes.

Value codes of one block, 8 groups of 4 tokens, D padded to a multiple of 32:

* int8: ``[8][D][4 tokens]``, code - 128 as a signed byte;
* int4: ``[8][D / 32][16][4 tokens]``: the low nibble of byte (g, u, i, j) is channel 32 u + i, the high one channel
  32 u + i + 16, each code - 8 as a signed nibble. A byte belongs to one token, so appending never changes older bytes.

``docs/memory_layout.md`` draws both.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvnumba.spec import BLOCK, SINK, CacheSpec

#: Columns of ``KVBuffers.state``.
LENGTH, KEPT = 0, 1

#: Value channels are padded to a multiple of this in memory.
V_UNIT = 32

#: Channels are read in vectors of this many float32.
LANES = 16

#: Arrays begin at a multiple of this many bytes: a line of the processor's cache, a vector of 16 float32.
ALIGNMENT = 64

#: Arrays of more bytes than this are pages of their own from the operating system.
MAPPED = 1 << 21

#: Bytes of a huge page on x86-64, and on AArch64 with pages of 4 KB.
HUGE = 1 << 21


class Float32Rows(NamedTuple):
    """Rows as float32."""

    rows: Any  #: float32 [B, H, capacity, D]


class Float16Rows(NamedTuple):
    """Rows as the bit patterns of float16."""

    rows: Any  #: uint16 [B, H, capacity, D]


class BFloat16Rows(NamedTuple):
    """Rows as the bit patterns of bfloat16."""

    rows: Any  #: uint16 [B, H, capacity, D]


class KeyCodes8(NamedTuple):
    """Keys, int8: blocks quantized per channel."""

    recent: Any  #: float32 [B, H, SINK + 2 * BLOCK, D]; sinks, then the two newest blocks, block b in slot b % 2
    codes: Any  #: uint8 [B, H, blocks, C * 32 * 4]
    params: Any  #: float32 [B, H, blocks, 2, D padded to 16]; lo, scale of each channel


class KeyCodes4(NamedTuple):
    """Keys, int4: as `KeyCodes8` with two tokens to a byte."""

    recent: Any  #: float32 [B, H, SINK + 2 * BLOCK, D]
    codes: Any  #: uint8 [B, H, blocks, C * 16 * 4]
    params: Any  #: float32 [B, H, blocks, 2, D padded to 16]


class ValueCodes8(NamedTuple):
    """Values, int8: each token quantized by itself."""

    sinks: Any  #: float32 [B, H, SINK, D]
    codes: Any  #: uint8 [B, H, blocks, 8 * Dp * 4]
    params: Any  #: float32 [B, H, blocks, 2, BLOCK]; lo, scale of each token


class ValueCodes4(NamedTuple):
    """Values, int4: as `ValueCodes8` with two channels to a byte."""

    sinks: Any  #: float32 [B, H, SINK, D]
    codes: Any  #: uint8 [B, H, blocks, 8 * Dp * 2]
    params: Any  #: float32 [B, H, blocks, 2, BLOCK]


class KVBuffers(NamedTuple):
    """One layer's keys and values."""

    k: Any  #: a store of keys
    v: Any  #: a store of values
    state: Any  #: int64 [max(1, B), 2]; tokens stored; first block whose float32 key rows are in ``recent``


FloatRows = (Float32Rows, Float16Rows, BFloat16Rows)
KeyCodes = (KeyCodes8, KeyCodes4)
ValueCodes = (ValueCodes8, ValueCodes4)

KEY_STORES = {
    "float32": Float32Rows,
    "float16": Float16Rows,
    "bfloat16": BFloat16Rows,
    "int8": KeyCodes8,
    "int4": KeyCodes4,
}
VALUE_STORES = {**KEY_STORES, "int8": ValueCodes8, "int4": ValueCodes4}


def round_up(n: int, unit: int) -> int:
    """The smallest multiple of *unit* that is at least *n*."""
    return -(-n // unit) * unit


def blocks_for(capacity: int) -> int:
    """Blocks of a code store with room for *capacity* tokens: at least one, so that there is room for the sinks too."""
    return max(1, -(-(capacity - SINK) // BLOCK)) if capacity > 0 else 0


def usable_capacity(spec: CacheSpec, capacity: int) -> int:
    """Tokens that fit into the buffers made for *capacity*: codes come in whole blocks, float rows as asked."""
    codes = is_coded(spec.k_format) or is_coded(spec.v_format)
    return SINK + BLOCK * blocks_for(capacity) if codes and capacity > 0 else capacity


def is_coded(format: str) -> bool:
    return format in ("int8", "int4")


def allocate(spec: CacheSpec, capacity: int) -> KVBuffers:
    """Empty buffers that hold *capacity* tokens (a value of `usable_capacity`)."""
    keys = allocate_store(KEY_STORES[spec.k_format], spec.batch_size, spec.num_kv_heads, capacity, spec.head_dim)
    values = allocate_store(VALUE_STORES[spec.v_format], spec.batch_size, spec.num_kv_heads, capacity, spec.v_head_dim)
    return KVBuffers(keys, values, np.zeros((max(1, spec.batch_size), 2), np.int64))


def allocate_store(store: type, batch: int, heads: int, capacity: int, dim: int, spare: bool = False) -> Any:
    """An empty store of one tensor; *spare*: much of it is not written soon."""
    blocks, lead = blocks_for(capacity), (batch, heads)
    if store in FloatRows:
        return store(aligned((*lead, capacity, dim), np.float32 if store is Float32Rows else np.uint16, spare))
    if store in KeyCodes:
        block_bytes = round_up(dim, 4) * (BLOCK if store is KeyCodes8 else BLOCK // 2)
        first, params = (*lead, SINK + 2 * BLOCK, dim), (*lead, blocks, 2, round_up(dim, LANES))
    else:
        block_bytes = round_up(dim, V_UNIT) * (BLOCK if store is ValueCodes8 else BLOCK // 2)
        first, params = (*lead, SINK, dim), (*lead, blocks, 2, BLOCK)
    # Zeros, not garbage: padded channels and tokens not yet written are read by the kernels with weight 0.
    return store(
        aligned(first, np.float32),
        aligned((*lead, blocks, block_bytes), np.uint8, spare),
        aligned(params, np.float32, spare),
    )


def aligned(shape: tuple[int, ...], dtype: Any, spare: bool = False) -> np.ndarray:
    """Zeros that begin at a multiple of ``ALIGNMENT``; *spare*: much is not written soon and takes no memory yet.

    Large arrays are not the allocator's: it keeps what is given back, and the old arrays of layers that grow in turn
    add up to a second cache.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size > sys.maxsize - ALIGNMENT:
        raise MemoryError(f"no memory for {size} bytes")
    raw = mapped(size, huge=not spare) if size > MAPPED else np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def doubled(capacity: int, length: int) -> bool:
    """Whether room for *capacity* tokens is *length* tokens and as many spare, not room for a prompt that comes."""
    return 5 * length < 4 * capacity <= 10 * length


def mapped(size: int, huge: bool) -> np.ndarray:
    """*size* zero bytes in pages that exist once they are written, and go back to the system with the array.

    In huge pages all of an array is soon written, one byte of each makes 2 MB; small ones are slower to fill.
    """
    # Private: the default would be shared with a forked child.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        pages = mmap.mmap(-1, size + (HUGE if huge else 0), **private)
    except (OSError, OverflowError):
        raise MemoryError(f"no memory for {size} bytes") from None
    raw = np.frombuffer(pages, np.uint8)
    start = -raw.ctypes.data % HUGE if huge else 0
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            if huge:
                pages.madvise(mmap.MADV_HUGEPAGE, start, size - size % HUGE)  # the rest would take a whole one
            else:
                pages.madvise(mmap.MADV_NOHUGEPAGE)
    return raw[start : start + size]


def take_store(store: Any, rows: Sequence[int], lengths: Sequence[int], capacity: int) -> Any:
    """A store of its own with room for *capacity* tokens; row i holds the first lengths[i] tokens of row rows[i].

    Nothing else is copied: what lies past the length of a row may be what another owner of the arrays stored there.
    """
    _, heads, _, dim = store[0].shape
    spare = doubled(capacity, max(lengths, default=0))
    taken = allocate_store(type(store), len(rows), heads, capacity, dim, spare)
    for to, (row, length) in enumerate(zip(rows, lengths)):
        if type(store) in FloatRows:
            taken.rows[to, :, :length] = store.rows[row, :, :length]
        else:
            taken[0][to] = store[0][row]
            _take_codes(store, row, taken, to, max(0, length - SINK))
    return taken


def _take_codes(store: Any, row: int, taken: Any, to: int, coded: int) -> None:
    """Copy codes and parameters of the first *coded* tokens after the sinks of one row."""
    whole, rest = divmod(coded, BLOCK)
    blocks = whole if type(store) in KeyCodes or rest == 0 else whole + 1
    for old, new in zip(store[1:], taken[1:]):
        new[to, :, :blocks] = old[row, :, :blocks]
    if blocks > whole:  # values: of the last block only *rest* tokens
        groups = taken.codes[to, :, whole].reshape(taken.codes.shape[1], 8, taken.codes.shape[3] // 32, 4)
        groups[:, rest // 4, :, rest % 4 :] = 0
        groups[:, rest // 4 + 1 :] = 0
        taken.params[to, :, whole, :, rest:] = 0


def share_store(store: Any) -> Any:
    """A store of the same tokens for another owner: float rows beside codes are copied, all else is shared.

    Float rows beside codes are few, whatever the length, and are written again and again; in the shared arrays a token
    is written once, past the tokens stored before.
    """
    if type(store) in FloatRows:
        return store
    first = aligned(store[0].shape, np.float32)
    first[...] = store[0]
    return type(store)(first, *store[1:])

"""How the classes call compiled code: one small array in place of a tree of named tuples.

Handing a `KVBuffers` from Python to compiled code costs several microseconds: every named tuple is inspected and every
array is wrapped. For calls from the classes the addresses and shapes of its arrays are written once into an int64
array, the *map* of the buffers, from which compiled code makes the same tuple at no cost. One set of entry points is
compiled for each pair of formats. Who passes a map keeps the buffers alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, overload

from kvnumba._jit import exact, inner, sums
from kvnumba.buffers import Float32Rows, FloatRows, KVBuffers
from kvnumba.kernels.append import append_checked, append_some_checked
from kvnumba.kernels.attention import few_units, many_units
from kvnumba.kernels.states import Extras

#: Items of a map for one array: its address and five lengths.
_SLOT = 6
#: Slots: three arrays of each store, then the state.
_VALUES, _STATE = 3 * _SLOT, 6 * _SLOT


class Entries(NamedTuple):
    """Compiled functions for one pair of formats; *map* is what `map_buffers` returns."""

    append: Callable[..., int]  #: (map, k, v) -> as `kernels.append.append_checked`
    append_some: Callable[..., int]  #: (map, k, v, counts): of row b the first counts[b] tokens
    few: Callable[..., bool]  #: (map, q, out, lse, sm_scale, causal, first, last) -> whether the result is finite
    many: Callable[..., bool]  #: as few
    few_with: Callable[..., bool]  #: (map, q, out, lse, sm_scale, causal, extras, first, last): as few
    many_with: Callable[..., bool]  #: as few_with


def map_buffers(buffers: KVBuffers) -> npt.NDArray[np.int64]:
    """Addresses and shapes of all arrays of *buffers*."""
    entries = np.zeros(7 * _SLOT, np.int64)
    for start, arrays in ((0, buffers.k), (_VALUES, buffers.v), (_STATE, (buffers.state,))):
        for i, array in enumerate(arrays):
            at = start + i * _SLOT
            entries[at] = array.ctypes.data
            entries[at + 1 : at + 1 + array.ndim] = array.shape
    return entries


@intrinsic
def _pointer(typingctx, address):
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@inner
def _view4(entries, at, dtype):
    shape = (entries[at + 1], entries[at + 2], entries[at + 3], entries[at + 4])
    return carray(_pointer(entries[at]), shape, dtype)


@inner
def _view5(entries, at, dtype):
    shape = (entries[at + 1], entries[at + 2], entries[at + 3], entries[at + 4], entries[at + 5])
    return carray(_pointer(entries[at]), shape, dtype)


def open_store(entries, start, kind):
    """The store of class *kind* whose arrays begin at item *start* of a map."""
    raise NotImplementedError("compiled code only")


@overload(open_store)
def _open_store(entries, start, kind):
    store = kind.instance_class
    if store in FloatRows:
        dtype = np.float32 if store is Float32Rows else np.uint16
        return lambda entries, start, kind: kind(_view4(entries, start, dtype))

    def codes(entries, start, kind):
        first = _view4(entries, start, np.float32)
        packed = _view4(entries, start + _SLOT, np.uint8)
        return kind(first, packed, _view5(entries, start + 2 * _SLOT, np.float32))

    return codes


@inner
def open_buffers(entries, k_kind, v_kind):
    """The buffers that a map was made of."""
    state = carray(_pointer(entries[_STATE]), (entries[_STATE + 1], entries[_STATE + 2]), np.int64)
    return KVBuffers(open_store(entries, 0, k_kind), open_store(entries, _VALUES, v_kind), state)


@inner
def borrowed(extras):
    """*extras* with arrays whose owners are not counted, which would cost at every tile."""
    mask, slopes, logits = extras.mask, extras.alibi_slopes, extras.sink_logits
    return Extras(
        carray(_pointer(np.int64(mask.ctypes.data)), mask.shape, np.float32), extras.softcap, extras.left, extras.right,
        carray(_pointer(np.int64(slopes.ctypes.data)), slopes.shape, np.float32),
        carray(_pointer(np.int64(logits.ctypes.data)), logits.shape, np.float32), extras.sinks, extras.dropped,
    )  # fmt: skip


_made: dict[tuple[type, type], Entries] = {}


def entries_of(k_kind: type, v_kind: type) -> Entries:
    """Entry points for a store of keys and one of values; compiled when first called."""
    if (k_kind, v_kind) not in _made:
        _made[k_kind, v_kind] = _make(k_kind, v_kind)
    return _made[k_kind, v_kind]


def _make(k_kind: type, v_kind: type) -> Entries:

    @exact
    def append_tokens(entries, k, v):
        return append_checked(open_buffers(entries, k_kind, v_kind), k, v)

    @exact
    def append_some_tokens(entries, k, v, counts):
        return append_some_checked(open_buffers(entries, k_kind, v_kind), k, v, counts)

    @sums
    def attend_few(entries, q, out, lse, sm_scale, causal, first, last):
        buffers = open_buffers(entries, k_kind, v_kind)
        return few_units(buffers, q, out, lse, sm_scale, causal != 0, None, first, last)

    @sums
    def attend_many(entries, q, out, lse, sm_scale, causal, first, last):
        buffers = open_buffers(entries, k_kind, v_kind)
        return many_units(buffers, q, out, lse, sm_scale, causal != 0, None, first, last)

    @sums
    def attend_few_with(entries, q, out, lse, sm_scale, causal, extras, first, last):
        buffers = open_buffers(entries, k_kind, v_kind)
        return few_units(buffers, q, out, lse, sm_scale, causal != 0, borrowed(extras), first, last)

    @sums
    def attend_many_with(entries, q, out, lse, sm_scale, causal, extras, first, last):
        buffers = open_buffers(entries, k_kind, v_kind)
        return many_units(buffers, q, out, lse, sm_scale, causal != 0, borrowed(extras), first, last)

    return Entries(append_tokens, append_some_tokens, attend_few, attend_many, attend_few_with, attend_many_with)

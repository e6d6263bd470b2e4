"""Writing a cache: append and truncate.

Appending only writes beyond the stored length. A key block is quantized once, when its 32nd token arrives; its float32
rows stay in ``recent`` until the next block is sealed, so that a cut into it is exact.
"""

from __future__ import annotations

from numba.extending import overload

from kvnumba._jit import exact, inner
from kvnumba.buffers import KEPT, LENGTH, BFloat16Rows, Float16Rows, FloatRows, KeyCodes, KeyCodes8, ValueCodes8
from kvnumba.kernels.decode import decode
from kvnumba.kernels.encode import (
    all_within,
    copy,
    narrow_bfloat16,
    narrow_float16,
    put_four_int4,
    put_four_int8,
    put_int4,
    put_int8,
    seal_int4,
    seal_int8,
)
from kvnumba.kernels.places import capacity_of, recent_row, sealed_blocks
from kvnumba.spec import BLOCK, QUANTIZABLE, SINK

#: What `append_checked` returns.
STORED, NO_ROOM, NOT_FINITE = 0, 1, 2

#: Tokens up to which all are checked before any is stored.
FEW = 64


def write(store, x, b, h, length, count):
    """Store the rows x[b, h, :count, :] (float32 [B, H, S, D]) of one head as tokens *length* onwards."""
    raise NotImplementedError("compiled code only")


def take_back(store, b, first, last, kept):
    """Make the float32 rows beside the codes those of a cache that holds *first* tokens in batch row b, not *last*.

    Returns the first key block whose float32 rows are still there.
    """
    raise NotImplementedError("compiled code only")


def erase(store, b, first, last):
    """Fill tokens [first, last) of one batch row with zeros: float rows, or codes and their parameters."""
    raise NotImplementedError("compiled code only")


@overload(write)
def _write(store, x, b, h, length, count):
    kind = store.instance_class
    if kind in FloatRows:
        put = {Float16Rows: narrow_float16, BFloat16Rows: narrow_bfloat16}.get(kind, copy)

        def rows(store, x, b, h, length, count):
            head, given, dim = b * x.shape[1] + h, x.shape[2], x.shape[3]
            put(x, head * given * dim, count * dim, store.rows, (head * store.rows.shape[2] + length) * dim)

        return rows
    if kind in KeyCodes:
        seal = seal_int8 if kind is KeyCodes8 else seal_int4

        def keys(store, x, b, h, length, count):
            head, given, dim = b * x.shape[1] + h, x.shape[2], x.shape[3]
            padded, done = store.params.shape[4], 0
            while done < count:
                token = length + done
                # Up to the end of the sinks or of the block.
                room = SINK - token if token < SINK else BLOCK - (token - SINK) % BLOCK
                n = min(room, count - done)
                row = (head * store.recent.shape[2] + recent_row(token)) * dim
                copy(x, (head * given + done) * dim, n * dim, store.recent, row)
                done += n
                if token >= SINK and n == room:
                    block = (token - SINK) // BLOCK
                    first = (head * store.recent.shape[2] + SINK + block % 2 * BLOCK) * dim
                    at = head * store.codes.shape[2] + block
                    seal(store.recent, first, dim, store.codes, at * store.codes.shape[3],
                         store.params, at * 2 * padded, padded)  # fmt: skip

        return keys

    put, put_four = (put_int8, put_four_int8) if kind is ValueCodes8 else (put_int4, put_four_int4)

    def values(store, x, b, h, length, count):
        head, given, dim = b * x.shape[1] + h, x.shape[2], x.shape[3]
        block_bytes, t = store.codes.shape[3], 0
        while t < count:
            token, row = length + t, (head * given + t) * dim
            if token < SINK:
                copy(x, row, dim, store.sinks, (head * SINK + token) * dim)
                t += 1
                continue
            block, i = (token - SINK) // BLOCK, (token - SINK) % BLOCK
            at = head * store.codes.shape[2] + block
            group, param = at * block_bytes + (i // 4) * (block_bytes // 8), at * 2 * BLOCK + i
            if i % 4 == 0 and count - t >= 4:
                put_four(x, row, dim, store.codes, group, 0, store.params, param)
                t += 4
            else:
                put(x, row, dim, store.codes, group, i % 4, store.params, param)
                t += 1

    return values


@overload(take_back)
def _take_back(store, b, first, last, kept):
    kind = store.instance_class
    if kind in FloatRows:  # as if no more had come; float rows have no use for it
        return lambda store, b, first, last, kept: max(0, sealed_blocks(first) - 1)
    if kind in KeyCodes:

        def keys(store, b, first, last, kept):
            old, new = sealed_blocks(last), sealed_blocks(first)
            start = SINK + new * BLOCK  # first token of the block that will be filling
            left = max(0, first - start)
            slot = SINK + new % 2 * BLOCK
            heads = store.codes.shape[1] if b < store.codes.shape[0] else 0
            for h in range(heads):
                if new < old and new < kept and left > 0:
                    head = b * store.codes.shape[1] + h
                    at = (head * store.recent.shape[2] + slot) * store.recent.shape[3]
                    decode(store, b, h, start, first, store.recent, at)
                if first < SINK:
                    store.recent[b, h, first:SINK] = 0
                store.recent[b, h, slot + left : slot + BLOCK] = 0
                if new < 1 or new - 1 < kept:
                    other = SINK + (new + 1) % 2 * BLOCK
                    store.recent[b, h, other : other + BLOCK] = 0
            return min(kept, new)

        return keys

    def values(store, b, first, last, kept):
        if first < SINK and b < store.sinks.shape[0]:
            store.sinks[b, :, first:SINK] = 0
        return kept

    return values


@overload(erase)
def _erase(store, b, first, last):
    kind = store.instance_class
    if kind in FloatRows:

        def rows(store, b, first, last):
            store.rows[b, :, first:last] = 0

        return rows
    if kind in KeyCodes:

        def keys(store, b, first, last):
            old, new = sealed_blocks(last), sealed_blocks(first)
            store.codes[b, :, new:old] = 0
            store.params[b, :, new:old] = 0

        return keys

    def values(store, b, first, last):
        group_bytes = store.codes.shape[3] // 8
        for h in range(store.codes.shape[1]):
            for token in range(max(first, SINK), last):
                block, i = (token - SINK) // BLOCK, (token - SINK) % BLOCK
                group = store.codes[b, h, block, i // 4 * group_bytes : (i // 4 + 1) * group_bytes]
                group[i % 4 :: 4] = 0
                store.params[b, h, block, 0, i] = 0
                store.params[b, h, block, 1, i] = 0

    return values


@inner
def advance_row(state, b, count):
    """Count *count* more tokens as stored in one batch row."""
    old, new = state[b, LENGTH], state[b, LENGTH] + count
    if sealed_blocks(new) > sealed_blocks(old):
        state[b, KEPT] = sealed_blocks(new) - 1
    state[b, LENGTH] = new


@inner
def cut_row(store, state, b, n, erasing):
    """Remove the tokens of one batch row from *n* on; returns what `take_back` does.

    The store of a cache without rows, which still has a length, has no row b.
    """
    kept = take_back(store, b, n, state[b, LENGTH], state[b, KEPT])
    if erasing and b < store[0].shape[0]:
        erase(store, b, n, state[b, LENGTH])
    return kept


@exact
def append_store(store, x, state):
    """Append float32 [B, H, S, D] to one store, and count it; False, and nothing done, where it does not fit."""
    count = x.shape[2]
    for b in range(x.shape[0]):
        if state[b, LENGTH] + count > capacity_of(store):
            return False
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            write(store, x, b, h, state[b, LENGTH], count)
        advance_row(state, b, count)
    return True


@exact
def append(buffers, k, v):
    """Append keys and values to a cache, in place.

    Parameters
    ----------
    buffers : KVBuffers
        Modified in place, ``state`` included.
    k : float32 [B, H, S, D], C-contiguous
    v : float32 [B, H, S, Dv], C-contiguous
        Finite where the format is a code.

    Returns
    -------
    bool
        False, and nothing done, if the buffers have no room for S more tokens.
    """
    count = k.shape[2]
    if count == 0:
        return True
    if not has_room(buffers, count):
        return False
    for b in range(k.shape[0]):
        for h in range(k.shape[1]):
            write(buffers.k, k, b, h, buffers.state[b, LENGTH], count)
            write(buffers.v, v, b, h, buffers.state[b, LENGTH], count)
    for b in range(buffers.state.shape[0]):
        advance_row(buffers.state, b, count)
    return True


@inner
def append_some_checked(buffers, k, v, counts):
    """As `append_checked`, of row b only the first counts[b] tokens: int64 [max(1, B)], each from 0 to S."""
    for b in range(k.shape[0]):
        if buffers.state[b, LENGTH] + counts[b] > min(capacity_of(buffers.k), capacity_of(buffers.v)):
            return NO_ROOM
    for b in range(k.shape[0]):
        for h in range(k.shape[1]):
            if not (quantizable(buffers.k, k, b, h) and quantizable(buffers.v, v, b, h)):
                return NOT_FINITE
    for b in range(k.shape[0]):
        for h in range(k.shape[1]):
            write(buffers.k, k, b, h, buffers.state[b, LENGTH], counts[b])
            write(buffers.v, v, b, h, buffers.state[b, LENGTH], counts[b])
    for b in range(buffers.state.shape[0]):
        advance_row(buffers.state, b, counts[b])
    return STORED


@inner
def append_checked(buffers, k, v):
    """As `append`, of numbers that may not be finite; nothing has changed unless STORED is returned."""
    count = k.shape[2]
    if count > 0 and not has_room(buffers, count):
        return NO_ROOM
    if count <= FEW:
        for b in range(k.shape[0]):
            for h in range(k.shape[1]):
                if not (quantizable(buffers.k, k, b, h) and quantizable(buffers.v, v, b, h)):
                    return NOT_FINITE
        append(buffers, k, v)
        return STORED
    # Head by head: what was read for the check is still near when it is stored.
    rows = recent_copy(buffers.k)
    for b in range(k.shape[0]):
        for h in range(k.shape[1]):
            if not (
                write_checked(buffers.k, k, b, h, buffers.state) and write_checked(buffers.v, v, b, h, buffers.state)
            ):
                for other in range(b + 1):  # what heads before wrote is beyond what counts, except the recent rows
                    length = buffers.state[other, LENGTH]
                    forget(buffers.k, other, length, length + count)
                    forget(buffers.v, other, length, length + count)
                put_back(buffers.k, rows)
                return NOT_FINITE
    for b in range(buffers.state.shape[0]):
        advance_row(buffers.state, b, count)
    return STORED


@inner
def forget(store, b, first, last):
    """Undo the writing of tokens [first, last) of one batch row, but for what `put_back` does."""
    take_back(store, b, first, last, 0)
    erase(store, b, first, last)


@inner
def write_checked(store, x, b, h, state):
    """`write`, if *store* can hold the numbers; whether it can."""
    fine = quantizable(store, x, b, h)
    if fine:
        write(store, x, b, h, state[b, LENGTH], x.shape[2])
    return fine


@inner
def has_room(buffers, count):
    """Whether every batch row has room for *count* more tokens."""
    room = min(capacity_of(buffers.k), capacity_of(buffers.v))
    return buffers.state[:, LENGTH].max() + count <= room


def quantizable(store, x, b, h):
    """Whether all of x[b, h] (float32 [B, H, S, D]) can be stored in *store*."""
    raise NotImplementedError("compiled code only")


def recent_copy(store):
    """A copy of the float32 rows of key blocks, which appending overwrites in turn."""
    raise NotImplementedError("compiled code only")


def put_back(store, rows):
    """Undo what was done to the rows that `recent_copy` returned."""
    raise NotImplementedError("compiled code only")


@overload(quantizable)
def _quantizable(store, x, b, h):
    if store.instance_class in FloatRows:
        return lambda store, x, b, h: True

    def finite(store, x, b, h):
        size = x.shape[2] * x.shape[3]
        return all_within(x, (b * x.shape[1] + h) * size, size, QUANTIZABLE) == 1

    return finite


@overload(recent_copy)
def _recent_copy(store):
    return (lambda store: store.recent.copy()) if store.instance_class in KeyCodes else (lambda store: None)


@overload(put_back)
def _put_back(store, rows):
    if store.instance_class not in KeyCodes:
        return lambda store, rows: None

    def restore(store, rows):
        store.recent[:] = rows

    return restore


@exact
def truncate_store(store, state, n, erasing):
    """Keep the first *n* tokens of one store, and say so in *state*; erase the others where *erasing*."""
    for b in range(state.shape[0]):
        if n < state[b, LENGTH]:
            state[b, KEPT] = cut_row(store, state, b, n, erasing)
            state[b, LENGTH] = n


@inner
def truncate_row(buffers, b, n, erasing):
    """Keep the first *n* tokens of one batch row; erase the others where *erasing*."""
    state = buffers.state
    if n < state[b, LENGTH]:
        cut_row(buffers.v, state, b, n, erasing)
        state[b, KEPT] = cut_row(buffers.k, state, b, n, erasing)
        state[b, LENGTH] = n


@exact
def truncate_rows(buffers, lengths, erasing):
    """Keep the first lengths[b] tokens of each batch row: int64 [max(1, B)].

    Without *erasing* float rows, codes and their parameters are left as they are: others may read them.
    """
    for b in range(buffers.state.shape[0]):
        truncate_row(buffers, b, lengths[b], erasing)


@exact
def truncate(buffers, n):
    """Keep the first *n* tokens of a cache, in place; what is removed is erased."""
    for b in range(buffers.state.shape[0]):
        truncate_row(buffers, b, n, True)

"""Stored tokens as float32 rows again."""

from __future__ import annotations

import numpy as np
from numba.extending import overload

from kvnumba._jit import exact
from kvnumba.buffers import LENGTH, BFloat16Rows, Float16Rows, FloatRows, KeyCodes, KeyCodes8, ValueCodes8
from kvnumba.kernels.encode import copy, widen_bfloat16, widen_float16
from kvnumba.kernels.places import recent_row, sealed_blocks
from kvnumba.spec import BLOCK, SINK


def decode(store, b, h, first, last, out, at):
    """out[at:] = tokens [first, last) of one head as float32 rows; sealed keys and coded values are decoded."""
    raise NotImplementedError("compiled code only")


@overload(decode)
def _decode(store, b, h, first, last, out, at):
    kind = store.instance_class
    if kind in FloatRows:
        get = {Float16Rows: widen_float16, BFloat16Rows: widen_bfloat16}.get(kind, copy)

        def rows(store, b, h, first, last, out, at):
            dim = store.rows.shape[3]
            start = ((b * store.rows.shape[1] + h) * store.rows.shape[2] + first) * dim
            get(store.rows, start, (last - first) * dim, out, at)

        return rows
    eight = kind in (KeyCodes8, ValueCodes8)
    if kind in KeyCodes:

        def keys(store, b, h, first, last, out, at):
            dim, flat = store.recent.shape[3], out.ravel()
            for t in range(first, last):
                i = (t - SINK) % BLOCK
                codes = store.codes[b, h, (t - SINK) // BLOCK]
                lo, scale = store.params[b, h, (t - SINK) // BLOCK]
                for c in range(dim):
                    if eight:
                        code = np.int64(codes[(c // 4) * 128 + i * 4 + c % 4])
                    else:
                        byte = np.int64(codes[(c // 4) * 64 + (i % 16) * 4 + c % 4])
                        code = byte >> 4 if i >= 16 else byte & 15
                    flat[at + (t - first) * dim + c] = lo[c] + np.float32(code) * scale[c]

        return keys

    def values(store, b, h, first, last, out, at):
        dim, flat = store.sinks.shape[3], out.ravel()
        group_bytes = store.codes.shape[3] // 8
        for t in range(first, last):
            i = (t - SINK) % BLOCK
            codes = store.codes[b, h, (t - SINK) // BLOCK]
            lo = store.params[b, h, (t - SINK) // BLOCK, 0, i]
            scale = store.params[b, h, (t - SINK) // BLOCK, 1, i]
            start = (i // 4) * group_bytes + i % 4
            for c in range(dim):
                if eight:
                    code = np.int64(codes[start + c * 4]) ^ 128
                else:
                    byte = np.int64(codes[start + (c // 32) * 64 + (c % 16) * 4])
                    code = ((byte >> 4) if c % 32 >= 16 else (byte & 15)) ^ 8
                flat[at + (t - first) * dim + c] = lo + np.float32(code) * scale

    return values


def decode_head(store, b, h, length, out, at):
    """out[at:] = all *length* tokens of one head as float32 rows."""
    raise NotImplementedError("compiled code only")


@overload(decode_head)
def _decode_head(store, b, h, length, out, at):
    kind = store.instance_class
    if kind in FloatRows:
        return lambda store, b, h, length, out, at: decode(store, b, h, 0, length, out, at)
    keys = kind in KeyCodes

    def codes(store, b, h, length, out, at):
        first = store.recent if keys else store.sinks
        dim = first.shape[3]
        sealed = SINK + sealed_blocks(length) * BLOCK if keys else max(length, SINK)
        head = (b * first.shape[1] + h) * first.shape[2]
        copy(first, head * dim, min(length, SINK) * dim, out, at)
        decode(store, b, h, SINK, sealed, out, at + SINK * dim)
        if length > sealed:
            row = (head + recent_row(sealed)) * dim
            copy(first, row, (length - sealed) * dim, out, at + sealed * dim)

    return codes


def decode_token(store, b, h, token, length, out):
    """out[:] = one of *length* tokens of one head, for out float32 [D]."""
    raise NotImplementedError("compiled code only")


@overload(decode_token)
def _decode_token(store, b, h, token, length, out):
    kind = store.instance_class
    if kind in FloatRows:
        return lambda store, b, h, token, length, out: decode(store, b, h, token, token + 1, out, 0)
    keys = kind in KeyCodes

    def codes(store, b, h, token, length, out):
        first = store.recent if keys else store.sinks
        dim = first.shape[3]
        if token < SINK or (keys and token >= SINK + sealed_blocks(length) * BLOCK):
            copy(first, ((b * first.shape[1] + h) * first.shape[2] + recent_row(token)) * dim, dim, out, 0)
        else:
            decode(store, b, h, token, token + 1, out, 0)

    return codes


@exact
def decode_store(store, state, out):
    """out[b, h, t] = token t as float32 row, for out [B, H, T, D]; what lies past the length of a row is left alone."""
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            at = (b * out.shape[1] + h) * out.shape[2] * out.shape[3]
            decode_head(store, b, h, state[b, LENGTH], out, at)

"""Where a token lives, for compiled code."""

from __future__ import annotations

from numba.extending import overload

from kvnumba._jit import inner
from kvnumba.buffers import FloatRows
from kvnumba.spec import BLOCK, SINK


@inner
def recent_row(token):
    """Row of ``recent`` that holds *token*: a sink, or a token of one of the two newest blocks."""
    if token < SINK:
        return token
    return SINK + (token - SINK) % (2 * BLOCK)


@inner
def sealed_blocks(length):
    """Key blocks that are quantized when *length* tokens are stored."""
    return max(0, (length - SINK) // BLOCK)


def capacity_of(store):
    """Tokens that fit into a store."""
    raise NotImplementedError("compiled code only")


@overload(capacity_of)
def _capacity_of(store):
    if store.instance_class in FloatRows:
        return lambda store: store.rows.shape[2]
    return lambda store: SINK + BLOCK * store.codes.shape[2] if store.codes.shape[2] > 0 else 0

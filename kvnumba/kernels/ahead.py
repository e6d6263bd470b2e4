"""Asking for memory while a loop computes.

A loop over one tile asks for the tile that is read after it, a line or a few in each pass, so that memory works all the
time. The run is asked for in four streams, each a quarter of it: the processor reads four pages side by side faster
than one page after another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba.extending import overload

from kvnumba.buffers import Float32Rows, FloatRows
from kvnumba.simd import Emitter
from kvnumba.spec import BLOCK, SINK

#: Bytes that the processor fetches at once.
LINE = 64
#: Streams of one run.
STREAMS = 4


class Run(NamedTuple):
    """Bytes that will be read soon."""

    memory: Any  #: array of any type
    start: Any  #: first byte
    count: Any  #: bytes; 0: nothing to ask for


class Ahead:
    """Asks for a `Run` (of values of the emitter) in passes of *lines* lines: 1, 2 or 4."""

    def __init__(self, e: Emitter, run: Run, lines: int) -> None:
        self._e, self._run, self._lines = e, run, lines
        rounds = (run.count + (STREAMS * LINE - 1)) // (STREAMS * LINE)
        self._stream, self._total = rounds * LINE, rounds * STREAMS  # bytes of a stream, lines of all
        self._done = e.variable(e.integer(0))

    def ask(self) -> None:
        """Ask for the next lines, if any are left."""
        e, done = self._e, self._done.get()
        with e.when(done.compare("<", self._total)):
            for i in range(self._lines):
                stream = (done + i) & (STREAMS - 1)
                e.prefetch(self._run.memory, self._run.start + stream * self._stream + ((done >> 2) << 6))
            self._done.set(done + self._lines)


def is_float(store):
    """Whether *store* (a Numba type) holds float rows."""
    return store.instance_class in FloatRows


def run_of(store, b, h, token, count):
    """The `Run` of *count* tokens from *token* on, the first of a block, of one head; sinks are left out."""
    raise NotImplementedError("compiled code only")


def token_bytes(store):
    """Bytes of one token of one head: row or codes."""
    raise NotImplementedError("compiled code only")


@overload(token_bytes)
def _token_bytes(store):
    if is_float(store):
        size = 4 if store.instance_class is Float32Rows else 2
        return lambda store: store.rows.shape[3] * size
    return lambda store: store.codes.shape[3] // BLOCK


def params_of(store, b, h, token, count):
    """The `Run` of the parameters of the blocks that hold *count* tokens from *token* on; none of float rows."""
    raise NotImplementedError("compiled code only")


@overload(params_of)
def _params_of(store, b, h, token, count):
    if is_float(store):
        return lambda store, b, h, token, count: Run(store.rows, 0, 0)

    def params(store, b, h, token, count):
        block = max(0, token - SINK) // BLOCK
        size = store.params.shape[3] * store.params.shape[4] * 4
        start = ((b * store.params.shape[1] + h) * store.params.shape[2] + block) * size
        return Run(store.params, start, (count + BLOCK - 1) // BLOCK * size if token >= SINK else 0)

    return params


@overload(run_of)
def _run_of(store, b, h, token, count):
    if is_float(store):

        def rows(store, b, h, token, count):
            size = token_bytes(store)
            return Run(store.rows, ((b * store.rows.shape[1] + h) * store.rows.shape[2] + token) * size, count * size)

        return rows

    def codes(store, b, h, token, count):
        block = max(0, token - SINK) // BLOCK
        start = ((b * store.codes.shape[1] + h) * store.codes.shape[2] + block) * store.codes.shape[3]
        return Run(store.codes, start, count * token_bytes(store) if token >= SINK else 0)

    return codes

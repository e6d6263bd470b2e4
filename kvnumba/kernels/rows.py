"""Reading float rows: scores of a few queries against rows, and weighted sums of rows.

All micro-kernels take up to four query rows at once, so that each row of the cache is loaded once for them.
Float16 and bfloat16 are widened in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import overload

from kvnumba.buffers import BFloat16Rows, Float16Rows
from kvnumba.kernels.ahead import Ahead
from kvnumba.simd import LANES, Emitter, Pointer, Value, microkernel

#: Query rows that one micro-kernel call handles at most.
ROWS = 4

#: Tokens scored at once, by number of query rows: rows x tokens accumulators stay in registers.
_TOKENS = {1: 8, 2: 8, 3: 4, 4: 4}
#: Vectors of channels accumulated at once, by number of query rows.
_VECTORS = {1: 8, 2: 8, 3: 4, 4: 4}

Load = Callable[[Emitter, Pointer, Value, Value | None], Value]


def _float32(e: Emitter, rows: Pointer, at: Value, mask: Value | None) -> Value:
    return e.load(rows, at, LANES) if mask is None else e.load_masked(rows, at, mask)


def _float16(e: Emitter, rows: Pointer, at: Value, mask: Value | None) -> Value:
    return e.widen_half(_float32(e, rows, at, mask))


def _bfloat16(e: Emitter, rows: Pointer, at: Value, mask: Value | None) -> Value:
    return e.widen_bfloat(_float32(e, rows, at, mask))


def _score(load: Load, lines: int) -> Any:
    @microkernel
    def score(e, rows, start, count, dim, work, q, q_stride, scores, score_stride, queries, far):
        """work[scores + r * score_stride + t] = sum over c of work[q + r * q_stride + c] * rows[start + t * dim + c].

        Parameters
        ----------
        rows : array
            Storage of the rows; ``start`` is the item of the first one.
        count : int
            Rows to score, at least 1; scores are written up to the next multiple of 8.
        dim : int
            Channels of a row.
        work : float32 array
            Scratch that holds the queries at ``q`` (padded with zeros to a multiple of 16) and takes the scores.
        queries : int
            Query rows, 1 to 4.
        far : Run
            What to ask for meanwhile.
        """
        full = dim & -LANES
        tail = e.first_lanes(dim - full)
        ahead = Ahead(e, far, lines)
        for n in range(1, ROWS + 1):
            with e.when(queries.compare("==", n)):
                tokens = _TOKENS[n]
                with e.range(0, count, tokens) as t:
                    # Rows past the last are the last one again: no memory beyond the store is touched.
                    at = [start + e.minimum(t + i, count - 1) * dim for i in range(tokens)]
                    sums = [[e.variable(e.zeros()) for _ in range(tokens)] for _ in range(n)]

                    def step(c, mask, at=at, sums=sums, n=n, tokens=tokens):
                        keys = [load(e, rows, a + c, mask) for a in at]
                        for r in range(n):
                            x = e.load(work, q + q_stride * r + c, LANES)
                            for i in range(tokens):
                                sums[r][i].set(e.fma(x, keys[i], sums[r][i].get()))

                    with e.range(0, full, LANES) as c:
                        ahead.ask()
                        step(c, None)
                    with e.when(full.compare("<", dim)):
                        step(full, tail)
                    total = e.sum_each([s.get() for row in sums for s in row])
                    for r in range(n):
                        lanes = list(range(r * tokens, (r + 1) * tokens))
                        e.store(e.shuffle(total, None, lanes), work, scores + score_stride * r + t)

    return score


def _accumulate(load: Load, lines: int) -> Any:
    @microkernel
    def accumulate(e, rows, start, count, dim, work, p, p_stride, out, out_stride, queries, far):
        """work[out + r * out_stride + c] += sum over t of work[p + r * p_stride + t] * rows[start + t * dim + c].

        Parameters
        ----------
        rows : array
            Storage of the rows; ``start`` is the item of the first one.
        count, dim : int
            Rows, and channels of a row.
        work : float32 array
            Scratch that holds the weights at ``p`` and the sums at ``out`` (padded to a multiple of 16 channels).
        queries : int
            Query rows, 1 to 4.
        far : Run
            What to ask for meanwhile.
        """

        ahead = Ahead(e, far, lines)

        def channels(c, vectors, n, mask):
            at = [c + LANES * u for u in range(vectors)]
            sums = [[e.variable(e.load(work, out + out_stride * r + a, LANES)) for a in at] for r in range(n)]
            with e.range(0, count) as t:
                ahead.ask()
                row = start + t * dim
                values = [load(e, rows, row + a, mask) for a in at]
                for r in range(n):
                    weight = e.splat(e.load(work, p + p_stride * r + t))
                    for u in range(vectors):
                        sums[r][u].set(e.fma(weight, values[u], sums[r][u].get()))
            for r in range(n):
                for u, a in enumerate(at):
                    e.store(sums[r][u].get(), work, out + out_stride * r + a)

        full = dim & -LANES
        for n in range(1, ROWS + 1):
            with e.when(queries.compare("==", n)):
                wide = _VECTORS[n] * LANES
                whole = e.minimum(dim & -wide, full)
                with e.range(0, whole, wide) as c:
                    channels(c, _VECTORS[n], n, None)
                with e.range(whole, full, LANES) as c:
                    channels(c, 1, n, None)
                with e.when(full.compare("<", dim)):
                    channels(full, 1, n, e.first_lanes(dim - full))

    return accumulate


score_float32, accumulate_float32 = _score(_float32, 4), _accumulate(_float32, 4)
score_float16, accumulate_float16 = _score(_float16, 2), _accumulate(_float16, 2)
score_bfloat16, accumulate_bfloat16 = _score(_bfloat16, 2), _accumulate(_bfloat16, 2)


def score_rows(store, rows, start, count, dim, work, q, q_stride, scores, score_stride, queries, far):
    """Scores against float rows in the format that the type of *store* says; arguments as the micro-kernel's."""
    raise NotImplementedError("compiled code only")


def accumulate_rows(store, rows, start, count, dim, work, p, p_stride, out, out_stride, queries, far):
    """Weighted sum of float rows in the format that the type of *store* says; arguments as the micro-kernel's."""
    raise NotImplementedError("compiled code only")


@overload(score_rows)
def _score_rows(store, rows, start, count, dim, work, q, q_stride, scores, score_stride, queries, far):
    kernel = {Float16Rows: score_float16, BFloat16Rows: score_bfloat16}.get(store.instance_class, score_float32)
    return lambda store, rows, start, count, dim, work, q, q_stride, scores, score_stride, queries, far: kernel(
        rows, start, count, dim, work, q, q_stride, scores, score_stride, queries, far
    )


@overload(accumulate_rows)
def _accumulate_rows(store, rows, start, count, dim, work, p, p_stride, out, out_stride, queries, far):
    kernel = {Float16Rows: accumulate_float16, BFloat16Rows: accumulate_bfloat16}.get(
        store.instance_class, accumulate_float32
    )
    return lambda store, rows, start, count, dim, work, p, p_stride, out, out_stride, queries, far: kernel(
        rows, start, count, dim, work, p, p_stride, out, out_stride, queries, far
    )

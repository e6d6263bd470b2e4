"""Online softmax: the state of a query row and its four verbs.

A row's state is (m, l, acc): the largest score so far, the sum of exp(score - m), and the sum of exp(score - m) * v.
*init* is (-inf, 0, 0). *update* takes a tile of scores, *merge* joins the states of two sets of keys, *finish* divides.
(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, FlashAttention.)
"""

from __future__ import annotations

import numpy as np

from kvnumba.simd import I64, LANES, Float, Integer, microkernel


@microkernel
def update(e, work, scores, score_stride, count, padded, m, l, ratios, rows) -> Integer:
    """Take *count* scores of each row into (m, l) and turn them into probabilities relative to the new m.

    Parameters
    ----------
    work : float32 array
        Scratch. Overwritten: the scores, row r at ``scores + r * score_stride``; m and l, row r at ``m + r`` and
        ``l + r``; at ``ratios + r`` comes exp(old m - new m), with which sums relative to the old m are to be
        multiplied. 16 items may be read from m and l on.
    count, padded : int
        Scores, and up to where they are followed by zeros: a multiple of 16.
    rows : int
        1 to 4.

    Returns
    -------
    int
        Whether a ratio differs from 1.
    """
    changed = e.variable(e.integer(0))
    full, rounded = count & -LANES, (count + (LANES - 1)) & -LANES
    for n in range(1, 5):
        with e.when(rows.compare("==", n)):
            starts = [scores + score_stride * r for r in range(n)]
            with e.when(full.compare("<", count)):
                seen = e.first_lanes(count - full)
                for at in starts:
                    e.store(e.select(seen, e.load(work, at + full, LANES), e.full(-np.inf)), work, at + full)
            with e.range(rounded, padded, LANES) as t:
                for at in starts:
                    e.store(e.zeros(), work, at + t)
            largest = [e.variable(e.full(-np.inf)) for _ in starts]
            with e.range(0, rounded, LANES) as t:
                for top, at in zip(largest, starts, strict=True):
                    top.set(e.maximum(e.load(work, at + t, LANES), top.get()))
            old = e.load(work, m, LANES)
            new = e.maximum(e.fold_each([top.get() for top in largest], e.maximum), old)
            # A row that has seen nothing keeps m = -inf; subtracting 0 instead makes its probabilities exp(-inf) = 0.
            anchor = e.select(new.compare("==", -np.inf), e.zeros(), new)
            anchors = [e.shuffle(anchor, None, [r] * LANES) for r in range(n)]
            totals = [e.variable(e.zeros()) for _ in starts]
            with e.range(0, rounded, LANES) as t:
                for total, at, lanes in zip(totals, starts, anchors, strict=True):
                    p = e.exp(e.load(work, at + t, LANES) - lanes)
                    e.store(p, work, at + t)
                    total.set(total.get() + p)
            ratio = e.exp(old - anchor)
            some = list(range(n))
            sums = e.fma(e.load(work, l, LANES), ratio, e.sum_each([total.get() for total in totals]))
            for value, at in ((new, m), (sums, l), (ratio, ratios)):
                e.store(e.shuffle(value, None, some), work, at)
            same = e.shuffle(ratio, None, some).compare("==", 1.0)
            changed.set(e.extend(e.any(same ^ -1), I64))
    return changed.get()


@microkernel
def scale(e, work, at, count, factor):
    """work[at : at + count] *= factor, up to the next multiple of 16."""
    lanes = e.splat(factor)
    with e.range(0, count, LANES) as c:
        e.store(e.load(work, at + c, LANES) * lanes, work, at + c)


@microkernel
def fill(e, work, at, count, number):
    """work[at : at + count] = number, up to the next multiple of 16."""
    lanes = e.splat(number)
    with e.range(0, count, LANES) as c:
        e.store(lanes, work, at + c)


@microkernel
def load_row(e, source, start, count, factor, work, at):
    """work[at : at + count] = source[start : start + count] * factor, then zeros up to the next multiple of 16."""
    lanes = e.splat(factor)
    full = count & -LANES
    with e.range(0, full, LANES) as c:
        e.store(e.load(source, start + c, LANES) * lanes, work, at + c)
    with e.when(full.compare("<", count)):
        seen = e.first_lanes(count - full)
        row = e.load_masked(source, start + full, seen) * lanes
        e.store(e.select(seen, row, e.zeros()), work, at + full)


@microkernel
def finish(e, work, acc, count, offset, factor, out, at) -> Float:
    """out[at + c] = (work[acc + c] + offset) * factor for c < count; the result is NaN if any of them is not finite."""
    add, lanes = e.splat(offset), e.splat(factor)
    check = e.variable(e.zeros())

    full = count & -LANES

    def part(c, mask):
        x = (e.load(work, acc + c, LANES) + add) * lanes
        if mask is None:
            e.store(x, out, at + c)
        else:
            x = e.select(mask, x, e.zeros())
            e.store_masked(x, out, at + c, mask)
        check.set(e.fma(x, e.zeros(), check.get()))  # 0 * inf and 0 * NaN are NaN

    with e.range(0, full, LANES) as c:
        part(c, None)
    with e.when(full.compare("<", count)):
        part(full, e.first_lanes(count - full))
    return e.reduce_add(check.get())

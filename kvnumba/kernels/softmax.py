"""Online softmax: the state of a query row and its four verbs.

A row's state is (m, l, acc): the largest score so far, the sum of exp(score - m), and the sum of exp(score - m) * v.
*init* is (-inf, 0, 0). *update* takes a tile of scores, *merge* joins the states of two sets of keys, *finish* divides.
(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, FlashAttention.)
"""

from __future__ import annotations

import numpy as np

from kvnumba.simd import LANES, Float, microkernel


@microkernel
def update(e, work, scores, count, padded, m, l) -> Float:
    """Take *count* scores into (m, l) and turn them into probabilities relative to the new m.

    Parameters
    ----------
    work : float32 array
        Scratch: scores at ``scores``, overwritten; m at ``m`` and l at ``l``, overwritten.
    count, padded : int
        Scores, and up to where they are followed by zeros: a multiple of 16.

    Returns
    -------
    float32
        exp(old m - new m): what sums relative to the old m are to be multiplied with.
    """
    full = count & -LANES
    with e.when(full.compare("<", count)):
        seen = e.first_lanes(count - full)
        e.store(e.select(seen, e.load(work, scores + full, LANES), e.full(-np.inf)), work, scores + full)
    rounded = (count + (LANES - 1)) & -LANES
    with e.range(rounded, padded, LANES) as t:
        e.store(e.zeros(), work, scores + t)
    largest = e.variable(e.full(-np.inf))
    with e.range(0, rounded, LANES) as t:
        largest.set(e.maximum(e.load(work, scores + t, LANES), largest.get()))
    old = e.load(work, m)
    new = e.maximum(e.reduce_max(largest.get()), old)
    # A row that has seen nothing keeps m = -inf; subtracting 0 instead makes its probabilities exp(-inf) = 0.
    anchor = e.select(new.compare("==", -np.inf), e.same(new, 0.0), new)
    lanes_anchor = e.splat(anchor)
    total = e.variable(e.zeros())
    with e.range(0, rounded, LANES) as t:
        p = e.exp(e.load(work, scores + t, LANES) - lanes_anchor)
        e.store(p, work, scores + t)
        total.set(total.get() + p)
    ratio = e.exp(old - anchor)
    e.store(new, work, m)
    e.store(e.fma(e.load(work, l), ratio, e.reduce_add(total.get())), work, l)
    return ratio


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

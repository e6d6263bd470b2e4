"""Rows of a batch: chosen, repeated, and of different lengths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import bit_equal, normal
from test_snapshots import both, data, pairs, same

import kvnumba as kv
from kvnumba.spec import FORMATS


def four_rows(rng, k_format, v_format, length=78, **options):
    cache, reference = both(k_format, v_format, batch_size=4, **options)
    k, v = data(rng, cache.spec, length)
    for each in (cache, reference):
        each.append(k, v)
    return cache, reference


# ---- chosen rows


@pairs
def test_k07_reorder_takes_whole_rows_and_is_exact(rng, k_format, v_format):
    cache, reference = four_rows(rng, k_format, v_format)
    keys, values = cache.keys(), cache.values()
    for each in (cache, reference):
        each.reorder([2, 2, 0, 1])
    assert bit_equal(cache.keys(), keys[[2, 2, 0, 1]])
    assert bit_equal(cache.values(), values[[2, 2, 0, 1]])
    for _ in range(40):
        k, v = data(rng, cache.spec, 1)
        for each in (cache, reference):
            each.append(k, v)
    assert same(cache, reference)
    common = 68  # the residual of keys is sealed with the tokens that came later
    assert bit_equal(cache.keys()[0, :, :common], cache.keys()[1, :, :common])
    assert bit_equal(cache.values()[0, :, :78], cache.values()[1, :, :78])
    assert not bit_equal(cache.keys()[0, :, 78:], cache.keys()[1, :, 78:])


@pairs
def test_k07_permutations_and_their_inverses_come_back_to_the_start(rng, k_format, v_format):
    cache, _ = four_rows(rng, k_format, v_format)
    before = [array.copy() for array in (*cache.buffers.k, *cache.buffers.v, cache.buffers.state)]
    for _ in range(50):
        order = rng.permutation(4)
        cache.reorder(order)
        cache.reorder(np.argsort(order))
    after = [*cache.buffers.k, *cache.buffers.v, cache.buffers.state]
    assert all(bit_equal(a, b) for a, b in zip(before, after))


@pairs
@pytest.mark.parametrize("idx", [[3], [0, 1, 2, 3], [1, 1, 1, 0, 3, 3], []])
def test_select_keeps_the_rows_that_are_named_and_what_an_exact_cut_needs(rng, k_format, v_format, idx):
    cache, reference = four_rows(rng, k_format, v_format)
    for each in (cache, reference):
        each.truncate([78, 50, 3, 0])
        each.select(np.array(idx, np.int32))
    assert cache.spec == reference.spec
    assert same(cache, reference)
    cut = [min(n, 45) for n in cache.lengths]
    k, v = data(rng, cache.spec, 40)
    for each in (cache, reference):
        each.truncate(cut)
        each.append(k, v)
    assert same(cache, reference)
    assert cache.attend(normal(rng, len(idx), 4, 2, 33)).shape == (len(idx), 4, 2, 17)
    cache.reset()
    assert (len(cache), cache.keys().shape[0]) == (0, len(idx))


@pairs
def test_repeat_interleave_puts_equal_rows_side_by_side(rng, k_format, v_format):
    cache, reference = both(k_format, v_format, batch_size=2)
    k, v = data(rng, cache.spec, 70)
    for each in (cache, reference):
        each.append(k, v)
        each.repeat_interleave(3)
    assert bit_equal(cache.keys(), both_keys := reference.keys())
    assert bit_equal(both_keys[0], both_keys[2])
    assert cache.spec.batch_size == 6
    assert same(cache, reference)


@pairs
def test_rows_of_a_shared_cache_are_chosen_without_effect_on_the_others(rng, k_format, v_format):
    cache, reference = four_rows(rng, k_format, v_format)
    snapshot, frozen = cache.freeze(), reference.freeze()
    other = snapshot.unfreeze()
    cache.reorder([3, 2, 1, 0])
    cache.append(*data(rng, cache.spec, 40))
    other.select([1])
    other.append(*data(rng, other.spec, 40))
    assert same(snapshot.unfreeze(), frozen)


@pytest.mark.parametrize("method", ["reorder", "select"])
@pytest.mark.parametrize(
    "idx", [[0, 1, 2, 4], [0, 1, 2, -1], [[0, 1, 2, 3]], 2, [0.0, 1.0, 2.0, 3.0], [True] * 4, "abcd", None, [[0], 1]]
)
def test_rows_that_are_not_there_are_refused_and_nothing_changes(rng, method, idx):
    cache, reference = four_rows(rng, "int8", "float32", 40)
    with pytest.raises((ValueError, TypeError), match="idx must"):
        getattr(cache, method)(idx)
    assert same(cache, reference)


@pytest.mark.parametrize("idx", [[0, 1, 2], [0, 1, 2, 3, 3], []])
def test_reorder_keeps_the_number_of_rows(rng, idx):
    cache, reference = four_rows(rng, "int8", "float32", 40)
    with pytest.raises(ValueError, match="idx must have one entry for each of the 4 rows"):
        cache.reorder(idx)
    assert same(cache, reference)


@pytest.mark.parametrize("n", [0, -1, 1.5, None])
def test_repeat_interleave_takes_a_positive_number(rng, n):
    cache, reference = four_rows(rng, "int8", "float32", 5)
    with pytest.raises((ValueError, TypeError), match="n must be a positive integer"):
        cache.repeat_interleave(n)
    assert same(cache, reference)


@pytest.mark.parametrize("n", [2**19, 10**30])
def test_more_rows_than_any_cache_has_are_refused_at_once(rng, n):
    cache, reference = four_rows(rng, "int8", "float32", 5)
    with pytest.raises(ValueError, match="batch_size must be an integer from 0 to 1048576"):
        cache.repeat_interleave(n)
    assert same(cache, reference)


# ---- rows of different lengths


def same_as_single_rows(cache, singles):
    """Whether each row has the state and the results of a cache of its own, bit for bit, and zeros behind."""
    keys, values = cache.keys(), cache.values()
    for b, single in enumerate(singles):
        n = len(single)
        assert cache.lengths[b] == n
        assert bit_equal(keys[b : b + 1, :, :n], single.keys())
        assert bit_equal(values[b : b + 1, :, :n], single.values())
        assert not keys[b, :, n:].any()
        assert not values[b, :, n:].any()
    assert len(cache) == max(len(single) for single in singles)


def ragged(rng, k_format, v_format, rounds=6, size=60, batch=4):
    """A cache of rows of different lengths, and one cache for each row."""
    options = {"num_kv_heads": 2, "head_dim": 33, "v_head_dim": 17, "k_format": k_format, "v_format": v_format}
    cache, singles = kv.KVCache(**options, batch_size=batch), [kv.KVCache(**options) for _ in range(batch)]
    for _ in range(rounds):
        counts = rng.integers(0, size, batch)
        counts[0] = 0
        k, v = data(rng, cache.spec, size)
        for b, n in enumerate(counts):
            singles[b].append(k[b : b + 1, :, :n], v[b : b + 1, :, :n])
            k[b, :, n:] = v[b, :, n:] = np.nan
        cache.append(k, v, lengths=counts)
        same_as_single_rows(cache, singles)
        cut = [int(rng.integers(max(0, n - 40), n + 1)) for n in cache.lengths]
        cache.truncate(cut)
        for n, single in zip(cut, singles):
            single.truncate(n)
        same_as_single_rows(cache, singles)
    return cache, singles


@pytest.mark.parametrize(("k_format", "v_format"), list(itertools.product(FORMATS, FORMATS)))
def test_a_row_has_the_state_of_a_cache_of_its_own_whatever_the_others_hold(rng, k_format, v_format):
    ragged(rng, k_format, v_format)


@pairs
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_a_row_has_the_results_of_a_cache_of_its_own(rng, k_format, v_format, queries):
    cache, singles = ragged(rng, k_format, v_format)
    q = normal(rng, 4, 4, queries, 33)
    mask = rng.random((4, 1, queries, len(cache))) < 0.7
    for options in ({}, {"causal": False}, {"window": (9, 2)}, {"mask": mask}, {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]}):
        out, lse = cache.attend(q, return_lse=True, **options)
        for b, single in enumerate(singles):
            own = {**options, "mask": mask[b : b + 1, ..., : len(single)]} if "mask" in options else options
            alone = single.attend(q[b : b + 1], return_lse=True, **own)
            assert bit_equal(out[b : b + 1], alone[0])
            assert bit_equal(lse[b : b + 1], alone[1])
    assert len(singles[0]) == 0
    assert not out[0].any()
    assert np.isneginf(lse[0]).all()


@pairs
def test_step_with_lengths_pairs_each_query_with_its_token(rng, k_format, v_format):
    cache, singles = ragged(rng, k_format, v_format, rounds=2)
    for size, counts in ((24, [5, 24, 0, 17]), (1, [1, 0, 1, 1]), (3, [3, 3, 3, 3])):
        k, v = data(rng, cache.spec, size)
        q = normal(rng, 4, 4, size, 33)
        longest = max(n + m for n, m in zip(cache.lengths, counts))
        mask, out = rng.random((1, 4, size, longest)) < 0.8, np.empty((4, 4, size, 17), np.float32)
        got, lse = cache.step(q, k, v, lengths=counts, mask=mask, return_lse=True, out=out)
        assert got is out
        for b, (n, single) in enumerate(zip(counts, singles)):
            own = mask[:, :, :n, : len(single) + n]
            part, part_lse = single.step(*(x[b : b + 1, :, :n] for x in (q, k, v)), mask=own, return_lse=True)
            assert np.allclose(got[b : b + 1, :, :n], part, rtol=1e-4, atol=1e-5)
            assert np.allclose(lse[b : b + 1, :, :n], part_lse, rtol=1e-4, atol=1e-5)
            assert not got[b, :, n:].any()
            assert np.isneginf(lse[b, :, n:]).all()
        same_as_single_rows(cache, singles)


@pairs
def test_prompts_of_unequal_length_go_on_as_each_alone(rng, k_format, v_format):  # K33
    cache, reference = both(k_format, v_format, batch_size=3)
    singles = [both(k_format, v_format)[0] for _ in range(3)]
    k, v = data(rng, cache.spec, 32)
    counts = [3, 17, 32]
    for each in (cache, reference):
        each.append(k, v, lengths=counts)
    for b, n in enumerate(counts):
        singles[b].append(k[b : b + 1, :, :n], v[b : b + 1, :, :n])
    for _ in range(5):
        k, v = data(rng, cache.spec, 1)
        q = normal(rng, 3, 4, 1, 33)
        out = cache.step(q, k, v)
        for b, single in enumerate(singles):
            assert bit_equal(out[b : b + 1], single.step(*(x[b : b + 1] for x in (q, k, v))))
        reference.append(k, v)
    assert same(cache, reference)


@pairs
def test_rows_of_different_lengths_survive_snapshots_and_equal_the_reference(rng, k_format, v_format):
    cache, reference = both(k_format, v_format, batch_size=3, capacity=300)
    for counts in ([5, 70, 0], [70, 0, 40]):
        k, v = data(rng, cache.spec, 70)
        for each in (cache, reference):
            each.append(k, v, lengths=counts)
    snapshot, frozen = cache.freeze(), reference.freeze()
    k, v = data(rng, cache.spec, 40)
    for each in (cache, reference):
        each.truncate([75, 60, 40])
        each.append(k, v, lengths=[40, 1, 0])
    assert same(cache, reference)
    other, going = snapshot.unfreeze(), frozen.unfreeze()
    for each in (other, going):
        each.append(k, v, lengths=[0, 40, 3])
        each.truncate(60)  # rows that are shorter stay
    assert same(other, going)
    assert same(snapshot.unfreeze(), frozen)
    assert same(cache, reference)


@pytest.mark.parametrize(
    "lengths",
    [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 6], [0, 0, 0, -1], [1.0] * 4, 3, [[1, 2, 3, 4]], "1234", [True] * 4],
)
def test_lengths_that_do_not_fit_are_refused_and_nothing_changes(rng, lengths):
    cache, reference = four_rows(rng, "int8", "float32", 40)
    k, v = data(rng, cache.spec, 5)
    q = normal(rng, 4, 4, 5, 33)
    calls = (
        lambda: cache.append(k, v, lengths=lengths),
        lambda: cache.step(q, k, v, lengths=lengths),
        lambda: cache.attend(q, lengths=lengths),
    )
    for call in calls:
        with pytest.raises((ValueError, TypeError), match="lengths must"):
            call()
        assert same(cache, reference)


@pytest.mark.parametrize("n", [[1, 2, 3], [1, 2, 3, 41], [0, 0, 0, -1], [1.0] * 4, [[1, 2, 3, 4]], np.array(3)])
def test_cuts_that_no_row_can_have_are_refused_and_nothing_changes(rng, n):
    cache, reference = four_rows(rng, "int8", "float32", 40)
    with pytest.raises((ValueError, TypeError), match="n must"):
        cache.truncate(n)
    assert same(cache, reference)


def test_step_with_lengths_needs_a_query_for_each_token(rng):
    cache, reference = four_rows(rng, "int8", "float32", 40)
    k, v = data(rng, cache.spec, 5)
    with pytest.raises(ValueError, match="q and k must have the same number of tokens"):
        cache.step(normal(rng, 4, 4, 1, 33), k, v, lengths=[1, 1, 1, 0])
    assert same(cache, reference)


def test_padding_may_hold_anything_and_tokens_may_not(rng):
    cache, reference = both("int8", "int4", batch_size=2)
    k, v = data(rng, cache.spec, 5)
    k[1, 0, 3] = np.nan
    with pytest.raises(ValueError, match=r"k must be finite.*\[1, 0, 3, 0\]"):
        cache.append(k, v, lengths=[2, 4])
    assert cache.lengths == [0, 0]
    for each in (cache, reference):
        each.append(k, v, lengths=[5, 3])
    assert same(cache, reference)


def test_a_cache_without_rows_has_a_length_and_can_be_cut(rng):
    cache, reference = both("int8", "int4", batch_size=0)
    k, v = data(rng, cache.spec, 50)
    for each in (cache, reference):
        each.append(k, v)
        each.append(k, v, lengths=[])
        each.truncate(70)
    assert (len(cache), cache.lengths, len(reference)) == (70, [], 70)
    cache.truncate([])
    cache.select([])
    assert len(cache.freeze().unfreeze()) == 70


@pairs
@pytest.mark.parametrize("lengths", [None, [2, 0, 5]])
def test_the_reference_attends_to_rows_of_different_lengths_as_its_formula_says(rng, k_format, v_format, lengths):
    cache, reference = both(k_format, v_format, batch_size=3)
    k, v = data(rng, cache.spec, 50)
    q, mask = normal(rng, 3, 4, 5, 33), rng.random((1, 4, 5, 50)) < 0.7
    for each in (cache, reference):
        each.append(k, v, lengths=[50, 0, 7])
    options = {"mask": mask, "lengths": lengths, "return_lse": True}
    out, lse = cache.attend(q, **options)
    truth, truth_lse = reference.attend(q, **options)
    # Weights of codes are rounded (at most 10 % of the quantization error); float formats only round sums.
    tolerance = 0.05 if {k_format, v_format} & {"int8", "int4"} else 1e-5
    assert np.abs(out - truth).max() < tolerance
    seen = np.isfinite(truth_lse)
    assert bit_equal(np.isfinite(lse), seen)
    assert np.abs(lse[seen] - truth_lse[seen]).max() < tolerance

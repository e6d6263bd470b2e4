"""Any order of operations on caches and snapshots against the slow twin: the state bit for bit, attention to rounding.

``KVNUMBA_EXAMPLES=5000 pytest tests/test_state_machine.py`` tries as many sequences, over every pair of formats.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import bit_equal, largest_errors, normal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import kvnumba as kv
from kvnumba.reference import ReferenceKVCache
from kvnumba.spec import CODE_FORMATS, FORMATS

#: Each format once as keys and once as values.
PAIRS = [("float32", "int4"), ("float16", "bfloat16"), ("bfloat16", "float16"), ("int8", "float32"), ("int4", "int8")]
#: Sequences in all, when they are counted by hand.
BY_HAND = int(os.environ.get("KVNUMBA_EXAMPLES", "0"))
EXAMPLES, TRIED = (BY_HAND, list(itertools.product(FORMATS, FORMATS))) if BY_HAND else (550, PAIRS)

LONGEST = 300  #: tokens of a row
MOST_ROWS = 6
OWNERS = 4

which = st.integers(0, OWNERS - 1)
seeds = st.integers(0, 2**32 - 1)
queries = st.sampled_from([0, 1, 1, 2, 3, 5, 14, 40])
groups = st.integers(1, 3)


class Sequence(RuleBasedStateMachine):
    """Caches, each beside its twin, and snapshots of both."""

    def __init__(self, k_format, v_format):
        super().__init__()
        self.formats = {"k_format": k_format, "v_format": v_format}
        self.folder = tempfile.TemporaryDirectory()
        self.owners, self.snapshots = [], []

    @initialize(
        batch=st.integers(1, 3),
        heads=st.integers(1, 3),
        dim=st.integers(1, 80),
        v_dim=st.integers(1, 80),
        capacity=st.sampled_from([0, 0, 1, 37, 250]),
    )
    def begin(self, batch, heads, dim, v_dim, capacity):
        options = {"num_kv_heads": heads, "head_dim": dim, "v_head_dim": v_dim, "batch_size": batch, **self.formats}
        self.owners.append([kv.KVCache(**options, capacity=capacity), ReferenceKVCache(**options)])

    def at(self, i):
        return self.owners[i % len(self.owners)]

    def data(self, cache, length, seed):
        """Keys and values: even, with constant channels and tokens, or of another size."""
        rng, spec = np.random.default_rng(seed), cache.spec
        lead = (spec.batch_size, spec.num_kv_heads, length)
        k, v = normal(rng, *lead, spec.head_dim), normal(rng, *lead, spec.v_head_dim)
        if seed % 4 == 1:
            k[..., ::2], v[:, :, ::2] = 3, -1
        if seed % 4 == 2:
            k, v = k * np.float32(40), v * np.float32(1e-3)
        return k, v

    def check(self, cache, twin):
        assert cache.spec == twin.spec
        assert cache.lengths == twin.lengths
        assert len(cache) == len(twin) <= cache.capacity or len(cache) == 0
        assert bit_equal(cache.keys(), twin.keys())
        assert bit_equal(cache.values(), twin.values())

    def check_result(self, cache, q, result, truth):
        keys, values = cache.keys(), cache.values()
        for b, n in enumerate(cache.lengths):
            (out, lse), (true_out, true_lse) = ([x[b] for x in pair] for pair in (result, truth))
            bound, lse_bound = largest_errors(cache.spec, q[b], keys[b, :, :n], values[b, :, :n])
            assert np.abs(out - true_out).max(initial=0) <= bound
            seen = np.isfinite(true_lse)
            assert bit_equal(np.isfinite(lse), seen)
            assert not out[~seen].any()
            rounded = 2.0**-23 * np.abs(true_lse[seen])
            assert (np.abs(lse[seen] - true_lse[seen]) <= lse_bound + rounded).all()

    # ---- tokens

    @rule(i=which, length=st.integers(0, 100), seed=seeds)
    def append(self, i, length, seed):
        cache, twin = self.at(i)
        k, v = self.data(cache, min(length, LONGEST - len(cache)), seed)
        for each in (cache, twin):
            each.append(k, v)
        self.check(cache, twin)

    @rule(i=which, length=st.integers(0, 60), seed=seeds)
    def append_to_some(self, i, length, seed):
        cache, twin = self.at(i)
        k, v = self.data(cache, min(length, LONGEST - len(cache)), seed)
        lengths = np.random.default_rng(seed).integers(0, k.shape[2] + 1, k.shape[0])
        for each in (cache, twin):
            each.append(k, v, lengths=lengths)
        self.check(cache, twin)

    @rule(i=which, length=st.integers(1, 50), seed=seeds)
    def append_refused(self, i, length, seed):
        cache, twin = self.at(i)
        sides = [side for side, format in zip("kv", self.formats.values()) if format in CODE_FORMATS]
        given = dict(zip("kv", self.data(cache, length, seed)))
        if sides:
            given[sides[seed % len(sides)]].reshape(-1)[seed % given["v"].size % given["k"].size] = np.nan
        else:
            given["v"] = given["v"][..., :-1]
        with pytest.raises(ValueError, match="must"):
            cache.append(**given)
        self.check(cache, twin)

    @rule(i=which, length=queries, group=groups, seed=seeds)
    def step(self, i, length, group, seed):
        cache, twin = self.at(i)
        k, v = self.data(cache, min(length, LONGEST - len(cache)), seed)
        q = normal(np.random.default_rng(seed), k.shape[0], k.shape[1] * group, *k.shape[2:])
        result, truth = (each.step(q, k, v, return_lse=True) for each in (cache, twin))
        self.check(cache, twin)
        self.check_result(cache, q, result, truth)

    @rule(i=which, length=queries, group=groups, causal=st.booleans(), seed=seeds)
    def attend(self, i, length, group, causal, seed):
        self.attend_as(i, length, group, causal, seed)

    def attend_as(self, i, length, group, causal, seed):
        cache, twin = self.at(i)
        spec = cache.spec
        q = normal(np.random.default_rng(seed), spec.batch_size, spec.num_kv_heads * group, length, spec.head_dim)
        result, truth = (each.attend(q, causal=causal, return_lse=True) for each in (cache, twin))
        self.check_result(cache, q, result, truth)
        assert bit_equal(cache.attend(q, causal=causal), result[0])

    @rule(i=which, back=st.integers(0, 120))
    def truncate(self, i, back):
        cache, twin = self.at(i)
        n = max(0, len(cache) - back)
        for each in (cache, twin):
            each.truncate(n)
        self.check(cache, twin)

    @rule(i=which, seed=seeds)
    def truncate_rows(self, i, seed):
        cache, twin = self.at(i)
        rng = np.random.default_rng(seed)
        kept = [int(rng.integers(max(0, n - 60), n + 1)) for n in cache.lengths]
        for each in (cache, twin):
            each.truncate(kept)
        self.check(cache, twin)

    @rule(i=which)
    def reset(self, i):
        cache, twin = self.at(i)
        for each in (cache, twin):
            each.reset()
        self.check(cache, twin)

    @rule(i=which, capacity=st.integers(0, 400))
    def reserve(self, i, capacity):
        cache, twin = self.at(i)
        cache.reserve(capacity)
        assert cache.capacity >= capacity
        self.check(cache, twin)

    # ---- rows

    @rule(i=which, seed=seeds)
    def reorder(self, i, seed):
        cache, twin = self.at(i)
        batch = cache.spec.batch_size
        idx = np.random.default_rng(seed).integers(0, batch, batch)
        for each in (cache, twin):
            each.reorder(idx)
        self.check(cache, twin)

    @rule(i=which, count=st.integers(1, 3), seed=seeds)
    def select(self, i, count, seed):
        cache, twin = self.at(i)
        idx = np.random.default_rng(seed).integers(0, cache.spec.batch_size, count).tolist()
        for each in (cache, twin):
            each.select(idx)
        self.check(cache, twin)

    @rule(i=which, n=st.integers(1, 3))
    def repeat_interleave(self, i, n):
        cache, twin = self.at(i)
        n = min(n, MOST_ROWS // cache.spec.batch_size)
        for each in (cache, twin):
            each.repeat_interleave(n)
        self.check(cache, twin)

    # ---- snapshots, copies, files

    @rule(i=which, consume=st.booleans())
    def freeze(self, i, consume):
        cache, twin = self.at(i)
        self.snapshots.append((cache.freeze(consume=consume), twin.freeze(consume=consume)))
        del self.snapshots[:-3]
        self.check(cache, twin)

    @precondition(lambda self: self.snapshots)
    @rule(i=st.integers(0, 2))
    def unfreeze(self, i):
        snapshot, frozen = self.snapshots[i % len(self.snapshots)]
        self.owners.append([snapshot.unfreeze(), frozen.unfreeze()])
        del self.owners[:-OWNERS]
        self.check(*self.owners[-1])

    @rule(i=which, make=st.sampled_from([copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]))
    def go_on_with_a_copy(self, i, make):
        owner = self.at(i)
        owner[0] = make(owner[0])
        self.check(*owner)

    @rule(i=which)
    def go_on_from_a_file(self, i):
        owner, path = self.at(i), Path(self.folder.name, "state")
        owner[0].save(path)
        owner[0] = kv.KVCache.load(path)
        self.check(*owner)

    @precondition(lambda self: self.snapshots)
    @rule()
    def forget_a_snapshot(self):
        del self.snapshots[0]

    def teardown(self):
        try:
            for i, (cache, twin) in enumerate(self.owners):
                self.check(cache, twin)
                self.attend_as(i, 1 + i % 2, 2, True, i)
            for snapshot, frozen in self.snapshots:
                self.check(snapshot.unfreeze(), frozen)
        finally:
            self.folder.cleanup()


@pytest.mark.slow
@pytest.mark.parametrize(("k_format", "v_format"), TRIED)
def test_any_sequence_of_operations_equals_the_reference(k_format, v_format):
    run_state_machine_as_test(
        lambda: Sequence(k_format, v_format),
        settings=settings(
            max_examples=-(-EXAMPLES // len(TRIED)),
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

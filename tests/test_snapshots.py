"""Snapshots share memory, and nobody notices: not in the state, not in time, not between threads."""

from __future__ import annotations

import copy
import itertools
import linecache
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import bit_equal, normal

import kvnumba as kv
from kvnumba.buffers import allocate
from kvnumba.reference import ReferenceKVCache
from kvnumba.snapshot import _settling

#: Each format once as keys and once as values.
PAIRS = [("float32", "int4"), ("float16", "bfloat16"), ("bfloat16", "float16"), ("int8", "float32"), ("int4", "int8")]
pairs = pytest.mark.parametrize(("k_format", "v_format"), PAIRS)

#: A float32 number, and its bytes, that no other data here holds.
SECRET = np.float32(12345.678)


def both(k_format, v_format, **options):
    """The cache and its reference, empty."""
    options = {"num_kv_heads": 2, "head_dim": 33, "v_head_dim": 17, **options}
    options.update(k_format=k_format, v_format=v_format)
    return kv.KVCache(**options), ReferenceKVCache(**options)


def data(rng, spec, length):
    lead = (spec.batch_size, spec.num_kv_heads, length)
    return normal(rng, *lead, spec.head_dim), normal(rng, *lead, spec.v_head_dim)


def same(cache, reference):
    """Whether lengths, keys and values are equal bit for bit."""
    return (
        cache.lengths == reference.lengths
        and bit_equal(cache.keys(), reference.keys())
        and bit_equal(cache.values(), reference.values())
    )


def filled(rng, k_format, v_format, length, **options):
    """A cache and its reference of the same *length* tokens."""
    cache, reference = both(k_format, v_format, **options)
    k, v = data(rng, cache.spec, length)
    for each in (cache, reference):
        each.append(k, v)
    return cache, reference


def single_caches():
    """One cache of each class of one tensor and kind of storage."""
    yield kv.ConcatCache()
    yield from (kv.InPlaceCache(dtype=dtype, capacity=200) for dtype in ("float32", "bfloat16"))
    yield from (kv.QuantizedCache(layout, bits) for layout in ("per_channel", "per_token") for bits in (4, 8))


# ---- the state


@pairs
def test_any_interleaving_of_continuations_equals_as_many_caches_that_share_nothing(rng, k_format, v_format):
    owners = [filled(rng, k_format, v_format, 70, capacity=400)]
    snapshots = []
    for _ in range(250):
        i = int(rng.integers(len(owners)))
        cache, reference = owners[i]
        action = rng.choice(["append", "append", "truncate", "freeze", "unfreeze", "drop", "forget", "pickle", "reset"])
        if action == "append":
            k, v = data(rng, cache.spec, int(rng.integers(0, 40)))
            cache.append(k, v)
            reference.append(k, v)
        elif action == "truncate":
            n = int(len(cache) - min(len(cache), rng.integers(0, 60)))
            cache.truncate(n)
            reference.truncate(n)
        elif action == "freeze":
            snapshots.append((cache.freeze(), reference.freeze()))
        elif action == "unfreeze" and snapshots:
            snapshot, frozen = snapshots[int(rng.integers(len(snapshots)))]
            owners.append((snapshot.unfreeze(), frozen.unfreeze()))
        elif action == "drop" and len(owners) > 1:
            del owners[i]
        elif action == "forget" and snapshots:
            del snapshots[int(rng.integers(len(snapshots)))]
        elif action == "pickle":
            owners[i] = pickle.loads(pickle.dumps(cache)), reference
        elif action == "reset" and rng.random() < 0.3:
            cache.reset()
            reference.reset()
        del cache, reference
        owners, snapshots = owners[-6:], snapshots[-4:]
        assert all(same(*pair) for pair in owners)
        assert all(same(snapshot.unfreeze(), frozen) for snapshot, frozen in snapshots)


@pairs
def test_a_snapshot_of_a_continuation_of_a_snapshot_keeps_all_three_apart(rng, k_format, v_format):
    caches = [filled(rng, k_format, v_format, 50, capacity=200)]
    for _ in range(3):
        cache, reference = caches[-1]
        caches.append((cache.freeze().unfreeze(), reference.freeze().unfreeze()))
    for cache, reference in [*caches, *caches[::-1]]:
        k, v = data(rng, cache.spec, 37)
        cache.append(k, v)
        reference.append(k, v)
    assert all(same(*pair) for pair in caches)


def test_a_refused_append_to_shared_arrays_changes_nothing_and_takes_no_turn(rng):
    cache, reference = filled(rng, "int4", "int8", 70, capacity=200)
    snapshot = cache.freeze()
    k, v = data(rng, cache.spec, 5)
    bad = k.copy()
    bad[0, 0, 2, 3] = np.nan
    with pytest.raises(ValueError, match="k must be finite"):
        cache.append(bad, v)
    other = snapshot.unfreeze()
    for each in (other, cache, reference):
        each.append(k, v)
    assert same(cache, reference)
    assert same(other, reference)
    assert np.shares_memory(other._buffers.k.codes, snapshot._cache._buffers.k.codes)  # it was the first to write


def test_a_first_append_without_memory_leaves_a_cache_of_codes_empty(rng, monkeypatch, tmp_path):
    cache = kv.QuantizedCache()
    monkeypatch.setattr("kvnumba.cache.allocate_store", no_memory)
    with pytest.raises(MemoryError):
        cache.append(normal(rng, 2, 40, 8))
    monkeypatch.undo()
    cache.save(tmp_path / "file")
    cache.append(normal(rng, 3, 40, 7))
    assert cache.contiguous().shape == (3, 40, 7)


@pytest.mark.parametrize("operation", ["select", "reserve", "reset", "buffers", "consume"])
def test_what_fails_on_the_way_leaves_cache_and_snapshot_as_they_were(rng, monkeypatch, operation):
    cache, reference = filled(rng, "int8", "int4", 70, batch_size=3)
    snapshot = cache.freeze()
    operations = {
        "select": lambda: cache.select([2, 1]),
        "reserve": lambda: cache.reserve(1000),
        "reset": cache.reset,
        "buffers": lambda: cache.buffers,
        "consume": lambda: cache.freeze(consume=True),
    }
    monkeypatch.setattr("kvnumba.cache.target", no_memory)  # the last thing that is made of new buffers
    with pytest.raises(MemoryError):
        operations[operation]()
    monkeypatch.undo()
    assert same(cache, reference)
    cache.append(*data(rng, cache.spec, 40))
    cache.truncate(3)
    assert same(snapshot.unfreeze(), reference)


def no_memory(*_):
    raise MemoryError


def test_layers_are_taken_all_or_none(rng, monkeypatch):
    caches = kv.KVCaches(3, 2, 8)
    for layer in range(3):
        caches.append(layer, *normal(rng, 2, 1, 2, 10, 8))
    makers = iter([allocate, allocate, no_memory])
    with monkeypatch.context() as patch:
        patch.setattr("kvnumba.cache.allocate", lambda *sizes: next(makers)(*sizes))
        with pytest.raises(MemoryError):
            caches.freeze(consume=True)
    assert [len(layer) for layer in caches] == [10] * 3
    snapshot = caches.freeze(consume=True)
    assert [len(layer) for layer in caches] == [0] * 3
    assert [len(layer) for layer in snapshot.unfreeze()] == [10] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_forked_while_a_thread_shares_arrays_goes_on(rng):
    cache, _ = filled(rng, "float32", "float32", 5)
    held, snapshot = threading.Event(), cache.freeze()

    def settle():
        with _settling:
            held.set()
            time.sleep(0.3)

    thread = threading.Thread(target=settle)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that waits for ever
        snapshot.unfreeze()
        os._exit(0)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_single_tensor_caches_share_and_part_as_the_large_one_does(rng):
    for cache in single_caches():
        x = normal(rng, 1, 2, 150, 16)
        cache.append(x[:, :, :70])
        fresh = copy.deepcopy(cache).contiguous()
        snapshot = cache.freeze()
        one, two = snapshot.unfreeze(), snapshot.unfreeze()
        one.append(x[:, :, 70:110])
        two.append(-x[:, :, 70:150])
        cache.truncate(69)
        cache.append(x[:, :, 69:])
        assert bit_equal(snapshot.unfreeze().contiguous(), fresh)
        alone = type(cache)(*((cache.layout, cache.bits) if isinstance(cache, kv.QuantizedCache) else ()))
        if isinstance(cache, kv.InPlaceCache):
            alone = kv.InPlaceCache(dtype=cache._format)
        alone.append(np.concatenate([x[:, :, :70], -x[:, :, 70:150]], 2))
        assert bit_equal(two.contiguous(), alone.contiguous())
        alone.reset()
        alone.append(x)
        alone.truncate(110)
        alone.append(x[:, :, 110:])
        assert bit_equal(cache.contiguous(), alone.contiguous())
        assert len(one) == 110


def test_a_view_of_shared_rows_never_changes(rng):
    cache = kv.InPlaceCache(capacity=100)
    cache.append(normal(rng, 1, 2, 20, 4))
    snapshot = cache.freeze()
    view = snapshot.unfreeze().view()
    before = view.copy()
    del snapshot
    cache.truncate(0)
    cache.append(normal(rng, 1, 2, 40, 4))
    assert bit_equal(view, before)


def interrupted(action, step):
    """Whether KeyboardInterrupt ended *action*; it comes before line *step* of the package that is run, from 0 on."""
    lines, before = itertools.count(), sys.gettrace()

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(str(Path(kv.__file__).parent)):
            return None
        # Never at the end of a with block, which Python itself does not interrupt: its lock would stay taken.
        leaving = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not leaving and next(lines) == step:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


INTERRUPTED = {
    "ConcatCache": kv.ConcatCache,
    "InPlaceCache": kv.InPlaceCache,
    "InPlaceCache with room": lambda: kv.InPlaceCache(capacity=200),
    "QuantizedCache per channel": lambda: kv.QuantizedCache("per_channel", 4),
    "QuantizedCache per token": lambda: kv.QuantizedCache("per_token", 8),
    "KVCache": lambda: Both(2, 16, k_format="int8", v_format="int4"),
    "KVCache with room": lambda: Both(2, 16, k_format="int4", capacity=200),
}


class Both(kv.KVCache):
    """Takes and gives keys and values as one array."""

    def append(self, x):
        super().append(x, x)

    def contiguous(self):
        return np.concatenate([self.keys(), self.values()], 3)


def holding(make, x):
    cache = INTERRUPTED[make]()
    cache.append(x)
    return cache


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("make", INTERRUPTED)
@pytest.mark.parametrize(
    "operation",
    [
        lambda cache, x: cache.append(x),
        lambda cache, _: cache.truncate(60),
        lambda cache, _: cache.reset(),
        lambda cache, _: cache.freeze(consume=True),
        lambda cache, _: cache.freeze(),
    ],
    ids=["append", "truncate", "reset", "consume", "freeze"],
)
def test_an_operation_that_is_interrupted_anywhere_leaves_snapshots_as_they_were(rng, make, operation, first):
    x = normal(rng, 1, 2, 70, 16)
    before = holding(make, x).contiguous()
    for step in itertools.count():
        cache = holding(make, x)
        snapshot, other = cache.freeze(), copy.copy(cache)
        if not first:  # another owner has written past the tokens of the cache
            other.append(x[:, :, :1])
        ended = interrupted(lambda cache=cache: operation(cache, x), step)
        cache.truncate(min(len(cache), 5))
        cache.append(-x)
        assert bit_equal(snapshot.unfreeze().contiguous(), before)
        assert bit_equal(other.contiguous()[:, :, :70], before)
        if not ended:
            break
    assert step > 0


@pytest.mark.parametrize("make", INTERRUPTED)
def test_a_cache_whose_first_freeze_was_interrupted_does_not_erase_what_the_next_snapshot_has(rng, make):
    x = normal(rng, 1, 2, 70, 16)
    before = holding(make, x).contiguous()
    for step in itertools.count():
        cache = holding(make, x)
        ended = interrupted(cache.freeze, step)
        snapshot = cache.freeze()
        cache.truncate(5)
        assert bit_equal(snapshot.unfreeze().contiguous(), before)
        if not ended:
            break
    assert step > 3


def test_compiled_code_of_the_user_writes_into_arrays_of_one_cache_only(rng):
    from kvnumba import kernels

    cache, reference = filled(rng, "int4", "int8", 70, capacity=200)
    snapshot, frozen = cache.freeze(), reference.freeze()
    k, v = data(rng, cache.spec, 9)
    buffers = cache.buffers
    later = cache.freeze()
    assert kernels.append(buffers, k, v)
    moved = cache.freeze(consume=True)
    reference.append(k, v)
    assert same(snapshot.unfreeze(), frozen)
    assert same(later.unfreeze(), frozen)
    assert kernels.append(buffers, k, v)
    assert same(moved.unfreeze(), reference)


# ---- removed tokens


@pairs
def test_k49_nothing_removed_is_in_what_goes_on_or_out(rng, k_format, v_format):
    cache, _ = both(k_format, v_format, head_dim=16, v_head_dim=16, capacity=100)
    k, v = data(rng, cache.spec, 40)
    k[:, :, 30:] = v[:, :, 30:] = SECRET
    cache.append(k, v)
    snapshot = cache.freeze()
    # The last token is in the residual of keys; of values a code with a range of 0 has it as its lo.
    stored = {side: getattr(cache, side)()[0, 0, 39, :1].tobytes() for side in ("keys", "values")}
    assert all(count_bytes(cache, word) for word in stored.values())
    cache.truncate(20)
    for place in (cache, cache.freeze(), cache.freeze().unfreeze(), copy.deepcopy(cache), copy.copy(cache)):
        assert not any(count_bytes(place, word) for word in stored.values())
    for array in (*cache.buffers.k, *cache.buffers.v):
        assert not any(word in array.tobytes() for word in stored.values())
    assert len(snapshot.unfreeze().keys()[0, 0]) == 40


def count_bytes(place, word):
    """How often the float32 *word* is among the keys and values of a cache, or of one restored from its pickle."""
    cache = pickle.loads(pickle.dumps(place))
    cache = cache.unfreeze() if isinstance(cache, kv.Snapshot) else cache
    found = sum(array.tobytes().count(word) for array in (cache.keys(), cache.values()))
    return found + pickle.dumps(place).count(word)


@pairs
def test_a_cache_alone_erases_what_it_removes_also_after_its_snapshots_are_gone(rng, k_format, v_format):
    cache, _ = both(k_format, v_format, capacity=100)
    k, v = data(rng, cache.spec, 40)
    cache.append(k[:, :, :20], v[:, :, :20])
    empty = pickle.dumps(cache)
    cache.append(k[:, :, 20:], v[:, :, 20:])
    snapshot = cache.freeze()
    del snapshot
    cache.truncate(20)
    raw = [array.tobytes() for store in cache._buffers[:2] for array in store]
    fresh = pickle.loads(empty)
    assert raw == [array.tobytes() for store in fresh._buffers[:2] for array in store]


# ---- time and memory


@pairs
def test_freeze_unfreeze_and_truncate_take_the_same_time_for_any_length(k_format, v_format):
    def median(cache, action):
        times = []
        for _ in range(101):
            start = time.perf_counter()
            action(cache)
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    def shorten(cache):
        cache.truncate(len(cache) - 1)

    short, long = (both(k_format, v_format, num_kv_heads=1, head_dim=64, v_head_dim=64)[0] for _ in range(2))
    for cache, length in ((short, 300), (long, 100_000)):
        x = np.zeros((1, 1, length, 64), np.float32)
        cache.append(x, x)
    for action in (kv.KVCache.freeze, lambda cache: cache.freeze().unfreeze(), shorten):
        median(short, action)
        assert median(long, action) < 5 * median(short, action)  # a copy of 100,000 tokens takes over 50 times as long


def test_bytes_that_are_shared_are_counted_once(rng):
    cache, _ = filled(rng, "int8", "int4", 68, num_kv_heads=1, head_dim=32, v_head_dim=32, capacity=300)
    snapshot = cache.freeze()
    float32_rows = 2 * 4 * 32 * 4  # the sinks of each owner
    assert snapshot.nbytes == cache.nbytes == kv.nbytes(cache) == kv.nbytes(snapshot, snapshot)
    assert kv.nbytes(cache, snapshot) == cache.nbytes + float32_rows
    other = snapshot.unfreeze()
    x = normal(rng, 1, 1, 32, 32)
    cache.append(x, x)  # in place: one more block
    assert kv.nbytes(cache, [snapshot]) == cache.nbytes + float32_rows
    other.append(x, x)  # a second owner writes: a copy
    assert kv.nbytes([cache, other], snapshot) == cache.nbytes + other.nbytes + float32_rows
    with pytest.raises(TypeError, match="objects must be caches"):
        kv.nbytes(3)


# ---- threads, copies, processes


@pairs
def test_16_threads_that_go_on_from_one_snapshot_get_what_they_get_alone(rng, k_format, v_format):
    cache, reference = filled(rng, k_format, v_format, 70, capacity=150)
    snapshots = [cache.freeze(), pickle.loads(pickle.dumps(cache.freeze()))]
    snapshots.append(snapshots[1].unfreeze().freeze(consume=True))
    tokens = [data(rng, cache.spec, 40) for _ in range(16)]
    q = normal(rng, 1, 4, 1, 33)
    alone = []
    for k, v in tokens:
        fresh = pickle.loads(pickle.dumps(cache))
        fresh.append(k, v)
        alone.append((fresh.keys(), fresh.values(), fresh.attend(q)))
    for snapshot in snapshots:
        ready, results = threading.Barrier(16), [None] * 16

        def go_on(i, snapshot=snapshot, ready=ready, results=results):
            ready.wait()
            other = snapshot.unfreeze()
            for t in range(40):
                other.append(*(x[:, :, t : t + 1] for x in tokens[i]))
            results[i] = other.keys(), other.values(), other.attend(q)

        threads = [threading.Thread(target=go_on, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(bit_equal(a, b) for got, want in zip(results, alone) for a, b in zip(got, want))
        assert same(snapshot.unfreeze(), reference)


@pairs
def test_k64_copies_and_pickles_of_caches_and_snapshots_are_independent(rng, k_format, v_format):
    cache, reference = filled(rng, k_format, v_format, 70, batch_size=2, capacity=150)
    for make in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        other, snapshot = make(cache), make(cache.freeze())
        assert (other.capacity, other.spec) == (cache.capacity, cache.spec)
        k, v = data(rng, cache.spec, 20)
        other.append(k, v)
        going = snapshot.unfreeze()
        going.append(k, v)
        assert bit_equal(going.keys(), other.keys())
        assert same(cache, reference)
        assert same(snapshot.unfreeze(), reference)


def test_a_pickle_holds_the_stored_tokens_and_no_spare_room(rng):
    cache, _ = filled(rng, "float32", "float32", 10, capacity=100_000)
    assert len(pickle.dumps(cache)) < 2 * cache.nbytes + 2_000


def longer(snapshot, k, v):
    cache = snapshot.unfreeze()
    cache.append(k, v)
    return cache


def test_k64_a_snapshot_goes_on_in_a_spawned_process(rng):
    cache, reference = filled(rng, "int8", "float32", 70)
    k, v = data(rng, cache.spec, 20)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        other = pool.apply(longer, (cache.freeze(), k, v))
    reference.append(k, v)
    assert same(other, reference)

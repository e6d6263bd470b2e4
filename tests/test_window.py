"""Caches with a window: what is dropped is never missed."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from conftest import bit_equal, normal

import kvnumba as kv
from kvnumba import reference
from kvnumba.functional import prepare, run
from kvnumba.spec import SINK
from kvnumba.window import BACK, UNIT, chunk_of, limit_of

#: Those whose kernels with options other tests compile too; every format moves as one of these does.
PAIRS = [("float32", "float32"), ("int8", "int8"), ("int4", "int4")]
pairs = pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
WINDOW, HEADS, DIM = 70, 2, 20


def new(k_format="int4", v_format="int4", window=WINDOW, batch=1):
    return kv.KVCache(HEADS, DIM, k_format=k_format, v_format=v_format, batch_size=batch, window=window)


def data(rng, count, batch=1):
    return normal(rng, batch, HEADS, count, DIM), normal(rng, batch, HEADS, count, DIM)


def whole(cache):
    """An empty cache of the same formats that keeps everything."""
    s = cache.spec
    return kv.KVCache(HEADS, DIM, k_format=s.k_format, v_format=s.v_format, batch_size=s.batch_size)


def expected(full, q, window=WINDOW, **options):
    """What a cache that never dropped a token gives through the same window."""
    request = prepare(full.buffers, len(full), q, SINK, window=(window - 1, -1), **options)
    return run(full._target, len(full), request)


def filled(rng, count, batch=1, **options):
    cache = new(batch=batch, **options)
    k, v = data(rng, count, batch)
    cache.append(k, v)
    assert cache._dropped > 0
    full = whole(cache)
    full.append(k, v)
    return cache, full


def same(cache, full, q):
    assert len(cache) == len(full)
    at = cache.positions
    assert bit_equal(cache.keys(), full.keys()[:, :, at])
    assert bit_equal(cache.values(), full.values()[:, :, at])
    assert bit_equal(cache.attend(q), expected(full, q))


@pairs
@pytest.mark.parametrize("window", [1, 70, 1024])
def test_a_windowed_cache_gives_to_the_bit_what_one_that_drops_nothing_gives(rng, k_format, v_format, window):
    cache = new(k_format, v_format, window)
    full = whole(cache)
    most = limit_of(window)
    for count in [3, 1, 30, 66, *[1] * 40, 64, 500, 17, *[1] * 40, 1300, 900, *[64] * 12, 1]:
        k, v = data(rng, count)
        q = normal(rng, 1, 2 * HEADS, min(count, 17), DIM)
        out = cache.step(q, k, v)
        full.append(k, v)
        assert bit_equal(out, expected(full, q, window))
        assert cache.capacity <= most
    assert cache._dropped > 0
    at = cache.positions
    assert at[:SINK].tolist() == [0, 1, 2, 3]
    assert at[SINK:].tolist() == list(range(len(full) - len(at) + SINK, len(full)))
    assert len(at) >= SINK + window - 1 + BACK
    assert bit_equal(cache.keys(), full.keys()[:, :, at])
    assert bit_equal(cache.values(), full.values()[:, :, at])


@pairs
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "sink_logits": [1.0, 2.0, 0.0, -1.0]}])
def test_a_prompt_longer_than_the_window_is_attended_as_if_nothing_were_dropped(rng, k_format, v_format, options):
    cache = new(k_format, v_format)
    full = whole(cache)
    for count in (900, 301):
        k, v = data(rng, count)
        q = normal(rng, 1, 2 * HEADS, count, DIM)
        out, lse = cache.step(q, k, v, return_lse=True, **options)
        full.append(k, v)
        want, want_lse = reference.attention(
            q, full.keys(), full.values(), causal=True, window=(WINDOW - 1, -1), window_sinks=SINK, return_lse=True,
            **options,
        )  # fmt: skip
        got, got_lse = expected(full, q, return_lse=True, **options)
        np.testing.assert_allclose(out, got, rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(lse, got_lse, rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(out, want, rtol=1e-3, atol=4e-3)  # weights of codes are rounded
        np.testing.assert_allclose(lse, want_lse, rtol=1e-3, atol=4e-3)
    assert cache._dropped > 0


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("columns", [1, 1800])
def test_columns_of_a_mask_are_positions(rng, rows, columns):
    cache, full = filled(rng, 1500)
    mask = rng.random((1, 1, rows, columns)) < 0.7
    k, v = data(rng, 300)
    q = normal(rng, 1, HEADS, 300, DIM)
    out = np.empty((1, HEADS, 300, DIM), np.float32)
    assert cache.step(q, k, v, mask=mask, out=out) is out
    full.append(k, v)
    # Weights of codes are rounded by tile, of which a piece ends with one that is cut.
    assert np.abs(out - expected(full, q, mask=mask)).max() < 1e-4
    row = mask[:, :, -1:]
    assert bit_equal(cache.attend(q[:, :, -1:], mask=row), expected(full, q[:, :, -1:], mask=row))
    with pytest.raises(ValueError, match="mask must have 1800 columns, one for each token, got 1799"):
        cache.attend(q[:, :, -1:], mask=np.ones((1, 1799), bool))


def test_slopes_take_the_true_distance_of_the_sinks(rng):
    cache, full = filled(rng, 1700)
    q = normal(rng, 1, HEADS, 3, DIM)
    slopes = [0.001, 0.1]
    got = cache.attend(q, alibi_slopes=slopes)
    assert np.abs(got - expected(full, q, alibi_slopes=slopes)).max() < 2e-5


def test_a_window_of_the_call_hides_the_sinks(rng):
    cache, full = filled(rng, 1700)
    q = normal(rng, 1, HEADS, 3, DIM)
    for window in [(WINDOW - 1, -1), (20, 0), (0, 0)]:
        assert bit_equal(cache.attend(q, window=window), full.attend(q, window=window))
    for left in (-1, WINDOW):
        with pytest.raises(ValueError, match=f"window must reach back 0 to 69 tokens, got {left}"):
            cache.attend(q, window=(left, 0))


@pairs
def test_the_newest_64_tokens_can_always_be_taken_back(rng, k_format, v_format):
    cache = new(k_format, v_format)
    full = whole(cache)
    for _ in range(60):
        k, v = data(rng, int(rng.integers(1, 150)))
        for each in (cache, full):
            each.append(k, v)
        n = max(0, len(full) - int(rng.integers(0, BACK + 1)))
        for each in (cache, full):
            each.truncate(n)
        same(cache, full, normal(rng, 1, HEADS, min(n, 1), DIM))
    assert cache._dropped > 1000
    before = len(cache)
    lowest = cache.positions[SINK] + WINDOW
    for n in (0, lowest - 1):
        with pytest.raises(ValueError, match=rf"n must be at least {lowest}, got {n}: the window of later tokens"):
            cache.truncate(int(n))
    assert len(cache) == before
    cache.truncate(int(lowest))
    full.truncate(int(lowest))
    q = normal(rng, 1, HEADS, 1, DIM)
    # The window may now begin in the tile that holds the sinks too: other sums.
    np.testing.assert_allclose(cache.attend(q), expected(full, q), rtol=1e-5, atol=2e-5)
    cache.reset()
    assert (len(cache), cache.positions.tolist(), cache.nbytes) == (0, [], 0)
    cache.append(*data(rng, 5))
    cache.truncate(1)
    assert len(cache) == 1


@pairs
def test_snapshots_copies_and_files_go_on_from_the_same_window(rng, tmp_path, k_format, v_format):
    cache, full = filled(rng, 1800, batch=2, k_format=k_format, v_format=v_format)
    snapshot = cache.freeze()
    cache.save(tmp_path / "file")
    others = [
        snapshot.unfreeze(), snapshot.unfreeze(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)),
        kv.KVCache.load(tmp_path / "file"),
    ]  # fmt: skip
    assert kv.nbytes(snapshot, others[:2]) < 1.5 * cache.nbytes
    cache.append(*data(rng, 700, 2))
    q = normal(rng, 2, HEADS, 1, DIM)
    for other in others:
        assert other.spec == cache.spec
        same(other, full, q)
    for i, other in enumerate(others):
        k, v = data(np.random.default_rng(i), 700, 2)
        twin = copy.deepcopy(full)
        for each in (other, twin):
            each.append(k, v)
            each.truncate(2470)
        same(other, twin, q)
    same(snapshot.unfreeze(), full, q)


def test_rows_move_on_together(rng):
    cache, full = filled(rng, 1600, batch=2)
    for each in (cache, full):
        each.repeat_interleave(2)
        each.reorder([3, 1, 0, 2])
        each.select([0, 1, 2])
        each.append(*data(np.random.default_rng(5), 400, 3))
    same(cache, full, normal(rng, 3, HEADS, 1, DIM))
    assert cache.lengths == [2000] * 3
    for call in (
        lambda: cache.append(*data(rng, 2, 3), lengths=[1, 2, 2]),
        lambda: cache.attend(normal(rng, 3, HEADS, 1, DIM), lengths=[1, 1, 1]),
        lambda: cache.step(normal(rng, 3, HEADS, 2, DIM), *data(rng, 2, 3), lengths=[1, 2, 2]),
    ):
        with pytest.raises(ValueError, match="lengths must be None for a cache with a window"):
            call()
    assert len(cache) == 2000


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_long_append_that_fails_leaves_everything_as_it_was(rng, bad):
    cache, full = filled(rng, 1500)
    k, v = data(rng, 900)
    v[0, 1, 899, 3] = bad
    q = normal(rng, 1, HEADS, 900, DIM)
    for call in (lambda: cache.append(k, v), lambda: cache.step(q, k, v)):
        with pytest.raises(ValueError, match=r"v must be finite"):
            call()
        assert len(cache) == 1500
    with pytest.raises(ValueError, match="q must have"):
        cache.step(q[..., :3], *data(rng, 900))
    with pytest.raises(ValueError, match="out must"):
        cache.step(q, *data(rng, 900), out=np.empty((1, 1), np.float32))
    same(cache, full, q[:, :, :1])


@pytest.mark.parametrize("size", [1, 100])
def test_a_refused_append_drops_nothing(rng, size):
    cache, _ = filled(rng, 1500)
    while cache._stored() + size <= cache._limit:
        cache.append(*data(rng, 1))
    before, positions = pickle.dumps(cache), cache.positions
    k, v = data(rng, size)
    k[0, 0, -1, 0] = np.nan
    with pytest.raises(ValueError, match=r"k must be finite"):
        cache.append(k, v)
    np.testing.assert_array_equal(cache.positions, positions)
    assert pickle.dumps(cache) == before


def test_a_reset_that_fails_leaves_everything_as_it_was(rng, monkeypatch):
    cache, _ = filled(rng, 1500)
    positions = cache.positions
    with monkeypatch.context() as patch:
        patch.setattr("kvnumba.cache.allocate", no_memory)
        with pytest.raises(MemoryError):
            cache.reset()
    np.testing.assert_array_equal(cache.positions, positions)


def no_memory(*_):
    raise MemoryError


def test_queries_whose_window_is_gone_are_refused(rng):
    cache, full = filled(rng, 1700)
    most = int(len(cache) - cache.positions[SINK] - WINDOW + 1)
    q = normal(rng, 1, HEADS, most, DIM)
    assert np.abs(cache.attend(q) - expected(full, q)).max() < 2e-5
    with pytest.raises(ValueError, match=f"q must have queries whose window is still there, at most {most}, got"):
        cache.attend(normal(rng, 1, HEADS, most + 1, DIM))
    k, v = data(rng, 2)
    with pytest.raises(ValueError, match=r"q must have at most 66 queries, or as many as k has tokens, 2, got 67"):
        cache.step(normal(rng, 1, HEADS, 67, DIM), k, v)
    assert len(cache) == 1700
    cache.append(*data(rng, limit_of(WINDOW) - len(cache.positions) - 1))  # the next step must drop
    full.append(*data(np.random.default_rng(0), len(cache) - 1700))
    assert cache.step(normal(rng, 1, HEADS, 66, DIM), k, v).shape == (1, HEADS, 66, DIM)


@pytest.mark.parametrize(
    ("window", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("4", TypeError), (True, TypeError)]
)
def test_a_window_is_a_positive_integer(window, error):
    with pytest.raises(error, match="window must be a positive integer"):
        kv.KVCache(1, 8, window=window)


def test_what_a_windowed_cache_is(rng):
    cache = kv.KVCache(1, 8, window=5, capacity=10**6)
    assert type(cache) is kv.WindowedKVCache
    assert isinstance(cache, kv.KVCache)
    assert cache.spec.window == 5
    assert repr(cache).endswith(f"batch_size=1, window=5, length=0, capacity={limit_of(5)})")
    cache.reserve(10**9)
    assert cache.capacity == limit_of(5)
    with pytest.raises(AttributeError, match="buffers of a cache with a window"):
        _ = cache.buffers
    with pytest.raises(TypeError, match="window must be None for Mine; derive the class from WindowedKVCache"):
        type("Mine", (kv.KVCache,), {})(1, 8, window=5)
    assert (UNIT % 64, chunk_of(5) % UNIT, chunk_of(4096)) == (0, 0, 1024)
    assert limit_of(4096) < 1.35 * 4096
    for window in (1, 64, 65, 1024, 4096, 4097):  # what docs/embedding.md says

        def up(n):
            return -(-n // 128) * 128

        assert limit_of(window) == 132 + up(window + 191) + max(256, up(window // 4))
    assert [limit_of(window) for window in (64, 1024, 4096)] == [644, 1668, 5508]


def test_layers_may_have_windows_of_their_own(rng, tmp_path):
    caches = kv.KVCaches(2, HEADS, DIM, window=[None, 8], k_format="int8")
    for i in range(2):
        caches.append(i, *data(rng, 900))
    with pytest.raises(ValueError, match="n must be at least"):
        caches.truncate(100)
    assert [len(cache) for cache in caches] == [900, 900]
    caches.save(tmp_path / "file")
    caches = kv.KVCaches.load(tmp_path / "file")
    caches.truncate(880)
    assert [(len(cache), cache.spec.window) for cache in caches] == [(880, None), (880, 8)]


def test_the_class_with_a_window_loads_no_file_without(rng, tmp_path):
    kv.KVCache(1, 8).save(tmp_path / "file")
    with pytest.raises(ValueError, match="path must be a file of a cache with a window"):
        kv.WindowedKVCache.load(tmp_path / "file")


def test_memory_stays_the_same_for_any_number_of_tokens(rng):
    cache, _ = filled(rng, 2 * limit_of(WINDOW))
    allocated, k, v = cache.nbytes_allocated, *data(rng, 1000)
    for _ in range(100):
        cache.append(k, v)
    assert cache.nbytes_allocated == allocated
    assert cache.nbytes <= allocated


def test_a_window_is_the_same_without_compilation(rng, tmp_path):
    k, v = data(rng, 1200)
    q = normal(rng, 1, HEADS, 1, DIM)
    np.savez(tmp_path / "data.npz", k=k, v=v, q=q)
    code = (
        "import sys, numpy as np, kvnumba as kv; x = np.load(sys.argv[1]); k, v = x['k'], x['v'];"
        f"cache = kv.KVCache({HEADS}, {DIM}, k_format='int4', v_format='int4', window={WINDOW});"
        "cache.append(k, v); cache.truncate(1190); copy = cache.freeze().unfreeze();"
        "assert len(copy) == 1190 and copy.spec.window == cache.spec.window;"
        "np.save(sys.argv[2], copy.step(x['q'], k[:, :, :3], v[:, :, :3]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "data.npz"), str(tmp_path / "out.npy")]
    done = subprocess.run(command, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cache = new()
    cache.append(k, v)
    cache.truncate(1190)
    out = cache.step(q, k[:, :, :3], v[:, :, :3])
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), out, rtol=1e-3, atol=4e-3)  # weights of codes are rounded

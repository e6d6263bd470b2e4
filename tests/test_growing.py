"""Caches of one array: what goes in comes out, nothing is shared, nothing removed is left behind."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from kvnumba import QuantizedCache, reference
from kvnumba.growing import ConcatCache, InPlaceCache
from kvnumba.snapshot import Snapshot

BOTH = pytest.mark.parametrize("make", [ConcatCache, InPlaceCache])
SECRET = 12345.678


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def same(cache, expected: np.ndarray) -> bool:
    """Length, shape, view and copy of *cache* are those of *expected*, bit for bit."""
    view, owned = cache.view(), cache.contiguous()
    n = expected.shape[cache.axis]
    return (
        len(cache) == cache.length == n
        and cache.shape == view.shape == owned.shape == expected.shape
        and view.tobytes() == owned.tobytes() == expected.tobytes()
        and owned.flags.c_contiguous
        and owned.flags.writeable
    )


# ---- append and read


@BOTH
@pytest.mark.parametrize(("axis", "rank"), [(0, 1), (0, 3), (1, 2), (1, 4), (2, 4), (3, 4), (2, 5)])
def test_any_axis_of_any_rank_grows_like_concatenate(make, axis: int, rank: int):  # K28
    rng = np.random.default_rng(1)
    cache, chunks, first = make(axis), [], 0
    for _ in range(60):
        shape = list(range(2, 2 + rank))
        shape[axis] = int(rng.integers(1, 10))
        chunks.append(np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape))
        first += chunks[-1].size
        cache.append(chunks[-1])
        assert same(cache, np.concatenate(chunks, axis))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("came", ["float16", "float32", "float64", "int32", "bool"])
def test_an_in_place_cache_rounds_to_its_own_dtype(dtype: str, came: str):
    x = (3 * normal((2, 3, 4, 5))).astype(came)
    cache = InPlaceCache(dtype=dtype)
    cache.append(x)
    if dtype == "bfloat16":
        expected = reference.to_bfloat16(x.astype(np.float32))
        assert cache.nbytes == 2 * x.size
        assert np.array_equal(cache.view().astype(np.float32), reference.from_bfloat16(expected))
    else:
        assert same(cache, x.astype(dtype))
        assert cache.dtype == cache.view().dtype == np.dtype(dtype)


def test_bfloat16_is_rounded_as_ml_dtypes_does():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    special = [0.0, -0.0, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, 1e-40, 1.00390625, 1.01171875, 65280.0]
    x = np.concatenate([np.float32(special), normal((1000,)) * np.float32(1e10)])
    cache = InPlaceCache(0, "bfloat16")
    cache.append(x)
    assert cache.view().dtype == cache.dtype == ml_dtypes.bfloat16
    with np.errstate(over="ignore"):
        assert cache.view().tobytes() == x.astype(ml_dtypes.bfloat16).tobytes()
    cache.append(x.astype(ml_dtypes.bfloat16))
    assert cache.view()[: len(x)].tobytes() == cache.view()[len(x) :].tobytes()


def test_nan_stays_nan_in_bfloat16():
    cache = InPlaceCache(0, "bfloat16")
    cache.append(np.uint32([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000]).view(np.float32))
    assert np.isnan(cache.view().astype(np.float32)).all()


def test_without_ml_dtypes_a_bfloat16_view_is_widened(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvnumba.checks.bfloat16", lambda: None)
    x = normal((1, 2, 3, 4))
    cache = InPlaceCache(dtype="bfloat16")
    cache.append(x)
    assert cache.view().dtype == cache.dtype == np.float32
    assert np.array_equal(cache.view(), reference.from_bfloat16(reference.to_bfloat16(x)))
    assert not cache.view().flags.writeable


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_a_concat_cache_keeps_the_dtype_of_the_first_append(dtype: str):
    x = normal((1, 2, 3, 4))
    cache = ConcatCache()
    assert cache.dtype is None
    cache.append(x.astype(dtype))
    for later in ("float64", "float32", "float16", "int8"):
        cache.append(x.astype(later))
    native = np.dtype(dtype).newbyteorder("=")
    assert cache.dtype == native
    parts = [x.astype(native)] + [x.astype(n).astype(native) for n in ("float64", "float32", "float16", "int8")]
    assert same(cache, np.concatenate(parts, 2))


def test_a_concat_cache_keeps_bfloat16_and_makes_floats_of_integers():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = normal((1, 2, 3, 4))
    cache = ConcatCache()
    cache.append(x.astype(ml_dtypes.bfloat16))
    cache.append(x)
    assert same(cache, np.concatenate([x, x], 2).astype(ml_dtypes.bfloat16))
    cache.reset()
    cache.append(np.arange(6).reshape(1, 1, 6))
    assert cache.dtype == np.float32


@BOTH
def test_layout_of_the_chunk_does_not_matter(make):  # K11, K39
    x = normal((2, 3, 4, 5))
    locked = x.copy()
    locked.setflags(write=False)
    odd = np.frombuffer(b"\0" + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    for came in (np.asfortranarray(x), x[..., ::-1].copy()[..., ::-1], np.repeat(x, 2, 2)[:, :, ::2], locked, odd):
        cache = make()
        cache.append(came)
        cache.append(came)
        assert same(cache, np.concatenate([x, x], 2))
    cache = make()
    cache.append(np.broadcast_to(x[:1], x.shape))
    assert same(cache, np.broadcast_to(x[:1], x.shape))


# ---- nothing is shared


@BOTH
def test_the_callers_array_is_copied(make):  # K29
    cache = make()
    for _ in range(3):
        k = np.ones((1, 2, 3, 4), np.float32)
        cache.append(k)
        k[:] = 99
    assert (cache.view() == 1).all()


@BOTH
def test_views_are_read_only_and_copies_are_owned(make):  # K29
    cache = make()
    cache.append(normal((1, 2, 3, 4)))
    before = cache.contiguous()
    with pytest.raises(ValueError, match="read-only"):
        cache.view()[:] = 0
    cache.contiguous()[:] = 0
    assert same(cache, before)
    cache.append(before)
    assert len(cache) == 6


def test_an_in_place_view_is_the_buffer_itself():
    cache = InPlaceCache(capacity=10)
    cache.append(normal((1, 2, 3, 4)))
    assert np.shares_memory(cache.view(), cache.view())
    assert np.shares_memory(cache.view(), cache._buffer)


@BOTH
def test_a_view_is_not_changed_by_later_appends(make):  # K28
    cache = make()
    x = normal((2, 3, 4, 5))
    cache.append(x)
    old, n = cache.view(), len(cache)
    for i in range(100):
        cache.append(normal((2, 3, 1 + i % 9, 5), i))
    assert old.tobytes() == x.tobytes()
    assert n == 4


def test_a_concat_view_never_changes():
    cache = ConcatCache()
    x = normal((2, 3, 4, 5))
    cache.append(x)
    old = cache.view()
    cache.truncate(1)
    cache.append(x)
    cache.reset()
    assert old.tobytes() == x.tobytes()


# ---- refusals


WRONG = {
    "heads": np.zeros((1, 3, 5, 64)),
    "channels": np.zeros((1, 2, 5, 32)),
    "batch": np.zeros((2, 2, 5, 64)),
    "rank 3": np.zeros((2, 5, 64)),
    "rank 5": np.zeros((1, 1, 2, 5, 64)),
    "rank 2": np.zeros((5, 64)),
    "nothing": np.zeros((1, 3, 0, 64)),
}


@BOTH
@pytest.mark.parametrize("case", WRONG)
def test_another_shape_is_refused_and_changes_nothing(make, case: str):  # K35
    x = normal((1, 2, 5, 64))
    cache = make()
    cache.append(x)
    with pytest.raises(ValueError, match=r"x must have"):
        cache.append(WRONG[case])
    assert same(cache, x)
    cache.append(x)
    assert same(cache, np.concatenate([x, x], 2))


@BOTH
def test_the_message_names_the_shape_that_is_stored(make):
    cache = make()
    cache.append(normal((1, 2, 5, 64)))
    with pytest.raises(ValueError, match=r"x must have shape \[1, 2, S, 64\] .* got \[1, 2, 5, 32\]; reset"):
        cache.append(WRONG["channels"])
    with pytest.raises(ValueError, match=r"x must have more than 2 axes .* got \[5, 64\]"):
        make().append(WRONG["rank 2"])


@BOTH
def test_what_is_no_array_of_numbers_is_refused(make):  # K41
    cache = make()
    for bad in (np.ma.zeros((1, 2, 3, 4)), np.zeros((1, 2, 3, 4), complex), "abc", None, [[1], [2, 3]]):
        with pytest.raises((TypeError, ValueError), match=r"^x must be"):
            cache.append(bad)
        assert len(cache) == 0
    cache.append(normal((1, 2, 3, 4)))


def test_arguments_are_checked_by_name():
    for make in (ConcatCache, InPlaceCache):
        with pytest.raises(ValueError, match="axis must be an integer of at least 0, got -1"):
            make(-1)
        with pytest.raises(TypeError, match="axis must be"):
            make("2")
    with pytest.raises(ValueError, match="capacity must be an integer of at least 0, got -5"):
        InPlaceCache(capacity=-5)
    for wrong in ("float64", "int8", np.float64, "f4"):
        with pytest.raises(ValueError, match='dtype must be one of "float32", "float16", "bfloat16"'):
            InPlaceCache(dtype=wrong)
    with pytest.raises(ValueError, match="dtype must be one of"):
        InPlaceCache(dtype=None)
    with pytest.raises(TypeError, match="dtype must be one of"):
        InPlaceCache(dtype=3.5)
    assert InPlaceCache(dtype=np.float16).dtype == np.float16


# ---- nothing at all


@BOTH
def test_a_chunk_of_no_tokens_changes_nothing(make):  # K38
    nothing, x = np.zeros((1, 2, 0, 4), np.float16), normal((1, 2, 3, 4))
    cache = make()
    cache.append(nothing)
    assert len(cache) == 0
    cache.append(x)
    cache.append(nothing)
    assert same(cache, x)


@BOTH
def test_an_empty_cache_can_be_asked_everything(make):  # K38
    for cache in (make(), make().freeze().unfreeze()):
        assert len(cache) == cache.nbytes == cache.nbytes_allocated == cache.capacity == 0
        assert cache.shape[2] == cache.view().shape[2] == cache.contiguous().shape[2] == 0
        cache.truncate(0)
        cache.reset()
        assert repr(cache).startswith(make.__name__ + "(axis=2")


@BOTH
def test_a_batch_of_none_has_a_length_all_the_same(make):  # K38
    cache = make()
    cache.append(np.zeros((0, 2, 3, 4), np.float32))
    cache.append(np.zeros((0, 2, 2, 4), np.float32))
    assert same(cache, np.zeros((0, 2, 5, 4), np.float32))


# ---- cut and reset


@BOTH
def test_a_cut_to_zero_removes_everything(make):  # K02
    cache = make()
    cache.append(np.float32([0, 1, 2]).reshape(1, 1, 3, 1))
    cache.truncate(0)
    assert same(cache, np.zeros((1, 1, 0, 1), np.float32))
    cache.append(np.float32([7]).reshape(1, 1, 1, 1))
    assert same(cache, np.float32([7]).reshape(1, 1, 1, 1))


@BOTH
@pytest.mark.parametrize("n", [0, 1, 19, 39, 40])
def test_after_a_cut_the_cache_goes_on_as_if_never_fed_more(make, n: int):
    x, y = normal((2, 3, 40, 5)), normal((2, 3, 30, 5), 1)
    cache = make()
    cache.append(x)
    cache.truncate(n)
    assert same(cache, x[:, :, :n])
    cache.append(y)
    assert same(cache, np.concatenate([x[:, :, :n], y], 2))


@BOTH
def test_a_cut_outside_the_length_is_refused(make):
    cache = make()
    cache.append(normal((1, 1, 3, 1)))
    for wrong in (4, -1):
        with pytest.raises(ValueError, match=f"n must be from 0 to the length 3, got {wrong}"):
            cache.truncate(wrong)
    with pytest.raises(TypeError, match="n must be"):
        cache.truncate(None)
    assert len(cache) == 3


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "concat"])
def test_removed_tokens_leave_no_trace(dtype: str):  # K49
    cache = ConcatCache() if dtype == "concat" else InPlaceCache(dtype=dtype, capacity=50)
    x = normal((1, 2, 40, 8))
    x[:, :, 30:] = SECRET
    cache.append(x)
    stored = cache.contiguous()[0, 0, 39, :2].tobytes()
    assert stored in pickle.dumps(cache)
    cache.truncate(20)
    for place in (cache, cache.freeze(), cache.freeze().unfreeze(), copy.deepcopy(cache)):
        assert stored not in pickle.dumps(place)
    assert stored not in cache._buffer.tobytes()
    assert np.array_equal(cache.contiguous(), cache.view())


@BOTH
def test_reset_makes_a_new_cache(make):  # K32
    cache = make()
    cache.append(normal((1, 2, 78, 4)))
    cache.reset()
    assert len(cache) == cache.nbytes == cache.nbytes_allocated == cache.capacity == 0
    assert cache.view().shape[2] == 0
    x = normal((2, 3, 3, 5))
    cache.append(x)
    assert same(cache, x)


def test_reset_keeps_the_capacity_that_was_asked_for():
    cache = InPlaceCache(capacity=100)
    for _ in range(2):
        assert cache.capacity == 100
        cache.append(normal((1, 1, 150, 1)))
        cache.append(normal((1, 1, 1, 1)))
        assert (cache.capacity, cache.reallocs) == (300, 1)
        cache.reset()
    assert cache.reallocs == 0


# ---- growth


def test_growth_doubles_and_is_counted():  # K69
    cache = InPlaceCache(dtype="float16")
    expected = 0
    for n in range(1, 4097):
        cache.append(np.full((1, 1, 1, 2), n % 1000, np.float32))
        expected = expected if expected >= n else max(n, 2 * expected)
        assert cache.capacity == expected
    assert cache.reallocs == 12
    assert cache.capacity == 4096 <= 2 * len(cache)
    assert (cache.view()[0, 0, :, 0] == np.arange(1, 4097) % 1000).all()


def test_a_chunk_larger_than_twice_the_buffer_sets_the_capacity():
    cache = InPlaceCache()
    cache.append(normal((1, 1, 3, 1)))
    assert (cache.capacity, cache.reallocs) == (3, 0)
    cache.append(normal((1, 1, 10, 1)))
    assert (cache.capacity, cache.reallocs) == (13, 1)
    cache.append(normal((1, 1, 1, 1)))
    assert (cache.capacity, cache.reallocs) == (26, 2)


def test_room_made_beforehand_is_never_replaced():
    cache = InPlaceCache(capacity=64)
    cache.append(normal((1, 2, 1, 4)))
    view = cache.view()
    for i in range(63):
        cache.append(normal((1, 2, 1, 4), i))
    assert (cache.capacity, cache.reallocs) == (64, 0)
    assert np.shares_memory(view, cache.view())


def test_bytes_are_those_of_the_tokens_and_of_the_buffer():
    cache = InPlaceCache(dtype="bfloat16", capacity=64)
    cache.append(normal((1, 2, 3, 4)))
    assert (cache.nbytes, cache.nbytes_allocated) == (2 * 3 * 4 * 2, 2 * 64 * 4 * 2)
    one = ConcatCache()
    one.append(normal((1, 2, 3, 4)))
    assert one.nbytes == one.nbytes_allocated == 2 * 3 * 4 * 4
    assert one.capacity == 3


def test_the_repr_says_what_is_inside():
    cache = InPlaceCache(dtype="bfloat16", capacity=8)
    cache.append(normal((1, 2, 3, 4)))
    assert repr(cache) == "InPlaceCache(axis=2, shape=(1, 2, 3, 4), dtype=bfloat16, capacity=8, reallocs=0)"
    assert repr(cache.freeze()) == f"Snapshot({cache!r})"
    one = ConcatCache(axis=1)
    one.append(normal((2, 3)))
    assert repr(one) == "ConcatCache(axis=1, shape=(2, 3), dtype=float32)"


# ---- snapshots


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "concat"])
def test_a_snapshot_and_its_caches_are_independent(dtype: str):  # K30
    parent = ConcatCache() if dtype == "concat" else InPlaceCache(dtype=dtype)
    parent.append(normal((2, 3, 70, 5)))
    at_freeze = parent.contiguous()
    snapshot = parent.freeze()
    assert isinstance(snapshot, Snapshot)
    assert (len(snapshot), snapshot.nbytes) == (70, parent.nbytes)
    one, two = snapshot.unfreeze(), snapshot.unfreeze()
    parent.append(normal((2, 3, 50, 5), 1))
    parent.truncate(10)
    parent.reset()
    one.append(normal((2, 3, 5, 5), 2))
    two.append(normal((2, 3, 7, 5), 3))
    one.truncate(40)
    assert same(snapshot.unfreeze(), at_freeze)
    assert same(one, at_freeze[:, :, :40])
    assert two.contiguous()[:, :, :70].tobytes() == at_freeze.tobytes()
    assert (type(one), one.axis, one.dtype) == (type(parent), 2, two.dtype)
    assert len(two) == 77


@BOTH
def test_freeze_can_move_the_state(make):
    cache = make()
    x = normal((1, 2, 7, 4))
    cache.append(x)
    buffer = cache._buffer
    snapshot = cache.freeze(consume=True)
    assert snapshot._cache._buffer is buffer
    assert len(cache) == cache.nbytes == 0
    cache.append(normal((1, 3, 2, 5)))
    assert same(snapshot.unfreeze(), x)


@BOTH
def test_copies_and_pickles_are_independent(make):  # K64
    cache = make()
    x = normal((1, 2, 7, 4))
    cache.append(x)
    for other in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        other.append(x)
        other.truncate(3)
        other.append(2 * x)
        assert same(cache, x)
    snapshot = pickle.loads(pickle.dumps(cache.freeze()))
    assert same(snapshot.unfreeze(), x)
    assert same(copy.deepcopy(snapshot).unfreeze(), x)


def test_a_clone_keeps_capacity_and_count():
    cache = InPlaceCache(capacity=4)
    cache.append(normal((1, 1, 5, 1)))
    cache.append(normal((1, 1, 1, 1)))
    other = cache.freeze().unfreeze()
    assert (other.capacity, other.reallocs) == (cache.capacity, cache.reallocs) == (10, 1)
    other.reset()
    assert other.capacity == 4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["per_channel", "per_token"])
def test_codes_of_no_rows_grow_and_are_pickled(layout, bits):
    cache = QuantizedCache(layout, bits)
    for _ in range(3):
        cache.append(np.zeros((0, 5, 3)))
    assert pickle.loads(pickle.dumps(cache)).contiguous().shape == (0, 15, 3)

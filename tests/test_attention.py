"""Attention over arrays and over caches, against float64.

Bounds: rounding may cost twice the error of plain float32 NumPy; codes may add 2 % (int8) or 10 % (int4) of the error
that their quantization causes itself (see ``check_attend`` in conftest).
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import bit_equal, check_attend, normal, output_rounding, rounding_budget

import kvnumba as kv
from kvnumba import reference
from kvnumba.spec import FORMATS

#: Pairs that stand for all others where a test is about something else than formats.
PAIRS = [("float32", "float32"), ("int8", "int8"), ("int4", "int4"), ("int8", "int4")]
#: The same for options, which compile their kernels once more.
FEW_PAIRS = [("float32", "float32"), ("int8", "int8"), ("int4", "int4")]
LENGTHS = [0, 1, 3, 4, 5, 31, 32, 33, 35, 36, 37, 63, 64, 65, 67, 68, 69, 127, 128, 129, 300, 1000]
DIMS = [1, 3, 7, 8, 15, 16, 17, 33, 64, 80, 96, 127, 128, 192, 256, 576]
SEVERAL = [2, 3, 5, 8, 9, 17, 40, 130]


def filled(rng, k_format, v_format, *, length, heads=2, dim=32, v_dim=None, batch=1):
    """A cache that holds *length* random tokens, and what was appended."""
    v_dim = dim if v_dim is None else v_dim
    cache = kv.KVCache(heads, dim, k_format=k_format, v_format=v_format, batch_size=batch, v_head_dim=v_dim)
    k, v = normal(rng, batch, heads, length, dim), normal(rng, batch, heads, length, v_dim)
    cache.append(k, v)
    return cache, k, v


# ---- the cache: formats, sizes, lengths


@pytest.mark.parametrize(("k_format", "v_format"), list(itertools.product(FORMATS, FORMATS)))
def test_every_key_format_pairs_with_every_value_format(rng, k_format, v_format):
    cache, k, v = filled(rng, k_format, v_format, length=300, batch=2)
    check_attend(cache, normal(rng, 2, 6, 1, 32), k, v)
    check_attend(cache, normal(rng, 2, 6, 9, 32), k, v)


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_around_sinks_blocks_and_tiles(rng, k_format, v_format, length):
    cache, k, v = filled(rng, k_format, v_format, length=length, dim=64)
    check_attend(cache, normal(rng, 1, 4, 1, 64), k, v)
    check_attend(cache, normal(rng, 1, 4, 7, 64), k, v)


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
@pytest.mark.parametrize("dim", DIMS)
def test_every_head_dim(rng, k_format, v_format, dim):
    cache, k, v = filled(rng, k_format, v_format, length=78, dim=dim)
    check_attend(cache, normal(rng, 1, 4, 1, dim), k, v)
    check_attend(cache, normal(rng, 1, 4, 5, dim), k, v)


@pytest.mark.parametrize(("k_format", "v_format"), [*PAIRS, ("bfloat16", "float16")])
@pytest.mark.parametrize(("dim", "v_dim"), [(24, 16), (192, 128), (1, 33), (65, 3), (64, 576), (576, 1)])
def test_value_dim_may_differ_from_key_dim(rng, k_format, v_format, dim, v_dim):
    cache, k, v = filled(rng, k_format, v_format, length=78, dim=dim, v_dim=v_dim)
    check_attend(cache, normal(rng, 1, 2, 1, dim), k, v)
    check_attend(cache, normal(rng, 1, 2, 6, dim), k, v)


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 9])
def test_every_gqa_group_size(rng, k_format, v_format, group):
    cache, k, v = filled(rng, k_format, v_format, length=140, heads=3)
    check_attend(cache, normal(rng, 1, 3 * group, 1, 32), k, v)
    check_attend(cache, normal(rng, 1, 3 * group, 4, 32), k, v)


@pytest.mark.parametrize(("k_format", "v_format"), [*PAIRS, ("float16", "bfloat16")])
@pytest.mark.parametrize("rows", SEVERAL)
@pytest.mark.parametrize("causal", [True, False])
def test_several_queries(rng, k_format, v_format, rows, causal):
    cache, k, v = filled(rng, k_format, v_format, length=200)
    check_attend(cache, normal(rng, 1, 4, rows, 32), k, v, causal=causal)


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_more_causal_queries_than_tokens_give_zero_rows(rng, k_format, v_format):
    cache, k, v = filled(rng, k_format, v_format, length=37)
    q = normal(rng, 1, 4, 40, 32)
    check_attend(cache, q, k, v)
    out, lse = cache.attend(q, return_lse=True)
    np.testing.assert_array_equal(out[:, :, :3], 0)
    np.testing.assert_array_equal(lse[:, :, :3], -np.inf)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("where", ["key channel", "key token", "value channel", "value token"])
def test_an_outlier_adds_no_more_error_than_even_data(rng, format, rows, where):
    # 100 times the rest: weights of one common scale would round the rest away.
    k, v, q = normal(rng, 4, 4, 300, 64), normal(rng, 4, 4, 300, 64), normal(rng, 4, 8, rows, 64)
    side, axis = where.split()
    x = k if side == "key" else v
    x[(..., 9) if axis == "channel" else (slice(None), slice(None), 77)] *= 100
    cache = kv.KVCache(4, 64, batch_size=4, **{"k_format" if side == "key" else "v_format": format})
    cache.append(k, v)
    check_attend(cache, q, k, v, sm_scale=0.01)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_constant_channels_and_tokens_add_no_error(rng, format, rows, size):
    # A constant group has scale 1 and codes 0; next to small numbers, weights of one common scale must not see that 1.
    k, v, q = normal(rng, 2, 2, 300, 64), normal(rng, 2, 2, 300, 64), normal(rng, 2, 4, rows, 64)
    k *= np.float32(size)
    v *= np.float32(size)
    k[..., [3, 60]] = v[:, :, 100:140] = np.float32(0.3 * size)
    cache = kv.KVCache(2, 64, batch_size=2, k_format=format, v_format=format)
    cache.append(k, v)
    check_attend(cache, q, k, v, sm_scale=0.1 / size)


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_a_token_that_takes_nearly_all_the_weight(rng, k_format, v_format):
    cache, k, v = filled(rng, k_format, v_format, length=300)
    q = 20 * k.repeat(2, 1)[:, :, 100:101]
    check_attend(cache, q, k, v)


# ---- options


@pytest.mark.parametrize(("k_format", "v_format"), FEW_PAIRS)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("shape", ["full", "heads", "rows", "keys", "two axes", "one axis"])
def test_masks_of_every_broadcast_shape(rng, k_format, v_format, rows, shape):
    cache, k, v = filled(rng, k_format, v_format, length=130, batch=2)
    q = normal(rng, 2, 4, rows, 32)
    shape = {
        "full": (2, 4, rows, 130),
        "heads": (1, 4, 1, 130),
        "rows": (2, 1, rows, 130),
        "keys": (1, 1, 1, 130),
        "two axes": (rows, 130),
        "one axis": (130,),
    }[shape]
    keep = rng.random(shape) < 0.5
    check_attend(cache, q, k, v, mask=keep)
    check_attend(cache, q, k, v, mask=normal(rng, *shape))
    check_attend(cache, q, k, v, causal=False, mask=np.where(keep, normal(rng, *shape), np.float32(-np.inf)))


def test_a_mask_with_one_column_hides_whole_rows(rng):
    cache, k, v = filled(rng, "float32", "float32", length=70)
    keep = np.array([True, False, True]).reshape(1, 1, 3, 1)
    q = normal(rng, 1, 4, 3, 32)
    check_attend(cache, q, k, v, mask=keep)
    np.testing.assert_array_equal(cache.attend(q, mask=keep)[:, :, 1], 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_additive_masks_of_other_float_types(rng, dtype):
    cache, k, v = filled(rng, "float32", "float32", length=70)
    mask = normal(rng, 70).astype(dtype)
    check_attend(cache, normal(rng, 1, 4, 2, 32), k, v, mask=mask)


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
@pytest.mark.parametrize("sm_scale", [0.0, 0.125, 1.0, -0.3])
def test_softmax_scale(rng, k_format, v_format, sm_scale):
    cache, k, v = filled(rng, k_format, v_format, length=140)
    for rows in (1, 5):
        check_attend(cache, normal(rng, 1, 4, rows, 32), k, v, sm_scale=sm_scale)


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_output_has_the_dtype_of_q(rng, k_format, v_format, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes").bfloat16
    cache, k, v = filled(rng, k_format, v_format, length=140)
    for rows in (1, 5):
        q = normal(rng, 1, 4, rows, 32).astype(dtype)
        check_attend(cache, q, k, v)
        assert bit_equal(cache.attend(q), cache.attend(q.astype(np.float32)).astype(dtype))


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
@pytest.mark.parametrize("rows", [1, 8])
def test_lse_is_the_log_of_the_softmax_denominator(rng, k_format, v_format, rows):
    cache, k, v = filled(rng, k_format, v_format, length=140)
    q = normal(rng, 1, 4, rows, 32)
    out, lse = cache.attend(q, return_lse=True)
    assert bit_equal(out, cache.attend(q))
    truth, true_lse = cache_truth(cache, q, return_lse=True)
    assert lse.shape == (1, 4, rows)
    # lse moves at most as much as the largest score does; a score moves as the quantized weights allow.
    _, exact_lse = reference.attention(q, k, v, causal=True, return_lse=True)
    allowed = {"float32": 0, "int8": 0.02, "int4": 0.1}[k_format] * np.abs(true_lse - exact_lse).max()
    scores = np.abs(q).max() * np.abs(k).max() * np.sqrt(32)
    assert np.abs(lse - true_lse).max() <= allowed + 4 * np.spacing(np.float32(scores))
    assert truth.shape == out.shape


def cache_truth(cache, q, *, causal=True, **options):
    """float64 attention over what *cache* holds."""
    return reference.attention(q, cache.keys(), cache.values(), causal=causal, **options)


@pytest.mark.parametrize("rows", [1, 5])
def test_out_receives_the_result(rng, rows):
    cache, *_ = filled(rng, "int8", "int4", length=70)
    q = normal(rng, 1, 4, rows, 32)
    out = np.full((1, 4, rows, 32), np.nan, np.float32)
    assert cache.attend(q, out=out) is out
    assert bit_equal(out, cache.attend(q))


@pytest.mark.parametrize("option", ["mask", "alibi_slopes", "sink_logits"])
@pytest.mark.parametrize("rows", [1, 16])
def test_out_may_lie_where_an_option_lies(rng, option, rows):
    q, k, v = normal(rng, 1, 2, rows, 8), normal(rng, 1, 2, 16, 8), normal(rng, 1, 2, 16, 16)
    cache = kv.KVCache(2, 8, v_head_dim=16, k_format="int8", v_format="int4")
    cache.append(k, v)
    for attend in (cache.attend, lambda q, **options: kv.attention(q, k, v, **options)):
        out = np.full((1, 2, rows, 16), 0.5, np.float32)
        given = out[:, :1] if option == "mask" else out.reshape(-1)[:2]
        given[...] = normal(rng, *given.shape)
        right = attend(q, **{option: given.copy()})
        assert bit_equal(attend(q, **{option: given}, out=out), right)


@pytest.mark.parametrize("name", ["sinks", "dropped"])
def test_what_windows_need_inside_is_no_option(rng, name):
    cache, *_ = filled(rng, "float32", "float32", length=30)
    with pytest.raises(TypeError, match=name):
        cache.attend(normal(rng, 1, 4, 1, 32), **{name: 4})


@pytest.mark.parametrize("name", ["softcap", "return_lse", "causal"])
def test_an_option_that_is_no_array_is_refused_as_one(rng, name):
    cache, *_ = filled(rng, "float32", "float32", length=3)
    with pytest.raises(TypeError, match=f"{name} must be"):
        cache.attend(normal(rng, 1, 4, 1, 32), **{name: np.ones(2)})


def test_out_of_another_shape_is_refused(rng):
    cache, *_ = filled(rng, "float32", "float32", length=3)
    with pytest.raises(ValueError, match="out must"):
        cache.attend(normal(rng, 1, 4, 1, 32), out=np.zeros((1, 4, 2, 32), np.float32))


# ---- what may not be seen


@pytest.mark.parametrize(("k_format", "v_format"), FEW_PAIRS)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity(rng, k_format, v_format, rows):
    cache, k, v = filled(rng, k_format, v_format, length=130)
    q = normal(rng, 1, 4, rows, 32)
    keep = rng.random((1, 4, rows, 130)) < 0.5
    keep[:, 1] = False
    for mask in (keep, np.where(keep, np.float32(0), np.float32(-np.inf))):
        out, lse = cache.attend(q, mask=mask, return_lse=True)
        np.testing.assert_array_equal(out[:, 1], 0)
        np.testing.assert_array_equal(lse[:, 1], -np.inf)
        assert np.isfinite(lse[:, 0]).all()
        check_attend(cache, q, k, v, mask=mask)


@pytest.mark.parametrize(("k_format", "v_format"), FEW_PAIRS)
def test_a_mask_that_keeps_one_tile_only(rng, k_format, v_format):
    cache, k, v = filled(rng, k_format, v_format, length=300)
    for seen in (slice(0, 4), slice(4, 36), slice(150, 151), slice(292, 300)):
        keep = np.zeros(300, bool)
        keep[seen] = True
        for rows in (1, 5):
            check_attend(cache, normal(rng, 1, 4, rows, 32), k, v, causal=False, mask=keep)


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_hidden_keys_and_values_may_hold_anything(rng, rows, bad):
    hidden = [0, 1, 2, 50, 64, 129]
    keep = np.ones(130, bool)
    keep[hidden] = False
    k, v, q = normal(rng, 1, 2, 130, 32), normal(rng, 1, 2, 130, 32), normal(rng, 1, 4, rows, 32)
    truth = reference.attention(q, k, v, causal=True, mask=keep)
    bound = rounding_budget(truth, q, k, v, causal=True, mask=keep)
    k[:, :, hidden], v[:, :, hidden] = bad, bad
    cache = kv.KVCache(2, 32)
    cache.append(k, v)
    assert np.abs(cache.attend(q, mask=keep) - truth).max() <= bound


# ---- plain arrays


@pytest.mark.parametrize("dim", [1, 7, 16, 64, 80, 128])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 129), (5, 64), (40, 300), (9, 0), (64, 64)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_over_arrays(rng, dim, rows, keys, causal):
    q, k, v = normal(rng, 2, 6, rows, dim), normal(rng, 2, 2, keys, dim), normal(rng, 2, 2, keys, dim + 1)
    out, lse = kv.attention(q, k, v, causal=causal, return_lse=True)
    truth, true_lse = reference.attention(q, k, v, causal=causal, return_lse=True)
    assert (out.dtype, out.shape) == (np.float32, truth.shape)
    assert np.abs(out - truth).max(initial=0) <= rounding_budget(truth, q, k, v, causal=causal)
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)


def test_attention_is_not_causal_by_default(rng):
    q, k, v = normal(rng, 1, 2, 4, 8), normal(rng, 1, 2, 4, 8), normal(rng, 1, 2, 4, 8)
    assert bit_equal(kv.attention(q, k, v), kv.attention(q, k, v, causal=False))
    assert not np.allclose(kv.attention(q, k, v), kv.attention(q, k, v, causal=True))


def test_attention_over_arrays_takes_masks_and_scale(rng):
    q, k, v = normal(rng, 2, 4, 5, 16), normal(rng, 2, 4, 70, 16), normal(rng, 2, 4, 70, 16)
    for mask in (rng.random((2, 1, 5, 70)) < 0.5, normal(rng, 4, 1, 70)):
        options = {"mask": mask, "sm_scale": 0.7, "causal": True}
        truth = reference.attention(q, k, v, **options)
        assert np.abs(kv.attention(q, k, v, **options) - truth).max() <= rounding_budget(truth, q, k, v, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_attention_over_arrays_of_other_float_types(rng, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="bfloat16 arrays need ml_dtypes").bfloat16
    q, k, v = (normal(rng, 1, 2, n, 16).astype(dtype) for n in (3, 40, 40))
    out = kv.attention(q, k, v)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    truth = reference.attention(*wide)
    assert out.dtype == np.dtype(dtype)
    bound = rounding_budget(truth, *wide) + output_rounding(truth, dtype)
    assert np.abs(out.astype(np.float64) - truth).max() <= bound


# ---- merge


@pytest.mark.parametrize("cuts", [[0, 130], [0, 50, 130], [0, 1, 4, 36, 36, 130]])
def test_merge_of_parts_equals_attention_over_all(rng, cuts):
    q, k, v = normal(rng, 2, 4, 3, 16), normal(rng, 2, 2, 130, 16), normal(rng, 2, 2, 130, 16)
    parts = [kv.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in itertools.pairwise(cuts)]
    out, lse = kv.merge_attention([p[0] for p in parts], [p[1] for p in parts])
    truth, true_lse = reference.attention(q, k, v, return_lse=True)
    # Every part is rounded once and the merge once more.
    assert np.abs(out - truth).max() <= 2 * rounding_budget(truth, q, k, v)
    np.testing.assert_allclose(lse, true_lse, rtol=1e-6, atol=1e-6)


def test_merge_of_two_caches_equals_attention_over_the_whole_sequence(rng):
    k, v, q = normal(rng, 1, 2, 200, 32), normal(rng, 1, 2, 200, 32), normal(rng, 1, 4, 1, 32)
    parts = []
    for piece in (slice(0, 90), slice(90, 200)):
        cache = kv.KVCache(2, 32)
        cache.append(k[:, :, piece], v[:, :, piece])
        parts.append(cache.attend(q, return_lse=True))
    out, _ = kv.merge_attention(*zip(*parts, strict=True))
    truth = reference.attention(q, k, v)
    assert np.abs(out - truth).max() <= 2 * rounding_budget(truth, q, k, v)


def test_merge_leaves_out_parts_that_saw_nothing(rng):
    out, lse = normal(rng, 1, 2, 3, 8), normal(rng, 1, 2, 3)
    nothing = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    merged, merged_lse = kv.merge_attention([out, nothing[0]], [lse, nothing[1]])
    np.testing.assert_array_equal(merged, out)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-6)
    merged, merged_lse = kv.merge_attention([nothing[0]] * 2, [nothing[1]] * 2)
    np.testing.assert_array_equal(merged, 0)
    np.testing.assert_array_equal(merged_lse, -np.inf)


@pytest.mark.parametrize("where", [0, 1])
def test_merge_takes_an_lse_of_plus_infinity_with_zeros_for_a_part_that_saw_nothing(rng, where):
    out, lse = normal(rng, 1, 2, 3, 8), normal(rng, 1, 2, 3)
    empty, unseen = out.copy(), lse.copy()
    empty[0, 1, 2], unseen[0, 1, 2] = 0, np.inf  # what FlashAttention 2 returns
    parts = [(empty, unseen), (out, lse)][:: 1 - 2 * where]
    merged, merged_lse = kv.merge_attention(*zip(*parts))
    np.testing.assert_array_equal(merged[0, 1, 2], out[0, 1, 2])
    np.testing.assert_allclose(merged_lse[0, 1, 2], lse[0, 1, 2], rtol=1e-6)
    assert unseen[0, 1, 2] == np.inf  # what came is as it was
    for count in (1, 2):
        merged, merged_lse = kv.merge_attention([empty] * count, [unseen] * count)
        np.testing.assert_array_equal(merged[0, 1, 2], 0)
        assert merged_lse[0, 1, 2] == -np.inf
        np.testing.assert_allclose(merged, empty, rtol=1e-6)


@pytest.mark.parametrize("held", [1.0, np.nan])
def test_merge_refuses_an_lse_of_plus_infinity_beside_numbers(rng, held):
    out, lse = normal(rng, 1, 2, 3, 8), normal(rng, 1, 2, 3)
    full, wrong = np.zeros_like(out), lse.copy()
    full[0, 1, 2, 5], wrong[0, 0, 1], wrong[0, 1, 2] = held, np.inf, np.inf
    with pytest.raises(ValueError, match=r"lses\[1\] must be below \+inf where outs\[1\] is not 0.*at \[0, 1, 2\]"):
        kv.merge_attention([out, full], [lse, wrong])


def test_merge_makes_a_row_with_a_nan_in_its_lse_nan_and_no_other(rng):
    out, lse = normal(rng, 1, 2, 3, 8), normal(rng, 1, 2, 3)
    spoilt = lse.copy()
    spoilt[0, 0, 1] = np.nan
    merged, merged_lse = kv.merge_attention([out, out], [lse, spoilt])
    assert np.isnan(merged[0, 0, 1]).all()
    assert np.isnan(merged_lse[0, 0, 1])
    assert np.isfinite(np.delete(merged[0].reshape(6, 8), 1, 0)).all()


def test_merge_says_that_the_parts_must_be_sequences(rng):
    with pytest.raises(TypeError, match="outs must be a sequence of arrays"):
        kv.merge_attention(None, [normal(rng, 1, 2, 3)])

"""The reference against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvnumba import reference

F = np.float32


def test_quantize_group_of_0_to_15_has_step_1_and_codes_equal_to_the_values():
    codes, lo, scale = reference.quantize_group(np.arange(16, dtype=F), 4, axis=0)
    np.testing.assert_array_equal(codes, np.arange(16))
    assert codes.dtype == np.uint8
    assert (lo.dtype, scale.dtype) == (np.float32, np.float32)
    assert (lo, scale) == (0, 1)


def test_ties_round_half_away_from_zero():
    x = np.array([0, 0.5, 1.5, 2.5, 3.5, 254.5, 255], F)
    codes, _, _ = reference.quantize_group(x, 8, axis=0)
    np.testing.assert_array_equal(codes, [0, 1, 2, 3, 4, 255, 255])


def test_the_largest_float32_below_a_half_rounds_down():
    # Adding 0.5 in float32 and truncating would give 1.
    below = np.nextafter(F(0.5), F(0))
    codes, _, _ = reference.quantize_group(np.array([0, below, 15], F), 4, axis=0)
    np.testing.assert_array_equal(codes, [0, 0, 15])


def test_a_constant_group_has_scale_1_and_codes_0():
    codes, lo, scale = reference.quantize_group(np.full((3, 5), -9, F), 8, axis=1)
    np.testing.assert_array_equal(codes, np.zeros((3, 5)))
    np.testing.assert_array_equal(lo, np.full((3, 1), -9))
    np.testing.assert_array_equal(scale, np.ones((3, 1)))
    np.testing.assert_array_equal(reference.dequantize(codes, lo, scale), np.full((3, 5), -9, F))


def test_a_range_that_underflows_has_scale_1():
    codes, _, scale = reference.quantize_group(np.array([0, 1e-45], F), 8, axis=0)
    assert scale == 1
    np.testing.assert_array_equal(codes, [0, 0])


def test_a_denormal_scale_is_clamped_to_the_largest_code():
    # 3.2e-43 is 228 units of 2**-149; 228 / 255 rounds to one unit, so the quotients are 0, 100 and 228.
    unit = np.float64(2.0**-149)
    codes, _, scale = reference.quantize_group(np.array([0, 100 * unit, 228 * unit]).astype(F), 8, axis=0)
    assert scale == F(unit)
    np.testing.assert_array_equal(codes, [0, 100, 228])
    # 22 / 15 is 1.47 units: the scale is one unit and 22 is beyond the largest code.
    codes, _, scale = reference.quantize_group(np.array([0, 22 * unit]).astype(F), 4, axis=0)
    assert scale == F(unit)
    np.testing.assert_array_equal(codes, [0, 15])


def test_groups_run_along_the_axis_that_is_given():
    x = np.array([[0, 10], [15, 40]], F)
    codes, lo, scale = reference.quantize_group(x, 4, axis=0)
    np.testing.assert_array_equal(lo, [[0, 10]])
    np.testing.assert_array_equal(scale, [[1, 2]])
    np.testing.assert_array_equal(codes, [[0, 0], [15, 15]])


def test_dequantize_rounds_the_product_before_the_sum():
    # 3 * (1 + 2**-23) is halfway between two float32 numbers and rounds to even, 3 + 2**-21. Without that rounding
    # the sum with -3 would be 3 * 2**-23.
    value = reference.dequantize(np.array([3], np.uint8), F(-3), np.nextafter(F(1), F(2)))
    assert value.dtype == np.float32
    assert value[0] == F(2.0**-21)


def test_nibbles_hold_the_even_index_low_and_pad_an_odd_end_with_0():
    packed = reference.pack_nibbles(np.array([[1, 2, 3], [15, 0, 9]], np.uint8))
    np.testing.assert_array_equal(packed, [[0x21, 0x03], [0x0F, 0x09]])
    np.testing.assert_array_equal(reference.unpack_nibbles(packed, 3), [[1, 2, 3], [15, 0, 9]])
    assert reference.pack_nibbles(np.zeros((2, 0), np.uint8)).shape == (2, 0)


@pytest.mark.parametrize(
    ("x", "bits"),
    [
        (1.0, 0x3F80),
        (1 + 2**-8, 0x3F80),  # halfway: to even, down
        (1 + 3 * 2**-8, 0x3F82),  # halfway: to even, up
        (1 + 2**-8 + 2**-20, 0x3F81),
        (-1.0, 0xBF80),
        (3.4028235e38, 0x7F80),  # the largest float32 rounds to infinity
        (np.inf, 0x7F80),
    ],
)
def test_bfloat16_rounds_to_nearest_even(x, bits):
    assert reference.to_bfloat16(np.array([x], F))[0] == bits


def test_bfloat16_keeps_a_nan_whose_bits_are_all_low():
    nan = np.array([0x7F800001], np.uint32).view(F)
    assert np.isnan(reference.from_bfloat16(reference.to_bfloat16(nan)))[0]


def one_head(*numbers):
    """Array [1, 1, n, 1]."""
    return np.array(numbers, float).reshape(1, 1, -1, 1)


def test_attention_weights_are_the_softmax_of_the_scores():
    # Scores ln 1, ln 2, ln 5: weights 1/8, 2/8, 5/8.
    out, lse = reference.attention(
        one_head(1), np.log(one_head(1, 2, 5)), one_head(8, 16, 0), sm_scale=1.0, return_lse=True
    )
    assert out.item() == pytest.approx(1 + 4, abs=1e-14)
    assert lse.item() == pytest.approx(np.log(8), abs=1e-14)


def test_attention_default_scale_is_one_over_the_root_of_the_key_dim():
    q, k = np.ones((1, 1, 1, 4)), np.zeros((1, 1, 2, 4))
    k[0, 0, 1] = np.log(3) / 2  # q.k = 2 ln 3, times 1/2
    assert reference.attention(q, k, one_head(0, 4)).item() == pytest.approx(3, abs=1e-14)


def test_causal_attention_is_aligned_to_the_last_key():
    out = reference.attention(one_head(0, 0, 0), one_head(*[0] * 8), one_head(*range(8)), causal=True)
    np.testing.assert_allclose(out.ravel(), [2.5, 3, 3.5], atol=1e-14)


def test_more_causal_queries_than_keys_leave_the_first_rows_empty():
    out, lse = reference.attention(one_head(0, 0, 0), one_head(0), one_head(7), causal=True, return_lse=True)
    np.testing.assert_array_equal(out.ravel(), [0, 0, 7])
    np.testing.assert_array_equal(lse.ravel(), [-np.inf, -np.inf, 0])


def test_lengths_cut_the_keys_and_move_the_causal_edge():
    k, v = np.zeros((2, 1, 4, 1)), np.tile(one_head(0, 1, 2, 100), (2, 1, 1, 1))
    out = reference.attention(np.zeros((2, 1, 2, 1)), k, v, causal=True, lengths=[3, 2])
    np.testing.assert_allclose(out[..., 0], [[[0.5, 1]], [[0, 0.5]]], atol=1e-14)


def test_query_head_h_reads_kv_head_h_over_group():
    v = np.arange(2.0).reshape(1, 2, 1, 1)
    out = reference.attention(np.zeros((1, 6, 1, 1)), np.zeros((1, 2, 1, 1)), v)
    np.testing.assert_array_equal(out.ravel(), [0, 0, 0, 1, 1, 1])


def test_a_bool_mask_keeps_true_and_a_float_mask_is_added():
    k, v = one_head(0, 0, 0), one_head(1, 2, 4)
    assert reference.attention(one_head(0), k, v, mask=np.array([True, False, True])).item() == 2.5
    bias = np.array([0, np.log(2), -np.inf])
    assert reference.attention(one_head(0), k, v, mask=bias).item() == pytest.approx(5 / 3, abs=1e-14)


def test_a_row_that_sees_nothing_is_0_with_lse_minus_infinity():
    mask = np.array([[True, True], [False, False]])
    out, lse = reference.attention(one_head(1, 1), one_head(1, 2), one_head(3, 3), mask=mask, return_lse=True)
    np.testing.assert_allclose(out.ravel(), [3, 0], atol=1e-15)
    assert out[0, 0, 1, 0] == 0
    assert lse[0, 0, 1] == -np.inf
    out = reference.attention(one_head(1), one_head(), one_head())
    assert out.item() == 0


def test_nan_in_a_hidden_key_or_value_does_not_matter_and_in_a_seen_one_does():
    k, v = one_head(0, np.nan, 0), one_head(1, np.nan, 3)
    assert reference.attention(one_head(0), k, v, mask=np.array([True, False, True])).item() == 2
    assert np.isnan(reference.attention(one_head(0), k, v).item())


def test_softcap_acts_before_the_mask():
    # tanh(ln 3 / 2) = 1/2, so the score 2 ln 3 with cap 4 ln 3 becomes 2 ln 3: weights 1 : 9 : 0.
    score = 4 * np.log(3)
    k = one_head(0, score / 2, 0)
    mask = np.array([0, 0, -np.inf])
    out = reference.attention(one_head(1), k, one_head(0, 10, 99), sm_scale=1.0, softcap=score, mask=mask)
    expected = 10 / (1 + np.exp(-score * np.tanh(0.5)))
    assert out.item() == pytest.approx(expected, abs=1e-13)


def test_window_limits_both_sides():
    q, k, v = one_head(0, 0), one_head(*[0] * 5), one_head(*range(5))
    out = reference.attention(q, k, v, window=(1, 0))  # positions 3 and 4
    np.testing.assert_allclose(out.ravel(), [2.5, 3.5], atol=1e-14)
    out = reference.attention(q, k, v, window=(-1, 1))
    np.testing.assert_allclose(out.ravel(), [2, 2], atol=1e-14)


def test_alibi_takes_slope_times_distance():
    # Distances 1 and 0, slope ln 2: weights 1/3 and 2/3.
    out = reference.attention(one_head(0), one_head(0, 0), one_head(0, 3), alibi_slopes=[np.log(2)])
    assert out.item() == pytest.approx(2, abs=1e-14)


def test_a_sink_logit_takes_part_in_the_denominator_only():
    out, lse = reference.attention(one_head(0), one_head(0, 0), one_head(3, 3), sink_logits=[0.0], return_lse=True)
    assert out.item() == pytest.approx(2, abs=1e-14)
    assert lse.item() == pytest.approx(np.log(3), abs=1e-14)


def test_merge_of_two_parts_is_attention_over_both():
    # Parts with denominators 1 and 3 and means 4 and 8: (4 + 24) / 4.
    out, lse = reference.merge_attention([one_head(4), one_head(8)], [[[[0.0]]], [[[np.log(3)]]]])
    assert out.item() == pytest.approx(7, abs=1e-14)
    assert lse.item() == pytest.approx(np.log(4), abs=1e-14)


def test_merge_leaves_out_parts_that_saw_nothing():
    nothing = (one_head(np.nan), [[[-np.inf]]])
    out, lse = reference.merge_attention([one_head(4), nothing[0]], [[[[1.0]]], nothing[1]])
    assert (out.item(), lse.item()) == (4, 1)
    out, lse = reference.merge_attention([nothing[0]] * 2, [nothing[1]] * 2)
    assert (out.item(), lse.item()) == (0, -np.inf)


def test_cache_keeps_4_sinks_seals_32_tokens_and_holds_the_rest_as_residual():
    cache = reference.ReferenceKVCache(1, 1, k_format="int4", v_format="int8")
    ramp = np.arange(40, dtype=F).reshape(1, 1, 40, 1)
    cache.append(ramp, ramp)
    keys = cache.k_state()
    np.testing.assert_array_equal(keys["sinks"].ravel(), [0, 1, 2, 3])
    np.testing.assert_array_equal(keys["residual"].ravel(), [36, 37, 38, 39])
    assert keys["codes"].shape == (1, 1, 1, 32, 1)
    assert keys["lo"].item() == 4
    assert keys["scale"].item() == F(31) / F(15)
    assert (keys["codes"].min(), keys["codes"].max()) == (0, 15)
    values = cache.v_state()  # a token of one channel is its own range
    np.testing.assert_array_equal(values["lo"].ravel(), np.arange(4, 40))
    np.testing.assert_array_equal(cache.values().ravel(), np.arange(40))


def test_cut_into_the_last_sealed_block_brings_its_rows_back_exactly():
    cache = reference.ReferenceKVCache(1, 1, k_format="int4", v_format="int4")
    ramp = np.arange(80, dtype=F).reshape(1, 1, 80, 1)
    cache.append(ramp[:, :, :36], ramp[:, :, :36])
    block = cache.keys()[0, 0, 4:36, 0]
    cache.append(ramp[:, :, 36:], ramp[:, :, 36:])
    cache.truncate(40)
    assert len(cache) == 40
    np.testing.assert_array_equal(cache.keys().ravel(), [0, 1, 2, 3, *block, 36, 37, 38, 39])
    np.testing.assert_array_equal(cache.k_state()["residual"].ravel(), [36, 37, 38, 39])
    assert cache.k_state()["kept"] is None
    cache.truncate(10)  # the rows of tokens 4..35 went when the next block was sealed: their values come back
    np.testing.assert_array_equal(cache.k_state()["residual"].ravel(), block[:6])
    assert np.abs(block[:6] - np.arange(4, 10)).max() > 0
    cache.truncate(2)
    np.testing.assert_array_equal(cache.keys().ravel(), [0, 1])
    cache.truncate(0)
    assert len(cache) == 0


def test_cache_refuses_nan_in_codes_and_stores_nothing():
    cache = reference.ReferenceKVCache(1, 2, k_format="float32", v_format="int8")
    good, bad = np.ones((1, 1, 1, 2), F), np.array([[[[1, np.nan]]]], F)
    with pytest.raises(ValueError, match=r"v must be finite .* \[0, 0, 0, 1\]"):
        cache.append(good, bad)
    assert len(cache) == 0
    cache.append(bad, good)
    assert len(cache) == 1


def test_snapshots_share_nothing():
    cache = reference.ReferenceKVCache(1, 1)
    cache.append(one_head(1), one_head(1))
    snapshot = cache.freeze(consume=True)
    assert len(cache) == 0
    other = snapshot.unfreeze()
    other.append(one_head(2), one_head(2))
    assert (len(snapshot), len(other)) == (1, 2)

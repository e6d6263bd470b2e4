"""Quantized arrays: the codes of the definition bit for bit, on every kind of input."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from conftest import bit_equal

from kvnumba import reference
from kvnumba.kernels import packing, quantize
from kvnumba.quantization import (
    QuantizedTensor,
    pack_nibbles,
    quantize_per_channel,
    quantize_per_token,
    unpack_nibbles,
)
from kvnumba.quantization.groups import Groups

DIMS = [1, 2, 3, 15, 16, 17, 33, 63, 65, 80, 96, 127]


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def by_definition(x: np.ndarray, bits: int, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, lo and scale of groups along *axis*, from the formula in ``kvnumba.kernels.quantize``."""
    lo, hi = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    scale = (hi - lo) / np.float32(2**bits - 1)
    scale = np.where(scale > 0, scale, np.float32(1))
    quotient = ((x - lo) / scale).astype(np.float64)  # in float64, adding 0.5 is exact
    return np.minimum(np.floor(quotient + 0.5), 2**bits - 1).astype(np.uint8), lo, scale


def bound(x: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Largest error of a value: half a scale, and the float32 roundings of scale, quotient, product and sum."""
    lo, hi = x.min(axis, keepdims=True).astype(np.float64), x.max(axis, keepdims=True).astype(np.float64)
    roundings = 2 * np.spacing(np.maximum(abs(lo), abs(hi)).astype(np.float32))
    return (hi - lo) / (2**bits - 1) / 2 * (1 + 1e-3) + roundings


def per_block(x: np.ndarray, block: int, function) -> np.ndarray:
    """*function* of each block of tokens, put together along the token axis."""
    return np.concatenate([function(x[..., t : t + block, :]) for t in range(0, x.shape[-2], block)], axis=-2)


# ---- the definition


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("d", DIMS)
def test_per_token_codes_are_those_of_the_definition(d: int, bits: int):  # K13
    x = normal((2, 35, d))
    qt = quantize_per_token(x, bits)
    codes, lo, scale = by_definition(x, bits, -1)
    assert qt.unpacked().tobytes() == codes.tobytes()
    assert qt.lo.tobytes() == lo.tobytes()
    assert qt.scale.tobytes() == scale.tobytes()
    assert qt.dequantize().tobytes() == (lo + codes.astype(np.float32) * scale).tobytes()
    assert (abs(qt.dequantize() - x) <= bound(x, bits, -1)).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("d", DIMS)
def test_per_channel_codes_are_those_of_the_definition(d: int, bits: int):  # K13
    x = normal((2, 70, d))
    qt = quantize_per_channel(x, bits)
    codes = per_block(x, 32, lambda part: by_definition(part, bits, -2)[0])
    lo = per_block(x, 32, lambda part: by_definition(part, bits, -2)[1])
    scale = per_block(x, 32, lambda part: by_definition(part, bits, -2)[2])
    assert qt.unpacked().tobytes() == codes.tobytes()
    assert qt.lo.tobytes() == lo.tobytes()
    assert qt.scale.tobytes() == scale.tobytes()
    spread = np.repeat(scale, 32, axis=-2)[:, :70], np.repeat(lo, 32, axis=-2)[:, :70]
    assert qt.dequantize().tobytes() == (spread[1] + codes.astype(np.float32) * spread[0]).tobytes()
    limit = per_block(x, 32, lambda part: np.broadcast_to(bound(part, bits, -2), part.shape))
    assert (abs(qt.dequantize() - x) <= limit).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_slow_twin_gives_the_same_bytes(bits: int):
    x = normal((3, 40, 17)) * np.float32(100)
    codes, lo, scale = reference.quantize_group(x, bits, -1)
    qt = quantize_per_token(x, bits)
    assert qt.unpacked().tobytes() == codes.tobytes()
    assert qt.scale.tobytes() == scale.tobytes()
    assert qt.dequantize().tobytes() == reference.dequantize(codes, lo, scale).tobytes()
    assert pack_nibbles(codes & 15).tobytes() == reference.pack_nibbles(codes & 15).tobytes()


@pytest.mark.parametrize("S", [1, 2, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("block", [1, 7, 32, 1000])
def test_blocks_are_counted_from_token_zero_and_the_last_may_be_short(S: int, block: int):
    x = normal((2, S, 5))
    qt = quantize_per_channel(x, 8, block_size=block)
    assert qt.lo.shape == (2, -(-S // block), 5)
    assert np.array_equal(qt.lo, per_block(x, block, lambda part: part.min(-2, keepdims=True)))
    limit = per_block(x, block, lambda part: np.broadcast_to(bound(part, 8, -2), part.shape))
    assert (abs(qt.dequantize() - x) <= limit).all()


@pytest.mark.parametrize("shape", [(40, 6), (3, 40, 6), (2, 3, 40, 6), (2, 1, 3, 40, 6)])
def test_leading_axes_are_independent(shape: tuple[int, ...]):  # K24
    x = normal(shape)
    many, tokens = quantize_per_channel(x, 4), quantize_per_token(x, 8)
    assert many.dequantize().shape == tokens.dequantize().shape == shape
    for at in np.ndindex(*shape[:-2]):
        assert many.dequantize()[at].tobytes() == quantize_per_channel(x[at], 4).dequantize().tobytes()
        assert tokens.dequantize()[at].tobytes() == quantize_per_token(x[at], 8).dequantize().tobytes()


def test_one_token_alone_can_be_quantized():
    x = normal((33,))
    qt = quantize_per_token(x)
    assert qt.lo.shape == ()
    assert (abs(qt.dequantize() - x) <= bound(x, 8, -1)).all()


# ---- groups that are hard


@pytest.mark.parametrize("bits", [4, 8])
def test_constant_groups_come_back_exactly(bits: int, recwarn: pytest.WarningsRecorder):  # K09
    k = normal((1, 32, 16))
    constants = {5: 9.0, 6: -9.0, 7: 0.0, 8: 100.0}
    for channel, value in constants.items():
        k[..., channel] = value
    out = quantize_per_channel(k, bits).dequantize()
    for channel, value in constants.items():
        assert (out[..., channel] == np.float32(value)).all()
    assert np.isfinite(out).all()
    v = np.stack([np.full(16, 0.01, np.float32), np.zeros(16, np.float32)])
    assert np.array_equal(quantize_per_token(v, bits).dequantize(), v)
    assert not recwarn.list


@pytest.mark.parametrize("bits", [4, 8])
def test_the_last_channel_does_not_touch_another_token(bits: int):  # K13
    for d in DIMS:
        x = normal((70, d))
        before = quantize_per_token(x, bits)
        x[40, -1] += 3
        after = quantize_per_token(x, bits)
        others = np.arange(70) != 40
        assert np.array_equal(before.codes[others], after.codes[others])
        assert np.array_equal(before.dequantize()[others], after.dequantize()[others])


@pytest.mark.parametrize(("bits", "levels"), [(8, 255), (4, 15)])
def test_wide_ranges_stay_finite(bits: int, levels: int):  # K21
    k = normal((32, 8)).astype(np.float16)
    k[3, 2], k[9, 2] = 65504, -65504
    out = quantize_per_channel(k, bits).dequantize()
    assert (abs(out[:, 2] - k[:, 2].astype(np.float32)) <= 131008 / levels / 2 * 1.001).all()
    clean = np.delete(k, 2, axis=1)
    assert np.array_equal(np.delete(out, 2, axis=1), quantize_per_channel(clean, bits).dequantize())
    v = np.random.default_rng(3).uniform(-1, 4, 64).astype(np.float32)
    v[0], v[17] = -1, 125000
    error = abs(quantize_per_token(v, bits).dequantize() - v)
    assert (error <= 125001 / levels / 2 * 1.001).all()


@pytest.mark.filterwarnings("error")
def test_the_widest_range_that_is_accepted_does_not_overflow():  # K21
    x = np.float32([1.7e38, -1.7e38, 0.0])
    for bits in (4, 8):
        out = quantize_per_token(x, bits).dequantize()
        assert np.isfinite(out).all()
        assert (abs(out.astype(np.float64) - x) <= bound(x, bits, -1)).all()


TINY = [[0, 1.4e-45], [0, 1e-40], [1.0, np.nextafter(np.float32(1), np.float32(2))], [-1e-38, 1e-38], [0, 3.1e-44]]


@pytest.mark.parametrize("ends", TINY)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_range_whose_scale_underflows_keeps_order_and_its_range(ends: list[float], bits: int):  # K54
    x = np.sort(np.linspace(*np.float32(ends), 9, dtype=np.float32))
    for qt in (quantize_per_token(x, bits), quantize_per_channel(x[:, None], bits)):
        out = qt.dequantize().reshape(-1)
        assert np.isfinite(out).all()
        assert (abs(out - x) <= x.max() - x.min()).all()
        assert (np.diff(out) >= 0).all()


def test_codes_above_127_are_not_negative():  # K55
    x = np.arange(256, dtype=np.float32)
    qt = quantize_per_token(x, 8)
    assert np.array_equal(qt.codes, np.arange(256))
    assert qt.dequantize().tobytes() == x.tobytes()
    assert quantize_per_token(x[:16], 4).dequantize().tobytes() == x[:16].tobytes()


@pytest.mark.parametrize(("bits", "levels"), [(8, 255), (4, 15)])
def test_the_smallest_element_has_code_zero_and_the_largest_the_last_code(bits: int, levels: int):  # K55
    x = normal((10_000, 24))
    codes = quantize_per_token(x, bits).unpacked()
    rows = np.arange(len(x))
    assert (codes[rows, x.argmin(1)] == 0).all()
    assert (codes[rows, x.argmax(1)] == levels).all()


def test_ties_round_away_from_zero():  # K55
    x = np.float32([0, 0.5, 1.5, 2.5, 3.5, 255])
    assert quantize_per_token(x, 8).codes.tolist() == [0, 1, 2, 3, 4, 255]
    assert quantize_per_channel(x[:, None], 8).codes[:, 0].tolist() == [0, 1, 2, 3, 4, 255]


def test_the_largest_float_below_a_half_rounds_down():
    x = np.float32([0, np.nextafter(np.float32(0.5), np.float32(0)), 255])
    assert quantize_per_token(x, 8).codes.tolist() == [0, 0, 255]


def test_the_sign_of_zero_does_not_reach_the_bytes():
    for x in ([0.0, -0.0, 1.0], [-0.0, 0.0, 1.0], [-0.0, -0.0, -0.0]):
        for qt in (quantize_per_token(np.float32(x)), quantize_per_channel(np.float32(x)[:, None])):
            assert not np.signbit(qt.lo).any()


def test_widths_give_as_many_values_as_they_say():  # K50
    x = normal((4, 512))
    for function in (quantize_per_token, lambda y, bits: quantize_per_channel(y.T.copy(), bits, block_size=512)):
        assert 8 < len(np.unique(function(x[:1], 4).dequantize())) <= 16
        assert 16 < len(np.unique(function(x[:1], 8).dequantize())) <= 256


# ---- every input


@pytest.mark.parametrize("function", [quantize_per_channel, quantize_per_token])
def test_memory_order_does_not_matter(function):  # K48, K11
    x = np.asfortranarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    plain = function(np.ascontiguousarray(x))
    for came in (
        x,
        np.repeat(x, 2, 1)[:, ::2],
        x[..., ::-1].copy()[..., ::-1],
        x.tolist(),
        x.astype(int),
        x.astype(">f8"),
    ):
        qt = function(came)
        assert qt.codes.tobytes() == plain.codes.tobytes()
        assert qt.dequantize().tobytes() == plain.dequantize().tobytes()
    assert qt.dequantize().shape == (2, 3, 4)
    axis = -2 if function is quantize_per_channel else -1
    assert (abs(plain.dequantize() - x) <= bound(x, plain.bits, axis)).all()


def test_the_input_is_neither_kept_nor_changed():  # K29
    x = normal((8, 8))
    before = x.copy()
    qt = quantize_per_token(x)
    values = qt.dequantize()
    assert x.tobytes() == before.tobytes()
    x[:] = 99
    assert qt.dequantize().tobytes() == values.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_input_is_refused_with_its_position(bad: float):  # K51
    x = normal((2, 40, 64))
    x[1, 10, 3] = bad
    for function in (quantize_per_channel, quantize_per_token):
        with pytest.raises(ValueError, match=rf"x must be finite to be quantized, got {bad} at \[1, 10, 3\]"):
            function(x)


def test_arguments_are_checked_by_name():
    x = normal((4, 4))
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 5"):
        quantize_per_token(x, 5)
    with pytest.raises(TypeError, match="bits must be 4 or 8, got True"):
        quantize_per_channel(x, True)
    with pytest.raises(ValueError, match="block_size must be a positive integer, got 0"):
        quantize_per_channel(x, 4, 0)
    with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., S, D\] .*got \[4\]"):
        quantize_per_channel(x[0])
    with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., D\] .*got \[\]"):
        quantize_per_token(1.0)
    with pytest.raises(ValueError, match=r"at least one channel, got \[4, 0\]"):
        quantize_per_token(x[:, :0])
    with pytest.raises(TypeError, match=r"x must be .*complex64"):
        quantize_per_token(x.astype(np.complex64))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 7, 5)])
def test_no_tokens_are_quantized_to_nothing(shape: tuple[int, ...], bits: int):  # K38
    for qt in (quantize_per_channel(np.zeros(shape), bits), quantize_per_token(np.zeros(shape), bits)):
        assert qt.dequantize().shape == shape
        assert qt.unpacked().shape == shape
        assert qt.nbytes == 0
        assert qt.bits_per_value == 0


# ---- QuantizedTensor


def test_bytes_are_codes_and_parameters():
    qt = quantize_per_channel(normal((2, 64, 33)), 4)
    assert qt.codes.shape == (2, 64, 17)
    assert qt.nbytes == 2 * 64 * 17 + 2 * 2 * 33 * 8
    assert qt.bits_per_value == 8 * qt.nbytes / (2 * 64 * 33)
    qt = quantize_per_token(normal((2, 64, 33)), 8)
    assert qt.nbytes == 2 * 64 * 33 + 2 * 64 * 8


def test_the_repr_says_shape_width_and_layout():  # K50
    text = repr(quantize_per_channel(normal((2, 64, 32)), 4))
    assert text == (
        "QuantizedTensor(shape=(2, 64, 32), bits=4, layout='per_channel', block_size=32: "
        "3072 bytes, 6.00 bits per value)"
    )
    assert "bits=8, layout='per_token':" in repr(quantize_per_token(normal((2, 3))))


def test_a_tensor_survives_pickle():  # K64
    qt = quantize_per_channel(normal((2, 40, 9)), 4)
    again = pickle.loads(pickle.dumps(qt))
    assert again.dequantize().tobytes() == qt.dequantize().tobytes()


def test_the_parts_of_a_tensor_must_belong_together():
    qt = quantize_per_channel(normal((2, 40, 9)), 4)
    parts = {n: getattr(qt, n) for n in ("codes", "lo", "scale", "bits", "layout", "shape", "block_size")}
    assert QuantizedTensor(**parts).dequantize().tobytes() == qt.dequantize().tobytes()
    wrong = [
        ("codes", qt.codes[..., :-1], ValueError, r"codes must have shape \[2, 40, 5\], got \[2, 40, 4\]"),
        ("codes", qt.codes.astype(np.int8), TypeError, "codes must be an array of uint8, got int8"),
        ("lo", qt.lo[:, :1], ValueError, r"lo must have shape \[2, 2, 9\]"),
        ("scale", qt.scale.tolist(), TypeError, "scale must be an array of float32, got list"),
        ("bits", 8, ValueError, "codes must have shape"),
        ("block_size", 64, ValueError, "lo must have shape"),
        ("layout", "per_token", ValueError, r"lo must have shape \[2, 40, 1\], got \[2, 2, 9\]"),
        ("axis", 1, ValueError, None),
        ("axis", 0, ValueError, r"lo must have shape \[1, 40, 9\], got \[2, 2, 9\]"),
        ("axis", 3, ValueError, r"axis must be an integer from -3 to 2 for shape \[2, 40, 9\], got 3"),
        ("axis", "2", TypeError, "axis must be an integer"),
        ("shape", (2, 40, 12), ValueError, "codes must have shape"),
        ("shape", (9,), ValueError, "shape must have 2 or more axes"),
        ("shape", 9, TypeError, "shape must be a tuple of integers, got 9 of type int"),
        ("shape", "abc", TypeError, "shape must be a tuple of integers, got 'abc' of type str"),
        ("shape", (2, 40.0, 9), TypeError, r"shape\[1\] must be an integer of at least 0, got 40.0 of type float"),
        ("shape", (2, -40, 9), ValueError, r"shape\[1\] must be an integer of at least 0, got -40"),
    ]
    for name, value, error, text in wrong:
        if text is None:  # another way to say the same
            assert QuantizedTensor(**{**parts, name: value}).axis == -2
            continue
        with pytest.raises(error, match=text):
            QuantizedTensor(**{**parts, name: value})


def test_parts_from_a_file_may_be_read_only():  # K39
    qt = quantize_per_token(normal((5, 9)), 8)
    expected = qt.dequantize()
    for part in (qt.codes, qt.lo, qt.scale):
        part.setflags(write=False)
    assert qt.dequantize().tobytes() == expected.tobytes()


# ---- nibbles


def test_golden_nibbles():
    codes = np.uint8([[1, 2, 3, 4, 15], [0, 15, 8, 7, 9]])
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x43, 0x0F], [0xF0, 0x78, 0x09]]
    assert unpack_nibbles(packed, 5).tolist() == codes.tolist()
    assert unpack_nibbles(packed, 6)[:, 5].tolist() == [0, 0]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 31, 32, 33, 127])
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (0, 3)])
def test_nibbles_of_any_rank_come_back(n: int, lead: tuple[int, ...]):  # K13
    codes = np.random.default_rng(n).integers(0, 16, (*lead, n))
    for came in (codes, codes.astype(np.uint8), codes.astype(np.int8)[..., ::-1].copy()[..., ::-1], codes.tolist()):
        if np.asarray(came).shape != codes.shape:
            continue  # a list cannot say how long rows of none are
        packed = pack_nibbles(came)
        assert packed.shape == (*lead, (n + 1) // 2)
        assert packed.dtype == np.uint8
        assert np.array_equal(unpack_nibbles(packed, n), codes)


def test_what_does_not_fit_a_nibble_is_refused():
    for bad in (16, -1, 255, 2**40):
        with pytest.raises(ValueError, match=rf"codes must hold integers from 0 to 15, got {bad} at \[1, 2\]"):
            pack_nibbles([[0, 1, 2], [3, 4, bad]])
    with pytest.raises(TypeError, match="codes must hold integers from 0 to 15, got float64"):
        pack_nibbles([1.0])
    with pytest.raises(ValueError, match="at least one axis"):
        pack_nibbles(3)


def test_unpacking_checks_the_length_of_rows():
    with pytest.raises(ValueError, match=r"rows of 3 bytes to hold n = 5 codes, got shape \[2, 2\]"):
        unpack_nibbles(np.zeros((2, 2), np.uint8), 5)
    with pytest.raises(TypeError, match="n must be"):
        unpack_nibbles(np.zeros((2, 2), np.uint8), 4.0)
    with pytest.raises(ValueError, match="packed must hold integers from 0 to 255, got 256"):
        unpack_nibbles([256, 0], 4)


# ---- how it is compiled


WITHOUT_COMPILER = """
import hashlib, sys
import numpy as np
from kvnumba.quantization import quantize_per_channel, quantize_per_token
digest = hashlib.sha256()
x = (np.arange(2 * 35 * 9, dtype=np.float32) * np.float32(37.7) % np.float32(11.3) - 5).reshape(2, 35, 9)
x[0, 3] = 0.25
tiny = np.float32([[0, 1.4e-45], [0, 1e-40], [-1e-38, 1e-38], [-0.0, 0.0]])
ties = np.float32([[0, 0.5, 1.5, 2.5, 3.5, 255]])
for bits in (4, 8):
    for part in (x, tiny, ties, -ties):
        for qt in (quantize_per_channel(part, bits), quantize_per_token(part, bits)):
            for array in (qt.codes, qt.lo, qt.scale, qt.dequantize()):
                digest.update(array.tobytes())
print(digest.hexdigest())
"""


def test_bytes_are_the_same_without_a_compiler():  # K54, K55
    out = []
    for disable in ("0", "1"):
        env = dict(os.environ, NUMBA_DISABLE_JIT=disable, PYTHONWARNINGS="error::RuntimeWarning")
        run = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], env=env, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        out.append(run.stdout)
    assert out[0] == out[1]
    assert len(out[0]) == 65


def test_all_inputs_share_one_compiled_version():  # K66
    x = normal((2, 40, 8))
    for came in (x, x[:, ::2], x.astype(np.float16), np.asfortranarray(x), x[0], x.tolist(), x.astype(int)):
        for bits in (4, 8):
            quantize_per_channel(came, bits).dequantize()
            quantize_per_token(came, np.int32(bits)).dequantize()
    for kernel in (
        quantize.quantize_rows,
        quantize.quantize_blocks,
        quantize.dequantize_rows,
        quantize.dequantize_blocks,
        packing.pack_nibbles_rows,
        packing.unpack_nibbles_rows,
    ):
        assert len(kernel.signatures) == 1


# ---- values out of a tensor


@pytest.fixture(params=["per_channel", "per_token"])
def tensor(request):
    x = normal((3, 2, 75, 9))
    return x, quantize_per_channel(x, 4, 8) if request.param == "per_channel" else quantize_per_token(x, 4)


@pytest.mark.parametrize(
    "index",
    [
        0, -1, (1, 1), (2, 0, 7), (2, 0, 7, 3), (..., 5), (slice(None), 1), (0, 0, slice(8, 16)),
        (0, 0, slice(3, 42, 5)),
        (0, 0, slice(60, 5, -7)), (slice(0, 2), slice(None), slice(70, None)), (..., slice(2, 5)), (0, ..., 2),
        (0, 0, slice(5, 5)), (slice(2, 0), 0), slice(None), (),
    ],
)  # fmt: skip
def test_a_part_of_a_tensor_is_that_part_of_its_values(tensor, index):
    _, quantized = tensor
    expected = quantized.dequantize()[index]
    got = quantized[index]
    assert bit_equal(np.asarray(got), np.asarray(expected))


def test_a_part_decodes_only_the_groups_it_is_in(tensor, monkeypatch):
    _, quantized = tensor
    seen = []
    decode = Groups.decode
    monkeypatch.setattr(Groups, "decode", lambda self, *arrays: seen.append(arrays[0].size) or decode(self, *arrays))
    quantized[1, 0, 17]
    assert 0 < seen[0] <= 8 * 9


def test_an_index_that_is_not_basic_is_refused(tensor):
    _, quantized = tensor
    for index, words in (((0, 0, 75), "from -75 to 74 for axis 2, got 75"), ((0,) * 5, "at most 4 entries, got 5")):
        with pytest.raises(IndexError, match=words):
            quantized[index]
    with pytest.raises(TypeError, match="integers, slices and one ellipsis, got list"):
        quantized[[0, 1]]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_are_written_into_an_array_of_ones_own(tensor, dtype):
    _, quantized = tensor
    for out in (np.empty(quantized.shape, dtype), np.empty(quantized.shape[::-1], dtype).T):
        assert quantized.dequantize(out=out) is out
        assert bit_equal(out, quantized.dequantize().astype(dtype))
    with pytest.raises(ValueError, match=r"out must be writeable and have shape \[3, 2, 75, 9\], got \[3\]"):
        quantized.dequantize(out=np.empty(3, dtype))
    frozen = np.zeros(quantized.shape, dtype)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="got a read-only array"):
        quantized.dequantize(out=frozen)
    with pytest.raises(TypeError, match=r"out must be an array of float16.* got dtype int32"):
        quantized.dequantize(out=np.empty(quantized.shape, np.int32))


def test_the_error_is_that_of_the_formulas(tensor):
    x, quantized = tensor
    difference = quantized.dequantize().astype(np.float64) - x
    error = quantized.error(x)
    assert error.max == np.abs(difference).max()
    assert error.rms == pytest.approx(np.sqrt(np.mean(difference**2)))
    assert error.snr_db == pytest.approx(10 * np.log10(np.sum(x.astype(np.float64) ** 2) / np.sum(difference**2)))
    assert quantized.error(quantized.dequantize()) == (0, 0, np.inf)
    with pytest.raises(ValueError, match=r"x must have shape \[3, 2, 75, 9\] as the tensor, got \[2\]"):
        quantized.error(np.zeros(2))


# ---- any axis, any size of groups


def by_hand(x: np.ndarray, bits: int, axis: int, block: int) -> np.ndarray:
    """Values of *x* after quantization of each block along *axis* by itself."""
    moved = np.moveaxis(x, axis, -1)
    blocks = [
        quantize_per_token(moved[..., i : i + block], bits).dequantize() for i in range(0, moved.shape[-1], block)
    ]
    return np.moveaxis(np.concatenate(blocks, -1), -1, axis)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(7,), (64,), (5, 9), (8, 1), (3, 10, 7), (2, 3, 8, 5), (1, 2, 1, 33, 2)])
@pytest.mark.parametrize("block", [1, 3, 4, 32, None])
def test_groups_lie_along_any_axis(shape, bits, block, tmp_path):
    x = normal(shape)
    for axis in range(-len(shape), len(shape)):
        n = shape[axis]
        expected = by_hand(x, bits, axis, block or n)
        for function in (quantize_per_channel, quantize_per_token):
            qt = function(x, bits, block_size=block, axis=axis)
            assert bit_equal(qt.dequantize(), expected)
            assert qt.axis == axis % len(shape) - len(shape)
            groups = -(-n // (block or n))
            kept = qt.layout == "per_channel" or block is not None
            at = axis % len(shape)
            assert qt.lo.shape == (*shape[:at], *([groups] if kept else []), *shape[at + 1 :])
            assert qt.error(x).max <= qt.scale.max() * 0.501
            qt.save(tmp_path / "x")
            again = QuantizedTensor.load(tmp_path / "x")
            assert bit_equal(again.dequantize(), expected)
            assert repr(again) == repr(qt)


def test_a_whole_axis_is_a_block_of_its_own():
    x = normal((70, 6))
    qt = quantize_per_channel(x, 8, block_size=None)
    assert qt.block_size == 70
    assert qt.lo.shape == (1, 6)
    assert bit_equal(qt.dequantize(), quantize_per_token(x.T, 8).dequantize().T)
    assert quantize_per_channel(x[:0], block_size=None).dequantize().shape == (0, 6)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("block", [3, None])
@pytest.mark.parametrize(
    "index",
    [
        0, -1, (1, 1), (2, 0, 7), (..., 5), (slice(None), 1), (0, slice(3, 9)), (slice(3, 8, 3), 2),
        (slice(9, 2, -2), ...), (slice(None, None, -1), slice(None, None, -1), slice(None, None, -1)),
        (slice(4, 4), 1), (1, slice(4, 2), slice(2, 5)),
    ],
)  # fmt: skip
def test_a_part_of_a_tensor_with_groups_along_any_axis(axis, block, index):
    for function in (quantize_per_channel, quantize_per_token):
        qt = function(normal((10, 9, 11)), 4, block_size=block, axis=axis)
        assert bit_equal(np.asarray(qt[index]), np.asarray(qt.dequantize()[index]))


def test_an_axis_that_is_not_there_is_refused():
    x = normal((4, 6))
    with pytest.raises(ValueError, match=r"axis must be an integer from -2 to 1 for shape \[4, 6\], got 2"):
        quantize_per_token(x, axis=2)
    for bad in (None, np.array([0, 1]), [0]):
        for function in (quantize_per_channel, quantize_per_token):
            with pytest.raises(TypeError, match="axis must be an integer, the number of an axis, got"):
                function(x, axis=bad)
    with pytest.raises(ValueError, match="block_size must be a positive integer, got 0"):
        quantize_per_token(x, block_size=0)
    with pytest.raises(ValueError, match=r"at least one channel along axis 0, got shape \[0, 6\]"):
        quantize_per_token(x[:0], axis=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_any_float_type_goes_in_and_comes_out(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    x = normal((5, 40)).astype(dtype)
    qt = quantize_per_token(x, 8, block_size=16)
    assert bit_equal(qt.dequantize(), quantize_per_token(x.astype(np.float32), 8, block_size=16).dequantize())
    out = np.empty(x.shape, dtype)
    assert qt.dequantize(out=out) is out
    assert np.array_equal(out, qt.dequantize().astype(dtype))
    strided = np.empty((40, 5), dtype).T
    assert np.array_equal(qt.dequantize(out=strided), out)


# ---- into arrays of one's own


@pytest.mark.parametrize("bits", [4, 8])
def test_a_tensor_is_overwritten(bits):
    x, y = normal((3, 33, 7)), normal((3, 33, 7)) * 3
    for function in (quantize_per_channel, quantize_per_token):
        qt, other = function(x, bits), function(y, bits)
        places = [part.ctypes.data for part in (qt.codes, qt.lo, qt.scale)]
        assert function(y, bits, out=qt) is qt
        assert places == [part.ctypes.data for part in (qt.codes, qt.lo, qt.scale)]
        assert bit_equal(qt.dequantize(), other.dequantize())


def test_a_tensor_that_does_not_fit_is_left_as_it_is():
    x = normal((4, 6))
    qt = quantize_per_token(x, 4)
    before = qt.dequantize()
    spoilt = x.copy()
    spoilt[2, 3] = np.nan
    wrong = [
        (x[:2], {}, ValueError, r"out must have shape = \(2, 6\), got \(4, 6\)"),
        (x, {"bits": 8}, ValueError, "out must have bits = 8, got 4"),
        (x, {"block_size": 2}, ValueError, "out must have block_size = 2, got None"),
        (x, {"axis": 0}, ValueError, "out must have axis = -2, got -1"),
        (spoilt, {}, ValueError, r"x must be finite to be quantized, got nan at \[2, 3\]"),
    ]
    for came, settings, error, text in wrong:
        with pytest.raises(error, match=text):
            quantize_per_token(came, **{"bits": 4, "out": qt, **settings})
    with pytest.raises(ValueError, match="out must have layout = per_channel, got per_token"):
        quantize_per_channel(x, 4, out=qt)
    with pytest.raises(TypeError, match="out must be a QuantizedTensor, got ndarray"):
        quantize_per_token(x, 4, out=x)
    qt.lo.setflags(write=False)
    with pytest.raises(ValueError, match="out must have writeable arrays in C order"):
        quantize_per_token(2 * x, 4, out=qt)
    assert bit_equal(qt.dequantize(), before)


def test_nibbles_go_into_an_array_of_ones_own():
    codes = np.random.default_rng(0).integers(0, 16, (6, 9), np.uint8)
    expected = pack_nibbles(codes)
    for out in (np.zeros((6, 5), np.uint8), np.zeros((5, 6), np.uint8).T, codes.copy()[:, :5]):
        assert pack_nibbles(codes, out=out) is out
        assert np.array_equal(out, expected)
    own = codes.copy()
    assert np.array_equal(pack_nibbles(own, out=own[:, 2:7]), expected)  # over what is being packed
    for back in (np.zeros((6, 9), np.uint8), np.zeros((9, 6), np.uint8).T):
        assert unpack_nibbles(expected, 9, out=back) is back
        assert np.array_equal(back, codes)
    for out, error, text in [
        (np.zeros((6, 4), np.uint8), ValueError, r"out must be uint8 of shape \[6, 5\], got uint8 of shape \[6, 4\]"),
        (np.zeros((6, 5), np.int8), TypeError, "out must be an array of uint8, got dtype int8"),
        ([1], TypeError, "out must be an array of uint8, got list"),
        (np.broadcast_to(np.uint8(0), (6, 5)), ValueError, "out must be writeable"),
    ]:
        with pytest.raises(error, match=text):
            pack_nibbles(codes, out=out)

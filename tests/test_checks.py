"""The door: what comes in is taken in every sensible form, refused with a clear message otherwise, never changed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvnumba import checks

NAMES = "[batch, num_kv_heads, S, head_dim]"
SHAPE = (2, 3, None, 5)


def numbers(seed: int = 0, shape: tuple[int, ...] = (2, 3, 4, 5)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def take(x: object) -> np.ndarray:
    return checks.tokens("k", x, SHAPE, NAMES)


def plain(x: np.ndarray) -> bool:
    return type(x) is np.ndarray and x.dtype == np.float32 and x.dtype.isnative and x.flags.carray


def unaligned(x: np.ndarray) -> np.ndarray:
    out = np.frombuffer(b"\0" + x.tobytes(), dtype=x.dtype, offset=1).reshape(x.shape)
    assert not out.flags.aligned
    return out


def read_only(x: np.ndarray) -> np.ndarray:
    out = x.copy()
    out.setflags(write=False)
    return out


# ---- tokens


def test_an_array_in_the_form_of_the_kernels_is_passed_on_without_a_copy():
    x = numbers()
    assert take(x) is x


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
    "reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "sliced": lambda x: np.repeat(np.pad(x, ((0, 0), (0, 0), (0, 0), (3, 2))), 2, axis=2)[:, :, ::2, 3:8],
    "fortran": np.asfortranarray,
    "read_only": read_only,
    "unaligned": unaligned,
    "byte_swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    "nested lists": lambda x: x.tolist(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_plain_array(layout: str):  # K11, K39, K66
    x = numbers()
    came = LAYOUTS[layout](x)
    before = np.array(came)
    out = take(came)
    assert plain(out)
    assert out.tobytes() == x.tobytes()
    assert np.array_equal(np.array(came), before)


def test_a_broadcast_array_is_written_out():  # K11
    out = take(np.broadcast_to(np.float32([[1], [2], [3], [4]]), (2, 3, 4, 5)))
    assert plain(out)
    assert (out == np.float32([1, 2, 3, 4])[:, None]).all()


def test_a_memory_map_is_taken(tmp_path):  # K39
    x = numbers()
    np.save(tmp_path / "k.npy", x)
    out = take(np.load(tmp_path / "k.npy", mmap_mode="r"))
    assert plain(out)
    assert out.tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float64", "longdouble", "int8", "int32", "int64", "uint8", "bool"])
def test_other_element_types_are_converted_as_numpy_does(dtype: str):
    x = (10 * numbers()).astype(dtype)
    out = take(x)
    assert plain(out)
    assert out.tobytes() == x.astype(np.float32).tobytes()


def test_bfloat16_of_ml_dtypes_is_widened_exactly():  # K10
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = numbers().astype(ml_dtypes.bfloat16)
    out = take(x)
    assert plain(out)
    assert (out.view(np.uint32) == x.view(np.uint16).astype(np.uint32) << 16).all()


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "bool"])
def test_tensors_of_pytorch_are_taken(dtype: str):  # K10
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(numbers()).to(getattr(torch, dtype)).transpose(0, 1).contiguous().transpose(0, 1)
    if x.is_floating_point():
        x.requires_grad_()
    out = take(x)
    assert plain(out)
    assert out.tobytes() == x.detach().float().contiguous().numpy().tobytes()


@pytest.mark.torch
def test_a_tensor_on_another_device_is_refused_with_its_name():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"k must be in CPU memory.*device meta.*k\.cpu\(\)"):
        take(torch.zeros(2, 3, 4, 5, device="meta"))


def test_a_float64_beyond_float32_becomes_infinite_without_a_warning():
    x = np.full((2, 3, 1, 5), 1e300)
    assert np.isposinf(take(x)).all()


REFUSED = {
    "masked": (np.ma.array(numbers(), mask=False), TypeError, r"masked array.*k\.filled"),
    "matrix": (np.zeros((2, 2)).view(np.matrix), TypeError, r"numpy\.matrix.*numpy\.asarray\(k\)"),
    "object": (np.empty((2, 3, 4, 5), object), TypeError, "dtype object"),
    "complex": (numbers().astype(np.complex64), TypeError, "dtype complex64"),
    "text": (np.full((2, 3, 4, 5), "1"), TypeError, "dtype <U1"),
    "dates": (np.zeros((2, 3, 4, 5), "datetime64[s]"), TypeError, "datetime64"),
    "None": (None, TypeError, "got None"),
    "one word": ("abc", TypeError, "'abc' of type str"),
    "mapping": ({"a": 1}, TypeError, "type dict"),
    "ragged": ([[1.0, 2.0], [3.0]], ValueError, "unequal length"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_array_of_numbers_is_refused_by_name(case: str):  # K41
    x, error, text = REFUSED[case]
    with pytest.raises(error, match="^k must be .*" + text) as caught:
        take(x)
    assert type(caught.value).__module__ == "builtins"


def test_the_message_for_a_shape_has_name_expected_got():
    with pytest.raises(ValueError) as caught:
        checks.tokens("k", numbers(shape=(2, 8, 1, 64)), (2, 8, None, 128), NAMES)
    assert str(caught.value) == (
        "k must have shape [2, 8, S, 128] = [batch, num_kv_heads, S, head_dim], got [2, 8, 1, 64]"
    )


def test_swapped_axes_get_a_remedy():
    with pytest.raises(ValueError, match=r"pass k\.transpose\(0, 2, 1, 3\)"):
        take(numbers(shape=(2, 4, 3, 5)))


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 5, 1), (1, 3, 4, 5), (2, 2, 4, 5), (2, 3, 4, 6), (), (0,)])
def test_every_wrong_shape_is_refused(shape: tuple[int, ...]):  # K35
    for dtype in (np.float32, np.float16):
        with pytest.raises(ValueError, match=r"k must have shape \[2, 3, S, 5\]"):
            take(np.zeros(shape, dtype))


def test_a_given_length_is_checked_too():
    assert checks.tokens("v", numbers(), (2, 3, 4, 5), NAMES).shape == (2, 3, 4, 5)
    for dtype in (np.float32, np.float64):
        with pytest.raises(ValueError, match=r"v must have shape \[2, 3, 6, 5\]"):
            checks.tokens("v", numbers().astype(dtype), (2, 3, 6, 5), NAMES)


def test_zero_tokens_are_a_valid_number_of_tokens():  # K38
    assert take(np.zeros((2, 3, 0, 5), np.float32)).shape == (2, 3, 0, 5)
    assert take(np.zeros((2, 3, 0, 5), np.float64)).shape == (2, 3, 0, 5)


def test_keys_and_values_of_different_length_are_refused():  # K35
    checks.same_length("k", numbers(), "v", numbers(shape=(2, 3, 4, 7)))
    with pytest.raises(ValueError, match=r"k and v must have the same number of tokens, got 4 .* and 6"):
        checks.same_length("k", numbers(), "v", numbers(shape=(2, 3, 6, 5)))


# ---- finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [7, 70])
@pytest.mark.parametrize("place", [0, 1, 63, 64, 5 * 7 * 64 - 1])
def test_the_first_non_finite_element_is_named(bad: float, place: int, rows: int):  # K51
    x = numbers(shape=(1, 5, rows, 64))
    x.reshape(-1)[place] = bad
    x.reshape(-1)[-1] = np.nan if place != x.size - 1 else bad
    position = [int(i) for i in np.unravel_index(place, x.shape)]
    with pytest.raises(ValueError) as caught:
        checks.finite("v", x)
    assert str(caught.value) == f"v must be finite to be quantized, got {bad} at {position}"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [0.0, 1.7e38, -1.7e38, 1e-45, float(checks.QUANTIZABLE)])
@pytest.mark.parametrize("size", [0, 1, 1000, 10000])
def test_finite_values_of_any_size_pass(value: float, size: int):
    checks.finite("v", np.full((1, size), value, np.float32))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [2, 10000])
def test_a_magnitude_whose_range_may_leave_float32_is_refused(size: int):
    x = np.zeros((1, size), np.float32)
    x[0, 1] = np.nextafter(checks.QUANTIZABLE, np.float32(np.inf))
    with pytest.raises(ValueError, match=r"k must be at most 1\.7014e\+38 in magnitude .* at \[0, 1\]"):
        checks.finite("k", x)


@pytest.mark.parametrize("size", [2, 10000])
def test_infinities_of_both_signs_do_not_cancel(size: int):
    with pytest.raises(ValueError, match="inf at"):
        checks.finite("k", np.resize(np.float32([np.inf, -np.inf]), (1, size)))


# ---- query


def q_dtype(q: object) -> str:
    array, dtype = checks.query(q, 2, 3, 5)
    assert plain(array)
    return dtype.name


def test_a_float32_query_is_passed_on_without_a_copy():
    q = numbers(shape=(2, 6, 4, 5))
    array, dtype = checks.query(q, 2, 3, 5)
    assert array is q
    assert dtype == np.float32


def test_the_output_has_the_dtype_of_the_query():  # K10
    q = numbers(shape=(2, 6, 4, 5))
    for name in ("float16", "float32", "float64"):
        assert q_dtype(q.astype(name)) == name
        swapped = q.astype(np.dtype(name).newbyteorder())
        assert q_dtype(swapped) == name
        assert checks.query(swapped, 2, 3, 5)[1].isnative
    assert q_dtype(q.astype("int32")) == "float32"
    assert q_dtype(q > 0) == "float32"
    assert q_dtype(q.tolist()) == "float64"
    assert q_dtype(q[..., ::-1]) == "float32"


def test_a_bfloat16_query_gives_a_bfloat16_output():  # K10
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert q_dtype(numbers(shape=(2, 6, 4, 5)).astype(ml_dtypes.bfloat16)) == "bfloat16"


@pytest.mark.torch
def test_a_bfloat16_tensor_gives_a_bfloat16_output():  # K10
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    assert q_dtype(torch.zeros((2, 6, 4, 5), dtype=torch.bfloat16)) == "bfloat16"
    assert q_dtype(torch.zeros((2, 6, 4, 5), dtype=torch.float16)) == "float16"


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (33, 2), (1, 2), (0, 2)])
def test_query_heads_that_do_not_divide_are_refused_with_both_numbers(heads: int, kv_heads: int):  # K59
    for dtype in (np.float32, np.float16):
        with pytest.raises(ValueError, match=rf"num_kv_heads = {kv_heads}, got {heads} heads"):
            checks.query(np.zeros((1, heads, 1, 8), dtype), 1, kv_heads, 8)


def test_a_query_of_another_shape_is_refused():  # K59
    with pytest.raises(ValueError, match=r"q must have shape \[1, 2, S, 8\].*got \[1, 2, 1, 7\]"):
        checks.query(np.zeros((1, 2, 1, 7)), 1, 2, 8)
    with pytest.raises(ValueError, match=r"q must have shape \[1, num_q_heads, S, 8\].*got \[2, 1, 8\]"):
        checks.query(np.zeros((2, 1, 8), np.float32), 1, 2, 8)
    with pytest.raises(ValueError, match=r"q must have shape \[1, 2, S, 8\].*got \[3, 2, 1, 8\]"):
        checks.query(np.zeros((3, 2, 1, 8), np.float32), 1, 2, 8)


def test_a_query_of_no_rows_is_valid():  # K38
    assert checks.query(np.zeros((1, 2, 0, 8), np.float32), 1, 2, 8)[0].shape == (1, 2, 0, 8)


# ---- mask


def written_out(mask: checks.Mask, full: tuple[int, int, int, int]) -> np.ndarray:
    """The mask that a kernel sees, element by element through the strides."""
    flat = mask.array.reshape(-1)
    out = np.empty(full, mask.array.dtype)
    for at in np.ndindex(*full):
        out[at] = flat[sum(i * s for i, s in zip(at, mask.strides, strict=True))]
    return out


FULL = (2, 4, 3, 5)
MASK_SHAPES = [
    FULL,
    (1, 1, 1, 5),
    (2, 1, 3, 5),
    (1, 4, 1, 5),
    (2, 4, 1, 1),
    (1, 1, 3, 1),
    (3, 5),
    (5,),
    (4, 1, 5),
    (1,),
    (),
]


@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("kind", ["bool", "float16", "float32", "float64"])
def test_masks_broadcast_as_numpy_does_and_are_never_written_out(shape: tuple[int, ...], kind: str):  # K23
    rng = np.random.default_rng(1)
    m = np.asarray(rng.random(shape) < 0.5) if kind == "bool" else np.asarray(rng.standard_normal(shape), kind)
    out = checks.mask(m, *FULL)
    assert out is not None
    assert out.array.size == m.size
    assert out.array.flags.carray
    assert out.array.dtype == (np.uint8 if kind == "bool" else np.float32)
    assert np.array_equal(written_out(out, FULL), np.broadcast_to(m, FULL).astype(out.array.dtype))


def test_a_mask_broadcast_by_the_caller_is_not_written_out_either():
    row = np.random.default_rng(2).random((2, 1, 1, 5)) < 0.5
    out = checks.mask(np.broadcast_to(row, FULL), *FULL)
    assert out is not None
    assert out.array.shape == (2, 1, 1, 5)
    assert np.array_equal(written_out(out, FULL), np.broadcast_to(row, FULL))


@pytest.mark.parametrize("layout", ["transposed", "reversed", "fortran", "read_only", "unaligned", "byte_swapped"])
def test_masks_of_every_layout_are_taken(layout: str):  # K39
    x = numbers()
    out = checks.mask(LAYOUTS[layout](x), 2, 3, 4, 5)
    assert out is not None
    assert plain(out.array)
    assert out.array.tobytes() == x.tobytes()
    keep = checks.mask(read_only(x > 0), 2, 3, 4, 5)
    assert keep is not None
    assert keep.array.flags.carray
    assert np.array_equal(keep.array, x > 0)


def test_no_mask_is_none():
    assert checks.mask(None, *FULL) is None


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32])
def test_an_integer_mask_is_refused_with_the_remedy(dtype: type):  # K23
    with pytest.raises(TypeError, match=r"mask must be bool .* got u?int\d+; use mask\.astype\(bool\)"):
        checks.mask(np.ones((1, 1, 1, 5), dtype), *FULL)


@pytest.mark.parametrize("shape", [(6,), (4,), (0,), (2, 5), (3, 4, 3, 5), (2, 3, 3, 5), (1, 2, 4, 3, 5)])
def test_a_mask_that_does_not_broadcast_is_refused(shape: tuple[int, ...]):  # K23
    for dtype in (bool, np.float32):
        with pytest.raises(ValueError, match=r"mask must be broadcastable to \[2, 4, 3, 5\]"):
            checks.mask(np.zeros(shape, dtype), *FULL)


def test_minus_infinity_hides_and_nan_or_plus_infinity_are_refused():
    m = np.zeros((1, 1, 3, 5), np.float32)
    m[0, 0, 1] = -np.inf
    assert checks.mask(m, *FULL) is not None
    for bad in (np.nan, np.inf):
        m[0, 0, 2, 3] = bad
        with pytest.raises(ValueError, match=rf"mask must .*got {bad} at \[0, 0, 2, 3\]"):
            checks.mask(m, *FULL)


def test_a_mask_over_nothing_is_valid():  # K38
    for dtype in (bool, np.float32):
        out = checks.mask(np.zeros((2, 1, 0, 5), dtype), 2, 4, 0, 5)
        assert out is not None
        out = checks.mask(np.zeros((3, 0), dtype), 2, 4, 3, 0)
        assert out is not None


# ---- counts and words


def test_the_default_scale_is_one_over_the_root_of_head_dim():  # K22
    assert checks.scale(None, 64) == 0.125
    assert checks.scale(None, 80) == 1 / math.sqrt(80)


@pytest.mark.parametrize("value", [0.0, 0, 1, -2.5, np.float32(0.5), np.int64(3), np.float16(2)])
def test_every_finite_number_is_a_scale(value: float):  # K22
    out = checks.scale(value, 64)
    assert type(out) is float
    assert out == float(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, 10**400, np.float32(np.nan)])
def test_a_scale_that_is_not_finite_in_float32_is_refused(value: float):  # K22
    with pytest.raises(ValueError, match="sm_scale must be finite"):
        checks.scale(value, 64)


@pytest.mark.parametrize("value", ["0.1", True, 1j, [1.0], np.bool_(True)])
def test_a_scale_that_is_no_number_is_refused(value: object):
    with pytest.raises(TypeError, match="sm_scale must be a number or None"):
        checks.scale(value, 64)


def test_widths_are_four_and_eight_only():  # K50
    assert [checks.bits(n) for n in (4, 8, np.int32(4))] == [4, 8, 4]
    for wrong in (0, 1, 3, 5, 16, -4):
        with pytest.raises(ValueError, match=f"bits must be 4 or 8, got {wrong}"):
            checks.bits(wrong)
    for wrong in ("4", None, True, 4.0, [4]):
        with pytest.raises(TypeError, match="bits must be 4 or 8, got "):
            checks.bits(wrong)


def test_formats_and_layouts_are_words_from_a_list():
    assert checks.format("k_format", "int4") == "int4"
    assert checks.layout("per_token") == "per_token"
    with pytest.raises(ValueError, match=r'k_format must be one of "float32", .*"int4", got \'int2\''):
        checks.format("k_format", "int2")
    with pytest.raises(TypeError, match=r"v_format must be one of .*got None"):
        checks.format("v_format", None)
    with pytest.raises(ValueError, match='layout must be one of "per_channel", "per_token", got \'rows\''):
        checks.layout("rows")


def test_counts_are_integers_of_python_or_numpy():
    assert checks.positive_int("head_dim", 1) == 1
    assert checks.count("capacity", 0) == 0
    for value in (np.int8(7), np.uint64(7)):
        out = checks.count("capacity", value)
        assert type(out) is int
        assert out == 7
    for wrong in (True, 1.0, "1", None, np.float32(1), np.array(1)):
        with pytest.raises(TypeError, match="must be"):
            checks.positive_int("head_dim", wrong)
        with pytest.raises(TypeError, match="must be"):
            checks.count("capacity", wrong)
    with pytest.raises(ValueError, match="head_dim must be a positive integer, got 0"):
        checks.positive_int("head_dim", 0)
    with pytest.raises(ValueError, match="capacity must be an integer of at least 0, got -1"):
        checks.count("capacity", -1)


def test_a_cut_is_from_zero_to_the_length():  # K02
    assert [checks.length("n", n, 3) for n in (0, 3, np.int64(2))] == [0, 3, 2]
    assert checks.length("n", 0, 0) == 0
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=f"n must be from 0 to the length 3, got {wrong}"):
            checks.length("n", wrong, 3)
    for wrong in (None, 2.0, True):
        with pytest.raises(TypeError, match="n must be an integer from 0 to the length 3"):
            checks.length("n", wrong, 3)

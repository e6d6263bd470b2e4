"""The commands of ``kvnumba`` besides the demo."""

import errno
import io
import json
import os
import re
import resource
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
from typer.testing import CliRunner

import kvnumba as kv
from kvnumba import cli
from kvnumba.commands import bench, doctor


def call(*arguments, columns=200):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(cli.app, [str(one) for one in arguments])


def told(*arguments):
    """The JSON of a call that succeeds."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments, code=1):
    """The one line of a call that fails."""
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("kvnumba: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def values(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def zipped(name):
    """A zip archive of one member that is no array."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(name, b"nonsense")
    return made.getvalue()


# ---- quantize, dequantize


@pytest.mark.parametrize(
    ("layout", "bits"), [("per_channel", 4), ("per_channel", 8), ("per_token", 4), ("per_token", 8)]
)
@pytest.mark.parametrize("shape", [(3, 2, 70, 9), (70, 9), (1, 4)])
def test_the_file_is_that_of_the_functions_bit_for_bit(shape, layout, bits, tmp_path):
    x = values(*shape)
    np.save(tmp_path / "x.npy", x)
    found = told("quantize", tmp_path / "x.npy", tmp_path / "x.q", "--layout", layout, "--bits", bits)
    made = kv.QuantizedTensor.load(tmp_path / "x.q")
    expected = kv.quantize_per_channel(x, bits) if layout == "per_channel" else kv.quantize_per_token(x, bits)
    for part in ("codes", "lo", "scale"):
        np.testing.assert_array_equal(getattr(made, part), getattr(expected, part))
    assert (made.layout, made.bits, made.shape, made.block_size) == (layout, bits, shape, expected.block_size)
    error = expected.dequantize() - x.astype(np.float64)
    assert found["max_error"] == pytest.approx(np.abs(error).max())
    assert found["rms_error"] == pytest.approx(np.sqrt(np.square(error).mean()))
    assert found["bytes"] == expected.nbytes
    assert found["ratio"] == pytest.approx(x.nbytes / expected.nbytes)
    told("dequantize", tmp_path / "x.q", tmp_path / "y.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected.dequantize())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "x.q", "y.npy"]


def test_parts_end_where_groups_end(tmp_path, monkeypatch):
    from kvnumba.commands import quantize

    monkeypatch.setattr(quantize, "PART", 100)
    x = values(2, 75, 9)
    np.save(tmp_path / "x.npy", x)
    for layout, expected in (
        ("per_channel", kv.quantize_per_channel(x, 4, 8)),
        ("per_token", kv.quantize_per_token(x, 4, 8)),
    ):
        told("quantize", tmp_path / "x.npy", tmp_path / "x.q", "--layout", layout, "--block", 8, "--force")
        made = kv.QuantizedTensor.load(tmp_path / "x.q")
        np.testing.assert_array_equal(made.dequantize(), expected.dequantize())
        told("dequantize", tmp_path / "x.q", tmp_path / "y.npy", "--force")
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected.dequantize())


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot reserve room in files")
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", values(40, 8))
    told("quantize", tmp_path / "x.npy", tmp_path / "x.q")
    before = sorted(tmp_path.iterdir())

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "No space left on device" in refused("quantize", tmp_path / "x.npy", tmp_path / "y.q")
    assert "No space left on device" in refused("dequantize", tmp_path / "x.q", tmp_path / "y.npy")
    assert sorted(tmp_path.iterdir()) == before


def test_k48_fortran_order_and_views_keep_every_value_at_its_index(tmp_path):
    x = np.asfortranarray(np.arange(24).reshape(2, 3, 4))
    np.save(tmp_path / "x.npy", x)
    assert np.load(tmp_path / "x.npy").flags.f_contiguous
    told("quantize", tmp_path / "x.npy", tmp_path / "x.q", "--bits", 8)
    told("dequantize", tmp_path / "x.q", tmp_path / "y.npy")
    back, scale = np.load(tmp_path / "y.npy"), kv.QuantizedTensor.load(tmp_path / "x.q").scale
    assert back.shape == x.shape
    assert np.abs(back - x).max() <= scale.max() / 2 + 1e-6


def test_npz_and_safetensors_are_read_by_name(tmp_path):
    from safetensors.numpy import save_file

    x, y = values(40, 8), values(3, 5)
    np.savez(tmp_path / "two.npz", x=x, y=y)
    save_file({"x": x, "y": y}, tmp_path / "two.safetensors")
    for file in ("two.npz", "two.safetensors"):
        told("quantize", tmp_path / file, tmp_path / "x.q", "--array", "x", "--force")
        np.testing.assert_array_equal(
            kv.QuantizedTensor.load(tmp_path / "x.q").dequantize(), kv.quantize_per_channel(x).dequantize()
        )
        assert "--array must be one of the 2 arrays" in refused("quantize", tmp_path / file, tmp_path / "z.q", code=2)
        assert "got z" in refused("quantize", tmp_path / file, tmp_path / "z.q", "--array", "z", code=2)


class Trap:
    """What unpickling would run."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_k47_objects_are_never_unpickled(name, tmp_path):
    marker, x = tmp_path / "marker", np.empty(2, object)
    x[:] = [Trap(marker)] * 2
    (np.save if name.endswith("npy") else np.savez)(tmp_path / name, x)
    for command in (["quantize", tmp_path / name, tmp_path / "x.q"], ["inspect", tmp_path / name]):
        assert "Python objects, which are never unpickled" in refused(*command)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_k47_wrong_files_and_arguments_are_one_line(tmp_path):
    out = tmp_path / "out"
    np.save(tmp_path / "x.npy", values(4, 4))
    assert "must be a file, got nothing there" in refused("quantize", tmp_path / "no.npy", out, code=2)
    assert "must be a file, got a folder" in refused("quantize", tmp_path, out, code=2)
    same = tmp_path / "x.npy"
    assert "another file than the input" in refused("quantize", same, same, "--force", code=2)
    assert "--layout must be per_channel or per_token, got rows" in refused(
        "quantize", same, out, "--layout", "rows", code=2
    )
    assert "--bits must be 4 or 8, got 3" in refused("quantize", same, out, "--bits", 3, code=2)
    assert "in a folder that exists" in refused("quantize", same, tmp_path / "no" / "out", code=2)
    assert "--array must be left out" in refused("quantize", same, out, "--array", "x", code=2)
    for name, array, words in (
        ("flat.npy", values(5), "must have shape [..., S, D] for per_channel, got [5]"),
        ("none.npy", values(3, 0), "must have at least one channel, got [3, 0]"),
        ("text.npy", np.array([["a"]]), "x must be float16, bfloat16, float32"),
        ("nan.npy", np.array([[1.0, np.nan]]), "x must be finite to be quantized, got nan at [0, 1]"),
    ):
        np.save(tmp_path / name, array)
        assert words in refused("quantize", tmp_path / name, out)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:100])
    refused("quantize", tmp_path / "cut.npy", out)
    (tmp_path / "bad.safetensors").write_bytes(bytes(100))
    refused("quantize", tmp_path / "bad.safetensors", out)
    assert "must be a file that QuantizedTensor.save wrote" in refused("dequantize", tmp_path / "x.npy", out)
    assert not out.exists()
    out.write_bytes(b"precious")
    assert "must not exist; give --force to replace it" in refused("quantize", same, out, code=2)
    assert out.read_bytes() == b"precious"


def test_integers_empty_arrays_and_one_axis_per_token(tmp_path):
    for x, layout in (
        (np.arange(12).reshape(3, 4), "per_channel"),
        (values(0, 4), "per_channel"),
        (values(6), "per_token"),
    ):
        np.save(tmp_path / "x.npy", x)
        told("quantize", tmp_path / "x.npy", tmp_path / "x.q", "--layout", layout, "--bits", 8, "--force")
        told("dequantize", tmp_path / "x.q", tmp_path / "y.npy", "--force")
        back = np.load(tmp_path / "y.npy")
        assert back.shape == x.shape
        np.testing.assert_allclose(back, x, rtol=0, atol=0.03)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is one of Linux")
def test_files_larger_than_memory_are_streamed(tmp_path):
    """512 MB of floats with a heap of 256 MB: mapped files do not count for the limit, arrays do."""
    x = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(8, 1 << 17, 128))
    x[:, ::4096] = 1
    x.flush()
    del x

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))

    code = "import kvnumba, numpy as np; kvnumba.quantize_per_token(np.ones((2, 4))).dequantize()"
    code += "; import resource; resource.setrlimit(resource.RLIMIT_DATA, (300 << 20,) * 2)"
    code += "; import kvnumba.cli; kvnumba.cli.main()"
    arguments = ["quantize", str(tmp_path / "x.npy"), str(tmp_path / "x.q"), "--layout", "per_token", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, preexec_fn=limit, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["shape"] == [8, 1 << 17, 128]


# ---- inspect


def test_inspect_tells_what_a_file_holds(tmp_path):
    caches = kv.KVCaches(2, 2, 16, k_format=["int8", "int4"], v_format="int4")
    for i in range(2):
        caches.append(i, values(1, 2, 70, 16), values(1, 2, 70, 16))
    caches.save(tmp_path / "caches")
    found = told("inspect", tmp_path / "caches")
    assert (found["kind"], found["length"], found["nbytes"]) == ("KVCaches", 70, caches.nbytes)
    assert [(row["keys"], row["values"], row["lengths"]) for row in found["layers"]] == [
        ("int8", "int4", [70]), ("int4", "int4", [70]),
    ]  # fmt: skip
    caches[0].save(tmp_path / "cache")
    assert told("inspect", tmp_path / "cache")["layers"][0]["bytes_per_token"] == caches[0].spec.bytes_per_token
    kv.quantize_per_channel(values(40, 8)).save(tmp_path / "tensor")
    assert told("inspect", tmp_path / "tensor")["bits"] == 4
    one = kv.QuantizedCache("per_token", 8)
    one.append(values(5, 8))
    one.save(tmp_path / "one")
    assert told("inspect", tmp_path / "one")["layout"] == "per_token"
    plain = kv.InPlaceCache(axis=1)
    plain.append(values(2, 3))
    plain.save(tmp_path / "plain")
    assert told("inspect", tmp_path / "plain")["shape"] == [2, 3]
    np.save(tmp_path / "x.npy", values(3, 4))
    assert told("inspect", tmp_path / "x.npy")["shape"] == [3, 4]
    assert "KVCaches" in call("inspect", tmp_path / "caches").output
    data = bytearray((tmp_path / "caches").read_bytes())
    data[-1] ^= 1
    (tmp_path / "caches").write_bytes(data)
    assert "it is damaged, the sum of its data is another one" in refused("inspect", tmp_path / "caches")


@pytest.mark.parametrize("count", [1, 30])
def test_inspect_says_once_what_all_layers_have_in_common_and_wraps_nothing(tmp_path, count):
    caches = kv.KVCaches(count, 2, 64, k_format=kv.layer_formats(count), v_format="int4")
    for i in range(count):
        caches.append(i, *np.ones((2, 1, 2, 70, 64), np.float32))
    caches.save(tmp_path / "caches")
    lines = [line.split() for line in call("inspect", tmp_path / "caches", columns=80).output.splitlines()]
    assert ["kv", "heads", "2"] in lines
    assert ["values", "int4"] in lines
    if count == 1:
        assert ["bytes", "per", "token", "240"] in lines
    else:
        (head,) = [line for line in lines if "layer" in line]
        assert " ".join(head).count("┃ bytes per token ┃") == 1
        assert sum(line[-2:] == ["240", "│"] for line in lines) == 4


def lines_of(*arguments):
    """What a call that succeeds prints, as lines of words, without the lines of tables."""
    result = call(*arguments, columns=80)
    assert result.exit_code == 0, result.output
    return [[word for word in line.split() if word not in "│┃"] for line in result.output.splitlines()]


@pytest.mark.parametrize("name", ["x.npz", "x.safetensors"])
@pytest.mark.parametrize("count", [1, 3])
def test_inspect_lists_each_array_of_a_file(tmp_path, name, count):
    from safetensors.numpy import save_file

    arrays = {f"a{i}": values(2, 3) for i in range(count)}
    np.savez(tmp_path / name, **arrays) if name.endswith("npz") else save_file(arrays, tmp_path / name)
    dtype = "float32" if name.endswith("npz") else "F32"
    found = told("inspect", tmp_path / name)
    assert (found["count"], found["nbytes"]) == (count, 24 * count)
    assert found["arrays"] == [{"name": one, "shape": [2, 3], "dtype": dtype, "nbytes": 24} for one in arrays]
    if count > 1:
        rows = lines_of("inspect", tmp_path / name)
        assert [row for row in rows if row[:1] and row[0] in arrays] == [
            [one, "2,", "3", dtype, "24"] for one in arrays
        ]


def header_of(path, table, size):
    """A safetensors file with this header, and *size* bytes of data that take no room on the disk."""
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)


def test_inspect_reads_of_arrays_only_what_they_are(tmp_path):
    terabyte = {"dtype": "F16", "shape": [1 << 20, 1 << 19], "data_offsets": [0, 1 << 40]}
    header_of(tmp_path / "x.safetensors", {"x": terabyte}, 1 << 40)
    assert told("inspect", tmp_path / "x.safetensors")["nbytes"] == 1 << 40
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((4, 1 << 20), np.int32))
    tracemalloc.start()
    try:
        assert told("inspect", tmp_path / "x.npz")["arrays"][0]["nbytes"] == 1 << 24
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
    header_of(tmp_path / "none.safetensors", {}, 0)
    assert told("inspect", tmp_path / "none.safetensors")["arrays"] == []
    assert lines_of("inspect", tmp_path / "none.safetensors")[-1] == ["nbytes", "0"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 17]}, "the entry of x is not one of an array in this file"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}, "x of F32 [4] cannot have 12 bytes"),
        ({"dtype": "F32", "shape": [-4, -1], "data_offsets": [0, 16]}, "the entry of x is not one of an array"),
        ({"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}, "the entry of x is not one of an array"),
        ({"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}, "the entry of x is not one of an array"),
        ({"dtype": "F32", "shape": [4]}, "the entry of x must have dtype, shape and data_offsets"),
        (7, "the entry of x must have dtype, shape and data_offsets"),
    ],
)
def test_an_entry_of_no_array_is_one_line(tmp_path, entry, words):
    header_of(tmp_path / "x.safetensors", {"x": entry}, 16)
    for command in (["inspect", tmp_path / "x.safetensors"], ["quantize", tmp_path / "x.safetensors", tmp_path / "y"]):
        assert words in refused(*command)


@pytest.mark.parametrize("header", [b"[" * 100_000, b"[]", b"{", b'{"x": NaN}'])
def test_a_header_that_is_no_table_of_arrays_is_one_line(tmp_path, header):
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "must be a safetensors file of numbers" in refused("inspect", tmp_path / "x.safetensors")


def test_arrays_of_safetensors_files_are_read_as_they_are_wherever_they_lie(tmp_path):
    x = np.arange(24).reshape(4, 6)
    for dtype, code in (("F64", "<f8"), ("F32", "<f4"), ("F16", "<f2"), ("BF16", "<f4"), ("I16", "<i2"), ("U8", "u1")):
        data = x.astype(code).tobytes() if dtype != "BF16" else x.astype("<f4").view("<u2")[:, 1::2].tobytes()
        table = {"x": {"dtype": dtype, "shape": [4, 6], "data_offsets": [1, 1 + len(data)]}}
        header = json.dumps(table).encode()
        (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" + data)
        told("quantize", tmp_path / "x.safetensors", tmp_path / "x.q", "--bits", 8, "--force")
        np.testing.assert_array_equal(
            kv.QuantizedTensor.load(tmp_path / "x.q").codes, kv.quantize_per_channel(x, 8).codes
        )


def session_file(path, *states):
    """A file as `graph.Session.save` writes it."""
    with zipfile.ZipFile(path, "w") as archive:
        for i, state in enumerate(states):
            state.save(path.with_suffix(".part"))
            archive.write(path.with_suffix(".part"), f"{i}.safetensors")
    path.with_suffix(".part").unlink()


def states():
    made = (
        kv.KVCache(2, 16, k_format="int8", v_format="int4"),
        kv.QuantizedCache("per_token", 4),
        kv.ConcatCache(axis=1),
    )
    made[0].append(values(1, 2, 40, 16), values(1, 2, 40, 16))
    made[1].append(values(41, 8))
    made[2].append(values(2, 42))
    return made


@pytest.mark.parametrize("count", [1, 3])
def test_inspect_shows_each_state_of_a_session(tmp_path, count):
    session_file(tmp_path / "state.kv", *states()[:count])
    found = told("inspect", tmp_path / "state.kv")
    classes = ["KVCache", "QuantizedCache", "ConcatCache"][:count]
    assert (found["kind"], found["length"]) == ("Session", 40)
    assert found["nbytes"] == sum(state.nbytes for state in states()[:count])
    assert [(row["class"], row["length"]) for row in found["states"]] == list(zip(classes, (40, 41, 42)))
    assert found["states"][0]["shape"] == [1, 2, 40, 16]
    assert [row["format"] for row in found["states"]] == ["int8/int4", "int4 per_token", "float32"][:count]
    rows = lines_of("inspect", tmp_path / "state.kv")
    assert [row[1] for row in rows if len(row) > 1 and row[1] in classes] == classes


@pytest.mark.onnx
def test_inspect_reads_what_a_session_of_a_graph_saved(tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnx_ir", reason="onnx-ir is not installed")
    from graphs import attention

    from kvnumba import graph

    session = graph.Session(graph.fold_kv_cache(attention("grouped")), backend="reference")
    session.save(tmp_path / "state.kv")
    assert [row["class"] for row in told("inspect", tmp_path / "state.kv")["states"]] == ["ConcatCache"] * 2


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        (
            "x",
            b"garbage" * 9,
            "must be a saved cache, .* npy, npz or safetensors .* ONNX .*, got a file of another kind",
        ),
        ("x.npy", b"", "got a file of another kind"),
        ("x.nnef.tgz", b"\x1f\x8b" + bytes(50), "got a file of another kind"),
        ("x.kv", b"PK\x03\x04" + bytes(50), "got a damaged zip archive"),
        ("x.npy", b"\x93NUMPY\x01\x00\x76\x00{'shape': (3,", "must be an npy file of numbers: "),
        ("x.safetensors", b"garbage" * 9, "must be a safetensors file of numbers: "),
        ("x", zipped("a.txt"), "got a zip archive without arrays"),
        ("x", zipped("a.npy"), "must be an npz file of numbers: a.npy is no array"),
        ("x", zipped("0.safetensors"), "x is damaged, 0.safetensors: it is not the file of a cache"),
    ],
)
def test_what_is_wrong_with_a_file_of_no_known_kind(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    for command in (["inspect", tmp_path / name], ["quantize", tmp_path / name, tmp_path / "out"]):
        message = refused(*command)
        assert "pickle" not in message
        if command[0] == "inspect":
            assert re.search(words, message), message
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_damaged_state_of_a_session_is_named(tmp_path):
    session_file(tmp_path / "state.kv", *states())
    data = bytearray((tmp_path / "state.kv").read_bytes())
    data[2000] ^= 1
    (tmp_path / "state.kv").write_bytes(data)
    assert "state.kv is damaged, 0.safetensors: Bad CRC-32" in refused("inspect", tmp_path / "state.kv")


def raw_safetensors(path, dtype, size):
    header = json.dumps({"x": {"dtype": dtype, "shape": [4, 4], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


def test_types_that_numpy_does_not_have_are_read_or_named(tmp_path):
    raw_safetensors(tmp_path / "f8.safetensors", "F8_E4M3", 16)
    assert "x must be F64, F32, F16, BF16 or integers, got F8" in refused(
        "quantize", tmp_path / "f8.safetensors", tmp_path / "out"
    )
    raw_safetensors(tmp_path / "bf.safetensors", "BF16", 32)
    assert told("quantize", tmp_path / "bf.safetensors", tmp_path / "out")["max_error"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["--nothing"], "No such option: --nothing"),
        (["bench", "--nothing"], "No such option: --nothing; see kvnumba bench --help"),
        (["quantize", "x"], "Missing argument 'OUT'; see kvnumba quantize --help"),
        (["quantize", "x", "y", "--block", "0"], "--block must be an integer of at least 1, got '0'"),
        (["quantize", "x", "y", "--bits", "x"], "--bits must be 4 or 8, got x"),
        (["quantize", "x", "y", "--axis", "1.5"], "--axis must be an integer, got '1.5'"),
        (["bench", "--threads", "0"], "--threads must be an integer from 1 to 1024, got '0'"),
        (["bench", "--threads", "2000000"], "--threads must be an integer from 1 to 1024, got '2000000'"),
        (["bench", "--seconds", "nan"], "--seconds must be a number of at least 0.01, got 'nan'"),
        (["bench", "--seconds", "inf"], "--seconds must be a number of at least 0.01, got 'inf'"),
        (["demo", "--tokens", "0"], "--tokens must be an integer of at least 1, got '0'"),
        (["inspect", os.devnull], "must be a file, got something else"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, words):
    assert words in refused(*arguments, code=2)


def test_a_folder_that_cannot_be_written_and_too_little_memory_are_one_line(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", values(4, 4))
    assert "kvnumba: not enough memory" in refused("bench", "--lengths", 10**12, "--seconds", "0.01")
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK)
    message = refused("quantize", tmp_path / "x.npy", tmp_path / "out", code=2)
    assert f"{tmp_path / 'out'} must be in a folder that can be written" in message


def test_inspect_without_compiled_code_is_one_line(tmp_path):
    kv.KVCache(1, 8).save(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", "import kvnumba.cli; kvnumba.cli.main()", "inspect", str(tmp_path / "cache")],
        capture_output=True, text=True, check=False, env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("kvnumba: load needs compiled code")
    assert done.stderr.count("\n") == 1


@pytest.mark.onnx
def test_inspect_prints_the_caches_of_an_onnx_model(tmp_path):
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnx_ir", reason="onnx-ir is not installed")
    from graphs import attention

    onnx.save(attention("grouped"), tmp_path / "model.onnx")
    rows = told("inspect", tmp_path / "model.onnx")["layers"]
    assert [(row["node"], row["shape"]) for row in rows] == [
        ("past_k.cache", ["2", "2", "P+S", "8"]), ("past_v.cache", ["2", "2", "P+S", "8"]),
    ]  # fmt: skip
    lines = lines_of("inspect", tmp_path / "model.onnx")
    assert ["past_k.cache", "float", "2,", "2,", "P+S,", "8", "128"] in lines
    assert [line for line in lines if line[:1] == ["kind"]] == [["kind", "ONNX", "model"]]
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    assert "must be an ONNX model" in refused("inspect", tmp_path / "bad.onnx")


# ---- bench, doctor, warmup, help


def test_bench_measures_prints_and_draws(tmp_path):
    options = ("--formats", "int8,int8/int4", "--lengths", "64,128", "--seconds", "0.01")
    found = told("bench", *options)
    assert [(row["format"], row["tokens"]) for row in found["rows"]] == [
        (name, n) for n in (64, 128) for name in ("int8/int8", "int8/int4")
    ]
    assert found["bandwidth_gb_per_s"] > 0.1
    assert all(row["milliseconds"] > 0 for row in found["rows"])
    shown = call("bench", *options).output
    assert "o int8/int8   x int8/int4" in shown
    plot = bench.terminal_plot(found["rows"]).splitlines()
    assert len({len(line) for line in plot[:14]}) == 1
    assert "--formats must be of float32" in refused("bench", "--formats", "int9", code=2)
    assert "--lengths must be positive numbers" in refused("bench", "--lengths", "0", code=2)
    assert "--plot must be a file that ends in .png or .svg" in refused("bench", "--plot", tmp_path / "x.gif", code=2)
    assert "in a folder that exists" in refused("bench", "--plot", tmp_path / "no" / "x.png", code=2)


@pytest.mark.parametrize("count", [2, 25])
def test_no_sign_of_a_plot_hides_another(count):
    rows = [{"format": str(i), "tokens": n, "milliseconds": n} for n in (10, 20) for i in range(count)]
    drawn = "".join(line.partition("|")[2] for line in bench.terminal_plot(rows).splitlines())
    assert len(drawn.replace(" ", "")) == 2 * count
    assert len(set(drawn) - {" "}) == count


@pytest.mark.plots
def test_bench_draws_a_file(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    told("bench", "--formats", "int8", "--lengths", "64,128", "--seconds", "0.01", "--plot", tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert text.startswith("<?xml")
    for words in (
        "reading it once at",
        "One token: 32 query heads, 8 KV heads, 128 channels, 1 thread",
        "<!-- 128 -->",
    ):
        assert words in text


def test_doctor_tells_the_state_and_fails_with_the_self_test(monkeypatch):
    found = told("doctor")
    assert found["self_test"] == "passed"
    assert found["threads"] == kv.get_num_threads()
    assert any(one.startswith("numba ") for one in found["packages"])
    monkeypatch.setattr(kv.KVCache, "attend", lambda self, q: q)
    assert "attention is off by" in doctor.self_test()
    result = call("doctor")
    assert result.exit_code == 1
    assert "kvnumba: the self-test must pass, got: float32: attention is off" in result.stderr


def test_warmup_compiles_the_formats_asked_for():
    found = told("warmup", "--formats", "int8, int8/int4")
    assert found["formats"] == ["int8/int8", "int8/int4"]
    assert "got 'x'" in refused("warmup", "--formats", "x", code=2)


@pytest.mark.parametrize("command", ["quantize", "dequantize", "inspect", "bench", "doctor", "warmup", "demo"])
def test_help_of_each_command(command):
    result = call(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output


def seconds_of(code, *arguments):
    """The least time of the processor that Python takes to run *code*: other tests run on the same cores."""
    times = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(times)


def test_k65_help_takes_less_than_a_second():
    # Half of it is Numba's own import; on a machine that is slow at everything the rest still is no longer than that.
    numba, help = seconds_of("import numba"), seconds_of("import kvnumba.cli; kvnumba.cli.main()", "--help")
    assert help < max(1, 2.3 * numba)


@pytest.mark.parametrize("layout", ["per_channel", "per_token"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("part", [30, 1 << 22])
def test_groups_along_any_axis_in_parts(layout, bits, part, tmp_path, monkeypatch):
    from kvnumba.commands import quantize

    monkeypatch.setattr(quantize, "PART", part)
    encode = kv.quantize_per_channel if layout == "per_channel" else kv.quantize_per_token
    for shape in ((41,), (9, 25), (3, 7, 11)):
        x = values(*shape)
        np.save(tmp_path / "x.npy", x)
        for axis in (0, -1, len(shape) - 2):
            if axis < -len(shape):
                continue
            for block in (3, 50):
                args = ("--layout", layout, "--bits", bits, "--axis", axis, "--block", block, "--force")
                told("quantize", tmp_path / "x.npy", tmp_path / "x.q", *args)
                made, expected = kv.QuantizedTensor.load(tmp_path / "x.q"), encode(x, bits, block, axis)
                for name in ("codes", "lo", "scale"):
                    np.testing.assert_array_equal(getattr(made, name), getattr(expected, name))
                assert repr(made) == repr(expected)
                told("dequantize", tmp_path / "x.q", tmp_path / "y.npy", "--force")
                np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected.dequantize())
    assert "--axis must be from -3 to 2" in refused("quantize", tmp_path / "x.npy", tmp_path / "z", "--axis", 3, code=2)

"""Damaged files: whatever is done to the bytes, loading raises ValueError, or returns what those bytes say.

``python -m tests.fuzz_files 100000`` tries as many mutations and says what came of them.
"""

from __future__ import annotations

import copy
import json
import random
import re
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np

import kvnumba as kv
import kvnumba.interchange
import kvnumba.quantization.tensor
from kvnumba import buffers, storage

START = 8 + len(storage._START)


def caches() -> dict[str, object]:
    """One small object of each class and kind of content."""
    rng = np.random.default_rng(7)

    def numbers(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    made = {}
    for k_format, v_format in (("float32", "int4"), ("float16", "bfloat16"), ("int8", "int8"), ("int4", "float32")):
        cache = kv.KVCache(2, 5, v_head_dim=3, k_format=k_format, v_format=v_format, batch_size=2)
        cache.append(numbers(2, 2, 41, 5), numbers(2, 2, 41, 3))
        made[f"{k_format}-{v_format}"] = cache
    made["empty"] = kv.KVCache(1, 4, k_format="int8", v_format="int4")
    layers = kv.KVCaches(3, 1, 4, k_format=["int8", "int4", "float32"], v_format="int4")
    for i in range(3):
        layers.append(i, numbers(1, 1, 7, 4), numbers(1, 1, 7, 4))
    made["layers"] = layers
    for layout in ("per_channel", "per_token"):
        made[f"codes-{layout}"] = kv.QuantizedCache(layout, 4)
        made[f"codes-{layout}"].append(numbers(2, 70, 3))
    for name, cache in (("concat", kv.ConcatCache(1)), ("in-place", kv.InPlaceCache(1, "bfloat16"))):
        cache.append(numbers(2, 9, 3))
        made[name] = cache
    made["tensor"] = kv.quantize_per_channel(numbers(2, 9, 3), 4, 4)
    made["tensor-axis"] = kv.quantize_per_token(numbers(9, 2, 3), 8, 4, axis=0)
    return made


def saved(value: object, path: Path) -> bytes:
    """The bytes of the file of *value*."""
    value.save(path)
    return path.read_bytes()


def resealed(data: bytes) -> bytes:
    """*data* with the sums that it ought to have, as far as it has places for them."""
    size = int.from_bytes(data[:8], "little") + 8
    if not START + 160 < size <= len(data):
        return data
    header, body = bytearray(data[:size]), data[size:]
    found = re.search(rb'"data_sum":"([0-9a-f]{32})"', header)
    if found:
        header[found.start(1) : found.end(1)] = storage._sum_of(body)
    plain = storage._with_sum(bytes(header), storage._NO_SUM)
    return storage._with_sum(plain, storage._sum_of(plain)) + body


def flipped(data: bytes, rng: random.Random) -> bytes:
    """1 to 8 bytes changed, half of the times in the header."""
    changed, end = bytearray(data), len(data) if rng.random() < 0.5 else int.from_bytes(data[:8], "little") + 8
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(end)] ^= 1 << rng.randrange(8) if rng.random() < 0.5 else rng.randrange(1, 256)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    """The end, or a part in between, is missing."""
    start = rng.randrange(len(data))
    return data[:start] + (b"" if rng.random() < 0.5 else data[rng.randint(start + 1, len(data)) :])


def longer(data: bytes, rng: random.Random) -> bytes:
    """More bytes at the end or in between."""
    at = len(data) if rng.random() < 0.5 else rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.randint(1, 100)) + data[at:]


NUMBERS = [b"0", b"1", b"2", b"-1", b"3", b"33", b"255", b"4096", b"1099511627776", b"9" * 30, b"1e3", b"null", b"[]"]


def renumbered(data: bytes, rng: random.Random) -> bytes:
    """A number of the header is another one; the header's length field fits."""
    size = int.from_bytes(data[:8], "little") + 8
    header = data[8:size].rstrip(b" ")
    found = rng.choice(list(re.finditer(rb"(?<=[:\[,])\d+", header)))
    header = header[: found.start()] + rng.choice(NUMBERS) + header[found.end() :]
    header = header.ljust(storage.round_up(8 + len(header), 64) - 8)
    return len(header).to_bytes(8, "little") + header + data[size:]


VALUES = [0, 1, 2, 3, 4, 5, 8, 16, 31, 35, 36, 37, 64, 100, -1, 2**20, 2**40, 2**63, 2**200, None, True, False]
VALUES += [
    0.0,
    1.0,
    1.5,
    4.0,
    32.0,
    "",
    "int8",
    "int4",
    "float32",
    "bfloat16",
    "per_token",
    [],
    [0],
    [1, 2],
    [2**40, 2**40],
    {},
    "x" * 500,
]


def _places(value: object) -> list[tuple[object, object]]:
    """Every (container, key) inside *value*."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, item in inside:
        found += [(value, key), *_places(item)]
    return found


PLANS = {
    "KVCache": kv.interchange._layers_plan,
    "KVCaches": kv.interchange._layers_plan,
    "QuantizedCache": kv.interchange._codes_plan,
    "ConcatCache": kv.interchange._array_plan,
    "InPlaceCache": kv.interchange._array_plan,
    "QuantizedTensor": kvnumba.quantization.tensor.plan,
}


def reset(data: bytes, rng: random.Random) -> bytes:
    """Settings are others; table, sums and, where it is not large, the data are made to fit them."""
    size = int.from_bytes(data[:8], "little") + 8
    settings = json.loads(json.loads(data[8:size])["__metadata__"]["settings"])
    for _ in range(rng.randint(1, 2)):
        container, key = rng.choice(_places(settings))
        container[key] = copy.deepcopy(rng.choice(VALUES))
    kind, text = settings.pop("class", None), ""
    try:
        parts = PLANS[kind](settings)
    except (ValueError, KeyError, TypeError):
        parts = []
    body, count = data[size:], sum(part.nbytes for part in parts)
    if count < 1 << 16:
        body = (body + (bytes(count) if rng.random() < 0.5 else rng.randbytes(count)))[:count]
    text = json.dumps({"class": kind, **settings}, separators=(",", ":"))
    return storage._header(text, parts, storage._sum_of(body)) + body


def with_data(data: bytes, rng: random.Random) -> bytes:
    """Data are others."""
    size = int.from_bytes(data[:8], "little") + 8
    body = bytearray(data[size:])
    for _ in range(rng.randint(1, 4) if body else 0):
        body[rng.randrange(len(body))] = rng.choice([0, 1, 63, 127, 128, 255, rng.randrange(256)])
    return data[:size] + bytes(body)


PLAIN, SEALED = (flipped, cut, longer), (flipped, cut, longer, renumbered, reset, with_data)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Something is done to *data*; half of the times the sums are made to fit."""
    if rng.random() < 0.5:
        return rng.choice(PLAIN)(data, rng)
    return resealed(rng.choice(SEALED)(data, rng))


def check(value: object, original: bytes, damaged: bytes, path: Path) -> str:
    """Load *damaged* as the class of *value*; returns what came of it, AssertionError if that must not be."""
    path.write_bytes(damaged)
    tracemalloc.reset_peak()
    before, start = tracemalloc.get_traced_memory()[0], time.perf_counter()
    try:
        loaded = type(value).load(path)
    except ValueError as error:
        loaded, text = None, str(error)
        assert len(text) < 1000, text
    peak = tracemalloc.get_traced_memory()[1] - before
    assert time.perf_counter() - start < 1, "loading must end within a second"
    assert peak < 100 * len(damaged) + (4 << 20), f"{peak} bytes for a file of {len(damaged)}"
    if loaded is None:
        return "refused"
    # A file has one form for one content: what the bytes say, no more and no less.
    assert saved(loaded, path) == damaged, "a damaged file was read as another one"
    return "same" if damaged == original else "loaded"


def run(count: int, seed: int) -> Counter[str]:
    """Try *count* mutations; how many came to what."""
    rng, results = random.Random(seed), Counter[str]()
    seen = mock.patch.object(buffers, "MAPPED", sys.maxsize)  # all memory comes from NumPy, as tracemalloc sees it
    with tempfile.TemporaryDirectory() as folder, seen:
        path = Path(folder) / "file"
        values = []
        for value in caches().values():
            values.append((value, saved(value, path)))
            type(value).load(path)  # compiles
        tracemalloc.start()
        try:
            for i in range(count):
                value, data = values[i % len(values)]
                damaged = mutated(data, rng)
                try:
                    results[check(value, data, damaged, path)] += 1
                except BaseException:
                    kept = Path(tempfile.gettempdir()) / "kvnumba-fuzz.safetensors"
                    kept.write_bytes(damaged)
                    print(f"mutation {i} of seed {seed}, a {type(value).__name__}, is in {kept}", file=sys.stderr)
                    raise
        finally:
            tracemalloc.stop()
    return results


if __name__ == "__main__":
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print(dict(run(wanted, int(sys.argv[2]) if len(sys.argv) > 2 else 0)))

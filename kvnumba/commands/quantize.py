"""``kvnumba quantize`` and ``kvnumba dequantize``: arrays in files to codes and back, a part at a time."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvnumba import storage
from kvnumba.commands import CommandError, existing, free, print_json
from kvnumba.commands.tensors import Source, open_array
from kvnumba.quantization import QuantizedTensor, _part_shapes, _plan, quantize_per_channel, quantize_per_token

#: Numbers of a part: 16 MB of float32.
PART = 1 << 22

Progress = Callable[[int], None]
Array = npt.NDArray[Any]


class Errors:
    """Largest error, rms error and signal-to-noise ratio of all parts."""

    def __init__(self) -> None:
        self.largest = self.noise = self.signal = 0.0
        self.count = 0

    def add(self, x: Array, decoded: Array) -> None:
        exact = np.asarray(x, np.float64)
        difference = decoded - exact
        self.largest = max(self.largest, float(np.abs(difference).max(initial=0)))
        self.noise += float(np.square(difference).sum())
        self.signal += float(np.square(exact).sum())
        self.count += exact.size

    def told(self) -> dict[str, float | None]:
        """``max_error``, ``rms_error``, ``snr_db`` (None where nothing was lost)."""
        snr = 10 * math.log10(self.signal / self.noise) if self.noise and self.signal else None
        return {"max_error": self.largest, "rms_error": math.sqrt(self.noise / max(self.count, 1)), "snr_db": snr}


def quantize(
    source: Path, target: Path, layout: str, bits: int, block: int, name: str | None, force: bool, as_json: bool
) -> None:
    """Quantize the array of a file into a file that ``QuantizedTensor.load`` reads."""
    array = open_array(existing(source), name)
    free(target, source, force)
    axes = 2 if layout == "per_channel" else 1
    if len(array.shape) < axes:
        names = "[..., S, D]" if axes == 2 else "[..., D]"
        raise CommandError(f"{source} must have shape {names} for {layout}, got {list(array.shape)}")
    settings = {
        "bits": bits, "layout": layout, "shape": list(array.shape), "block_size": block if axes == 2 else None,
    }  # fmt: skip
    if not array.shape[-1]:
        raise CommandError(f"{source} must have at least one channel, got {list(array.shape)}")
    errors = Errors()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".kvnumba-") as folder, _bar(array.shape) as advance:
        shapes = _part_shapes(array.shape, bits, block if axes == 2 else 0)
        stores = [
            _mapped(Path(folder) / file, shape, dtype)
            for file, shape, dtype in (
                ("codes", shapes[0], np.uint8), ("lo", shapes[1], np.float32), ("scale", shapes[1], np.float32),
            )
        ]  # fmt: skip
        for index, groups in _parts(array, layout, block):
            x = array.read(index)
            try:
                part = quantize_per_channel(x, bits, block) if axes == 2 else quantize_per_token(x, bits)
            except (TypeError, ValueError) as error:
                raise CommandError(f"{source}: {_moved(str(error), index)}") from None
            for store, made, place in zip(stores, (part.codes, part.lo, part.scale), (index, groups, groups)):
                store[place] = made
            errors.add(x, part.dequantize())
            advance(x.size)
        storage.write(target, "QuantizedTensor", settings, _plan(settings), stores)
    told = {"input": str(source), "output": str(target), **settings, "dtype": array.dtype}
    size = math.prod(array.shape)
    stored = sum(store.nbytes for store in stores)
    told |= {"bytes": stored, "bits_per_value": 8 * stored / max(size, 1), "ratio": 4 * size / max(stored, 1)}
    _tell(told | errors.told(), as_json)


def dequantize(source: Path, target: Path, force: bool, as_json: bool) -> None:
    """Decode what ``quantize`` wrote into an npy file of float32."""
    try:
        tensor = QuantizedTensor.load(existing(source))
    except ValueError as error:
        raise CommandError(str(error)) from None
    free(target, source, force)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".kvnumba-") as folder, _bar(tensor.shape) as advance:
        made = Path(folder) / "array.npy"
        if math.prod(tensor.shape):
            out = np.lib.format.open_memmap(made, mode="w+", dtype=np.float32, shape=tensor.shape)
            array = Source(tensor.shape, "", lambda index: out[index])
            for index, groups in _parts(array, tensor.layout, tensor.block_size or 1):
                codes, lo, scale = tensor.codes[index], np.asarray(tensor.lo[groups]), np.asarray(tensor.scale[groups])
                shape = (*codes.shape[:-1], tensor.shape[-1])
                part = QuantizedTensor(codes, lo, scale, tensor.bits, tensor.layout, shape, tensor.block_size)
                out[index] = part.dequantize()
                advance(math.prod(shape))
            out.flush()
        else:
            np.save(made, np.empty(tensor.shape, np.float32))
        os.replace(made, target)
    told = {"input": str(source), "output": str(target), "shape": list(tensor.shape), "bytes": target.stat().st_size}
    _tell(told, as_json)


def _parts(array: Source, layout: str, block: int) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Indices of parts of about `PART` numbers, and of their groups: parts end where groups end."""
    shape = array.shape
    if len(shape) == 1:
        yield (slice(None),), ()
        return
    tokens = max(PART // shape[-1], 1)
    tokens = max(tokens // block, 1) * block if layout == "per_channel" else tokens
    for lead in product(*(range(n) for n in shape[:-2])):
        for start in range(0, shape[-2], tokens):
            stop = min(start + tokens, shape[-2])
            if layout == "per_channel":
                yield (*lead, slice(start, stop)), (*lead, slice(start // block, -(-stop // block)))
            else:
                yield (*lead, slice(start, stop)), (*lead, slice(start, stop))


def _mapped(path: Path, shape: tuple[int, ...], dtype: type) -> Array:
    """An array in a file, so that it need not fit into memory; an ordinary one if it is empty."""
    if not math.prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "w+", shape=shape)


def _moved(message: str, index: tuple[Any, ...]) -> str:
    """The message of a part, with where the part begins."""
    begin = [n if isinstance(n, int) else n.start or 0 for n in index]
    return f"{message} of the part that begins at {begin}" if any(begin) else message


def _bar(shape: tuple[int, ...]) -> Any:
    from kvnumba.commands.progress import bar

    return bar("values", math.prod(shape))


def _tell(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(told)
        return
    from kvnumba.commands.progress import table

    table(told)

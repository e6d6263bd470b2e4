"""``kvnumba quantize`` and ``kvnumba dequantize``: arrays in files to codes and back, a part at a time."""

from __future__ import annotations

import errno
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvnumba import storage
from kvnumba.commands import CommandError, existing, free, print_json
from kvnumba.commands.tensors import Source, open_array
from kvnumba.quantization.groups import AXES, Groups
from kvnumba.quantization.quantize import quantize_per_channel, quantize_per_token
from kvnumba.quantization.tensor import QuantizedTensor, plan, settings_of
from kvnumba.spec import BLOCK

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
    source: Path,
    target: Path,
    layout: str,
    bits: int,
    block: int | None,
    axis: int | None,
    name: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Quantize the array of a file into a file that ``QuantizedTensor.load`` reads."""
    array = open_array(existing(source), name)
    free(target, source, force)
    settings = _settings(source, array, layout, bits, block, axis)
    groups = Groups(array.shape, settings.get("axis", AXES[layout]), settings["block_size"])
    encode = quantize_per_channel if layout == "per_channel" else quantize_per_token
    errors = Errors()
    with _scratch(target) as folder, _bar(array.shape) as advance:
        types = {"U8": np.uint8, "F32": np.float32}
        stores = [_mapped(folder / part.name, part.shape, types[part.dtype]) for part in plan(settings)]
        for part in _parts(groups, bits):
            x = array.read(part.values)
            try:
                made = encode(x, bits, groups.block, groups.axis)
            except (TypeError, ValueError) as error:
                raise CommandError(f"{source}: {_moved(str(error), part.values)}") from None
            for store, piece, place in zip(stores, (made.codes, made.lo, made.scale), part[1:]):
                store[place] = piece
            errors.add(x, made.dequantize())
            advance(x.size)
        storage.write(target, "QuantizedTensor", settings, plan(settings), stores)
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
    with _scratch(target) as folder, _bar(tensor.shape) as advance:
        made = folder / "array.npy"
        if math.prod(tensor.shape):
            out = np.lib.format.open_memmap(made, mode="w+", dtype=np.float32, shape=tensor.shape)
            _reserve(made)
            for part in _parts(Groups(tensor.shape, tensor.axis, tensor.block_size), tensor.bits):
                values = out[part.values]
                codes = tensor.codes[part.codes]
                lo, scale = np.asarray(tensor.lo[part.lo]), np.asarray(tensor.scale[part.scale])
                settings = (tensor.bits, tensor.layout, values.shape, tensor.block_size, tensor.axis)
                values[...] = QuantizedTensor(codes, lo, scale, *settings).dequantize()
                advance(values.size)
            out.flush()
        else:
            np.save(made, np.empty(tensor.shape, np.float32))
        os.replace(made, target)
    told = {"input": str(source), "output": str(target), "shape": list(tensor.shape), "bytes": target.stat().st_size}
    _tell(told, as_json)


def _settings(
    source: Path, array: Source, layout: str, bits: int, block: int | None, axis: int | None
) -> storage.Settings:
    """What is to be said in the file, after a check that the array has such groups."""
    shape = array.shape
    needed = 1 if axis is not None else -AXES[layout]
    if len(shape) < needed:
        names = "[..., S, D]" if needed == 2 else "[..., D]"
        raise CommandError(f"{source} must have shape {names} for {layout}, got {list(shape)}")
    if axis is not None and not -len(shape) <= axis < len(shape):
        raise CommandError(f"--axis must be from {-len(shape)} to {len(shape) - 1} for {source}, got {axis}", 2)
    at = AXES[layout] if axis is None else axis if axis < 0 else axis - len(shape)
    if block is None and layout == "per_channel":
        block = BLOCK
    if not shape[-1] or (block is None and not shape[at]):
        raise CommandError(f"{source} must have at least one channel, got {list(shape)}")
    return settings_of(bits, layout, shape, block, at)


class Part(NamedTuple):
    """Places of some numbers of an array, of their codes and of their parameters."""

    values: tuple[slice, ...]
    codes: tuple[slice, ...]
    lo: tuple[slice, ...]
    scale: tuple[slice, ...]


def _parts(groups: Groups, bits: int) -> Iterator[Part]:
    """Parts of about `PART` numbers, one after another: they end where groups end, and where bytes do."""
    shape, last = groups.shape, len(groups.shape) - 1
    axis = len(shape) + groups.axis
    steps = []  # numbers of a part along each axis
    for i, n in enumerate(shape):
        unit = 1 if i != axis else n if groups.block is None else groups.block
        unit = math.lcm(unit, 8 // bits) if i == last else unit
        room = PART // max(math.prod(shape[i + 1 :]), 1)
        steps.append(max(min(n, room) // max(unit, 1), 1) * unit if n > room else max(n, 1))
    for begin in product(*(range(0, n, step) for n, step in zip(shape, steps))):
        values = tuple(slice(b, min(b + step, n)) for b, step, n in zip(begin, steps, shape))
        codes = (*values[:-1], slice(values[-1].start * bits // 8, -(-values[-1].stop * bits // 8)))
        own = values[axis]
        between = () if groups.block is None else (slice(own.start // groups.block, -(-own.stop // groups.block)),)
        parameters = (*values[:axis], *between, *values[axis + 1 :])
        yield Part(values, codes, parameters, parameters)


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A hidden folder beside *target* while the block runs."""
    folder = target.parent / f".kvnumba-{secrets.token_hex(8)}"
    try:  # of `tempfile` a signal between two of its lines would leave the folder there
        folder.mkdir(0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _mapped(path: Path, shape: tuple[int, ...], dtype: type) -> Array:
    """An array in a file, so that it need not fit into memory; an ordinary one if it is empty."""
    if not math.prod(shape):
        return np.empty(shape, dtype)
    array = np.memmap(path, dtype, "w+", shape=shape)
    _reserve(path)
    return array


def _reserve(path: Path) -> None:
    """Take the room of a mapped file: on a full disk the system would end the process where it writes to the array."""
    if not hasattr(os, "posix_fallocate"):
        return
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # file systems that cannot
                raise OSError(error.errno, error.strerror, str(path.parent.parent)) from None


def _moved(message: str, index: tuple[slice, ...]) -> str:
    """The message of a part, with where the part begins."""
    begin = [at.start for at in index]
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

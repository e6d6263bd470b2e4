"""Files: written whole or not at all, and read only if every byte is as it was written.

A file is a safetensors container with one form for one content: the same state gives the same bytes.
``docs/file_format.md`` describes it. Reading trusts nothing: the header must be the very one that its settings give,
which fixes the name, type, shape and place of every array and the size of the file. Only then is anything allocated.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from kvnumba._jit import COMPILED
from kvnumba.buffers import aligned, round_up
from kvnumba.checks import MAX_AXES
from kvnumba.kernels.interchange import add_words

Array = npt.NDArray[Any]

#: Version of the format. A file of another one is refused.
VERSION = 1

#: Bytes of each type of the container.
ITEM_BYTES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}

#: Data begin at a multiple of this; so does every array if the ones before it do.
_DATA_UNIT = 64
#: Bytes read or written at once: they stay in the processor's cache while they are summed and used.
_CHUNK = 1 << 18
#: Largest header that the safetensors package reads.
_MAX_HEADER = 100_000_000
_START = b'{"__metadata__":{"format":"kvnumba","version":"'
_NUMBER = re.compile(rb'(\d{1,9})"')
_SUM = re.compile(rb',"header_sum":"([0-9a-f]{32})"')
_NO_SUM = b"0" * 32


class Part(NamedTuple):
    """One array of a file."""

    name: str
    dtype: str  #: a key of `ITEM_BYTES`
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        for n in self.shape:
            size *= n
        return size


Settings = dict[str, Any]
#: The arrays that a file of these settings holds; ValueError, from `fault`, for settings that cannot be.
Plan = Callable[[Settings], Sequence[Part]]
#: Fills an array in C order with the next bytes of a file.
Fill = Callable[[Array], None]


def write(path: Any, kind: str, settings: Mapping[str, Any], parts: Iterable[Part], arrays: Iterable[Array]) -> None:
    """Write a file of class *kind*, or leave what was there if that fails.

    Parameters
    ----------
    path : str or path
        Taken as it is; an existing file is replaced. Its folder must exist.
    settings : mapping
        What `json` writes; in the order in which it is to stand.
    parts : Part
        Their data follow each other in this order.
    arrays : array
        C order; their bytes, one after another, are those of the parts.

    Raises
    ------
    OSError
        The file cannot be written. What was there before is untouched.
    """
    text, parts = json.dumps({"class": kind, **settings}, separators=(",", ":")), list(parts)
    with _replacing(path) as file:
        header = _header(text, parts, _NO_SUM)
        file.write(header)
        out = _Writer(file)
        for array in arrays:
            out.put(array)
        assert out.finish() == sum(part.nbytes for part in parts), "the arrays must be those of the parts"
        file.seek(0)
        file.write(_header(text, parts, out.sums.hex()))


@contextmanager
def reading(path: Any, kind: str, plan: Plan) -> Iterator[tuple[Settings, Fill]]:
    """Open a file of class *kind*: its settings, and what fills arrays with its data in the order of the parts.

    All data must be taken; their sum is compared at the end, so use nothing of them before the block is left.

    Raises
    ------
    OSError
        There is no such file, or it cannot be read.
    ValueError
        Another kind of file, another class, another version, a damaged file; a path that no file can have.
    """
    name = os.fspath(_target(path))
    with open(name, "rb", buffering=0) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            settings, sums, start, count = _checked_header(file, size, kind, plan)
            file.seek(start)
            data = _Reader(file, count)
            yield settings, data.fill
            if data.left or data.sums.hex() != sums:
                raise fault("the sum of its data is another one")
        except _Fault as error:
            what = f"it is damaged, {error}; save it again" if isinstance(error, _NotInFiles) else error
            raise ValueError(f"path must be a file that {kind}.save wrote, got {name!r}: {what}") from None


class _Fault(ValueError):
    """What is wrong with a file."""


class _NotInFiles(_Fault):
    """What a file cannot hold."""


def fault(what: str) -> ValueError:
    """An error that says what a file must hold: one that is read is damaged, and what is saved cannot be."""
    return _NotInFiles(what)


# ---- header


def _header(settings: str, parts: Sequence[Part], data_sum: bytes) -> bytes:
    """The beginning of a file, up to the data."""
    meta = {"format": "kvnumba", "version": str(VERSION), "header_sum": _NO_SUM.decode(), "data_sum": data_sum.decode(),
            "settings": settings}  # fmt: skip
    table: dict[str, Any] = {"__metadata__": meta}
    end = 0
    for part in parts:
        start, end = end, end + part.nbytes
        table[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": (start, end)}
    text = json.dumps(table, separators=(",", ":")).encode()
    text = text.ljust(round_up(8 + len(text), _DATA_UNIT) - 8)
    if len(text) > _MAX_HEADER:
        raise ValueError(f"a file must have a header of at most {_MAX_HEADER} bytes, got {len(text)}: too many arrays")
    header = len(text).to_bytes(8, "little") + text
    return _with_sum(header, _sum_of(header))


def _with_sum(header: bytes, digits: bytes) -> bytes:
    """*header* with other digits in the place of its sum."""
    at = 8 + len(_START) + len(f'{VERSION}","header_sum":"')
    return header[:at] + digits + header[at + len(digits) :]


def _checked_header(file: BinaryIO, size: int, kind: str, plan: Plan) -> tuple[Settings, bytes, int, int]:
    """Settings, sum of the data, where the data begin, and their bytes; after a check of all that the header says."""
    first = _exactly(file, min(size, 8 + len(_START)))
    if first[8:] != _START:
        raise _Fault("it is not a file of this package, or is damaged")
    length = int.from_bytes(first[:8], "little")
    if not len(_START) < length <= min(size - 8, _MAX_HEADER):
        raise fault(f"its header cannot have {length} bytes")
    header = first + _exactly(file, length - len(_START))
    version = _NUMBER.match(header, 8 + len(_START))
    if version is not None and int(version[1]) != VERSION:
        raise _Fault(f"it has version {int(version[1])} of the format, this package reads version {VERSION}")
    header_sum = version and _SUM.match(header, version.end())
    if not header_sum or _sum_of(_with_sum(header, _NO_SUM)) != header_sum[1]:
        raise fault("the sum of its header is another one")
    try:
        meta = json.loads(header[8:])["__metadata__"]
        settings, sums = json.loads(meta["settings"]), meta["data_sum"].encode()
        found = settings.pop("class")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise fault("its header cannot be read") from None
    if found != kind:
        raise _Fault(f"it is a file of {str(found)[:40]}; load it with the class that saved it")
    parts = plan(settings)
    text = json.dumps({"class": kind, **settings}, separators=(",", ":"))
    if _header(text, parts, sums) != header:
        raise fault("its settings do not fit the rest of its header")
    count = sum(part.nbytes for part in parts)
    if count != size - len(header):
        raise fault(f"it must have {count} bytes of data, got {size - len(header)}")
    return settings, sums, len(header), count


def integer(name: str, value: Any, lowest: int, highest: int) -> int:
    """Return *value* of a file's settings if it is an integer from *lowest* to *highest*."""
    if type(value) is not int or not lowest <= value <= highest:
        raise fault(f"{name} must be an integer from {lowest} to {highest}, got {str(value)[:40]}")
    return value


def word(name: str, value: Any, allowed: Sequence[str]) -> str:
    """Return *value* of a file's settings if it is one of *allowed*."""
    if not isinstance(value, str) or value not in allowed:
        raise fault(f"{name} must be one of {', '.join(allowed)}, got {str(value)[:40]}")
    return value


def shape_of(name: str, value: Any, axes: int) -> tuple[int, ...]:
    """A shape of at least *axes* axes such as NumPy can have."""
    if not isinstance(value, list) or not axes <= len(value) <= MAX_AXES:
        came = f"{len(value)}" if isinstance(value, list) else str(value)[:40]
        raise fault(f"{name} must be a list of {axes} to {MAX_AXES} integers, got {came}")
    size = 1
    for n in value:
        size *= max(1, integer(name, n, 0, 1 << 40))
    if size > 1 << 59:
        raise fault(f"{name} is that of no array")
    return tuple(value)


def keys_of(name: str, settings: Any, keys: Sequence[str]) -> None:
    """Raise unless *settings* has just these keys in this order."""
    if not isinstance(settings, dict) or list(settings) != list(keys):
        raise fault(f"{name} must say {', '.join(keys)}")


# ---- data


class _Sums:
    """The sum of bytes: of their little-endian 32-bit words, the last one filled up with zeros, modulo 2**64."""

    def __init__(self) -> None:
        self._sums, self._count = np.zeros(2, np.uint64), 0

    def add(self, data: Array) -> None:
        """Add uint8 [n]; n is a multiple of 4 in every call but the last. The memory behind may be overwritten."""
        words = data.view(np.uint32)
        if COMPILED:
            add_words(words, self._count, self._sums)
        else:
            wide, numbers = words.astype(np.uint64), np.arange(len(words), dtype=np.uint64)
            self._sums += np.array([wide.sum(), (wide * (numbers + np.uint64(self._count + 1))).sum()], np.uint64)
        self._count += len(words)

    def hex(self) -> bytes:
        return b"%016x%016x" % tuple(self._sums.tolist())


def _sum_of(header: bytes) -> bytes:
    sums, words = _Sums(), aligned((round_up(len(header), 4),), np.uint8)
    words[: len(header)] = np.frombuffer(header, np.uint8)
    sums.add(words)
    return sums.hex()


class _Writer:
    """Collects arrays into chunks, which are summed and written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._chunk, self._used, self._written = file, aligned((_CHUNK,), np.uint8), 0, 0
        self.sums = _Sums()

    def put(self, array: Array) -> None:
        data = _bytes_of(array)
        while data.size:
            n = min(data.size, _CHUNK - self._used)
            self._chunk[self._used : self._used + n] = data[:n]
            self._used, data = self._used + n, data[n:]
            if self._used == _CHUNK:
                self._flush()

    def _flush(self) -> None:
        self._file.write(self._chunk[: self._used].data)
        self._written += self._used
        words = round_up(self._used, 4)
        self._chunk[self._used : words] = 0
        self.sums.add(self._chunk[:words])
        self._used = 0

    def finish(self) -> int:
        """Write what is left; returns the number of bytes put."""
        self._flush()
        return self._written


class _Reader:
    """Reads *left* bytes chunk by chunk, summing each."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file, self._chunk, self._at, self._end = file, aligned((_CHUNK,), np.uint8), 0, 0
        self.left = left
        self.sums = _Sums()

    def fill(self, array: Array) -> None:
        data = _bytes_of(array)
        while data.size:
            if self._at == self._end:
                self._refill()
            n = min(data.size, self._end - self._at)
            data[:n] = self._chunk[self._at : self._at + n]
            self._at, data = self._at + n, data[n:]

    def _refill(self) -> None:
        n = min(self.left, _CHUNK)
        if n == 0:
            raise fault("its data end too early")
        view, got = self._chunk[:n].data, 0
        while got < n:
            more = self._file.readinto(view[got:])  # type: ignore[attr-defined]  # of a file without a buffer
            if not more:
                raise fault("its data end too early")
            got += more
        words = round_up(n, 4)
        self._chunk[n:words] = 0
        self.sums.add(self._chunk[:words])
        self._at, self._end, self.left = 0, n, self.left - n


def _bytes_of(array: Array) -> Array:
    """The memory of an array in C order, as uint8 [n]."""
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8)


def _exactly(file: BinaryIO, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = file.read(left)
        if not part:
            raise fault("it ends too early")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


# ---- the file itself


def _target(path: Any) -> Path:
    """The file that *path* means: of a symbolic link the one that it names."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or a path, got {type(path).__name__}")
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        name = b"\0"
    if b"\0" in name:
        raise ValueError(f"path must be one that a file can have, without null characters and surrogates, got {path!r}")
    target = Path(os.path.realpath(os.fsdecode(path)))
    if target.exists() and not target.is_file():  # a folder; a device, which must not be replaced; a pipe, which waits
        raise OSError(errno.EINVAL, "path must be that of a regular file, got something else", os.fspath(target))
    return target


@contextmanager
def _replacing(path: Any) -> Iterator[BinaryIO]:
    """A new file beside that of *path*; it takes its place when the block ends well and vanishes when it does not."""
    target = _target(path)
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}")
    with naming(path):
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                os.chmod(temporary, target.stat().st_mode & 0o7777)
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    _sync_folder(target.parent)


@contextmanager
def naming(path: Any) -> Iterator[None]:
    """Let an OSError in the block name *path*, not the hidden file beside it that is written first."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _sync_folder(folder: Path) -> None:
    """Let the new name outlast a loss of power, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError:  # some file systems cannot, and the file itself is safe
            pass
        finally:
            os.close(descriptor)

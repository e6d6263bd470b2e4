"""What files of caches hold: the stored tokens as arrays of the interchange form, one batch row after another.

The memory form, with its padding and its spare capacity, stays in memory. A row of keys or values is these arrays:

* float formats: ``rows [H, length, D]``;
* coded keys: ``sinks [H, 4, D]``, ``lo`` and ``scale [H, blocks, D]``, ``codes [H, blocks, 32, row bytes]``,
  ``residual [H, 0..31, D]``, ``kept [H, 0 or 32, D]``: the float32 rows of the last sealed block while they are there;
* coded values: ``sinks``, ``lo`` and ``scale [H, n]``, ``codes [H, n, row bytes]`` for the n tokens after the sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvnumba._jit import COMPILED
from kvnumba.buffers import (
    KEPT,
    LENGTH,
    FloatRows,
    KeyCodes,
    KeyCodes8,
    KVBuffers,
    ValueCodes8,
    aligned,
    allocate,
    allocate_store,
    is_coded,
    usable_capacity,
)
from kvnumba.checks import MAX_AXES
from kvnumba.kernels import interchange as forms
from kvnumba.spec import BITS, BLOCK, FORMATS, LONGEST, MOST, QUANTIZABLE, SINK, CacheSpec, row_bytes
from kvnumba.storage import Fill, Part, Settings, fault, integer, keys_of, reading, shape_of, word, write

_T = TypeVar("_T")
Array = npt.NDArray[Any]
State = npt.NDArray[np.int64]

#: Type of the arrays of a float format.
FLOAT_TYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}

#: Bytes of codes that are converted at once: they stay in the processor's cache between two passes.
_PIECE = 1 << 17

#: What the settings of a layer say; the first ones make its `CacheSpec`.
_SPEC = ("num_kv_heads", "head_dim", "v_head_dim", "k_format", "v_format", "batch_size", "window")
_LAYER = (*_SPEC, "dropped", "lengths", "kept")


class Layer(NamedTuple):
    """Keys and values of one layer, as they go to a file and come from it."""

    spec: CacheSpec
    buffers: KVBuffers
    dropped: int  #: tokens of a cache with a window that are gone, between the sinks and those in the buffers


# ---- layers of keys and values


def save_layers(path: Any, kind: str, layers: Sequence[Layer]) -> None:
    """Write a file of class *kind* that holds these layers."""
    _need_compiled("save")
    settings = {"block": BLOCK, "sink": SINK, "layers": [_described(layer) for layer in layers]}
    write(path, kind, settings, _layers_plan(settings), _layers_arrays(layers))


def load_layers(path: Any, kind: str, make: Callable[[Layer], _T]) -> list[_T]:
    """The layers of a file of class *kind*, each by *make*."""
    _need_compiled("load")
    with reading(path, kind, _layers_plan) as (settings, fill):
        layers = []
        for described in settings["layers"]:
            spec = CacheSpec(**{name: described[name] for name in _SPEC})
            buffers = _filled(spec, described["lengths"], described["kept"], fill)
            layers.append(make(Layer(spec, buffers, described["dropped"])))
    return layers


def _need_compiled(name: str) -> None:
    if not COMPILED:
        raise RuntimeError(f"{name} needs compiled code, got NUMBA_DISABLE_JIT=1; unset it to use files of codes")


def _described(layer: Layer) -> Settings:
    """The settings of a layer."""
    spec, state = layer.spec, layer.buffers.state
    numbers = {name: getattr(spec, name) for name in _SPEC}
    kept = [is_coded(spec.k_format) and has_kept(state, b) for b in range(len(state))]
    return {**numbers, "dropped": layer.dropped, "lengths": state[:, LENGTH].tolist(), "kept": kept}


def _layers_parts(layers: Sequence[Settings]) -> list[Part]:
    parts = []
    for i, layer in enumerate(layers):
        for b, (length, kept) in enumerate(zip(layer["lengths"], layer["kept"])):
            if b < layer["batch_size"]:
                for side, keys in (("k", True), ("v", False)):
                    name = f"layers.{i}.rows.{b}.{'keys' if keys else 'values'}"
                    dim = layer["head_dim" if keys else "v_head_dim"]
                    parts += row_parts(name, layer[f"{side}_format"], keys, layer["num_kv_heads"], dim, length, kept)
    return parts


def _layers_arrays(layers: Sequence[Layer]) -> Iterator[Array]:
    for spec, buffers, _ in layers:
        for b in range(spec.batch_size):
            length, kept = int(buffers.state[b, LENGTH]), has_kept(buffers.state, b)
            yield from row_arrays(buffers.k, b, length, kept)
            yield from row_arrays(buffers.v, b, length, kept)


def _layers_plan(settings: Settings) -> list[Part]:
    keys_of("its settings", settings, ("block", "sink", "layers"))
    _check_layout(settings)
    if not isinstance(settings["layers"], list):
        raise fault("layers must be a list")
    for layer in settings["layers"]:
        _check_layer(layer)
    return _layers_parts(settings["layers"])


def _check_layout(settings: Settings) -> None:
    for name, value in (("block", BLOCK), ("sink", SINK)):
        integer(name, settings[name], value, value)


def _check_layer(layer: Any) -> None:
    keys_of("a layer", layer, _LAYER)
    integer("num_kv_heads", layer["num_kv_heads"], 1, MOST)
    integer("head_dim", layer["head_dim"], 1, MOST)
    integer("v_head_dim", layer["v_head_dim"], 1, MOST)
    word("k_format", layer["k_format"], FORMATS)
    word("v_format", layer["v_format"], FORMATS)
    if layer["window"] is not None:
        integer("window", layer["window"], 1, LONGEST)
    integer("dropped", layer["dropped"], 0, 0 if layer["window"] is None else LONGEST)
    lengths, kept = layer["lengths"], layer["kept"]
    if not isinstance(lengths, list) or not isinstance(kept, list) or len(lengths) != len(kept) or not lengths:
        raise fault("lengths and kept must be lists of one entry for each row")
    lowest = 0 if len(lengths) == 1 else len(lengths)  # a cache without rows has a length too
    integer("batch_size", layer["batch_size"], lowest, min(len(lengths), MOST))
    for length, flag in zip(lengths, kept):
        _check_length(length, flag, is_coded(layer["k_format"]))


def _check_length(length: Any, kept: Any, coded_keys: bool) -> None:
    integer("length", length, 0, LONGEST)
    if type(kept) is not bool or (kept and not (coded_keys and sealed(length))):
        raise fault("kept must be true or false, and true only where a key block is sealed")


def _filled(spec: CacheSpec, lengths: list[int], kept: list[bool], fill: Fill) -> KVBuffers:
    buffers = allocate(spec, usable_capacity(spec, max(lengths)))
    for b, (length, flag) in enumerate(zip(lengths, kept)):
        buffers.state[b] = length, kept_state(length, flag or not is_coded(spec.k_format))
        if b < spec.batch_size:
            fill_row(buffers.k, b, length, flag, fill)
            fill_row(buffers.v, b, length, flag, fill)
    return buffers


# ---- one tensor of codes


def save_codes(path: Any, settings: Settings, store: Any, state: State) -> None:
    """Write a file of a QuantizedCache: *settings* are its layout, bits, lead and dim; *store* is None if it is new."""
    _need_compiled("save")
    length, keys = int(state[0, LENGTH]), settings["layout"] == "per_channel"
    kept = keys and has_kept(state, 0)
    settings = {"block": BLOCK, "sink": SINK, **settings, "length": length, "kept": kept}
    arrays = iter(()) if store is None else row_arrays(store, 0, length, kept)
    write(path, "QuantizedCache", settings, _codes_plan(settings), arrays)


def load_codes(path: Any, kind_of: Callable[[Settings], type]) -> tuple[Settings, Any, State]:
    """Settings, store (of the class that *kind_of* says; None if it is new) and state of a file of a QuantizedCache."""
    _need_compiled("load")
    with reading(path, "QuantizedCache", _codes_plan) as (settings, fill):
        length, kept, store = settings["length"], settings["kept"], None
        if settings["lead"] is not None:
            store = allocate_store(kind_of(settings), 1, _size(settings["lead"]), length, settings["dim"])
            fill_row(store, 0, length, kept, fill)
    state = np.array([[length, kept_state(length, kept)]], np.int64)
    return settings, store, state


def _codes_plan(settings: Settings) -> list[Part]:
    keys_of("its settings", settings, ("block", "sink", "layout", "bits", "lead", "dim", "length", "kept"))
    _check_layout(settings)
    keys = word("layout", settings["layout"], ("per_channel", "per_token")) == "per_channel"
    if integer("bits", settings["bits"], 4, 8) not in (4, 8):
        raise fault("bits must be 4 or 8")
    new = settings["lead"] is None
    dim = integer("dim", settings["dim"], 0 if new else 1, 0 if new else MOST)
    _check_length(settings["length"], settings["kept"], keys)
    if new:
        integer("length", settings["length"], 0, 0)
        return []
    heads = _size(shape_of("lead", settings["lead"], 0))
    return row_parts("tokens", f"int{settings['bits']}", keys, heads, dim, settings["length"], settings["kept"])


# ---- one array


def save_array(path: Any, kind: str, axis: int, dtype: str | None, array: Array | None) -> None:
    """Write a file of a cache that holds *array*, None if it is new; *dtype*: what the cache calls its numbers."""
    settings = {"axis": axis, "dtype": dtype, "shape": None if array is None else list(array.shape)}
    arrays = iter(()) if array is None else iter((np.ascontiguousarray(array),))
    write(path, kind, settings, _array_plan(settings), arrays)


def load_array(path: Any, kind: str, dtype_of: Callable[[str | None], Any]) -> tuple[int, str | None, Array | None]:
    """Axis, dtype and array of such a file; *dtype_of* says the dtype of the array, or raises ValueError."""
    with reading(path, kind, _array_plan) as (settings, fill):
        array = None
        dtype = dtype_of(settings["dtype"])
        if settings["shape"] is not None:
            array = np.empty(settings["shape"], dtype)
            fill(array)
    return settings["axis"], settings["dtype"], array


def _array_plan(settings: Settings) -> list[Part]:
    keys_of("its settings", settings, ("axis", "dtype", "shape"))
    axis, dtype, shape = integer("axis", settings["axis"], 0, MAX_AXES - 1), settings["dtype"], settings["shape"]
    if dtype is not None or shape is not None:
        word("dtype", dtype, tuple(FLOAT_TYPES))
    if shape is None:
        return []
    return [Part("tokens", FLOAT_TYPES[dtype], shape_of("shape", shape, axis + 1))]


def _size(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


# ---- one row of keys or values


def sealed(length: int) -> int:
    """Key blocks that are quantized when *length* tokens are stored."""
    return max(0, (length - SINK) // BLOCK)


def row_parts(name: str, format: str, keys: bool, heads: int, dim: int, length: int, kept: bool) -> list[Part]:
    """The arrays of one row of keys or values."""
    if not is_coded(format):
        return [Part(f"{name}.rows", FLOAT_TYPES[format], (heads, length, dim))]
    count, packed = max(0, length - SINK), row_bytes(dim, BITS[format])
    blocks, rest = divmod(count, BLOCK)
    groups = (heads, blocks, dim) if keys else (heads, count)
    parts = [
        Part(f"{name}.sinks", "F32", (heads, SINK, dim)),  # in full, zeros where none is stored
        Part(f"{name}.lo", "F32", groups),
        Part(f"{name}.scale", "F32", groups),
        Part(f"{name}.codes", "U8", (heads, blocks, BLOCK, packed) if keys else (heads, count, packed)),
    ]
    if keys:
        parts.append(Part(f"{name}.residual", "F32", (heads, rest, dim)))
        parts.append(Part(f"{name}.kept", "F32", (heads, BLOCK if kept else 0, dim)))
    return parts


def has_kept(state: State, b: int) -> bool:
    """Whether the float32 rows of the last sealed block of row *b* are there."""
    return bool(state[b, KEPT] < sealed(int(state[b, LENGTH])))


def kept_state(length: int, kept: bool) -> int:
    """What ``state`` says of it: the first block whose float32 rows are there."""
    return max(0, sealed(length) - 1) if kept else sealed(length)


# ---- a store to arrays


def row_arrays(store: Any, b: int, length: int, kept: bool) -> Iterator[Array]:
    """Arrays whose bytes are those of `row_parts`; each may be overwritten when the next is asked for."""
    if type(store) in FloatRows:
        for head in store.rows[b]:
            yield head[:length]
        return
    count = max(0, length - SINK)
    sinks = np.zeros((store[0].shape[1], SINK, store[0].shape[3]), np.float32)
    sinks[:, : min(length, SINK)] = store[0][b, :, : min(length, SINK)]
    yield sinks
    if type(store) in KeyCodes:
        blocks, rest = divmod(count, BLOCK)
        groups = np.moveaxis(store.params[b, :, :blocks, :, : sinks.shape[2]], 2, 0)
    else:
        tokens = store.params.shape[2] * BLOCK
        groups = np.moveaxis(store.params[b], 2, 0).reshape(2, len(sinks), tokens)[:, :, :count]
    lo, scale = np.ascontiguousarray(groups)
    yield lo
    yield np.where(scale == 0, np.float32(1), scale)  # of a constant group, see docs/memory_layout.md
    form = _Form(store)
    for codes in store.codes[b]:
        yield from _packed(form, codes, blocks * BLOCK if type(store) in KeyCodes else count)
    if type(store) in KeyCodes:
        yield np.ascontiguousarray(store.recent[b, :, _slot(blocks)][:, :rest])
        yield np.ascontiguousarray(store.recent[b, :, _slot(blocks - 1)][:, : BLOCK if kept else 0])


def _packed(form: _Form, codes: Array, count: int) -> Iterator[Array]:
    """Packed rows of *count* tokens of one head, piece by piece."""
    for first, tokens in form.pieces(count):
        rows = form.rows(tokens)
        form.unload(form.memory(codes, first, tokens), form.words(rows))
        packed = rows[:tokens, : form.packed]
        if form.odd:
            packed[:, -1] &= 15
        yield np.ascontiguousarray(packed)


# ---- arrays to a store


def fill_row(store: Any, b: int, length: int, kept: bool, fill: Fill) -> None:
    """Let an empty row of *store* hold what the arrays of `row_parts` say, which *fill* brings."""
    if type(store) in FloatRows:
        for head in store.rows[b]:
            fill(head[:length])
        return
    count, heads, dim = max(0, length - SINK), store[0].shape[1], store[0].shape[3]
    sinks = _taken(fill, (heads, SINK, dim))
    if sinks[:, length:].view(np.uint32).any():
        raise fault("sinks that are not stored must be 0")
    store[0][b, :, :SINK] = sinks
    keys = type(store) in KeyCodes
    blocks, rest = divmod(count, BLOCK)
    form = _Form(store)
    lo, scale = _taken_groups(form.bits, fill, (heads, blocks, dim) if keys else (heads, count))
    for h in range(heads):
        _fill_codes(form, store.codes[b, h], blocks * BLOCK if keys else count, scale[h], fill)
    if keys:
        store.params[b, :, :blocks, 0, :dim], store.params[b, :, :blocks, 1, :dim] = lo, scale
        store.recent[b, :, _slot(blocks)][:, :rest] = _taken(fill, (heads, rest, dim))
        if kept:
            store.recent[b, :, _slot(blocks - 1)] = _taken(fill, (heads, BLOCK, dim))
    else:
        for i, array in enumerate((lo, scale)):
            store.params[b, :, :blocks, i] = array[:, : blocks * BLOCK].reshape(heads, blocks, BLOCK)
            store.params[b, :, blocks : blocks + 1, i, :rest] = array[:, None, blocks * BLOCK :]


def _taken(fill: Fill, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The next float32 numbers of a file, which must be such as a cache of codes takes."""
    array = np.empty(shape, np.float32)
    fill(array)
    check_quantizable("float32 rows", array)
    return array


def _taken_groups(bits: int, fill: Fill, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """``lo`` and ``scale`` of groups."""
    lo, scale = np.empty(shape, np.float32), np.empty(shape, np.float32)
    fill(lo)
    fill(scale)
    check_groups(bits, lo, scale)
    return lo, scale


def check_groups(bits: int, lo: Array, scale: Array) -> None:
    """Raise unless groups of numbers can have these parameters, float32 in C order."""
    check_quantizable("lo", lo)
    with np.errstate(over="ignore", invalid="ignore"):
        highest = lo + np.float32(2**bits - 1) * scale
    # The largest numbers of the groups, but for the rounding of the scale, of the product and of the sum.
    if not (scale.min(initial=1) > 0 and highest.max(initial=0) <= QUANTIZABLE * np.float32(1 + 1e-6)):
        raise fault("scale must be above 0 and such that lo + code * scale can be quantized")


def check_quantizable(name: str, array: Array) -> None:
    """Raise unless every number of *array* is finite and at most half the range of float32 in magnitude."""
    if not (array.min(initial=0) >= -QUANTIZABLE and array.max(initial=0) <= QUANTIZABLE):  # a NaN is neither
        raise fault(f"{name} must hold numbers that can be quantized")


def _fill_codes(form: _Form, codes: Array, count: int, scale: Array, fill: Fill) -> None:
    """Codes of *count* tokens of one head; scales of constant groups become 0, as they are in memory."""
    for first, tokens in form.pieces(count):
        rows = form.rows(tokens)
        packed = rows[:tokens, : form.packed]
        if packed.flags.c_contiguous:
            fill(packed)
        else:
            narrow = np.empty(packed.shape, np.uint8)
            fill(narrow)
            packed[...] = narrow
        if form.odd and (packed[:, -1] > 15).any():
            raise fault("a row of codes of odd length must end in a nibble of 0")
        form.forget_constant(packed, scale, first)
        memory = form.memory(codes, first, tokens)
        form.load(form.words(rows), memory)
        if tokens % 4:  # of the last group of four values; keys come in whole blocks
            memory[-1].view(np.uint8).reshape(-1, 4)[:, tokens % 4 :] = 0


def _slot(block: int) -> slice:
    """Rows of ``recent`` that hold a block."""
    return slice(SINK + block % 2 * BLOCK, SINK + block % 2 * BLOCK + BLOCK)


class _Form:
    """How codes of one store are packed, in memory and in rows."""

    def __init__(self, store: Any) -> None:
        self.keys = type(store) in KeyCodes
        self.bits = 8 if type(store) in (KeyCodes8, ValueCodes8) else 4
        dim, block_bytes = store[0].shape[3], store.codes.shape[3]
        self.packed, self.odd = row_bytes(dim, self.bits), self.bits == 4 and dim % 2 == 1
        self.width = block_bytes // BLOCK  #: bytes of a row as wide as the memory form
        self.unit = BLOCK if self.keys else 4  #: tokens that belong together in memory
        side = "keys" if self.keys else "values"
        self.load = getattr(forms, f"{side}_from_rows_{self.bits}")
        self.unload = getattr(forms, f"rows_from_{side}_{self.bits}")
        self.step = max(1, _PIECE // block_bytes) * BLOCK  #: tokens of a piece
        self._rows = aligned((self.step, self.width), np.uint8)

    def pieces(self, count: int) -> Iterator[tuple[int, int]]:
        """First token and number of tokens of pieces of whole blocks, the last one of what is left."""
        for first in range(0, count, self.step):
            yield first, min(self.step, count - first)

    def rows(self, tokens: int) -> Array:
        """Whole units that hold *tokens*: uint8 [n, width], what is padding 0 unless it has been overwritten."""
        rows = self._rows[: -(-tokens // self.unit) * self.unit]
        rows[tokens:] = 0
        return rows

    def words(self, rows: Array) -> Array:
        """*rows* as the kernels take them."""
        if self.keys:
            return rows.view(np.uint32 if self.bits == 8 else np.uint16)
        return rows

    def memory(self, codes: Array, first: int, tokens: int) -> Array:
        """The units of *tokens* from *first* on, which begins a block, in codes [blocks, block bytes] of a head."""
        units = codes.reshape(-1, self.width * self.unit)
        found = units[first // self.unit : -(-(first + tokens) // self.unit)]
        return found.view(np.uint32) if self.bits == 8 else found

    def forget_constant(self, packed: Array, scale: Array, first: int) -> None:
        """Set scales of 1 to 0 where all codes of the group are 0; tokens of *packed* from *first* on."""
        if not self.keys:
            scale = scale[first : first + len(packed)]
            ones = np.flatnonzero(scale == 1)
            scale[ones] = packed[ones].any(1)
            return
        scale = scale[first // BLOCK : (first + len(packed)) // BLOCK]
        ones = np.flatnonzero((scale == 1).any(1))
        if ones.size:
            used = np.bitwise_or.reduce(packed.reshape(len(scale), BLOCK, -1)[ones], 1)
            if self.bits == 4:
                used = np.stack((used & 15, used >> 4), 2).reshape(len(ones), -1)[:, : scale.shape[1]]
            scale[ones] = np.where((scale[ones] == 1) & (used == 0), np.float32(0), scale[ones])

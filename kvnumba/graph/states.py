"""What the stateful nodes of a graph hold while a session runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import kvnumba as kv
from kvnumba.spec import Sized

Array = npt.NDArray[Any]


class State(Protocol):
    """The state of one node, or of a pair of caches that were fused with their attention."""

    name: str
    names: tuple[str, ...]  #: the past inputs it stands for

    def length(self) -> int: ...
    def truncate(self, n: int) -> None: ...
    def reset(self) -> None: ...
    def clone(self) -> Any: ...
    def past_shape(self, name: str, symbols: Mapping[str, int]) -> list[int]: ...
    def nbytes(self) -> int: ...
    def kind(self) -> tuple[Any, ...]: ...
    def save(self, path: str) -> None: ...
    def load(self, path: str) -> None: ...


class ArrayState:
    """A ``Cache`` node: one tensor, as floats or as codes.

    Parameters
    ----------
    name : str
    axis : int
    shape : list of str
        Of the past in the graph: numbers and names of symbols.
    form : str
        "float", "int8" or "int4".
    layout : str
        Of codes: "per_channel" or "per_token".
    past_first : bool
        Whether new tokens come after the stored ones; else before them.
    dtype : str
        Of the tokens; "" for any.
    """

    def __init__(
        self, name: str, axis: int, shape: list[str], form: str = "float", layout: str = "", past_first: bool = True,
        dtype: str = "",
    ) -> None:  # fmt: skip
        self.name, self.axis, self.shape, self.form, self.layout = name, axis, shape, form, layout
        self.past_first, self.dtype = bool(past_first), dtype
        self.names = (name,)
        self.reset()

    def reset(self) -> None:
        self.known: list[int] | None = None
        self.cache: Any = (
            kv.ConcatCache(self.axis) if self.form == "float" else kv.QuantizedCache(self.layout, int(self.form[3:]))
        )

    def length(self) -> int:
        return len(self.cache)

    def append(self, x: Array) -> Array:
        """Store *x* and return all: newest last, or first where the graph puts them first."""
        _fits(f"state {self.name!r} must be given tokens", x.shape, self.shape, self.axis)
        self.cache.append(x if self.past_first else np.flip(x, self.axis))
        self.known = list(x.shape)
        if not len(self.cache):  # which knows no shape yet
            return x
        if self.form != "float":
            decoded: Array = self.cache.contiguous().astype(x.dtype, copy=False)
            return decoded
        stored: Array = self.cache.view()
        return stored if self.past_first else np.ascontiguousarray(np.flip(stored, self.axis))

    def truncate(self, n: int) -> None:
        self.cache.truncate(n)

    def clone(self) -> ArrayState:
        other = object.__new__(ArrayState)
        other.__dict__.update(self.__dict__)
        other.cache = self.cache._clone()
        return other

    def past_shape(self, name: str, symbols: Mapping[str, int]) -> list[int]:
        if self.known is None:
            return _empty(self.shape, self.axis, symbols)
        return [len(self.cache) if i == self.axis else n for i, n in enumerate(self.known)]

    def nbytes(self) -> int:
        return int(self.cache.nbytes)

    def kind(self) -> tuple[Any, ...]:
        """What two states have in common of which one can go on from the other."""
        return self.axis, self.shape, self.form, self.layout, self.past_first, self.dtype

    def save(self, path: str) -> None:
        self.cache.save(path)

    def load(self, path: str) -> None:
        """Take what `save` wrote; ValueError if it is of another kind."""
        loaded = type(self.cache).load(path)
        kinds = [(one.axis,) if self.form == "float" else (one.layout, one.bits) for one in (loaded, self.cache)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"path must hold a state {self.name!r} of {kinds[1]}, got {kinds[0]}")
        stored = loaded.view() if self.form == "float" else loaded.contiguous()
        if len(loaded):
            _fits(f"path must hold a state {self.name!r}", stored.shape, self.shape, self.axis)
            if self.form == "float" and self.dtype not in ("", stored.dtype.name):
                raise ValueError(f"path must hold a state {self.name!r} of {self.dtype}, got {stored.dtype}")
        self.cache = loaded
        self.known = list(stored.shape) if len(loaded) else None


class AttentionState:
    """A ``CachedAttention`` node: keys and values [B, H_kv, T, D] in a `KVCache`."""

    def __init__(self, k_name: str, v_name: str, k_shape: list[str], v_shape: list[str], k: str, v: str) -> None:
        self.name, self.names = k_name, (k_name, v_name)
        self.shapes = {k_name: k_shape, v_name: v_shape}
        self.formats = k, v
        self.reset()

    def reset(self) -> None:
        self.cache: kv.KVCache | None = None

    def length(self) -> int:
        return 0 if self.cache is None else len(self.cache)

    def step(self, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """Store *k* and *v*, attend *q*: `KVCache.step`."""
        for name, x in zip(self.names, (k, v)):
            _fits(f"state {name!r} must be given tokens", x.shape, self.shapes[name], 2)
        if self.cache is None:
            k_format, v_format = self.formats
            cache = kv.KVCache(
                k.shape[1], k.shape[3], k_format=k_format, v_format=v_format, batch_size=k.shape[0],
                v_head_dim=v.shape[3],
            )  # fmt: skip
            out: Array = cache.step(q, k, v, **options)
            self.cache = cache
            return out
        return self.cache.step(q, k, v, **options)

    def truncate(self, n: int) -> None:
        if self.cache is not None:
            self.cache.truncate(n)

    def clone(self) -> AttentionState:
        other = object.__new__(AttentionState)
        other.__dict__.update(self.__dict__)
        other.cache = None if self.cache is None else self.cache._clone()
        return other

    def past_shape(self, name: str, symbols: Mapping[str, int]) -> list[int]:
        return _empty(self.shapes[name], 2, symbols) if self.cache is None else self._shape_in(self.cache, name)

    def _shape_in(self, cache: kv.KVCache, name: str) -> list[int]:
        spec = cache.spec
        dim = spec.head_dim if name == self.names[0] else spec.v_head_dim
        return [spec.batch_size, spec.num_kv_heads, len(cache), dim]

    def nbytes(self) -> int:
        return 0 if self.cache is None else self.cache.nbytes

    def kind(self) -> tuple[Any, ...]:
        """What two states have in common of which one can go on from the other."""
        return self.shapes, self.formats

    def save(self, path: str) -> None:
        if self.cache is None:
            raise ValueError(f"state {self.name!r} must hold tokens to be saved, got none")
        self.cache.save(path)

    def load(self, path: str) -> None:
        """Take what `save` wrote; ValueError if it is of another kind."""
        loaded = kv.KVCache.load(path)
        spec = loaded.spec
        if (spec.k_format, spec.v_format) != self.formats:
            raise ValueError(
                f"path must hold a state {self.name!r} of {self.formats}, got {(spec.k_format, spec.v_format)}"
            )
        for name, shape in self.shapes.items():
            _fits(f"path must hold a state {name!r}", self._shape_in(loaded, name), shape, 2)
        self.cache = loaded


class States(Sized):
    """The states of all nodes: what a snapshot of a session holds."""

    def __init__(self, states: dict[str, ArrayState | AttentionState]) -> None:
        self.by_name = states

    def __len__(self) -> int:
        return min((state.length() for state in self.by_name.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens."""
        return sum(state.nbytes() for state in self.by_name.values())

    def kinds(self) -> dict[str, tuple[Any, ...]]:
        """Equal for the sessions of one model."""
        return {name: state.kind() for name, state in self.by_name.items()}

    def _clone(self) -> States:
        return States({name: state.clone() for name, state in self.by_name.items()})

    def _take(self) -> States:
        taken = self._clone()
        for state in self.by_name.values():
            state.reset()
        return taken


def _empty(shape: list[str], axis: int, symbols: Mapping[str, int]) -> list[int]:
    """Shape of a state without tokens: 0 along *axis*, and 1 for a symbol that *symbols* does not know."""
    return [0 if i == axis else int(text) if text.isdecimal() else symbols.get(text, 1) for i, text in enumerate(shape)]


def _fits(must: str, got: Sequence[int], shape: list[str], axis: int) -> None:
    """Raise, with a message that begins with *must*, unless *got* agrees with the numbers of *shape* beside *axis*."""
    wrong = len(got) != len(shape) or any(
        text.isdecimal() and i != axis and int(text) != n for i, (text, n) in enumerate(zip(shape, got))
    )
    if wrong:
        wanted = ", ".join("S" if i == axis else text for i, text in enumerate(shape))
        raise ValueError(f"{must} of shape [{wanted}], got {list(got)}")


def attention_options(
    scale: float, is_causal: int, softcap: float, mask: Array | None, window: tuple[int, int] | None, T: int
) -> dict[str, Any]:
    """Attributes of an ONNX attention as options of `KVCache.attend`, over T keys."""
    options: dict[str, Any] = {"causal": bool(is_causal), "softcap": softcap}
    if not math.isnan(scale):
        options["sm_scale"] = scale
    if mask is not None:
        options["mask"] = _padded(mask, T)
    if window is not None:
        options["window"] = window
    return options


def _padded(mask: Array, T: int) -> Array:
    """A mask over fewer keys hides the others, as the ONNX operator says."""
    missing = T - mask.shape[-1]
    if missing <= 0 or mask.shape[-1] == 1:
        return mask
    hidden = np.zeros((*mask.shape[:-1], missing), mask.dtype)
    return np.concatenate([mask, hidden if mask.dtype == bool else hidden - np.inf], -1)


def split_heads(x: Array, heads: int) -> Array:
    """[B, S, H * D] as [B, H, S, D]; an array of four axes as it is."""
    if not heads or x.ndim == 4:
        return x
    batch, tokens, width = x.shape
    if width % heads:
        raise ValueError(f"hidden size must be a multiple of {heads} heads, got {width}")
    return x.reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3)

"""The caches of all layers of a model, with formats by layer, in one object and in one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from kvnumba import checks, interchange
from kvnumba.cache import KVCache
from kvnumba.snapshot import Snapshot, nbytes
from kvnumba.spec import MOST, Sized


class KVCaches(Sized, Sequence[KVCache]):
    """The key/value caches of all layers of a model: a sequence of `KVCache`.

    Parameters
    ----------
    num_layers : int
        At least 1.
    num_kv_heads, head_dim, v_head_dim, k_format, v_format, window
        As of `KVCache`; each for all layers, or a sequence with an entry for each.
    batch_size, capacity : int
        As of `KVCache`, for all layers.

    Notes
    -----
    ``len`` is the number of layers, `length` that of tokens. `layer_formats` gives the outer layers of a model, which
    are the most sensitive, another format than the rest. Where memory runs out while rows of all layers are chosen, the
    layers before are changed and those after are not.
    """

    #: What makes the cache of one layer.
    _kind: type[KVCache] = KVCache

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        *,
        k_format: str | Sequence[str] = "float32",
        v_format: str | Sequence[str] = "float32",
        batch_size: int = 1,
        capacity: int = 0,
        v_head_dim: int | Sequence[int] | None = None,
        window: int | Sequence[int | None] | None = None,
    ) -> None:
        count = checks.positive_int("num_layers", num_layers)
        if count > MOST:
            raise ValueError(f"num_layers must be at most {MOST}, got {count}")
        given = {
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "v_head_dim": v_head_dim,
            "k_format": k_format,
            "v_format": v_format,
            "window": window,
        }
        options = [_each(name, value, count) for name, value in given.items()]
        self._layers = [
            self._kind(batch_size=batch_size, capacity=capacity, **dict(zip(given, layer)))
            for layer in zip(*options, strict=True)
        ]

    # ---- the main work

    def append(self, layer: int, k: Any, v: Any, **options: Any) -> None:
        """`KVCache.append` of one layer, counted from 0; IndexError where there is no such layer."""
        self._layer(layer).append(k, v, **options)

    def attend(self, layer: int, q: Any, **options: Any) -> Any:
        """`KVCache.attend` of one layer, as `append`."""
        return self._layer(layer).attend(q, **options)

    def step(self, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """`KVCache.step` of one layer, as `append`."""
        return self._layer(layer).step(q, k, v, **options)

    def _layer(self, layer: int) -> KVCache:
        return self._layers[checks.layer(layer, len(self._layers))]

    # ---- state

    def truncate(self, n: Any) -> None:
        """Keep the first *n* tokens of every row of every layer, or n[b] of row b; every layer must have as many.

        Layers that are ahead lose the others too.
        """
        if isinstance(n, (list, tuple, np.ndarray)):
            self._need_same_rows()
            least = [min(lengths) for lengths in zip(*(layer.lengths for layer in self._layers))]
            n = checks.per_row("n", n, least, "the tokens that every layer has in the row")
        else:
            n = checks.length("n", n, self.length)
        cuts = [layer._cuts(n) for layer in self._layers]  # all are checked before the first is cut
        for layer, lengths in zip(self._layers, cuts):
            layer._cut(lengths)

    def reorder(self, idx: Any) -> None:
        """`KVCache.reorder` of every layer."""
        rows = self._rows(idx)
        for layer in self._layers:
            layer.reorder(rows)

    def select(self, idx: Any) -> None:
        """`KVCache.select` of every layer."""
        rows = self._rows(idx)
        for layer in self._layers:
            layer.select(rows)

    def repeat_interleave(self, n: int) -> None:
        """`KVCache.repeat_interleave` of every layer."""
        for layer in self._layers:
            layer.repeat_interleave(n)

    def _rows(self, idx: Any) -> list[int]:
        """*idx* as rows that every layer has."""
        self._need_same_rows()
        return checks.rows("idx", idx, self._layers[0].spec.batch_size)

    def _need_same_rows(self) -> None:
        """Raise unless a choice of rows that fits the first layer fits all of them."""
        sizes = sorted({layer.spec.batch_size for layer in self._layers})
        if len(sizes) > 1:
            raise ValueError(f"the layers must have the same batch_size, got {sizes}; choose rows of each layer")

    def reset(self) -> None:
        """Forget all tokens of all layers."""
        for layer in self._layers:
            layer.reset()

    def reserve(self, capacity: int) -> None:
        """Make room for *capacity* tokens in every layer."""
        for layer in self._layers:
            layer.reserve(capacity)

    def freeze(self, *, consume: bool = False) -> Snapshot[KVCaches]:
        """A snapshot of all layers, as `KVCache.freeze`; its ``len`` is the number of layers."""
        return Snapshot(self._take() if consume else self._clone())

    def _clone(self) -> KVCaches:
        return self._of([layer._clone() for layer in self._layers])

    def _take(self) -> KVCaches:
        empty = [layer._empty() for layer in self._layers]  # what can fail comes before what cannot
        taken = self._clone()
        for layer, buffers in zip(self._layers, empty):
            layer._restart(buffers)
        return taken

    @classmethod
    def _of(cls, layers: list[KVCache]) -> KVCaches:
        caches = object.__new__(cls)
        caches._layers = layers
        return caches

    def __copy__(self) -> KVCaches:
        return self._clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCaches:
        return self._clone()

    def save(self, path: Any) -> None:
        """Write all layers to one file, as `KVCache.save`."""
        interchange.save_layers(path, "KVCaches", [layer._layer() for layer in self._layers])

    @classmethod
    def load(cls, path: Any) -> KVCaches:
        """What `save` wrote, as `KVCache.load`."""
        layers = interchange.load_layers(path, "KVCaches", cls._kind._restored)
        if not layers:
            raise ValueError("path must be a file of at least one layer, got none")
        return cls._of(layers)

    # ---- what it is

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> KVCache: ...
    @overload
    def __getitem__(self, index: slice) -> list[KVCache]: ...
    def __getitem__(self, index: int | slice) -> KVCache | list[KVCache]:
        if isinstance(index, slice):
            return self._layers[index]
        return self._layers[checks.layer(index, len(self._layers), -len(self._layers))]

    def __iter__(self) -> Iterator[KVCache]:
        return iter(self._layers)

    @property
    def length(self) -> int:
        """Tokens that every layer holds; while a model runs, the first layers hold more."""
        return min(len(layer) for layer in self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens of all layers, as `KVCache.nbytes`."""
        return nbytes(self)

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of all arrays of all layers."""
        return sum(layer.nbytes_allocated for layer in self._layers)

    def __repr__(self) -> str:
        longest = max(len(layer) for layer in self._layers)
        most = f" (of the longest layer {longest})" if longest > self.length else ""
        layers = f"{len(self)} layer{'s' if len(self) > 1 else ''}"
        return f"KVCaches({layers}, length={self.length}{most}, nbytes={self.nbytes})"


def layer_formats(num_layers: int, inner: str = "int4", outer: str = "int8", count: int = 2) -> list[str]:
    """A format for each layer: *outer* for the first *count* and the last *count* layers, *inner* for those between.

    Examples
    --------
    >>> layer_formats(6)
    ['int8', 'int8', 'int4', 'int4', 'int8', 'int8']
    """
    number, edge = checks.positive_int("num_layers", num_layers), checks.count("count", count)
    inner, outer = checks.format("inner", inner), checks.format("outer", outer)
    return [outer if i < edge or i >= number - edge else inner for i in range(number)]


def _each(name: str, value: Any, count: int) -> list[Any]:
    """*value* for each layer."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} must have an entry for each of the {count} layers, got {len(value)}")
    return list(value)

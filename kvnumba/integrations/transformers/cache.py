"""`KVNumbaCache`: the cache of a model of transformers, and `KVNumbaLayer`, that of one layer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, CacheLayerMixin, get_layer_types_and_kwargs

from kvnumba import checks, interchange
from kvnumba.cache import KVCache
from kvnumba.container import KVCaches
from kvnumba.integrations.transformers.standin import Stored
from kvnumba.integrations.transformers.tensors import to_numpy, to_torch, without_gradient
from kvnumba.snapshot import Snapshot, nbytes
from kvnumba.spec import Sized

#: Kinds of layers of transformers whose keys and values are kept here; others keep a state of another kind.
KINDS = ("full_attention", "sliding_attention", "chunked_attention")


class KVNumbaLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, in a `KVCache`.

    Parameters
    ----------
    k_format, v_format : str
        As of `KVCache`.
    is_sliding : bool
        Whether the layer looks through a sliding window. All tokens are kept all the same: the window is in the mask.
    capacity : int
        Tokens to make room for when the first ones come.
    attend_stored : bool
        Attend what is stored also where the exact keys and values of a whole sequence are at hand.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        *,
        k_format: str = "int8",
        v_format: str = "int8",
        is_sliding: bool = False,
        capacity: int = 0,
        attend_stored: bool = False,
    ) -> None:
        self.k_format = checks.format("k_format", k_format)
        self.v_format = checks.format("v_format", v_format)
        self.is_sliding = is_sliding
        self.capacity = checks.count("capacity", capacity)
        self.attend_stored = checks.flag("attend_stored", attend_stored)
        self.dtype: torch.dtype | None = None
        self.version = 0  #: counts the changes, so that a `Stored` knows whether it is current
        self._cache: KVCache | None = None

    # ---- the main work

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store S tokens, and return all keys and values.

        Parameters
        ----------
        key_states, value_states : tensor [B, H_kv, S, D]
            float32, bfloat16 or float16, in CPU memory.

        Returns
        -------
        key, value : tensor [B, H_kv, T, D]
            Of the dtype given. The tensors themselves if nothing was stored before; else they are decoded only if an
            operation of torch reads them.

        Raises
        ------
        TypeError, ValueError
            As `KVCache.append`; nothing is stored then.
        """
        cache = self._made(key_states, value_states) if self._cache is None else self._cache
        first = len(cache) == 0
        cache.append(to_numpy("key_states", key_states), to_numpy("value_states", value_states))
        self._cache, self.dtype = cache, key_states.dtype
        self.version += 1
        if first and not self.attend_stored:
            return key_states, value_states
        spec, length, dtype = cache.spec, len(cache), key_states.dtype
        shape = (spec.batch_size, spec.num_kv_heads, length)
        keys = Stored(self, "keys", (*shape, spec.head_dim), dtype)
        values = Stored(self, "values", (*shape, spec.v_head_dim), dtype)
        return without_gradient((keys, values), key_states, value_states)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make an empty cache for tensors of these shapes, [B, H_kv, S, D], and this dtype."""
        self._cache, self.dtype = self._made(key_states, value_states), key_states.dtype

    def _made(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KVCache:
        batch, heads, _, dim = key_states.shape
        return KVCache(
            heads, dim, k_format=self.k_format, v_format=self.v_format, batch_size=batch, capacity=self.capacity,
            v_head_dim=value_states.shape[-1],
        )  # fmt: skip

    # ---- state

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest ``-tokens_to_remove`` tokens, as `KVCache.truncate`; 0 takes back none."""
        if tokens_to_remove > 0:
            raise ValueError(
                "tokens_to_remove must be 0 or negative (-3 takes back the newest 3 tokens), as in transformers 5.24, "
                f"got {tokens_to_remove}"
            )
        if tokens_to_remove and self._cache is not None:
            self._cache.truncate(max(len(self._cache) + tokens_to_remove, 0))
            self.version += 1

    def _undo(self, count: int) -> None:
        """Take back *count* tokens, and the size of the batch if none are left."""
        if self.get_seq_length() > count:
            self.crop(-count)
        else:
            self.reset()

    def reset(self) -> None:
        """Forget all tokens; the next ones may come in a batch of another size."""
        self._cache = None
        self.version += 1

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row b becomes row beam_idx[b], as `KVCache.reorder`."""
        if self._cache is not None:
            self._cache.reorder(_indices(beam_idx))
            self.version += 1

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows: integers, or a bool for each row."""
        if self._cache is not None:
            self._cache.select(_indices(indices, self._cache.spec.batch_size))
            self.version += 1

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes *repeats* rows."""
        if self._cache is not None:
            self._cache.repeat_interleave(repeats)
            self.version += 1

    def offload(self) -> None:
        """Nothing: the cache is in CPU memory."""

    def prefetch(self) -> None:
        """Nothing: the cache is in CPU memory."""

    # ---- what it is

    @property
    def stored(self) -> KVCache:
        """The cache itself.

        Raises
        ------
        ValueError
            Nothing was stored yet, so that not even its shape is known.
        """
        if self._cache is None:
            raise ValueError("the layer must hold tokens, got none yet; call the model first")
        return self._cache

    @property
    def is_initialized(self) -> bool:
        """Whether the shape is known."""
        return self._cache is not None

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, decoded, [B, H_kv, T, D]; None before the first tokens."""
        return None if self._cache is None or self.dtype is None else to_torch(self._cache.keys(), self.dtype)

    @property
    def values(self) -> torch.Tensor | None:
        """All values, decoded, [B, H_kv, T, Dv]; None before the first tokens."""
        return None if self._cache is None or self.dtype is None else to_torch(self._cache.values(), self.dtype)

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first tokens."""
        return -1 if self._cache is None else self._cache.spec.batch_size

    def get_seq_length(self) -> int:
        """Tokens stored."""
        return 0 if self._cache is None else len(self._cache)

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask for *query_length* further tokens is over, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def __repr__(self) -> str:
        return f"KVNumbaLayer({self.k_format}/{self.v_format}, length={self.get_seq_length()})"

    def clone(self) -> KVNumbaLayer:
        """Return a layer of its own with the same tokens; nothing is copied until one of the two goes on."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._cache = None if self._cache is None else self._cache._clone()
        return other


class KVNumbaCache(Sized, Cache):  # type: ignore[misc]
    """The cache of a model of transformers, in any format of `KVCache`, for ``past_key_values``.

    Parameters
    ----------
    config : PreTrainedConfig
        ``model.config``.
    k_format, v_format : str or sequence of str
        As of `KVCache`; for all layers, or one for each (`kvnumba.layer_formats`).
    capacity : int
        Tokens to make room for at once; more room is made by doubling.
    attend_stored : bool
        Attend what is stored also for the prompt. Without it the prompt is attended with the exact keys and values at
        hand, and stored quantized (KIVI, Liu et al. 2024). Tokens of later calls always attend what is stored.

    Notes
    -----
    With ``attn_implementation="kvnumba"`` attention reads the codes; with any other the model gets decoded tensors.
    Layers of other kinds (linear attention, convolution) are those of ``DynamicCache``. `get_seq_length` counts the
    tokens of one layer. A sliding layer keeps all its tokens: they can be taken back by any number.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        k_format: str | Sequence[str] = "int8",
        v_format: str | Sequence[str] = "int8",
        capacity: int = 0,
        attend_stored: bool = False,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be the config of a model (model.config), got {type(config).__name__}")
        kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        k_formats, v_formats = (
            _each(name, value, len(kinds)) for name, value in (("k_format", k_format), ("v_format", v_format))
        )
        layers: list[Any] = []
        for kind, option, k, v in zip(kinds, options, k_formats, v_formats, strict=True):
            if kind in KINDS:
                sliding = kind != "full_attention"
                layers.append(
                    KVNumbaLayer(
                        k_format=k, v_format=v, is_sliding=sliding, capacity=capacity, attend_stored=attend_stored
                    )
                )
            else:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**option))
        super().__init__(layers=layers)

    # ---- the main work

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`KVNumbaLayer.update` of one layer.

        Raises
        ------
        ValueError
            There is no such layer. What the layers before it took in the same call of the model is taken back.
        """
        if layer_idx >= len(self.layers):
            for layer in self.layers:
                if isinstance(layer, KVNumbaLayer):
                    layer._undo(key_states.shape[2])
            raise ValueError(
                f"the cache must have a layer for each of the model, got {len(self.layers)} layers, and tokens of "
                f"layer {layer_idx}, counted from 0; make it with KVNumbaCache(model.config) of this model"
            )
        made: tuple[torch.Tensor, torch.Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        return made

    # ---- snapshots

    def freeze(self, *, consume: bool = False) -> Snapshot[KVNumbaCache]:
        """Return a snapshot of the present state, as `KVCache.freeze`, at the same cost for any length."""
        return Snapshot(self._take() if consume else self._clone())

    def _clone(self) -> KVNumbaCache:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.layers = [layer.clone() for layer in self._ours("freeze")]
        return other

    def _take(self) -> KVNumbaCache:
        other = self._clone()
        self.reset()
        return other

    def __copy__(self) -> KVNumbaCache:
        return self._clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVNumbaCache:
        return self._clone()

    # ---- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all layers, bit for bit, to one file, which `load` and `kvnumba.KVCaches.load` read.

        Raises
        ------
        ValueError
            A layer holds no tokens, or is of another kind.
        OSError
            The file cannot be written. What was there is untouched.
        """
        layers = [layer.stored._layer() for layer in self._ours("save")]
        interchange.save_layers(path, "KVCaches", layers)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: PreTrainedConfig,
        *,
        capacity: int = 0,
        attend_stored: bool = False,
    ) -> KVNumbaCache:
        """Return a cache that goes on from what `save` wrote; the formats are those of the file.

        Parameters
        ----------
        path : str or path
        config : PreTrainedConfig
            ``model.config``: its number of layers must be that of the file. Heads and channels, which configs do not
            tell in one way, are compared by the first `update`.
        capacity, attend_stored
            As of `KVNumbaCache`.

        Raises
        ------
        ValueError
            Another number of layers; caches with a window, or with rows of different lengths.
        """
        caches = KVCaches.load(path)
        for i, cache in enumerate(caches):
            if cache.spec.window is not None or len(set(cache.lengths)) > 1:
                raise ValueError(
                    f"path must be a file of caches without a window, rows of one length, got {cache} as layer {i}"
                )
        formats = [(cache.spec.k_format, cache.spec.v_format) for cache in caches]
        made = cls(
            config, k_format=[k for k, _ in formats], v_format=[v for _, v in formats], capacity=capacity,
            attend_stored=attend_stored,
        )  # fmt: skip
        dtype = config.get_text_config(decoder=True).dtype or torch.float32
        for layer, cache in zip(made._ours("load"), caches, strict=True):
            cache.reserve(layer.capacity)
            layer._cache, layer.dtype = cache, dtype
        return made

    # ---- what it is

    def _ours(self, what: str) -> list[KVNumbaLayer]:
        """The layers, if all are ours."""
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, KVNumbaLayer):
                raise ValueError(f"{what} needs layers of attention only, got {type(layer).__name__} as layer {i}")
        return list(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens of all layers, as `KVCache.nbytes`."""
        return nbytes(*(layer._cache for layer in self._ours("nbytes") if layer._cache is not None))

    def __repr__(self) -> str:
        return f"KVNumbaCache({len(self.layers)} layers, length={self.get_seq_length()})"


def _each(name: str, value: str | Sequence[str], count: int) -> list[str]:
    """*value* for each layer."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [checks.format(name, value)] * count
    if len(value) != count:
        raise ValueError(f"{name} must have an entry for each of the {count} layers of the model, got {len(value)}")
    return list(value)


def _indices(indices: torch.Tensor, batch: int | None = None) -> Any:
    """Indices of rows as an array; a bool for each row becomes the rows with True."""
    indices = torch.as_tensor(indices)
    if indices.dtype == torch.bool and batch is not None:
        if indices.shape != (batch,):
            raise ValueError(f"indices must have shape [{batch}] = [batch] if they are bool, got {list(indices.shape)}")
        indices = indices.nonzero()[:, 0]
    return indices.detach().cpu().numpy()

"""What `KVNumbaLayer.update` returns in place of decoded keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from kvnumba.integrations.transformers.tensors import to_torch

if TYPE_CHECKING:
    from kvnumba.integrations.transformers.cache import KVNumbaLayer


class Stored(torch.Tensor):  # type: ignore[misc]
    """All keys, or all values, of a layer, [B, H_kv, T, D], not decoded unless somebody reads them.

    It says shape, dtype and device as the decoded tensor would. Our attention function takes the cache behind it; any
    operation of torch decodes first and goes on with a plain tensor, so that every other attention gets what it knows.
    A view of it is one of such a tensor. Operations that would change it in place raise RuntimeError.
    """

    layer: KVNumbaLayer
    side: str  #: "keys" or "values"
    version: int  #: `KVNumbaLayer.version` when it was made

    @staticmethod
    def __new__(cls, layer: KVNumbaLayer, side: str, shape: Sequence[int], dtype: torch.dtype) -> Stored:
        made: Stored = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device="cpu")
        made.layer, made.side, made.version = layer, side, layer.version
        return made

    def __init__(self, layer: KVNumbaLayer, side: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        pass

    # Nothing is to be done above the level of operations.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                if argument.is_write:
                    tree_map_only(cls, cls._refuse_write, args[i] if i < len(args) else kwargs.get(argument.name))
        args, kwargs = tree_map_only(cls, cls.decoded, (args, kwargs))
        return func(*args, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._refuse_write()

    def _refuse_write(self) -> None:
        raise RuntimeError(
            f"{self.side} of a cache layer must not be changed in place, for what is stored would stay as it is; "
            "clone() them first"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Stored({self.side}, shape={list(self.shape)}, dtype={self.dtype})"

    def decoded(self) -> torch.Tensor:
        """Return the tensor it stands for, decoded from the cache: [B, H_kv, T, D]."""
        if self.version != self.layer.version:
            raise RuntimeError(
                f"{self.side} of a cache layer must be read before the layer changes again, got a tensor of an earlier "
                "call; clone() it to keep it"
            )
        cache = self.layer.stored
        return to_torch(cache.keys() if self.side == "keys" else cache.values(), self.dtype)

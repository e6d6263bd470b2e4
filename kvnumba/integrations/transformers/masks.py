"""The mask that goes with our attention function: a stand-in, which says in words what a query sees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import causal_mask_function, eager_mask, prepare_padding_mask, sdpa_mask


class Mask(torch.Tensor):  # type: ignore[misc]
    """Which keys a query sees, [B, 1, S, T], not written out unless somebody else reads it.

    Our attention function takes `causal`, `window` and `seen`; a query sees a key if all three let it. Any operation of
    torch writes the mask out first, as eager attention has it: 0 where the query sees the key, the lowest number of the
    dtype elsewhere. From then on the mask is that tensor, also for us, for it may be changed through a view.
    """

    causal: bool  #: The queries are the last positions of the keys, and each sees none after its own.
    window: int | None  #: A query sees this many keys up to its own, itself included.
    seen: torch.Tensor | None  #: bool, broadcastable to [B, 1, S, T]; True lets the query see the key.
    plain: torch.Tensor | None  #: The tensor, once it is written out.

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        causal: bool = False,
        window: int | None = None,
        seen: torch.Tensor | None = None,
    ) -> Mask:
        made: Mask = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made.causal, made.window, made.seen, made.plain = causal, window, seen, None
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # Nothing is to be done above the level of operations.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        args, kwargs = tree_map_only(cls, cls.written, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Mask(shape={list(self.shape)}, causal={self.causal}, window={self.window})"

    @property
    def hides_nothing(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal and self.seen is None and self.plain is None

    def written(self) -> torch.Tensor:
        """Return the tensor it stands for: 0 or the lowest number of the dtype, [B, 1, S, T]."""
        if self.plain is None:
            S, T = self.shape[2:]
            keys, queries = (torch.arange(n, T, device=self.device) for n in (0, T - S))
            hidden = (keys > queries[:, None]) & self.causal
            if self.window is not None:
                hidden = hidden | (keys <= queries[:, None] - self.window)
            if self.seen is not None:
                hidden = hidden | ~self.seen
            zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.plain = zeros.masked_fill_(hidden, torch.finfo(self.dtype).min)
        return self.plain


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    config: Any = None,
    **options: Any,
) -> torch.Tensor:
    """Return the mask for `attention_forward`; for anybody else it is what ``eager_mask`` of transformers makes.

    Parameters
    ----------
    attention_mask : tensor of bool [B, T], optional
        False for padding.
    allow_is_causal_skip, allow_is_bidirectional_skip : bool
        Whether *mask_function* is nothing but order (with a window or chunks of *local_size*), or lets every query see
        every key.
    others
        As of ``transformers.masking_utils.sdpa_mask``.

    Returns
    -------
    Mask [B, 1, q_length, kv_length]
        Never None, which a model with an attention of its own reads as "no mask". Inside a graph of ``torch.compile``
        it is a plain tensor.
    """
    arguments = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, device=device, **options,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return eager_mask(**arguments, dtype=dtype)
    last = int(q_offset) + q_length - 1
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None and bool(padding.all()):
        padding = None
    seen = None if padding is None else padding[:, None, None, kv_offset : kv_offset + kv_length]
    mask = partial(Mask, (batch_size, 1, q_length, kv_length), dtype, device)
    if allow_is_causal_skip and kv_offset + kv_length == last + 1:
        chunk = getattr(config, "attention_chunk_size", None)
        if local_size is None or (chunk is None and getattr(config, "sliding_window", None) == local_size):
            return mask(causal=True, window=local_size, seen=seen)
        if local_size == chunk and padding is None and (q_length == 1 or kv_offset // chunk == last // chunk):
            return mask(causal=True, window=last % chunk + 1 if q_length == 1 else None)
    if allow_is_bidirectional_skip and local_size is None:
        return mask(seen=seen)
    return mask(seen=sdpa_mask(**arguments, allow_is_causal_skip=False))

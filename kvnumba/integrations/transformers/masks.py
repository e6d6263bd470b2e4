"""The mask that goes with our attention function: none where order alone says what a query sees."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

#: Attribute of a mask that is nothing but a window over the past: its size.
WINDOW = "kvnumba_window"


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
    config: Any = None,
    **options: Any,
) -> torch.Tensor | None:
    """Return the mask for `attention_forward`, as ``sdpa_mask`` of transformers makes it, or None: causal.

    Parameters
    ----------
    attention_mask : tensor of bool [B, T], optional
        False for padding.
    others
        As of ``transformers.masking_utils.sdpa_mask``.

    Returns
    -------
    tensor of bool [B, 1, q_length, kv_length] or None
        True keeps the key. None: the queries are the last positions of the keys, and each sees all up to its own. A
        mask that only adds a sliding window to that has the size of the window as its attribute ``WINDOW``; an
        operation on the mask loses the attribute, and then the mask itself is obeyed.
    """
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    in_order = allow_is_causal_skip and kv_offset + kv_length == int(q_offset) + q_length
    plain = in_order and (padding is None or bool(padding.all()))
    if plain and (local_size is None or kv_length <= local_size):
        return None
    mask = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip, config=config, **options,
    )  # fmt: skip
    if plain and mask is not None and _slides(config, local_size):
        setattr(mask, WINDOW, local_size)
    return mask


def _slides(config: Any, local_size: int | None) -> bool:
    """Whether *local_size* is a window that moves with the query, not a chunk that ends where it ends."""
    chunk = getattr(config, "attention_chunk_size", None)
    return local_size is not None and chunk is None and getattr(config, "sliding_window", None) == local_size

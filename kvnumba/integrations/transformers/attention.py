"""The attention function: attends the packed cache where it is at hand, and plain keys and values otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import kvnumba
from kvnumba.integrations.transformers.masks import WINDOW
from kvnumba.integrations.transformers.standin import Stored
from kvnumba.integrations.transformers.tensors import NAME, to_numpy, to_torch, without_gradient


@torch.compiler.disable
def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer of a model, as ``AttentionInterface`` of transformers calls it.

    Parameters
    ----------
    module : Module
        The attention of the layer; ``module.is_causal`` says whether it is causal, True if it does not say.
    query : tensor [B, H_q, S, D]
    key, value : tensor [B, H_kv, T, D]
        Those of a `KVNumbaCache` are read as codes; any others as they are.
    attention_mask : tensor, optional
        [B|1, H_q|1, S, T]: bool (True keeps the key) or float (added to the scores). None: causal if the module is.
    scaling : float, optional
        Factor of the scores; 1/sqrt(D) if None.
    sliding_window : int, optional
        A query sees this many keys, its own included. A mask that is given contains it.
    softcap : float, optional
        As in `kvnumba.attention`.
    s_aux : tensor [H_q], optional
        Sink logits (GPT-OSS).
    position_bias : tensor, optional
        Broadcastable to [B, H_q, S, T]: added to the scores.

    Returns
    -------
    out : tensor [B, S, H_q, D]
        In the dtype of *query*, in C order.
    None
        Weights are never made.

    Raises
    ------
    NotImplementedError
        Dropout, and gradients once `backward` reaches the result.
    """
    if dropout:
        raise NotImplementedError(
            f'dropout must be 0 for attn_implementation="{NAME}", got {dropout}; call model.eval() or use "sdpa"'
        )
    options: dict[str, Any] = {"sm_scale": scaling}
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    window = getattr(attention_mask, WINDOW, None)
    if attention_mask is None:
        options["causal"] = bool(causal)
        window = sliding_window if causal else None
    elif window is not None:
        options["causal"] = True
    else:
        options["causal"] = False
        options["mask"] = _mask(attention_mask, key.shape[2])
    if window is not None and key.shape[2] > window:
        options["window"] = (int(window) - 1, 0)
    if position_bias is not None:
        options["mask"] = _biased(position_bias, options.get("mask"))
    if softcap:
        options["softcap"] = float(softcap)
    if s_aux is not None:
        options["sink_logits"] = to_numpy("s_aux", s_aux)
    if type(key) is Stored and type(value) is Stored and key.layer is value.layer and key.version == key.layer.version:
        out = key.layer.stored.attend(to_numpy("query", query), **options)
    else:
        k, v = to_numpy("key", _plain(key)), to_numpy("value", _plain(value))
        out = kvnumba.attention(to_numpy("query", query), k, v, **options)
    result = to_torch(out, query.dtype).transpose(1, 2).contiguous()  # a copy only where S and H_q exceed 1
    return *without_gradient((result,), query, key, value, attention_mask, s_aux, position_bias), None


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.decoded() if isinstance(x, Stored) else x


def _mask(mask: torch.Tensor, length: int) -> Any:
    """A mask of transformers as ours: over the keys there are, hidden ones at ``-inf``."""
    mask = mask[..., :length]
    if mask.dtype is torch.bool:
        return to_numpy("attention_mask", mask)
    if not mask.is_floating_point():
        raise TypeError(
            f"attention_mask of shape {list(mask.shape)} must be bool or a float type, got {mask.dtype}; "
            "pass attention_mask.bool() if 1 keeps the key"
        )
    lowest = torch.finfo(mask.dtype).min
    return to_numpy("attention_mask", mask.masked_fill(mask <= lowest, -torch.inf))


def _biased(bias: torch.Tensor, mask: Any) -> Any:
    """A float mask: *bias* where *mask* keeps the key, or added to a mask of numbers."""
    added = to_numpy("position_bias", bias.float())
    if mask is None:
        return added
    if mask.dtype == bool:
        return np.where(mask, added, np.float32(-np.inf))
    return added + mask

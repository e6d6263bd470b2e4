"""The attention function: attends the packed cache where it is at hand, and plain keys and values otherwise."""

from __future__ import annotations

from typing import Any

import torch

import kvnumba
from kvnumba.integrations.transformers.masks import Mask
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
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
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
        [B|1, H_q|1, S|1, T|1]: bool (True keeps the key) or float (added to the scores), or what our mask function
        makes. None: causal if the module is.
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
    indices : tensor of int [B, S, K], optional
        The keys that a query may see, of those that the mask keeps (DeepSeek V3.2); negative ones name none.
    block_indices : tensor of int [B, H, S, K], optional
        The same in blocks of ``module.indexer.block_size`` keys, for groups of query heads (MiniMax M3).
    sinks : tensor [B, H_q, S, 1], optional
        A sink logit for each query.

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
    TypeError
        A mask of integers or none at all of torch; a tensor that is not in CPU memory.
    ValueError
        A mask for another number of queries or keys than there are.
    """
    if dropout:
        raise NotImplementedError(
            f'dropout must be 0 for attn_implementation="{NAME}", got {dropout}; call model.eval() or use "sdpa"'
        )
    S, T = query.shape[2], key.shape[2]
    mask, window = None, None
    if isinstance(attention_mask, Mask) and attention_mask.plain is None:
        causal, window = attention_mask.causal, attention_mask.window
        if not attention_mask.hides_nothing:
            _same_lengths(attention_mask, S, T, exactly=True)
            mask = attention_mask.seen
    elif attention_mask is not None:
        causal, mask = False, _plain_mask(attention_mask, S, T)
    else:
        causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
        window = sliding_window if causal else None
    if position_bias is not None:
        mask = _added(position_bias.float(), mask)
    if indices is not None:
        mask = _kept(_chosen(indices[:, None], 1, T), mask)
    if block_indices is not None:
        chosen = _chosen(block_indices, module.indexer.block_size, T)
        mask = _kept(chosen.repeat_interleave(query.shape[1] // chosen.shape[1], 1), mask)
    options: dict[str, Any] = {"sm_scale": scaling, "causal": causal}
    if mask is not None:
        options["mask"] = to_numpy("attention_mask", mask)
    if window is not None and window < T:
        options["window"] = (int(window) - 1, 0)
    if softcap:
        options["softcap"] = float(softcap)
    if s_aux is not None:
        options["sink_logits"] = to_numpy("s_aux", s_aux)
    result = _attended(query, key, value, options, sinks).transpose(1, 2).contiguous()  # a copy if S and H_q exceed 1
    return *without_gradient((result,), query, key, value, attention_mask, s_aux, position_bias, sinks), None


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any], sinks: torch.Tensor | None
) -> torch.Tensor:
    """[B, H_q, S, D]; *sinks* are one more score of each query, whose value is 0."""
    options["return_lse"] = sinks is not None
    if type(key) is Stored and type(value) is Stored and key.layer is value.layer and key.version == key.layer.version:
        out = key.layer.stored.attend(to_numpy("query", query), **options)
    else:
        k, v = to_numpy("key", _decoded(key)), to_numpy("value", _decoded(value))
        out = kvnumba.attention(to_numpy("query", query), k, v, **options)
    if sinks is None:
        return to_torch(out, query.dtype)
    weight = torch.sigmoid(torch.from_numpy(out[1])[..., None] - sinks.detach().float())
    return (to_torch(out[0], query.dtype) * weight).to(query.dtype)


def _decoded(x: torch.Tensor) -> torch.Tensor:
    return x.decoded() if isinstance(x, Stored) else x


def _same_lengths(mask: torch.Tensor, S: int, T: int, *, exactly: bool) -> None:
    """Raise ValueError if *mask* is for other lengths; without *exactly* an axis of length 1 is broadcast."""
    if mask.ndim == 4 and all(n == m or (n == 1 and not exactly) for n, m in zip(mask.shape[2:], (S, T), strict=True)):
        return
    raise ValueError(
        f"attention_mask must have shape [batch, heads, {S}, {T}] = [batch, heads, queries, keys], "
        f"got {list(mask.shape)}; give the layer a mask made for the keys of its own cache"
    )


def _plain_mask(mask: torch.Tensor, S: int, T: int) -> torch.Tensor:
    """A mask of transformers as ours: hidden keys at ``-inf``."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attention_mask must be a tensor or None, got {type(mask).__name__}")
    mask = mask.written() if isinstance(mask, Mask) else mask
    _same_lengths(mask, S, T, exactly=False)
    if mask.dtype is torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(
            f"attention_mask of shape {list(mask.shape)} must be bool or a float type, got {mask.dtype}; "
            "pass attention_mask.bool() if 1 keeps the key"
        )
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)


def _added(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A float mask: *bias* where *mask* keeps the key, or added to a mask of numbers."""
    if mask is None:
        return bias
    return _kept(mask, bias) if mask.dtype is torch.bool else bias + mask


def _kept(keep: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """*mask* where *keep* is True; the key is hidden elsewhere."""
    if mask is None:
        return keep
    return mask & keep if mask.dtype is torch.bool else torch.where(keep, mask, -torch.inf)


def _chosen(indices: torch.Tensor, size: int, T: int) -> torch.Tensor:
    """[B, H, S, T]: whether a key is in one of the blocks of *size* keys that *indices* [B, H, S, K] name."""
    count = -(-T // size)
    blocks = torch.zeros(*indices.shape[:3], count + 1, dtype=torch.bool)  # those below 0 name the last, cut off
    blocks.scatter_(-1, indices.long().masked_fill(indices < 0, count), True)
    return blocks[..., :count].repeat_interleave(size, -1)[..., :T]

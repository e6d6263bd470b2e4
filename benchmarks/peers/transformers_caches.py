"""The caches of Hugging Face transformers, with torch's attention over what they return.

``QuantizedCache`` decodes the whole past at every step. Its newest 128 tokens are float32.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from itertools import pairwise
from typing import Any

from .work import Entry, Runner, Work

#: Tokens left for the second call when a quantized cache is filled: its packing needs an even number of groups.
LAST = 2


def entries(work: Work) -> list[Entry]:
    import transformers  # noqa: F401

    found = [Entry("transformers DynamicCache", 32, lambda: build(work, lambda config: dynamic()))]
    if importlib.util.find_spec("hqq") and not work.prompt:
        for nbits in (8, 4):
            name = f"transformers QuantizedCache int{nbits}"
            found.append(Entry(name, nbits, lambda nbits=nbits: build(work, lambda c: quantized(c, nbits))))
    return found


def dynamic() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def quantized(config: Any, nbits: int) -> Any:
    from transformers.cache_utils import QuantizedCache

    return QuantizedCache("hqq", config, nbits=nbits, axis_key=1, axis_value=1)


def build(work: Work, make: Any) -> Runner:
    import torch
    from transformers import LlamaConfig

    torch.set_num_threads(work.threads)
    torch.set_grad_enabled(False)
    warnings.filterwarnings("ignore", module="transformers|hqq")
    attention = torch.nn.functional.scaled_dot_product_attention
    q, k_new, v_new = (torch.from_numpy(x) for x in work.step)
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=work.q_heads * work.dim,
        num_attention_heads=work.q_heads,
        num_key_value_heads=work.kv_heads,
        head_dim=work.dim,
    )
    filled = make(config)
    pieces = (0, work.past - LAST, work.past) if work.past else ()
    for a, b in pairwise(pieces):
        filled.update(*(torch.from_numpy(x[:, :, a:b].copy()) for x in (work.k, work.v)), 0)
    states = [copy.deepcopy(filled.layers) for _ in range(work.layers)]
    caches = [make(config) for _ in range(work.layers)]

    def restore() -> None:  # an update binds new tensors and leaves the old ones alone
        for cache, layers in zip(caches, states):
            cache.layers = [copy.copy(layer) for layer in layers]

    def step(cache: Any) -> Any:
        k, v = cache.update(k_new, v_new, 0)
        return attention(q, k, v, is_causal=work.prompt, enable_gqa=work.group > 1)

    return Runner([lambda cache=cache: step(cache) for cache in caches], lambda out: out.numpy(), restore)

"""Torch's ``scaled_dot_product_attention`` over tensors with room for the new tokens.

``enable_gqa`` is what model code calls. Folding the query heads of a group into queries gives the same result for one
token without a mask, and reads the cache once for each KV head.
"""

from __future__ import annotations

from typing import Any

from .work import Entry, Runner, Work


def entries(work: Work) -> list[Entry]:
    import torch

    torch.set_num_threads(work.threads)
    torch.set_grad_enabled(False)
    found = []
    for name, bits in (("float32", 32), ("bfloat16", 16)):
        found.append(Entry(f"torch {name}", bits, lambda name=name: build(work, name, folded=False)))
        if not work.prompt and work.group > 1:
            found.append(Entry(f"torch {name}, folded", bits, lambda name=name: build(work, name, folded=True)))
    return found


def build(work: Work, dtype: str, folded: bool) -> Runner:
    import torch

    attention = torch.nn.functional.scaled_dot_product_attention
    q, k_new, v_new = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in work.step)
    options: dict[str, Any] = {"is_causal": work.prompt}
    if folded:
        q = q.view(1, work.kv_heads, work.group, work.dim)
    else:
        options["enable_gqa"] = work.group > 1

    def layer() -> Any:
        k, v = (torch.from_numpy(x).to(q.dtype, copy=True) for x in (work.k, work.v))

        def step() -> Any:
            k[:, :, work.past :].copy_(k_new)
            v[:, :, work.past :].copy_(v_new)
            return attention(q, k, v, **options)

        return step

    return Runner([layer() for _ in range(work.layers)], lambda out: out.float().numpy())

"""Tensors of torch as arrays of NumPy and back, without a copy of what lies in CPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvnumba import checks

Array = npt.NDArray[Any]

#: What `attn_implementation` calls our attention.
NAME = "kvnumba"


def to_numpy(name: str, x: torch.Tensor) -> Array:
    """Return *x* as an array over the same memory.

    bfloat16, which NumPy does not know, comes as the dtype of the package ml_dtypes, or as a float32 copy without it.

    Raises
    ------
    TypeError
        *x* is not in CPU memory.
    """
    if x.device.type != "cpu":
        raise TypeError(
            f"{name} must be in CPU memory, got a tensor on device {x.device}; "
            'move the model with model.to("cpu"), or use another cache and attention there'
        )
    x = x.detach()
    if x.dtype != torch.bfloat16:
        return x.numpy()
    dtype = checks.bfloat16()
    return x.float().numpy() if dtype is None else x.view(torch.int16).numpy().view(dtype)


def to_torch(x: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return *x* as a tensor of *dtype*, over the same memory where it has that dtype."""
    if x.dtype.name == "bfloat16":
        tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(x)
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def without_gradient(made: tuple[torch.Tensor, ...], *inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return *made*, made of *inputs* outside torch: `backward` raises there if one of these wants gradients."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        made = _NoGradient.apply(made, *inputs)
    return made


class _NoGradient(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, made: tuple[torch.Tensor, ...], *inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f'attn_implementation="{NAME}" and KVNumbaCache have no gradients; '
            'train with model.set_attn_implementation("sdpa") and use_cache=False'
        )

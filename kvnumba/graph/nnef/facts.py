"""What the caches of an NNEF model give and cost."""

from __future__ import annotations

import numpy as np

from kvnumba.graph.nnef.model import DTYPES, QUANTIZED, SHAPES, Model, check
from kvnumba.spec import CacheSpec


def output_facts(model: Model) -> dict[str, tuple[str, list[str]]]:
    """Element type and symbolic shape of what each cache gives: its name to ("f32", ["1", "2", "P+S", "8"])."""
    check(model)
    facts = {}
    for name, one in model.named_caches.items():
        past, new = ([str(n) for n in one.attributes[shape]] for shape in SHAPES)
        axis = one.attributes["axis"]
        given = [f"{past[axis]}+{new[axis]}" if i == axis else n for i, n in enumerate(new)]
        facts[name] = (str(one.attributes["datum_type"]).lower(), given)
    return facts


def cost(model: Model) -> dict[str, dict[str, float]]:
    """Values and bytes that each cache stores for a token, parameters of codes included.

    Symbols other than that of the past length count as 1: the figures are those of one row of the batch.
    """
    check(model)
    costs = {}
    for name, one in model.named_caches.items():
        shape, axis = one.attributes["past_sequence_shape"], one.attributes["axis"]
        sizes = [1 if i == axis or isinstance(n, str) else int(n) for i, n in enumerate(shape)]
        values = int(np.prod(sizes))
        size = float(values * np.dtype(DTYPES[str(one.attributes["datum_type"]).lower()]).itemsize)
        if one.kind == QUANTIZED:
            form, dim = f"int{one.attributes['bits']}", sizes[-1]
            pair = (form, "float32") if one.attributes["per_channel"] else ("float32", form)
            size = values / dim * (CacheSpec(1, dim, dim, *pair).bytes_per_token - 4 * dim)
        costs[name] = {"values_per_token": float(values), "bytes_per_token": size}
    return costs

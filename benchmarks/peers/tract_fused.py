"""The tract engine on a graph of two caches and an attention, which it fuses into one operator that stores in place.

``RAYON_NUM_THREADS`` is its number of threads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .work import Entry, Runner, Work

#: Tokens that fill a cache at once.
CHUNK = 1024
HEADER = """version 1.0;
extension tract_registry tract_core;
extension tract_registry tract_transformers;
extension tract_symbol R;
extension tract_symbol S;
extension tract_symbol P;
"""


def entries(work: Work) -> list[Entry]:
    import tract  # noqa: F401

    found = [Entry("tract float32", 32, lambda: build(work, []))]
    if work.layers == 1 and not work.prompt:  # each step decodes the whole past, and filling takes as long
        found.append(Entry("tract int8", 8, lambda: build(work, ["quantize_kv_storage"])))
        found.append(Entry("tract int4", 4, lambda: build(work, ["quantize_kv_storage_int4"])))
    return found


def graph(work: Work) -> str:
    """The graph as NNEF: R queries, S new tokens behind P old ones. A prompt has no cache, R = S and a mask."""
    rows = "S" if work.prompt else "R"
    lines = [external("q", work.q_heads, rows, work.dim)]
    lines += [external(name, work.kv_heads, "S", work.dim) for name in "kv"]
    keys, values = "k", "v"
    if not work.prompt:
        lines += [cache(name, work.kv_heads, work.dim) for name in "kv"]
        keys, values = "k_all", "v_all"
    causal = str(work.prompt).lower()
    lines.append(
        f"o = tract_transformers_sdpa(q, {keys}, {values}, datum_type='f32', acc_datum_type='f32', is_causal={causal});"
    )
    return HEADER + "graph network(q, k, v) -> (o)\n{\n" + "\n".join(lines) + "\n}\n"


def external(name: str, heads: int, rows: str, dim: int) -> str:
    return f"{name} = tract_core_external(shape=[1,{heads},{rows},{dim}], datum_type='f32');"


def cache(name: str, heads: int, dim: int) -> str:
    shapes = f"past_sequence_shape=[1,{heads},P,{dim}], input_sequence_shape=[1,{heads},S,{dim}]"
    options = f"name='{name}_cache', axis=2, datum_type='f32', {shapes}"
    return f"{name}_all = tract_transformers_dyn_kv_cache({name}, {options});"


def load(work: Work, transforms: list[str]) -> Any:
    import tract

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "graph.nnef").write_text(graph(work), encoding="utf-8")
        model = tract.nnef().with_tract_transformers().load(folder)
    for name in transforms:
        model.transform(name)
    return model.into_runnable()


def build(work: Work, transforms: list[str]) -> Runner:
    import tract

    runnable = load(work, transforms)
    last = [tract.Tensor.from_numpy(x) for x in work.step]
    if work.prompt:
        return Runner([lambda: runnable.run(last)], read)
    states = [None] * work.layers
    added = [work.tokens]  # steps since the caches were filled: they cannot be cut, and filling takes long

    def restore() -> None:
        if work.layers * work.tokens // 64 < added[0]:
            added[0] = 0
            for i in range(work.layers):
                states[i] = fill(work, runnable.spawn_state)

    def step(i: int) -> Any:
        added[0] += 1
        return states[i].run(last)

    added[0] = work.layers * work.tokens
    return Runner([lambda i=i: step(i) for i in range(work.layers)], read, restore)


def fill(work: Work, spawn: Callable[[], Any]) -> Any:
    """A state that holds the past, from runs with one query each."""
    state = spawn()
    query = np.zeros((1, work.q_heads, 1, work.dim), np.float32)
    for start in range(0, work.past, CHUNK):
        rows = slice(start, min(start + CHUNK, work.past))
        state.run([query, *(np.ascontiguousarray(x[:, :, rows]) for x in (work.k, work.v))])
    return state


def read(outputs: Any) -> np.ndarray:
    return outputs[0].to_numpy()

"""OpenVINO's PagedAttention, called as its own operator, in each precision of its cache.

The form of OpenVINO 2026.4, which has 28 inputs; another version may refuse it. Its caches are pages of 32 tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .work import Entry, Runner, Work

PAGE = 32
#: Tokens that fill a cache at once, as a prompt of their own: what is stored does not depend on what came before.
CHUNK = 256


class Format(NamedTuple):
    """Bits, precision of the arithmetic."""

    bits: int
    computed: str = "f32"


FORMATS = {
    "f32": Format(32),
    "f16": Format(16),
    "bf16": Format(16, "bf16"),
    "u8": Format(8),
    "u4": Format(4),
}


def entries(work: Work) -> list[Entry]:
    import openvino  # noqa: F401

    return [
        Entry(f"openvino {name}", form.bits, lambda name=name, form=form: build(work, name, form))
        for name, form in FORMATS.items()
    ]


def operator(work: Work) -> Any:
    """A model of the one operator."""
    import openvino as ov
    from openvino import opset13 as ops
    from openvino.op import _PagedAttentionExtension as PagedAttention

    def parameter(name: str, shape: list[int], dtype: Any) -> Any:
        found = ops.parameter(ov.PartialShape(shape), dtype, name)
        found.get_output_tensor(0).set_names({name})
        return found

    query = parameter("q", [-1, work.q_heads * work.dim], np.float32)
    new = [parameter(name, [-1, work.kv_heads * work.dim], np.float32) for name in ("k", "v")]
    caches = [parameter(f"{name}_cache.0", [-1] * 4, ov.Type.dynamic) for name in ("key", "value")]
    places = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
    indices = [parameter(name, [-1], np.int32) for name in places]
    longest = parameter("max_context_len", [], np.int32)
    integers, floats, none, off = np.zeros(0, np.int32), np.zeros(0, np.float32), np.int32(0), np.zeros(0, np.uint8)
    settings = [np.float32(work.dim**-0.5), none, floats]  # scale, no window, no ALiBi
    unused = [none, integers, integers, floats]  # sums of scores, rotation of blocks
    unused += [floats, np.int32(64), np.int32(8)]  # sparse prompts: no threshold; block and stride must be given
    unused += [floats, none, integers, integers, integers, integers, off, integers]  # sinks, eviction, images
    arguments = [query, *new, *caches, *indices, *map(ops.constant, settings), longest, *map(ops.constant, unused)]
    attention = PagedAttention([x.output(0) for x in arguments])
    sizes = {
        "k_head_size": work.dim,
        "num_k_heads": work.kv_heads,
        "v_head_size": work.dim,
        "num_v_heads": work.kv_heads,
    }
    for name, size in sizes.items():
        attention.get_rt_info()[name] = size
    parameters = [query, *new, *caches, *indices, longest]
    return ov.Model([ops.result(attention.output(0))], parameters, "paged_attention")


def compiled(work: Work, name: str, form: Format) -> Any:
    import openvino as ov

    options = {
        "KV_CACHE_PRECISION": name,
        "INFERENCE_PRECISION_HINT": form.computed,
        "INFERENCE_NUM_THREADS": work.threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    return ov.Core().compile_model(operator(work), "CPU", options)


def by_tokens(x: np.ndarray) -> np.ndarray:
    """[1, H, S, D] as [S, H D]."""
    return np.ascontiguousarray(x[0].swapaxes(0, 1)).reshape(x.shape[2], -1)


def tokens_at(first: int, count: int, past: int = 0) -> dict[str, np.ndarray]:
    """Inputs that say where *count* new tokens go: a sequence of *past* others that begins on the page of *first*."""
    pages = np.arange(first // PAGE, -(-(first + past + count) // PAGE))
    inputs = {
        "past_lens": [past],
        "subsequence_begins": [0, count],
        "block_indices": pages,
        "block_indices_begins": [0, len(pages)],
        "max_context_len": past + count,
    }
    return {name: np.array(x, np.int32) for name, x in inputs.items()}


def feed(request: Any, inputs: dict[str, Any]) -> None:
    import openvino as ov

    for name, x in inputs.items():
        request.set_tensor(name, x if isinstance(x, ov.Tensor) else ov.Tensor(x))


class Cache:
    """Room for the keys or the values, as bytes that a tensor of any element type looks at."""

    def __init__(self, port: Any, pages: int) -> None:
        self.kind = port.get_element_type()
        self.shape = [pages, *(d.get_length() for d in list(port.get_partial_shape())[1:])]
        self.data = np.zeros(int(np.prod(self.shape)) * self.kind.bitwidth // 8, np.uint8)

    def tensor(self, data: np.ndarray) -> Any:
        import openvino as ov

        return ov.Tensor(data, ov.Shape(self.shape), self.kind)


def build(work: Work, name: str, form: Format) -> Runner:
    model = compiled(work, name, form)
    names = ("key_cache.0", "value_cache.0")
    caches = {name: Cache(model.input(name), work.tokens // PAGE + 1) for name in names}
    filling = model.create_infer_request()
    feed(filling, {name: cache.tensor(cache.data) for name, cache in caches.items()})
    k, v = by_tokens(work.k), by_tokens(work.v)
    for start in range(0, work.past, CHUNK):
        rows = slice(start, min(start + CHUNK, work.past))
        count = rows.stop - start
        query = np.zeros((count, work.q_heads * work.dim), np.float32)
        feed(filling, {"q": query, "k": k[rows], "v": v[rows], **tokens_at(start, count)})
        filling.infer()
    rows = [by_tokens(x) for x in work.step]
    inputs = {**dict(zip("qkv", rows)), **tokens_at(0, work.new, work.past)}

    def layer() -> Any:
        request = model.create_infer_request()
        copies = {name: cache.data.copy() for name, cache in caches.items()}
        feed(request, {**inputs, **{name: cache.tensor(copies[name]) for name, cache in caches.items()}})

        def step(copies: Any = copies) -> Any:  # tensors do not keep the memory they look at
            request.infer()
            return request

        return step

    def read(request: Any) -> np.ndarray:
        out = request.get_output_tensor(0).data
        return out.reshape(work.new, work.q_heads, work.dim).swapaxes(0, 1)

    return Runner([layer() for _ in range(work.layers)], read)

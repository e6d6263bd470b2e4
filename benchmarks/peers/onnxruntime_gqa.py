"""ONNX Runtime's ``GroupQueryAttention``: past and present share one buffer, into which the new tokens are written.

Codes have one scale for each channel, taken from the data before the caches are filled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .work import Entry, Runner, Work


class Format(NamedTuple):
    """How a cache stores numbers: dtype of its array, dtype of queries and results, largest code."""

    stored: str
    computed: str = "float32"
    largest: int = 0


FORMATS = {
    "float32": (32, Format("float32")),
    "float16": (16, Format("float16", "float16")),
    "int8": (8, Format("int8", largest=127)),
    "int4": (4, Format("uint8", largest=7)),
}


def entries(work: Work) -> list[Entry]:
    import onnx  # noqa: F401
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    return [
        Entry(f"onnxruntime {name}", bits, lambda bits=bits, form=form: build(work, bits, form))
        for name, (bits, form) in FORMATS.items()
    ]


def build(work: Work, bits: int, form: Format) -> Runner:
    import onnxruntime

    stores, scales = zip(*(stored(work, x, bits, form) for x in (work.k, work.v)))
    rows = [by_tokens(x).astype(form.computed) for x in work.step]
    inputs = dict(zip(("query", "key", "value"), rows))
    inputs |= {"last": np.array([work.tokens - 1], np.int32), "total": np.array(work.tokens, np.int32)}
    if form.largest:
        inputs |= dict(zip(("key_scale", "value_scale"), scales))
    session = open_session(work, bits, form, inputs, stores)
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    bound = {name: value(x) for name, x in inputs.items()}

    def layer() -> Any:
        binding = session.io_binding()
        for name, x in bound.items():
            binding.bind_ortvalue_input(name, x)
        for name, x in zip(("keys", "values"), stores):
            cache = value(x.copy())
            binding.bind_ortvalue_input(f"past_{name}", cache)
            binding.bind_ortvalue_output(f"present_{name}", cache)
        out = value(np.zeros_like(rows[0]))
        binding.bind_ortvalue_output("out", out)

        def step() -> Any:
            session.run_with_iobinding(binding)
            return out

        return step

    def read(out: Any) -> np.ndarray:
        return out.numpy().reshape(work.new, work.q_heads, work.dim).swapaxes(0, 1)

    return Runner([layer() for _ in range(work.layers)], read)


def by_tokens(x: np.ndarray) -> np.ndarray:
    """[1, H, S, D] as [1, S, H D]."""
    return np.ascontiguousarray(x[0].swapaxes(0, 1)).reshape(1, x.shape[2], -1)


def stored(work: Work, x: np.ndarray, bits: int, form: Format) -> tuple[np.ndarray, np.ndarray]:
    """A cache with the past of *x*, and the scales of its channels, float32 [1, H_kv, 1, D]."""
    room = np.zeros(x.shape, np.float32)
    room[:, :, : work.past] = x[:, :, : work.past]
    if not form.largest:
        return room.astype(form.stored), np.ones(1, np.float32)
    scale = np.abs(x).max(axis=2, keepdims=True) / np.float32(form.largest)
    codes = np.rint(room / scale).astype(np.int8)
    if bits == 4:
        codes = (codes + 8).astype(np.uint8)
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return codes, scale


def open_session(work: Work, bits: int, form: Format, inputs: dict[str, np.ndarray], stores: Any) -> Any:
    """A session of one node; *inputs* and *stores* [keys, values] have the shapes and dtypes of its arguments."""
    import onnxruntime
    from onnx import helper

    def info(name: str, x: np.ndarray) -> Any:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)

    caches = dict(zip(("keys", "values"), stores))
    names = ["query", "key", "value", "past_keys", "past_values", "last", "total"]
    attributes: dict[str, Any] = {"num_heads": work.q_heads, "kv_num_heads": work.kv_heads}
    if form.largest:
        names += ["", "", "", "", "", "key_scale", "value_scale"]
        kind = "PER_CHANNEL"
        attributes |= {"kv_cache_bit_width": bits, "k_quant_type": kind, "v_quant_type": kind}
    outputs = ["out", "present_keys", "present_values"]
    node = helper.make_node("GroupQueryAttention", names, outputs, domain="com.microsoft", **attributes)
    given = {**inputs, **{f"past_{name}": x for name, x in caches.items()}}
    results = {"out": inputs["query"], **{f"present_{name}": x for name, x in caches.items()}}
    tensors = ([info(name, x) for name, x in some.items()] for some in (given, results))
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "step", *tensors), opset_imports=versions, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = work.threads, 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

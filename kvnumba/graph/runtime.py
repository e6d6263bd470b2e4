"""Graphs with stateful nodes on two engines: ONNX Runtime, by operators in Python, and the evaluator of ``onnx``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from kvnumba.graph.nodes import ATTENTION, CACHE, DOMAIN, PAST_SHAPE, attribute, described, free_name, ours

Array = npt.NDArray[Any]

#: Domain of the operators of onnxruntime-extensions.
_CONTRIB = "ai.onnx.contrib"
#: A mask, and lengths, that are not there.
_NO_MASK, _NO_LENGTHS = "kvnumba.no_mask", "kvnumba.no_lengths"


class Owner(Protocol):
    """The session whose states the operators read and write."""

    def grow(self, state: str, x: Array) -> Array: ...
    def attend(self, state: str, q: Array, k: Array, v: Array, mask: Array | None, lengths: Array | None) -> Array: ...


class Engine(Protocol):
    """Runs a prepared model."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]: ...


def past_shapes(model: ir.Model) -> dict[str, tuple[str, int, int]]:
    """Turn the `PAST_SHAPE` nodes of *model* into inputs: name to (state, start, end). The session feeds them."""
    found = {}
    for node in ours(model, PAST_SHAPE):
        rank = attribute(node, "rank")
        start, end, _ = slice(attribute(node, "start", 0), attribute(node, "end", rank)).indices(rank)
        value = node.outputs[0]
        kind = ir.TensorType(ir.DataType.INT64)
        fed = ir.Value(name=free_name(model, f"{value.name}.fed"), shape=ir.Shape([end - start]), type=kind)
        if value.is_graph_output():  # an input cannot be an output as it is
            same = ir.Node("", "Identity", [fed], name=f"{node.name}.same")
            same.outputs[0].shape, same.outputs[0].type = fed.shape, fed.type
            model.graph.insert_before(node, same)
            value.replace_all_uses_with(same.outputs[0], replace_graph_outputs=True)
            value.name, same.outputs[0].name = f"{value.name}.before", value.name
        else:
            value.replace_all_uses_with(fed)
        model.graph.remove(node, safe=True)
        model.graph.inputs.append(fed)
        found[str(fed.name)] = (attribute(node, "state"), start, end)
    return found


class Reference:
    """The evaluator of the package ``onnx``: slow, and right."""

    def __init__(self, model: ir.Model, owner: Owner) -> None:
        from onnx.reference import ReferenceEvaluator
        from onnx.reference.op_run import OpRun

        def grow(self: Any, x: Array, **attributes: Any) -> tuple[Array]:
            return (owner.grow(attributes["state"], x),)

        def attend(self: Any, *inputs: Array, **attributes: Any) -> tuple[Array]:
            mask, lengths = [*inputs[3:], None, None][:2]
            q, k, v = inputs[:3]
            return (owner.attend(attributes["k_state"], q, k, v, mask, lengths),)

        operators = [
            type(name, (OpRun,), {"op_domain": DOMAIN, "_run": function})
            for name, function in ((CACHE, grow), (ATTENTION, attend))
        ]
        for node in ours(model, CACHE, ATTENTION):  # attributes without a value of ours are not known to the evaluator
            for name in [name for name in node.attributes if name not in ("state", "k_state")]:
                del node.attributes[name]
        self._evaluator = ReferenceEvaluator(ir.to_proto(model), new_ops=operators)
        self._outputs = [str(value.name) for value in model.graph.outputs]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(self._outputs, self._evaluator.run(None, dict(feeds)), strict=True))


#: Owners by handle, as the operators of ONNX Runtime find them.
_owners: WeakValueDictionary[str, Any] = WeakValueDictionary()
_registered = False


class OnnxRuntime:
    """ONNX Runtime; the stateful nodes are operators in Python of the package ``onnxruntime-extensions``."""

    def __init__(self, model: ir.Model, owner: Owner, threads: int) -> None:
        import onnxruntime
        from onnxruntime_extensions import get_library_path

        _register()
        self._handle = uuid.uuid4().hex
        _owners[self._handle] = owner
        _as_python_operators(model, self._handle)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.register_custom_ops_library(get_library_path())
        proto = ir.to_proto(model).SerializeToString()
        self._session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
        self._outputs = [value.name for value in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(self._outputs, self._session.run(None, dict(feeds)), strict=True))


def _register() -> None:
    """Make the operators known, once in a process: ONNX Runtime takes no more of them after its first session."""
    global _registered
    if _registered:
        return
    from onnxruntime_extensions import PyOp, onnx_op

    real, flag, whole = PyOp.dt_float, PyOp.dt_bool, PyOp.dt_int32
    names = {"handle": PyOp.dt_string, "state": PyOp.dt_string}
    onnx_op(op_type="KVNumbaCache", inputs=[real], outputs=[real], attrs=names)(_grow)
    for name, mask in (("KVNumbaAttention", flag), ("KVNumbaAttentionBias", real)):
        onnx_op(op_type=name, inputs=[real, real, real, mask, whole], outputs=[real], attrs=names)(_attend)
    _registered = True


def _grow(x: Array, handle: str, state: str) -> Array:
    return _owners[handle].guarded(x, lambda owner: owner.grow(state, x))


def _attend(q: Array, k: Array, v: Array, mask: Array, lengths: Array, handle: str, state: str) -> Array:
    def call(owner: Owner) -> Array:
        return owner.attend(state, q, k, v, mask if mask.ndim else None, lengths if lengths.ndim else None)

    return _owners[handle].guarded(q, call)


def _as_python_operators(model: ir.Model, handle: str) -> None:
    """Turn our nodes into operators that Python runs, which know float32 only: others are converted on the way."""
    nodes = ours(model, CACHE, ATTENTION)
    for node in nodes:
        kept = attribute(node, "dtype")
        state = attribute(node, "state" if node.op_type == CACHE else "k_state")
        inputs = [_cast(model, node, value, ir.DataType.FLOAT, _type(value, kept)) for value in node.inputs[:3]]
        name = "KVNumbaCache"
        if node.op_type == ATTENTION:
            mask, lengths = [*node.inputs[3:], None, None][:2]
            name = "KVNumbaAttention"
            if mask is None:
                mask = _constant(model, _NO_MASK, np.array(False))
            elif mask.dtype != ir.DataType.BOOL:
                if mask.dtype is None:
                    raise ValueError(f"{described(node)} must have a mask of a known type, got {mask.name!r} of none")
                name, mask = "KVNumbaAttentionBias", _cast(model, node, mask, ir.DataType.FLOAT, mask.dtype.value)
            inputs += [mask, lengths if lengths is not None else _constant(model, _NO_LENGTHS, np.array(0, np.int32))]
        attributes = ir.convenience.convert_attributes({"handle": handle, "state": state})
        made = ir.Node(_CONTRIB, name, inputs, attributes, name=node.name)
        old, new = node.outputs[0], made.outputs[0]
        new.name, new.shape = free_name(model, f"{old.name}.python"), old.shape
        new.type = ir.TensorType(ir.DataType.FLOAT)
        model.graph.insert_before(node, made)
        back = new
        if kept != ir.DataType.FLOAT.value:
            cast = ir.Node("", "Cast", [new], ir.convenience.convert_attributes({"to": kept}), name=f"{node.name}.back")
            back = cast.outputs[0]
            back.shape, back.type = old.shape, ir.TensorType(ir.DataType(kept))
            model.graph.insert_before(node, cast)
        old.replace_all_uses_with(back, replace_graph_outputs=True)
        name_of_output, old.name = old.name, f"{old.name}.before"
        back.name = name_of_output
        model.graph.remove(node, safe=True)
    model.opset_imports.pop(DOMAIN, None)
    model.opset_imports[_CONTRIB] = 1


def _cast(model: ir.Model, before: ir.Node, value: ir.Value | None, to: ir.DataType, kind: int) -> ir.Value | None:
    if value is None or kind == to.value:
        return value
    node = ir.Node("", "Cast", [value], ir.convenience.convert_attributes({"to": to.value}), name=f"{value.name}.real")
    node.outputs[0].name, node.outputs[0].shape = free_name(model, f"{value.name}.real"), value.shape
    node.outputs[0].type = ir.TensorType(to)
    model.graph.insert_before(before, node)
    return node.outputs[0]


def _type(value: ir.Value | None, kept: int) -> int:
    """Element type of *value*, as far as it is known, which need not be that of the keys."""
    return kept if value is None or value.dtype is None else value.dtype.value


def _constant(model: ir.Model, name: str, array: Array) -> ir.Value:
    if name not in model.graph.initializers:
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        model.graph.register_initializer(value)
    return model.graph.initializers[name]

"""An NNEF graph: what it holds, and its text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvnumba import checks
from kvnumba.graph.nnef.operators import OPERATORS
from kvnumba.graph.nnef.words import Hidden, identifier, literal, quoted

try:
    import nnef as _nnef
except ImportError as error:
    raise ImportError(f'kvnumba.graph.nnef needs the package nnef ({error}); pip install "kvnumba[nnef]"') from error

Array = npt.NDArray[Any]

PLAIN, QUANTIZED, SDPA = (
    "tract_transformers_dyn_kv_cache",
    "tract_transformers_quantized_dyn_kv_cache",
    "tract_transformers_sdpa",
)
#: What the operators of tract look like, in the language of NNEF.
_DECLARED = f"""
extension KHR_enable_fragment_definitions;
fragment {PLAIN}(input: tensor<scalar>, name: string, axis: integer, datum_type: string,
    past_sequence_shape: integer[], input_sequence_shape: integer[]) -> (output: tensor<scalar>);
fragment {QUANTIZED}(input: tensor<scalar>, name: string, axis: integer, bits: integer, per_channel: integer,
    datum_type: string, past_sequence_shape: integer[], input_sequence_shape: integer[]) -> (output: tensor<scalar>);
fragment {SDPA}(q: tensor<scalar>, k: tensor<scalar>, v: tensor<scalar>, mask: tensor<scalar> = 0.0,
    scale: scalar = 0.0, datum_type: string = 'f32', acc_datum_type: string = 'f32', is_causal: logical = false)
    -> (output: tensor<scalar>);
"""
SHAPES = ("past_sequence_shape", "input_sequence_shape")
#: The first of the codes that stand for the items of shapes while the package reads them; they count down.
_FIRST_CODE = 2**31 - 1
_PROPERTIES = re.compile(r"^fragment tract_core_properties\b.*?^\}\n?", re.DOTALL | re.MULTILINE)
_EXTENSION = re.compile(r"\bextension\s+(tract_\w+[^;]*);[ \t]*\n?")
_EXTERNAL = re.compile(
    r"\b(\w+)\s*=\s*(?:tract_core_external\s*\(([^()]*)\)|external\s*(?:<\s*(\w+)\s*>)?\s*\(([^()]*)\))"
)
_LIST = re.compile(rf"\b({'|'.join(SHAPES)}|shape)\s*=\s*\[([^\]]*)\]")
_SHAPE = re.compile(r"\bshape\s*=\s*\[[^\]]*\]")
_TYPE = re.compile(r"\bdatum_type\s*=\s*'(\w+)'")
#: What tract writes for `copy`, and the package does not know.
_ALIAS = re.compile(r"=\s*([A-Za-z_]\w*)\s*;")
DTYPES: dict[str, type[np.generic]] = {
    "bool": np.bool_,
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip
_GENERIC = {"scalar": "f32", "integer": "i64", "logical": "bool"}

Dim = int | str


@dataclass
class Input:
    """An input of a model: its name, the element type as tract writes it ("f32"), its shape with symbols as text."""

    name: str
    datum_type: str
    shape: list[Dim]


@dataclass
class Operation:
    """One operator: its name, what it reads, its attributes, the name of what it gives."""

    kind: str
    inputs: dict[str, Any]
    attributes: dict[str, Any]
    output: str


@dataclass
class Model:
    """An NNEF graph.

    ``extensions`` are the lines of tract, such as "tract_symbol P", without those for the registries; ``tensors`` hold
    the variables by their labels.
    """

    name: str
    inputs: list[Input]
    operations: list[Operation]
    outputs: list[str]
    extensions: list[str] = field(default_factory=list)
    tensors: dict[str, Array] = field(default_factory=dict)

    @property
    def caches(self) -> list[Operation]:
        """The stateful operators, in their order."""
        return [operation for operation in self.operations if operation.kind in (PLAIN, QUANTIZED)]

    @property
    def named_caches(self) -> dict[str, Operation]:
        """The stateful operators by name; those that share one are called "name of output"."""
        names = [str(one.attributes["name"]) for one in self.caches]
        named: dict[str, Operation] = {}
        for name, one in zip(names, self.caches):
            key = name if names.count(name) == 1 else f"{name} of {one.output}"
            while key in named:
                key += "'"
            named[key] = one
        return named


def parse(source: str) -> Model:
    """The model of the text of a ``graph.nnef``, without its variables' tensors."""
    if not isinstance(source, str):
        raise TypeError(f"source must be the text of a graph.nnef, got an object of type {type(source).__name__}")
    hidden = Hidden(source)
    extensions = [hidden.shown(line.strip()) for line in _EXTENSION.findall(hidden.text)]
    body, codes, kinds = _standard(hidden)
    try:
        graph = _nnef.parse_string(body)
    except Exception as error:
        raise ValueError(f"graph.nnef must be a graph of known operators: {hidden.shown(str(error))}") from None

    def value(x: Any) -> Any:
        """A name or a string as `str`, a constant as a number, a list of them."""
        if isinstance(x, (list, tuple)):
            return [value(item) for item in x]
        return hidden.content(str(x)) if isinstance(x, str) else x

    def attribute(name: str, x: Any) -> Any:
        return [codes.get(n, n) for n in x] if name in (*SHAPES, "shape") else value(x)

    inputs: list[Input] = []
    operations: list[Operation] = []
    for one in graph.operations:
        result = str(next(iter(one.outputs.values())))
        output = hidden.content(result)
        attributes = {k: attribute(k, x) for k, x in one.attribs.items()}
        if one.name == "external":
            inputs.append(Input(output, kinds.get(result, "f32"), attributes["shape"]))
            continue
        arguments = {k: value(x) for k, x in one.inputs.items()}
        if one.name == SDPA:  # what stands for "none" is not written
            arguments = {k: x for k, x in arguments.items() if x != 0.0}
            attributes = {k: x for k, x in attributes.items() if (k, x) != ("scale", 0.0)}
        operations.append(Operation(one.name, arguments, attributes, output))
    symbols = [line for line in extensions if not line.startswith("tract_registry")]
    model = Model(hidden.content(graph.name), inputs, operations, value(graph.outputs), symbols)
    check(model)
    return model


def _standard(hidden: Hidden) -> tuple[str, dict[int, Dim], dict[str, str]]:
    """The text as the package knows the language, what its numbers in shapes stand for, element types of the inputs."""
    codes: dict[int, Dim] = {}
    kinds: dict[str, str] = {}

    def coded(found: re.Match[str]) -> str:
        numbers = []
        for item in filter(None, map(str.strip, found[2].split(","))):
            numbers.append(_FIRST_CODE - len(codes))
            codes[numbers[-1]] = int(item) if re.fullmatch(r"-?\d{1,18}", item) else hidden.shown(item)
        return f"{found[1]} = {numbers}"

    def typed(found: re.Match[str]) -> str:
        output, typed_arguments, generic, arguments = found.groups()
        if arguments is not None:
            kinds[output] = _GENERIC.get(generic or "scalar", generic)
            return f"{output} = external({arguments})"
        shape, kind = _SHAPE.search(typed_arguments), _TYPE.search(typed_arguments)
        if not shape or not kind:
            return found[0]
        kinds[output] = hidden.content(kind[1]).lower()
        return f"{output} = external({shape[0]})"

    body = _EXTENSION.sub("", _PROPERTIES.sub("", hidden.text))
    body = _ALIAS.sub(r"= copy(\1);", _EXTERNAL.sub(typed, _LIST.sub(coded, body)))
    return re.sub(r"(version\s+[\d.]+\s*;)", lambda found: found[1] + _DECLARED, body, count=1), codes, kinds


def check(model: Model) -> None:
    """Raise ValueError unless all operators, element types and names are known, and the shapes can be run."""
    given = {one.name for one in model.inputs}
    for one in model.inputs:
        _known("datum_type", one.datum_type, one.name)
    for operation in model.operations:
        kind, attributes, output = operation.kind, operation.attributes, operation.output
        if kind not in OPERATORS and kind not in (PLAIN, QUANTIZED):
            raise ValueError(f"operator {kind} of {output!r} must be one of {', '.join(sorted(OPERATORS))}")
        _given(f"inputs of {output!r}", list(operation.inputs.values()), given)
        given.add(output)
        for name in ("datum_type", "acc_datum_type"):
            if name in attributes:
                _known(name, attributes[name], output)
        if kind == "variable" and not all(isinstance(n, int) and n >= 0 for n in attributes["shape"]):
            raise ValueError(f"shape of variable {output!r} must be numbers, got {as_list(attributes['shape'])}")
        if kind in (PLAIN, QUANTIZED):
            past, new = (len(attributes[name]) for name in SHAPES)
            if past != new or not 0 <= attributes["axis"] < past:
                raise ValueError(
                    f"operator {kind} of {output!r} must have two shapes of one rank and an axis of it, got "
                    f"{past} and {new} axes and axis {attributes['axis']}"
                )
    _given("outputs of the model", model.outputs, given)


def _given(what: str, x: Any, given: set[str]) -> None:
    for item in x if isinstance(x, (list, tuple)) else [x]:
        if isinstance(item, (list, tuple)):
            _given(what, item, given)
        elif isinstance(item, str) and item not in given:
            raise ValueError(f"{what} must be inputs of the model or results of operators before, got {item!r}")


def _known(name: str, kind: Any, output: str) -> None:
    if str(kind).lower() not in DTYPES:
        raise ValueError(f"{name} of {output!r} must be one of {', '.join(DTYPES)}, got {kind!r}")


def variable(model: Model, operation: Operation) -> Array:
    """The tensor of a variable, as float32."""
    label, shape = str(operation.attributes["label"]), operation.attributes["shape"]
    if label not in model.tensors:
        raise ValueError(f"tensors of the model must have {label!r} of shape {shape}, got none; load it, or set it")
    array = checks.as_float32(checks.numbers(f"tensor {label!r}", model.tensors[label]))
    if list(array.shape) != list(shape):
        raise ValueError(f"tensor {label!r} must have shape {shape}, got {list(array.shape)}")
    return array


def text(model: Model) -> str:
    """The text of ``graph.nnef`` for *model*, as tract reads it."""
    check(model)
    lines = ["version 1.0;", "", "extension tract_registry tract_core;"]
    if any(operation.kind.startswith("tract_transformers") for operation in model.operations):
        lines.append("extension tract_registry tract_transformers;")
    lines += [f"extension {line};" for line in model.extensions]
    inputs, outputs = ", ".join(identifier(one.name) for one in model.inputs), ", ".join(map(identifier, model.outputs))
    lines += ["", f"graph {identifier(model.name)}({inputs}) -> ({outputs})", "{"]
    for one in model.inputs:
        kind = quoted(one.datum_type)
        lines.append(
            f"    {identifier(one.name)} = tract_core_external(shape = {as_list(one.shape)}, datum_type = {kind});"
        )
    for operation in model.operations:
        arguments = [f"{key} = {_argument(x)}" for key, x in operation.inputs.items()]
        arguments += [f"{key} = {_attribute(key, x)}" for key, x in operation.attributes.items()]
        kind = "variable<scalar>" if operation.kind == "variable" else operation.kind
        lines.append(f"    {identifier(operation.output)} = {kind}({', '.join(arguments)});")
    return "\n".join([*lines, "}", ""])


def as_list(shape: list[Dim]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _argument(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(_argument, x))}]"
    return identifier(x) if isinstance(x, str) else literal(x)


def _attribute(key: str, x: Any) -> str:
    if key in (*SHAPES, "shape"):
        return as_list(x)
    return f"[{', '.join(map(literal, x))}]" if isinstance(x, (list, tuple)) else literal(x)

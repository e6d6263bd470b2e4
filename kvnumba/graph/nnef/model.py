"""An NNEF graph: what it holds, and its text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvnumba.graph.nnef.operators import OPERATORS

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
#: Codes of symbols in shapes, while the package reads them: numbers that no dimension has.
_FIRST_CODE = 2**31 - 1
_PROPERTIES = re.compile(r"^fragment tract_core_properties\b.*?^\}\n?", re.DOTALL | re.MULTILINE)
_EXTENSION = re.compile(r"^extension\s+(tract_\w+[^;]*);[ \t]*\n?", re.MULTILINE)
_EXTERNAL = re.compile(
    r"\btract_core_external\(\s*shape\s*=\s*\[([^\]]*)\]\s*,\s*datum_type\s*=\s*['\"](\w+)['\"]\s*\)"
)
_LIST = re.compile(rf"\b({'|'.join(SHAPES)}|shape)\s*=\s*\[([^\]]*)\]")
DTYPES = {"f32": np.float32, "f16": np.float16, "f64": np.float64, "i64": np.int64, "bool": np.bool_}

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


def parse(source: str) -> Model:
    """The model of the text of a ``graph.nnef``, without its variables' tensors."""
    codes: dict[int, str] = {}
    kinds: list[str] = []

    def coded(found: re.Match[str]) -> str:
        items = [item.strip() for item in found[2].split(",") if item.strip()]
        for i, item in enumerate(items):
            if not re.fullmatch(r"\d+", item):
                code = _FIRST_CODE - len(codes)
                codes[code] = item
                items[i] = str(code)
        return f"{found[1]} = [{', '.join(items)}]"

    def typed(found: re.Match[str]) -> str:
        kinds.append(found[2].lower())
        return f"external(shape = [{found[1]}])"

    extensions = [line.strip() for line in _EXTENSION.findall(source)]
    body = _EXTENSION.sub("", _PROPERTIES.sub("", source))
    body = _LIST.sub(coded, _EXTERNAL.sub(typed, body))
    body = re.sub(r"(version\s+[\d.]+\s*;)", lambda found: found[1] + _DECLARED, body, count=1)
    try:
        graph = _nnef.parse_string(body)
    except Exception as error:
        raise ValueError(f"graph.nnef must be a graph of known operators: {error}") from None

    def shape(numbers: Any) -> list[Dim]:
        return [codes.get(n, n) for n in numbers]

    inputs: list[Input] = []
    operations: list[Operation] = []
    for one in graph.operations:
        output = str(next(iter(one.outputs.values())))
        if one.name == "external":
            kind = kinds[len(inputs)] if len(inputs) < len(kinds) else "f32"
            inputs.append(Input(output, kind, shape(one.attribs["shape"])))
            continue
        attributes = {k: shape(v) if k in (*SHAPES, "shape") else v for k, v in one.attribs.items()}
        if one.name not in OPERATORS and one.name not in (PLAIN, QUANTIZED):
            raise ValueError(f"operator {one.name} of {output!r} must be one of {', '.join(sorted(OPERATORS))}")
        arguments = {k: _value(v) for k, v in one.inputs.items()}
        if one.name == SDPA:  # what stands for "none" is not written
            arguments = {k: v for k, v in arguments.items() if v != 0.0}
            attributes = {k: v for k, v in attributes.items() if (k, v) != ("scale", 0.0)}
        operations.append(Operation(one.name, arguments, attributes, output))
    symbols = [line for line in extensions if not line.startswith("tract_registry")]
    return Model(graph.name, inputs, operations, [str(name) for name in graph.outputs], symbols)


def _value(x: Any) -> Any:
    """An argument: a name as `str`, a constant as a number, a list of them."""
    if isinstance(x, (list, tuple)):
        return [_value(item) for item in x]
    return str(x) if isinstance(x, str) else x


def text(model: Model) -> str:
    """The text of ``graph.nnef`` for *model*, as tract reads it."""
    lines = ["version 1.0;", "", "extension tract_registry tract_core;"]
    if any(operation.kind.startswith("tract_transformers") for operation in model.operations):
        lines.append("extension tract_registry tract_transformers;")
    lines += [f"extension {line};" for line in model.extensions]
    names = ", ".join(one.name for one in model.inputs)
    lines += ["", f"graph {model.name}({names}) -> ({', '.join(model.outputs)})", "{"]
    for one in model.inputs:
        lines.append(
            f"    {one.name} = tract_core_external(shape = {as_list(one.shape)}, datum_type = '{one.datum_type}');"
        )
    for operation in model.operations:
        arguments = [f"{name} = {as_list(x)}" for name, x in operation.inputs.items()]
        arguments += [f"{name} = {_literal(name, x)}" for name, x in operation.attributes.items()]
        kind = "variable<scalar>" if operation.kind == "variable" else operation.kind
        lines.append(f"    {operation.output} = {kind}({', '.join(arguments)});")
    return "\n".join([*lines, "}", ""])


def as_list(x: Any) -> str:
    return f"[{', '.join(as_list(item) for item in x)}]" if isinstance(x, (list, tuple)) else str(x)


def _literal(name: str, x: Any) -> str:
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, str):
        return f"'{x}'"
    if isinstance(x, (list, tuple)):
        return as_list(x) if name in (*SHAPES, "shape") else f"[{', '.join(_literal('', item) for item in x)}]"
    return repr(float(x)) if isinstance(x, float) else str(x)

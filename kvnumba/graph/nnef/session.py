"""Runs NNEF models, and holds the state of their caches."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvnumba import checks
from kvnumba.graph.nnef.model import (
    DTYPES,
    PLAIN,
    QUANTIZED,
    Array,
    Dim,
    Input,
    Model,
    Operation,
    as_list,
    check,
    variable,
)
from kvnumba.graph.nnef.operators import OPERATORS
from kvnumba.graph.states import ArrayState, States
from kvnumba.snapshot import Snapshot


class Session:
    """Runs a model, and holds the state of its caches.

    Parameters
    ----------
    model : Model
    """

    def __init__(self, model: Model) -> None:
        check(model)
        self._model = model
        named = model.named_caches
        self._names = {one.output: name for name, one in named.items()}
        self._states = States({name: _state(name, one) for name, one in named.items()})

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """One call of the model: its caches grow.

        Raises
        ------
        TypeError, ValueError
            An input is missing, not known, or of another shape or element type, a variable has no tensor, or an
            operator got tokens that do not fit. The states are as before the call.
        """
        if not isinstance(feeds, Mapping):
            got = "None" if feeds is None else f"an object of type {type(feeds).__name__}"
            raise TypeError(f"feeds must be a mapping of inputs to arrays, got {got}")
        wanted = {one.name: one for one in self._model.inputs}
        if set(feeds) != set(wanted):
            raise ValueError(f"feeds must have the inputs {sorted(wanted)}, got {sorted(map(str, feeds))}")
        values: dict[str, Any] = {name: _fed(one, feeds[name]) for name, one in wanted.items()}
        symbols = self._symbols(values)
        before = self._states._clone()
        try:
            for operation in self._model.operations:
                values[operation.output] = self._step(operation, values, symbols)
        except BaseException:
            self._states = before
            raise
        return {name: values[name] for name in self._model.outputs}

    def _symbols(self, values: dict[str, Any]) -> dict[str, set[int]]:
        """What each symbol stands for in this call, by the inputs and the tokens stored: one number, or several."""
        found = [pair for one in self._model.inputs for pair in zip(one.shape, values[one.name].shape)]
        for name, one in self._model.named_caches.items():
            past = one.attributes["past_sequence_shape"][one.attributes["axis"]]
            found.append((past, self._states.by_name[name].length()))
        symbols: dict[str, set[int]] = {}
        for symbol, n in found:
            symbols.setdefault(str(symbol), set()).add(n)
        return symbols

    def _step(self, operation: Operation, values: dict[str, Any], symbols: dict[str, set[int]]) -> Array:
        def known(x: Any) -> Any:
            return [known(item) for item in x] if isinstance(x, list) else values[x] if isinstance(x, str) else x

        inputs, attributes = {name: known(x) for name, x in operation.inputs.items()}, operation.attributes
        try:
            if operation.kind in (PLAIN, QUANTIZED):
                held = self._states.by_name[self._names[operation.output]]
                assert isinstance(held, ArrayState)
                return _append(held, inputs["input"])
            if operation.kind == "variable":
                return variable(self._model, operation)
            if operation.kind == "reshape":
                attributes = {**attributes, "shape": [_number(n, symbols) for n in attributes["shape"]]}
            made: Array = OPERATORS[operation.kind](**inputs, **attributes)
            return made
        except (ValueError, TypeError) as error:
            raise ValueError(f"operator {operation.kind} of {operation.output!r}: {error}") from None

    @property
    def length(self) -> int:
        """Tokens stored."""
        return len(self._states)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens."""
        return self._states.nbytes

    def reset(self) -> None:
        """Forget all tokens."""
        for state in self._states.by_name.values():
            state.reset()

    def truncate(self, n: int) -> None:
        """Keep the first *n* tokens of every cache: at most as many as the shortest has."""
        n = checks.length("n", n, self.length)
        for state in self._states.by_name.values():
            state.truncate(n)

    def freeze(self) -> Snapshot[States]:
        """Return the present state, at the same cost for any length."""
        return Snapshot(self._states._clone())

    def unfreeze(self, snapshot: Snapshot[States]) -> None:
        """Go on from a snapshot of a session of the same model."""
        states = snapshot.unfreeze() if isinstance(snapshot, Snapshot) else None
        if not isinstance(states, States) or _kinds(states) != _kinds(self._states):
            raise ValueError("snapshot must come from a session of the same model, got another one")
        self._states = states


def _kinds(states: States) -> dict[str, Any]:
    """What must be the same in two sessions of one model."""
    settings = ("axis", "shape", "form", "layout")
    return {name: [getattr(state, key, None) for key in settings] for name, state in states.by_name.items()}


def _fed(one: Input, x: Any) -> Array:
    """What an input is given, in its element type; integers and bool must come through it unchanged."""
    given = checks.numbers(one.name, x)
    with np.errstate(invalid="ignore", over="ignore"):
        array = given.astype(DTYPES[one.datum_type.lower()], copy=False)
    if array.dtype.kind not in "f" and not np.array_equal(array, given):
        raise ValueError(f"{one.name} must hold values of {one.datum_type}, got others in an array of {given.dtype}")
    if array.ndim != len(one.shape) or any(isinstance(n, int) and n != m for n, m in zip(one.shape, array.shape)):
        raise ValueError(f"{one.name} must have shape {as_list(one.shape)}, got {list(array.shape)}")
    return array


def _append(held: ArrayState, x: Array) -> Array:
    """Store *x* and return all; the caches hold floats, so integers go in and out as the same bits."""
    if x.dtype.kind == "f" or held.form != "float":
        return held.append(x)
    if x.dtype.itemsize == 1:
        return held.append(x.astype(np.float16)).astype(x.dtype)
    return held.append(x.view(f"f{x.dtype.itemsize}")).view(x.dtype)


_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}


def _number(dim: Dim, symbols: dict[str, set[int]]) -> int:
    """A dimension as a number: sums, differences, products and quotients of numbers and symbols."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as n):
                return n
            case ast.Name(id=symbol):
                numbers = symbols.get(symbol, set())
                if len(numbers) == 1:
                    return next(iter(numbers))
                raise ValueError(f"symbol {symbol} must be known by one number, got {sorted(numbers) or 'none'}")
            case ast.UnaryOp(op=ast.USub(), operand=x):
                return -value(x)
            case ast.BinOp(left=x, op=op, right=y) if type(op) in _ARITHMETIC:
                return int(_ARITHMETIC[type(op)](value(x), value(y)))
        raise ValueError(f"dimension must be of numbers, symbols, + - * and /, got {dim!r}")

    if isinstance(dim, int):
        return dim
    try:
        return value(ast.parse(dim, mode="eval").body)
    except (SyntaxError, RecursionError, ZeroDivisionError):
        raise ValueError(f"dimension must be of numbers, symbols, + - * and /, got {dim!r}") from None


def _state(name: str, operation: Operation) -> ArrayState:
    attributes = operation.attributes
    shape = [str(n) for n in attributes["past_sequence_shape"]]
    form = "float" if operation.kind == PLAIN else f"int{attributes['bits']}"
    if operation.kind == QUANTIZED and (attributes["bits"] not in (4, 8) or attributes["axis"] != len(shape) - 2):
        raise ValueError(
            f"operator {QUANTIZED} of {operation.output!r} must have bits 4 or 8 and axis {len(shape) - 2}, got bits "
            f"{attributes['bits']} and axis {attributes['axis']}"
        )
    layout = "per_channel" if attributes.get("per_channel") else "per_token"
    return ArrayState(name, attributes["axis"], shape, form, layout)

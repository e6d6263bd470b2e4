"""Runs NNEF models, and holds the state of their caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvnumba.graph.nnef.model import DTYPES, PLAIN, QUANTIZED, Array, Model, Operation, as_list
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
        self._model = model
        self._states = States({str(one.attributes["name"]): _state(one) for one in model.caches})

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """One call of the model: its caches grow.

        Raises
        ------
        ValueError
            An input is missing, not known or of another shape, or an operator got tokens that do not fit. The states
            are as before the call.
        """
        wanted = {one.name: one for one in self._model.inputs}
        if set(feeds) != set(wanted):
            raise ValueError(f"feeds must have the inputs {sorted(wanted)}, got {sorted(feeds)}")
        values: dict[str, Any] = {}
        for name, one in wanted.items():
            values[name] = np.asarray(feeds[name], DTYPES.get(one.datum_type, np.float32))
            if values[name].ndim != len(one.shape) or any(
                isinstance(n, int) and n != m for n, m in zip(one.shape, values[name].shape)
            ):
                raise ValueError(f"{name} must have shape {as_list(one.shape)}, got {list(values[name].shape)}")
        before = self._states._clone()
        try:
            for operation in self._model.operations:
                values[operation.output] = self._step(operation, values)
        except Exception:
            self._states = before
            raise
        return {name: values[name] for name in self._model.outputs}

    def _step(self, operation: Operation, values: dict[str, Any]) -> Array:
        def known(x: Any) -> Any:
            return [known(item) for item in x] if isinstance(x, list) else values[x] if isinstance(x, str) else x

        inputs = {name: known(x) for name, x in operation.inputs.items()}
        try:
            if operation.kind in (PLAIN, QUANTIZED):
                held = self._states.by_name[str(operation.attributes["name"])]
                assert isinstance(held, ArrayState)
                return held.append(inputs["input"])
            if operation.kind == "variable":
                return self._model.tensors[str(operation.attributes["label"])]
            made: Array = OPERATORS[operation.kind](**inputs, **operation.attributes)
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
        """Keep the first *n* tokens of every cache."""
        for state in self._states.by_name.values():
            state.truncate(n)

    def freeze(self) -> Snapshot[States]:
        """Return the present state, at the same cost for any length."""
        return Snapshot(self._states._clone())

    def unfreeze(self, snapshot: Snapshot[States]) -> None:
        """Go on from a snapshot of a session of the same model."""
        states = snapshot.unfreeze()
        if not isinstance(states, States) or set(states.by_name) != set(self._states.by_name):
            raise ValueError("snapshot must come from a session of the same model, got another one")
        self._states = states


def _state(operation: Operation) -> ArrayState:
    attributes = operation.attributes
    shape = [str(n) for n in attributes["past_sequence_shape"]]
    form = "float" if operation.kind == PLAIN else f"int{attributes['bits']}"
    if operation.kind == QUANTIZED and (attributes["bits"] not in (4, 8) or attributes["axis"] != len(shape) - 2):
        raise ValueError(
            f"operator {QUANTIZED} of {operation.output!r} must have bits 4 or 8 and axis {len(shape) - 2}, got bits "
            f"{attributes['bits']} and axis {attributes['axis']}"
        )
    layout = "per_channel" if attributes.get("per_channel") else "per_token"
    return ArrayState(str(attributes["name"]), attributes["axis"], shape, form, layout)

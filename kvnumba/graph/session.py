"""`Session`: runs a graph with stateful nodes, and holds the state of all its layers."""

from __future__ import annotations

import os
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from kvnumba import checks
from kvnumba.graph.nodes import (
    ATTENTION,
    CACHE,
    NoCacheError,
    as_proto,
    attribute,
    described,
    dims,
    ours,
    with_its_data,
)
from kvnumba.graph.runtime import Engine, OnnxRuntime, Reference, past_shapes
from kvnumba.graph.states import ArrayState, AttentionState, States, attention_options, split_heads
from kvnumba.snapshot import Snapshot
from kvnumba.spec import Sized
from kvnumba.storage import naming

Array = npt.NDArray[Any]

BACKENDS = ("onnxruntime", "reference")


class Session(Sized):
    """A model whose caches were folded, on ONNX Runtime or on the evaluator of ``onnx``.

    Parameters
    ----------
    model : onnx.ModelProto, onnx_ir.Model, str or path
        With the nodes of `fold_kv_cache` or `fuse_kv_attention`. It is not changed.
    backend : str
        "onnxruntime" (packages onnxruntime and onnxruntime-extensions) or "reference".
    threads : int
        Of ONNX Runtime; 0: as many as it likes. `kvnumba.set_num_threads` says how many the attention uses.

    Raises
    ------
    NoCacheError
        The model has no such node.
    """

    def __init__(self, model: Any, *, backend: str = "onnxruntime", threads: int = 0) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        checks.count("threads", threads)
        graph = with_its_data(ir.from_proto(as_proto(model)))
        nodes = ours(graph, CACHE, ATTENTION)
        if not nodes:
            raise NoCacheError("model must have folded caches, got none; fold_kv_cache makes them")
        self._inputs = {str(value.name): value for value in graph.graph.inputs}
        self._nodes = {_key(node): _Facts(node) for node in nodes}
        self._states = States({name: facts.state() for name, facts in self._nodes.items()})
        self._past_shapes = past_shapes(graph)
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._engine: Engine = OnnxRuntime(graph, self, threads) if backend == "onnxruntime" else Reference(graph, self)
        self._outputs = [str(value.name) for value in graph.graph.outputs]

    # ---- the main work

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """One call of the model: the states grow by its tokens.

        Parameters
        ----------
        feeds : mapping of str to array
            The inputs that are left in the signature, of the types of the model; those with a value of their own may
            be left out.

        Returns
        -------
        dict of str to ndarray
            The outputs that are left.

        Raises
        ------
        TypeError, ValueError
            An input is missing, not known or of another type, or a node got tokens that do not fit. The states are as
            before the call.
        """
        arrays = self._arrays(feeds)
        symbols = {
            symbol: n for name, x in arrays.items() for symbol, n in zip(dims(self._inputs[name]) or [], x.shape)
            if isinstance(symbol, str)
        }  # fmt: skip
        with self._lock:
            before = self._states._clone()
            for name, (state, start, end) in self._past_shapes.items():
                arrays[name] = np.array(self._state_of(state).past_shape(state, symbols)[start:end], np.int64)
            self._error = None
            try:
                results = self._engine.run(arrays)
            except Exception:
                self._states = before
                if self._error is not None:
                    raise self._error from None
                raise
            if self._error is not None:
                self._states = before
                raise self._error
            return results

    def _arrays(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """*feeds* as arrays, after a check of their names and types."""
        if not isinstance(feeds, Mapping):
            raise TypeError(f"feeds must be a mapping of names of inputs to arrays, got {type(feeds).__name__}")
        needed = {name for name, value in self._inputs.items() if not value.is_initializer()}
        if needed - set(feeds) or set(feeds) - set(self._inputs):
            raise ValueError(f"feeds must have the inputs {sorted(self._inputs)}, got {sorted(map(str, feeds))}")
        arrays = {name: np.asarray(x) for name, x in feeds.items()}
        for name, array in arrays.items():
            known = self._inputs[name].dtype
            if known not in (None, ir.DataType.STRING) and array.dtype != known.numpy():
                raise TypeError(
                    f"input {name!r} must be {known.numpy()}, as the model says, got {array.dtype}; convert it by "
                    f'numpy.asarray(x, "{known.numpy()}")'
                )
        return arrays

    def grow(self, state: str, x: Array) -> Array:
        """What a ``Cache`` node does; the engines call it."""
        facts, held = self._nodes[state], self._states.by_name[state]
        assert isinstance(held, ArrayState)
        with _naming(facts.node):
            return held.append(x.astype(facts.dtype, copy=False)).astype(x.dtype, copy=False)

    def attend(self, state: str, q: Array, k: Array, v: Array, mask: Array | None, lengths: Array | None) -> Array:
        """What a ``CachedAttention`` node does; the engines call it."""
        facts, held = self._nodes[state], self._states.by_name[state]
        assert isinstance(held, AttentionState)
        with _naming(facts.node):
            flat = q.ndim == 3
            q4 = split_heads(q, facts.q_heads)
            k4, v4 = split_heads(k, facts.kv_heads), split_heads(v, facts.kv_heads)
            if (facts.is_causal or facts.window) and q4.shape[2] != k4.shape[2]:
                raise ValueError(
                    f"q must have as many tokens as k, {k4.shape[2]}, for positions to be counted, got {q4.shape[2]}"
                )
            options = attention_options(
                facts.scale, facts.is_causal, facts.softcap, mask, facts.window, held.length() + k4.shape[2]
            )
            if lengths is not None:
                options["lengths"] = _new_tokens(lengths, held, k4.shape[0], k4.shape[2])
            out = held.step(q4, k4, v4, **options).astype(q.dtype, copy=False)
        return out.transpose(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], -1) if flat else out

    def guarded(self, like: Array, call: Callable[[Session], Array]) -> Array:
        """The result of *call*; after an error, which `run` raises, something in the shape of *like*."""
        if self._error is None:
            try:
                return np.ascontiguousarray(call(self))
            except Exception as error:
                self._error = error
        return np.zeros_like(like)

    def _state_of(self, name: str) -> ArrayState | AttentionState:
        return next(state for state in self._states.by_name.values() if name in state.names)

    # ---- state

    def __len__(self) -> int:
        return len(self._states)

    @property
    def length(self) -> int:
        """Tokens stored."""
        return len(self._states)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens of all states."""
        return self._states.nbytes

    def reset(self) -> None:
        """Forget all tokens."""
        for state in self._states.by_name.values():
            state.reset()

    def truncate(self, n: int) -> None:
        """Keep the first *n* tokens of every state, as `KVCache.truncate`."""
        n = checks.length("n", n, self.length)
        for state in self._states.by_name.values():
            state.truncate(n)

    def freeze(self) -> Snapshot[States]:
        """Return the present state, which `unfreeze` goes back to; it takes the same time for any length."""
        return Snapshot(self._states._clone())

    def unfreeze(self, snapshot: Snapshot[States]) -> None:
        """Go on from a snapshot of a session of the same model."""
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"snapshot must come from freeze of a session, got {type(snapshot).__name__}")
        states = snapshot.unfreeze()
        if not isinstance(states, States) or states.kinds() != self._states.kinds():
            raise ValueError("snapshot must come from a session of the same model, got another one")
        self._states = states

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all states, bit for bit, to one file; what was there is replaced at once and only when all is written.

        The file is a zip archive, not compressed, of a safetensors file for each state (docs/file_format.md).
        """
        target = Path(path)
        with naming(path), tempfile.TemporaryDirectory(dir=target.parent, prefix=".kvnumba-") as folder:
            made = Path(folder) / "states.zip"
            with made.open("wb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                    for index, (name, state) in enumerate(self._states.by_name.items()):
                        part = os.path.join(folder, str(index))
                        try:
                            state.save(part)
                        except ValueError as error:
                            raise ValueError(f"state {name!r} cannot be saved: {error}") from None
                        archive.write(part, f"{index}.safetensors")
                        os.remove(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(made, target)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save` of a session of the same model wrote.

        Raises
        ------
        OSError, ValueError
            There is no such file, or it is damaged or of another model. The states are as before.
        """
        fresh = {name: facts.state() for name, facts in self._nodes.items()}
        with tempfile.TemporaryDirectory(prefix="kvnumba-") as folder:
            try:
                with zipfile.ZipFile(Path(path)) as archive:
                    members = {info.filename: info for info in archive.infolist()}
                    if set(members) != {f"{index}.safetensors" for index in range(len(fresh))}:
                        raise ValueError(f"path must hold {len(fresh)} states, got {len(members)} members")
                    if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
                        raise ValueError("path must not be compressed: only what `save` writes is read")
                    for index, state in enumerate(fresh.values()):
                        state.load(archive.extract(members[f"{index}.safetensors"], folder))
            except zipfile.BadZipFile as error:
                raise ValueError(f"path must be what `save` wrote, got a damaged file ({error})") from None
        self._states = States(fresh)

    def __reduce__(self) -> Any:
        raise TypeError("a Session cannot be copied; make another of the same model, and unfreeze a snapshot in it")

    def __repr__(self) -> str:
        states = f"{len(self._nodes)} state{'s' if len(self._nodes) > 1 else ''}"
        return f"Session({states}, length={self.length}, nbytes={self.nbytes})"


class _Facts:
    """What a stateful node says of itself."""

    def __init__(self, node: ir.Node) -> None:
        self.node = node
        self.label = described(node)
        self.dtype = ir.DataType(attribute(node, "dtype")).numpy()
        if node.op_type == CACHE:
            names = ("state", "axis", "past_shape", "format", "layout", "past_first")
            make: Callable[..., Any] = partial(ArrayState, dtype=self.dtype.name)
            self._made: Callable[[], Any] = partial(make, *(attribute(node, name, "") for name in names))
            return
        names = ("k_state", "v_state", "k_shape", "v_shape", "k_format", "v_format")
        self._made = partial(AttentionState, *(attribute(node, name) for name in names))
        self.scale, self.softcap = attribute(node, "scale"), attribute(node, "softcap")
        self.is_causal = attribute(node, "is_causal")
        self.q_heads, self.kv_heads = attribute(node, "q_num_heads", 0), attribute(node, "kv_num_heads", 0)
        left, right = attribute(node, "window", [-1, -1])
        self.window = None if left == right == -1 else (left, right)

    def state(self) -> Any:
        """A state without tokens."""
        return self._made()


def _key(node: ir.Node) -> str:
    return str(attribute(node, "state" if node.op_type == CACHE else "k_state"))


def _new_tokens(lengths: Array, held: AttentionState, batch: int, new: int) -> list[int]:
    """How many of the new tokens each row takes; *lengths*, [B] or [B, 1], holds the index of its last token."""
    flat = lengths.reshape(-1)
    if flat.size != batch:
        raise ValueError(f"seqlens_k must have shape [{batch}] = [batch], got {list(lengths.shape)}")
    stored = [0] * batch if held.cache is None else held.cache.lengths
    counts = [int(n) + 1 - past for n, past in zip(flat, stored)]
    for row, (n, past) in enumerate(zip(counts, stored)):
        if not 0 <= n <= new:
            raise ValueError(
                f"seqlens_k must be from {past - 1} to {past + new - 1} (the last of {past} stored and up to {new} new "
                f"tokens), got {int(flat[row])} at [{row}]"
            )
    return counts


class _naming:
    """Puts the name of a node before the message of what goes wrong in it."""

    def __init__(self, node: ir.Node) -> None:
        self.label = described(node)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, (ValueError, TypeError)):
            raise type(error)(f"{self.label}: {error}") from None

"""A Llama model in NumPy whose attention runs on ``kvnumba.KVCache``.

One layer is ``x + attention(norm(x))`` followed by ``x + feed_forward(norm(x))``. Keys and values of a layer live
in one cache. Several *streams* can run at once over the same weights: they share every matrix product and differ
only in their caches, which is how formats are compared token by token.

Shapes below: N streams, S new tokens, E embedding, H query heads, G key/value heads, D head dim, F feed-forward
width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvnumba.demo import DemoError

Floats = NDArray[np.float32]
#: The caches of one stream, one per layer.
Caches = Sequence[Any]
#: ``attend(cache, q [1, H, S, D], k, v [1, G, S, D]) -> [1, H, S, D]``: append to a cache, then read it.
Attend = Callable[[Any, Floats, Floats, Floats], Floats]


@dataclass(frozen=True)
class Config:
    """The numbers of a Llama model, under the names the GGUF metadata gives them."""

    block_count: int
    embedding_length: int
    head_count: int
    head_count_kv: int
    head_dim: int
    context_length: int
    rope_dims: int
    rope_base: float
    norm_eps: float


class Layer(NamedTuple):
    """Weights of one layer, float32, rows = outputs."""

    attn_norm: Floats  # [E]
    qkv: Floats  # [(H + 2 G) D, E]
    attn_output: Floats  # [E, H D]
    ffn_norm: Floats  # [E]
    gate_up: Floats  # [2 F, E]
    ffn_down: Floats  # [E, F]


@dataclass(frozen=True)
class Weights:
    """Weights outside the layers, and the layers."""

    embedding: Floats  # [V, E]
    layers: list[Layer]
    output_norm: Floats  # [E]
    output: Floats  # [V, E]; the same array as embedding where the model ties them
    inverse_freq: Floats  # [rope_dims / 2]


def new_caches(
    layers: int, kv_heads: int, head_dim: int, k_format: str, v_format: str, capacity: int, cache_class: Any = None
) -> list[Any]:
    """Empty caches, one for each of *layers*; *cache_class* stands in for ``kvnumba.KVCache``."""
    if cache_class is None:
        from kvnumba import KVCache as cache_class
    formats = {"k_format": k_format, "v_format": v_format}
    return [cache_class(kv_heads, head_dim, capacity=capacity, **formats) for _ in range(layers)]


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """``x / rms(x) * weight`` over the last axis."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    out: Floats = x * (weight / np.sqrt(mean_square + np.float32(eps)))
    return out


def silu(x: Floats) -> Floats:
    """``x * sigmoid(x)``, written so that no exponential overflows."""
    half = np.float32(0.5)
    out: Floats = x * (half + half * np.tanh(half * x))
    return out


def rotate(x: Floats, cos: Floats, sin: Floats) -> None:
    """Apply RoPE to *x* [..., S, D] in place; *cos*, *sin* [S, rope_dims / 2].

    GGUF files of this architecture order the rows of q and k so that the two channels of a pair are neighbours:
    pair i is channels 2 i and 2 i + 1. Channels beyond ``rope_dims`` stay as they are.
    """
    dims = 2 * cos.shape[-1]
    even, odd = x[..., 0:dims:2].copy(), x[..., 1:dims:2].copy()
    x[..., 0:dims:2] = even * cos - odd * sin
    x[..., 1:dims:2] = even * sin + odd * cos


def attend(cache: Any, q: Floats, k: Floats, v: Floats) -> Floats:
    """Append all tokens, then let every query read what is in the cache up to its own token."""
    cache.append(k, v)
    out: Floats = cache.attend(q, causal=True)
    return out


def attend_as_streamed(cache: Any, q: Floats, k: Floats, v: Floats) -> Floats:
    """The same result as appending and attending one token at a time, in far fewer calls.

    The state of a code format changes for earlier tokens at one event only: the last token of a block seals the
    block. So the tokens before it go in as one piece (they see the residual in float32), and that token goes in
    alone (it is the first to see its block as codes).
    """
    out = np.empty_like(q)
    for a, b in pieces_between_seals(len(cache), q.shape[2]):
        cache.append(k[:, :, a:b], v[:, :, a:b])
        out[:, :, a:b] = cache.attend(q[:, :, a:b], causal=True)
    return out


def pieces_between_seals(length: int, count: int) -> Iterator[tuple[int, int]]:
    """Cut *count* tokens that follow *length* others, before and after each token that seals a block."""
    from kvnumba.spec import BLOCK, SINK

    ends = set(range(SINK + BLOCK, length + count + 1, BLOCK))  # lengths at which a block is sealed
    cuts = [n for n in range(length + 1, length + count) if n in ends or n + 1 in ends]
    edges = [length, *cuts, length + count]
    for a, b in pairwise(edges):
        if b > a:
            yield a - length, b - length


class Model:
    """A Llama model ready to run.

    Attributes
    ----------
    config : Config
    weights : Weights
    """

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config = config
        self.weights = weights

    def new_caches(self, k_format: str, v_format: str, capacity: int, cache_class: Any = None) -> list[Any]:
        """Empty caches for one stream, one per layer, with room for *capacity* tokens."""
        c = self.config
        return new_caches(c.block_count, c.head_count_kv, c.head_dim, k_format, v_format, capacity, cache_class)

    def forward(self, tokens: NDArray[np.integer], streams: Sequence[Caches], attend: Attend = attend) -> Floats:
        """Run new tokens through the layers.

        Parameters
        ----------
        tokens : int array [S]
            The tokens that follow what the caches hold. Every stream gets the same ones.
        streams : sequence of N lists of caches
            Appended to; all of equal length.
        attend : callable
            How a layer appends and reads: ``attend`` or ``attend_as_streamed``.

        Returns
        -------
        float32 array [N, S, E]
            Hidden states after the last norm; see ``logits``.
        """
        c, w = self.config, self.weights
        cos, sin = self.angles(len(streams[0][0]), len(tokens))
        x = np.repeat(w.embedding[tokens][None], len(streams), axis=0)  # [N, S, E]
        for index, layer in enumerate(w.layers):
            normed = rms_norm(x, layer.attn_norm, c.norm_eps)
            x += self.attention(layer, normed, [caches[index] for caches in streams], cos, sin, attend)
            x += feed_forward(layer, rms_norm(x, layer.ffn_norm, c.norm_eps))
        return rms_norm(x, w.output_norm, c.norm_eps)

    def attention(
        self, layer: Layer, x: Floats, caches: Sequence[Any], cos: Floats, sin: Floats, attend: Attend
    ) -> Floats:
        """Attention of one layer: *x* [N, S, E], one cache per stream; returns [N, S, E]."""
        c = self.config
        n, s, _ = x.shape
        heads = times(x, layer.qkv).reshape(n, s, -1, c.head_dim).transpose(0, 2, 1, 3)  # [N, H + 2 G, S, D]
        rotate(heads[:, : c.head_count + c.head_count_kv], cos, sin)
        q, k, v = np.split(heads, [c.head_count, c.head_count + c.head_count_kv], axis=1)
        out = [attend(cache, q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i, cache in enumerate(caches)]
        merged = np.concatenate(out).transpose(0, 2, 1, 3).reshape(n, s, -1)  # [N, S, H D]
        return times(merged, layer.attn_output)

    def angles(self, start: int, count: int) -> tuple[Floats, Floats]:
        """Cosine and sine of RoPE, float32 [count, rope_dims / 2], for positions from *start*."""
        position = np.arange(start, start + count, dtype=np.float64)
        angle = position[:, None] * self.weights.inverse_freq.astype(np.float64)
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def logits(self, hidden: Floats) -> Floats:
        """Scores of the next token: [..., E] to [..., V]."""
        return times(hidden, self.weights.output)


def generate(model: Model, hidden: Floats, caches: Caches, count: int, ends: frozenset[int]) -> Iterator[int]:
    """The most likely continuation, token by token.

    Parameters
    ----------
    hidden : float32 array [1, S, E]
        What ``forward`` gave for the prompt; the caches hold the prompt.
    count : int
        Most tokens to give.
    ends : frozenset of int
        Tokens at which to stop; they are not given.
    """
    for _ in range(count):
        token = int(model.logits(hidden[0, -1]).argmax())
        if token in ends or len(caches[0]) >= model.config.context_length:
            return
        yield token
        hidden = model.forward(np.array([token]), [caches])


def feed_forward(layer: Layer, x: Floats) -> Floats:
    """SwiGLU: ``down(silu(gate(x)) * up(x))``, [N, S, E] to [N, S, E]."""
    gate, up = np.split(times(x, layer.gate_up), 2, axis=-1)
    return times(silu(gate) * up, layer.ffn_down)


def times(x: Floats, weight: Floats) -> Floats:
    """``x @ weight.T`` as one product over all rows: [..., in] and [out, in] to [..., out]."""
    rows: Floats = x.reshape(-1, x.shape[-1]) @ weight.T
    return rows.reshape(*x.shape[:-1], -1)


def read_model(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> tuple[Model, Any]:
    """Read a GGUF file and convert its weights to float32.

    Parameters
    ----------
    path : Path
        A GGUF file of architecture ``llama``.
    progress : callable
        Called with (tensors done, tensors in all).

    Returns
    -------
    Model and gguf.GGUFReader
        The reader still maps the file: ``text.py`` takes the vocabulary from it.

    Raises
    ------
    DemoError
        Where the file is missing, is not GGUF, or holds a model that this forward pass does not cover.
    """
    import gguf

    if not path.is_file():
        raise DemoError(f"--model must name a GGUF file, got {path}: no such file")
    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:
        raise DemoError(f"--model must name a GGUF file, got {path}: it cannot be read as GGUF ({error})") from None
    config = read_config(reader)
    return Model(config, read_weights(reader, config, progress)), reader


def metadata(reader: Any, key: str, default: Any = None) -> Any:
    """One metadata value of a GGUF file; DemoError where it is missing and has no default."""
    field = reader.get_field(key)
    if field is None:
        if default is None:
            raise DemoError(f"the model file must have the metadata {key}, got none; convert the model anew")
        return default
    return field.contents()


def read_config(reader: Any) -> Config:
    """The numbers of the model; DemoError for another architecture or an option that is not covered."""
    architecture = metadata(reader, "general.architecture", "unknown")
    if architecture != "llama":
        raise DemoError(f"the model must have the architecture llama, got {architecture}; use a Llama-type GGUF file")
    if metadata(reader, "llama.expert_count", 0):
        raise DemoError("the model must have one feed-forward part per layer, got a mixture of experts")
    scaling = metadata(reader, "llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise DemoError(f"llama.rope.scaling.type must be none or linear, got {scaling}")
    embedding = int(metadata(reader, "llama.embedding_length"))
    heads = int(metadata(reader, "llama.attention.head_count"))
    head_dim = int(metadata(reader, "llama.attention.key_length", embedding // heads))
    value_dim = int(metadata(reader, "llama.attention.value_length", head_dim))
    if value_dim != head_dim:
        raise DemoError(f"keys and values must have one head dim, got {head_dim} and {value_dim}")
    return Config(
        block_count=int(metadata(reader, "llama.block_count")),
        embedding_length=embedding,
        head_count=heads,
        head_count_kv=int(metadata(reader, "llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        context_length=int(metadata(reader, "llama.context_length", 2048)),
        rope_dims=int(metadata(reader, "llama.rope.dimension_count", head_dim)),
        rope_base=float(metadata(reader, "llama.rope.freq_base", 10000.0)),
        norm_eps=float(metadata(reader, "llama.attention.layer_norm_rms_epsilon")),
    )


def read_weights(reader: Any, config: Config, progress: Callable[[int, int], None]) -> Weights:
    """All weights as float32; matrices that read the same input are stacked into one."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    total = len(tensors)

    def take(name: str) -> Floats:
        import gguf

        tensor = tensors.pop(name, None)
        if tensor is None:
            raise DemoError(f"the model file must have the tensor {name}, got none")
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        progress(total - len(tensors), total)
        return np.ascontiguousarray(values, dtype=np.float32)

    def optional(name: str) -> Floats | None:
        return take(name) if name in tensors else None

    def layer(i: int) -> Layer:
        q, k, v = (take(f"blk.{i}.attn_{name}.weight") for name in "qkv")
        gate, up = (take(f"blk.{i}.ffn_{name}.weight") for name in ("gate", "up"))
        norms = take(f"blk.{i}.attn_norm.weight"), take(f"blk.{i}.ffn_norm.weight")
        output, down = take(f"blk.{i}.attn_output.weight"), take(f"blk.{i}.ffn_down.weight")
        return Layer(norms[0], np.concatenate([q, k, v]), output, norms[1], np.concatenate([gate, up]), down)

    embedding = take("token_embd.weight")
    weights = Weights(
        embedding=embedding,
        layers=[layer(i) for i in range(config.block_count)],
        output_norm=take("output_norm.weight"),
        output=embedding if (output := optional("output.weight")) is None else output,
        inverse_freq=inverse_freq(reader, config, optional("rope_freqs.weight")),
    )
    if tensors:
        others = ", ".join(sorted(tensors)[:3])
        raise DemoError(f"the model file must have the tensors of a plain Llama, got also {others}")
    return weights


def inverse_freq(reader: Any, config: Config, factors: Floats | None) -> Floats:
    """RoPE frequencies, float32 [rope_dims / 2], divided by the linear scaling and by *factors*, one for each pair."""
    pair = np.arange(0, config.rope_dims, 2, dtype=np.float64)
    freq = config.rope_base ** (-pair / config.rope_dims)
    if metadata(reader, "llama.rope.scaling.type", "none") == "linear":
        freq = freq / float(metadata(reader, "llama.rope.scaling.factor", 1.0))
    if factors is not None:
        freq = freq / factors
    return freq.astype(np.float32)

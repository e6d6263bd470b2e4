"""A key/value cache for language model inference on the CPU: small, fast, and exact about its state."""

from kvnumba._jit import COMPILED
from kvnumba._version import __version__
from kvnumba.cache import KVCache, QuantizedCache
from kvnumba.container import KVCaches, layer_formats
from kvnumba.functional import attention, merge_attention
from kvnumba.growing import ConcatCache, InPlaceCache
from kvnumba.quantization import (
    QuantizationError,
    QuantizedTensor,
    pack_nibbles,
    quantize_per_channel,
    quantize_per_token,
    unpack_nibbles,
)
from kvnumba.snapshot import Snapshot, nbytes
from kvnumba.spec import FORMATS, CacheSpec
from kvnumba.threads import get_num_threads, set_num_threads
from kvnumba.warm import warmup
from kvnumba.window import WindowedKVCache

if not COMPILED:
    from kvnumba.uncompiled import KVCache, QuantizedCache, WindowedKVCache

    KVCaches._kind = KVCache

__all__ = [
    "FORMATS",
    "CacheSpec",
    "ConcatCache",
    "InPlaceCache",
    "KVCache",
    "KVCaches",
    "QuantizedCache",
    "QuantizationError",
    "QuantizedTensor",
    "Snapshot",
    "WindowedKVCache",
    "__version__",
    "attention",
    "get_num_threads",
    "layer_formats",
    "merge_attention",
    "nbytes",
    "pack_nibbles",
    "quantize_per_channel",
    "quantize_per_token",
    "set_num_threads",
    "unpack_nibbles",
    "warmup",
]

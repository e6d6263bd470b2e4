"""The cache and its attention inside Hugging Face transformers.

Importing this module registers the attention function, so that ``attn_implementation="kvnumba"`` is known::

    from kvnumba.integrations.transformers import KVNumbaCache

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="kvnumba")
    model.generate(**inputs, past_key_values=KVNumbaCache(model.config, k_format="int8", v_format="int4"))

The cache also works with any other attention of a model, which then reads decoded tensors; the attention also works
with any other cache.
"""

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        f'kvnumba.integrations.transformers needs torch and transformers ({error}); pip install "kvnumba[transformers]"'
    ) from error

if tuple(int(part) for part in _transformers.__version__.split(".")[:2]) < (5, 24):
    raise ImportError(
        f"kvnumba.integrations.transformers needs transformers 5.24 or newer, got {_transformers.__version__}; "
        'pip install "kvnumba[transformers]"'
    )

from kvnumba.integrations.transformers.attention import attention_forward
from kvnumba.integrations.transformers.cache import KVNumbaCache, KVNumbaLayer
from kvnumba.integrations.transformers.masks import attention_mask
from kvnumba.integrations.transformers.tensors import NAME

__all__ = ["KVNumbaCache", "KVNumbaLayer", "attention_forward", "attention_mask"]

_transformers.AttentionInterface.register(NAME, attention_forward)
_transformers.AttentionMaskInterface.register(NAME, attention_mask)

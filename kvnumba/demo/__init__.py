"""The command ``kvnumba demo``: a small language model that runs on the caches of this package.

================  =====================================================================
``weights.py``    where the model file comes from: given, installed, kept, or downloaded
``model.py``      a Llama forward pass in NumPy over one ``KVCache`` per layer
``text.py``       text to tokens and back, from the vocabulary inside the model file
``measure.py``    what a format costs and saves: perplexity, KL, bytes, time
``made_up.py``    the same measurements without a model, on made-up keys and values
``show.py``       progress bars and tables
``run.py``        the demo from start to end
================  =====================================================================

Nothing here is imported by ``import kvnumba``.
"""

from __future__ import annotations

from kvnumba.commands import CommandError

#: The pairs (k_format, v_format) that the demo compares; the first is what the others are measured against.
PAIRS = (("float32", "float32"), ("int8", "int8"), ("int4", "int4"), ("int8", "int4"))


class DemoError(CommandError):
    """Something the user can put right; the message is one line."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message, code)


class NoWeights(DemoError):
    """No model file is here and none could be downloaded."""


def pair_name(k_format: str, v_format: str) -> str:
    """The name of a pair of formats: ``int4``, or ``int8/int4`` where keys and values differ."""
    return k_format if k_format == v_format else f"{k_format}/{v_format}"

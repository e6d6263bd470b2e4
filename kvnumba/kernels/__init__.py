"""Compiled functions, callable from your own ``@njit`` code.

They work on ``cache.buffers`` (`kvnumba.buffers.KVBuffers`), check nothing and raise nothing.
"""

from kvnumba.kernels.append import append, truncate
from kvnumba.kernels.attention import attend
from kvnumba.kernels.states import Extras

__all__ = ["Extras", "append", "attend", "truncate"]

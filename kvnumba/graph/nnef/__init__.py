"""NNEF models with the stateful operators of tract: read, written, and run on the caches of this package.

Known are ``tract_transformers_dyn_kv_cache``, ``tract_transformers_quantized_dyn_kv_cache`` and
``tract_transformers_sdpa`` of tract 0.23, and the few operators of NNEF between them. The grammar is read by the
package ``nnef`` of the Khronos group; what tract adds to it, the lines ``extension tract_registry`` and
``extension tract_symbol``, symbols in shapes and its typed ``external``, is taken off before and put back.
"""

from kvnumba.graph.nnef.facts import cost, output_facts
from kvnumba.graph.nnef.files import load, save
from kvnumba.graph.nnef.model import Input, Model, Operation, parse, text
from kvnumba.graph.nnef.session import Session

__all__ = ["Input", "Model", "Operation", "Session", "cost", "load", "output_facts", "parse", "save", "text"]

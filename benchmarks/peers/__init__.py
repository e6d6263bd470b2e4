"""This package beside every peer that is installed, on the same work, in one run: ``python -m benchmarks.peers``.

A *peer* is a module of this folder with a function ``entries``: what it can run, as a list of `work.Entry`. A peer that
is not installed raises ``ModuleNotFoundError`` there, and the run goes on without it.
"""

#: Modules with peers, in the order of the table.
PEERS = (
    "ours",
    "numpy_blas",
    "torch_sdpa",
    "onnxruntime_gqa",
    "openvino_paged",
    "tract_fused",
    "transformers_caches",
)

"""Pictures of the documentation, each made by a module of its own from numbers that lie beside it as JSON.

===========  ============================================================================
module       what it draws
===========  ============================================================================
``memory``   bytes of a model's caches against the tokens in them, from ``CacheSpec``
``quality``  perplexity and KL divergence against bits per value, measured on the demo's model
``codes``    one block of keys, its codes and their error; how often each code occurs
===========  ============================================================================

``python -m benchmarks.plots.NAME`` writes into ``docs/images``. ``benchmarks.plot_step_time`` and ``benchmarks.peers``
draw the pictures of time.
"""

"""What a caller holds: `LLM`, feeds, the path of prompts into the engine, outputs, and in `threads/` what runs them.

May import: byte_sizes, cache.tree, cluster, config, constraints, display, engine, geometry, kinds.quantize, mesh,
models, process, schedule, sizing, text, tiers, weights.
Packages: IPython, jax, numpy, rich.
"""

"""What a caller holds: `LLM`, feeds, prompts' way into the engine, outputs, and the thread that owns the engine.

May import: cache.tree, checkpoint, config, constraints, engine, geometry, machine, schedule, sizes, sizing, text.
Packages: jax, numpy, rich.
"""

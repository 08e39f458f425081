"""Drafters on the device: one file each, and the table in which steps find them.

May import: config, engine.frames, engine.mixers, engine.pack, engine.rings, engine.sampling, engine.token_groups,
engine.walk, geometry, models, state.
Packages: jax.
"""

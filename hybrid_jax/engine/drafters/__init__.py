"""Drafters on the device: one file each, and the table in which steps find them.

May import: config, engine.kinds, engine.pack, engine.rings, engine.sampling, engine.token_groups, engine.walk, models,
state.
Packages: jax.
"""

"""Drafters on the device: one file each, and the table in which steps find them.

May import: config, engine.frames, engine.mixers, engine.pack, engine.rings, engine.sampling, engine.walk, geometry,
models, pallas_kernels.token_sampling, state.
Packages: jax.
"""

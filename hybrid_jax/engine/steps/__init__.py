"""Kinds of steps, each in a file with its bucket, its packed rows, what the device does, and what comes back.

May import: config, engine.adjust, engine.drafters, engine.frames, engine.kept, engine.mixers, engine.on_matrices,
engine.pack, engine.rings, engine.sampling, engine.walk, geometry, models, schedule, state.
Packages: jax, numpy.
"""

"""The device side of tiers: copies of frames, those that the host's memory keeps, and the folder on disk.

May import: config, engine.programs, geometry, schedule, state, tiers.
Packages: jax, numpy.
"""

"""The device side of tiers: copies of frames, those that the host's memory keeps, the folder on disk, and a clock.

May import: cache.tree, config, costs, engine.programs, geometry, schedule, state, tiers.
Packages: jax, numpy.
"""

"""A model divided over devices, each of which runs a model of its own (tensor parallelism).

May import: config, geometry, kinds, layers.shards, state, tiers.
Packages: jax, numpy.
"""

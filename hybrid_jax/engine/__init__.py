"""The device side: compiled steps, what they are made of, sampling, and the runner that dispatches plans.

May import: cache.tree, config, costs, geometry, layers, machine, mesh, models, pallas_kernels, process,
products.cpu, schedule, sizing, state, tiers.
Packages: flax, jax, numpy.
"""

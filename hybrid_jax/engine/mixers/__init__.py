"""What mixers do in a step: a file for each kind and backend, and the table in which steps find them.

May import: config, engine.frames, engine.rings, geometry, layers, pallas_kernels, products, state.
Packages: flax, jax, numpy.
"""

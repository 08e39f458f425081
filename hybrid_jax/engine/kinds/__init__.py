"""What recurrent layers do in a step, a file for each kind and backend, and the tables that steps find them in.

May import: config, engine, geometry, layers, pallas_kernels, state.
Packages: flax, jax, numpy.
"""

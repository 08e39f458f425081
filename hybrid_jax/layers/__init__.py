"""Building blocks of models: pure functions of arrays, parameters first, static spec last.

May import: config, pallas_kernels, products.
Packages: jax, numpy.
"""

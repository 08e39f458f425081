"""Building blocks of models: pure functions of arrays, parameters first, static spec last.

May import: config, pallas_kernels.
Packages: jax, numpy.
"""

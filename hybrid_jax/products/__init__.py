"""Matrices of weights: how they are kept, and how each backend multiplies with them.

May import: config, pallas_kernels.
Packages: jax, numpy.
"""

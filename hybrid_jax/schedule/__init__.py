"""Which rows run next, and on which memory: admission, plans, sequences and who holds what. Integers, never jax.

May import: byte_sizes, cache, config, costs, geometry, tiers.
Packages: numpy.
"""

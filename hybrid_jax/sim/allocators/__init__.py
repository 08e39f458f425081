"""Allocators of KV pages and recurrent states: published ones, the engine's, and ideal ones. Only `pool-sim` and
benchmarks use them.

May import: cache.pools, config, costs, geometry, sim, sizes.
Packages: numpy.
"""

"""Allocators of KV pages and recurrent states: published ones, the engine's, and ideal ones. Only `pool-sim` and
benchmarks use them.

May import: byte_sizes, cache.pools, config, costs, geometry, sim.
Packages: numpy.
"""

"""Allocators of KV pages and recurrent states: the engine's own, published ones, and ideal ones. Only `pool-sim` and
benchmarks use them.

May import: byte_sizes, cache.pools.recount, config, geometry, kinds, schedule, sim, sizing.
Packages: numpy.
"""

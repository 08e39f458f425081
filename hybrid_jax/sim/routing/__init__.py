"""Routers on virtual time: fleets of engines, and published ways to choose between them.

May import: cache, cluster, config, costs, sim.prefix_cache.
Packages: numpy.
"""

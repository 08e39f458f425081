"""Routers on virtual time: fleets of engines, and published ways to choose between them.

May import: cluster, config, costs, schedule, sim.prefix_cache.
Packages: numpy.
"""

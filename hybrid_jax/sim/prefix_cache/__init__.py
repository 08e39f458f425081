"""Traces through the prefix cache and the scheduler, and the offline optimum beside them.

May import: byte_sizes, cache, config, costs, geometry, schedule, sim, tiers.
Packages: numpy.
"""

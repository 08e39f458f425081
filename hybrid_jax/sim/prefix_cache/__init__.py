"""Traces through the prefix cache and the scheduler, and the offline optimum beside them.

May import: cache, config, costs, geometry, schedule, sim.
Packages: numpy.
"""

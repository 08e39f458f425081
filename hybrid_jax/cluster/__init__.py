"""Several engines that answer one stream of requests: who has what, and who gets which request.

May import: cache.pools, cache.tree, config, costs, schedule.request.
Packages: numpy.
"""

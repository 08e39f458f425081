"""What to keep: values of nodes by recency, FLOPs and expected use, and weights tuned while running.

May import: cache.pools, cache.tree, config, costs.
Packages: numpy.
"""

"""The tree of prefixes: looking up, inserting, evicting, and why something was lost.

May import: cache.pools.
Packages: numpy.
"""

"""What runs in a process that computes for another one: an `LLM` that serves a link.

May import: api, process, tiers.
Packages: numpy.
"""

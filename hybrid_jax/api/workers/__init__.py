"""Engines in other processes, as a caller has them: what is said between both, over what, and how they are started.

May import: api.completions, api.options, api.outputs, api.progress_bar, api.threads, byte_sizes, cluster, config,
schedule.request, text, tiers.
Packages: numpy.
"""

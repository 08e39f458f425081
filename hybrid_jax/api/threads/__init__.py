"""What runs calls: the thread that owns an engine, what threads send each other, and the questions that it answers.

May import: api.completions, api.outputs, api.progress_bar, byte_sizes, cache.tree, cluster, config, costs, mesh.hosts,
process, schedule, sizing, tiers.
Packages: numpy.
"""

"""Studies on virtual time, without a model: the very classes an engine runs, and published ones beside them.

May import: config, costs, kinds.
"""

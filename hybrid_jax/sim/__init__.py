"""Studies on virtual time, without a model: the same classes that an engine runs, and published ones beside them.

May import: config, costs, kinds, models.known.
"""

"""Weights of 8 and 4 bits as files have them: what config.json says of them, and which tensors are what. No arrays.

May import: config, kinds, models.family, models.headers, models.names.
"""

"""What a kind of layer is to the host: shapes of its weights and of what it caches, and its costs. No arrays.

May import: config, layers.parts.
"""

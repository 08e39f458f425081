"""What the host knows of each kind of layer: shapes of its weights and of what it caches, and its costs. No arrays.

May import: config, products.formats, products.parts.
"""

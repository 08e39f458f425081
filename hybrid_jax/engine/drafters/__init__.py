"""Drafters on the device: one file each, and the table in which steps find them.

May import: config, engine.pack, state.
Packages: jax.
"""

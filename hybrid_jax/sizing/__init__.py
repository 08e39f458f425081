"""Whether a model fits a device, and which settings suit it: cards, budgets, temporaries, defaults. Never jax.

May import: config, costs, geometry, kinds, machine, sizes.
"""

"""Whether a model fits a device, and which settings suit it: cards, budgets, temporaries, defaults. Never jax.

May import: byte_sizes, config, costs, geometry, kinds, machine, pallas_kernels.plan.
"""

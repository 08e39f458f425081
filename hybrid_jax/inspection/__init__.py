"""What a model costs and what of it fits a device, from its config alone: as data, as text, in a notebook. Never jax.

May import: byte_sizes, config, costs, display, geometry, kinds.quantize, machine, mesh.split, models,
pallas_kernels.plan, sizing.
"""

"""Compiled programs: which one runs a dispatch, compiling them, also ahead and in the background, keeping them on disk.

May import: config, costs, engine.pack, engine.steps, machine, mesh, pallas_kernels, process, schedule, state.
Packages: jax.
"""

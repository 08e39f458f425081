"""Compiled programs: compiling them, also ahead and in the background, and keeping them on disk.

May import: machine, pallas_kernels, process.
Packages: jax.
"""

"""Compiled programs: compiling them, also ahead, behind running steps and in threads, and keeping them on disk.

May import: machine, pallas_kernels.
Packages: jax.
"""

"""Compiled programs: compiling them, ahead, behind and in threads, and keeping them on disk.

May import: machine, pallas_kernels.
Packages: jax.
"""

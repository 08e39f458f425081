"""What leaves an engine's memory and may come back: its form, its files, and a folder of them on disk. Needs no jax.

May import: byte_sizes, geometry.
Packages: numpy.
"""

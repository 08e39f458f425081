"""What surrounds this package in a program that is not ours: standard streams, and jax's settings.

May import: nothing of the package.
Packages: jax, numpy.
"""

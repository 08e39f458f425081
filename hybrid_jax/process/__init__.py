"""What surrounds this package in a program that is not ours: standard streams, jax's settings, and what imports
touch.

May import: nothing of the package.
Packages: jax, numpy.
"""

"""Frames, slots, pages and handles: who holds which part of the arena.

May import: nothing of the package.
Packages: numpy.
"""

"""What plans copy between the arena, the host's memory and the disk, when, and whether it pays.

May import: cache, costs, geometry, schedule.plan, schedule.sequence, tiers.
Packages: numpy.
"""

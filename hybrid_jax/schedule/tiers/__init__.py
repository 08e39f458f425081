"""What plans copy between the arena, the host's memory and the disk, and when.

May import: cache, geometry, schedule.plan, schedule.sequence, tiers.
Packages: numpy.
"""

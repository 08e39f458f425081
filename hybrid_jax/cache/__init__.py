"""Frames, slots and the prefix tree: integers on the host, no device and no arrays of state."""

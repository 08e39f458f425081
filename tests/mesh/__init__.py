"""Models that are divided over devices: eight of a CPU, which jax makes of one."""

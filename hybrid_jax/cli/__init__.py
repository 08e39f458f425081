"""The command line: one function a command, its words, and its exit codes. Each command loads only what it needs.

May import: api, batch, byte_sizes, config, display, engine.this_device, inspection, machine, models, process, sim,
sizing, text, tiers, train, weights.
Packages: benchmarks, jax, rich, typer.
"""

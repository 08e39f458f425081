"""The command line: one function a command, its words, and its exit codes. Each command loads only what it needs.

May import: api, batch, config, costs, geometry, machine, models, sim, sizes, sizing, text, train.
Packages: rich, typer.
"""

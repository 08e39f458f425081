"""Options that several commands take, and how a dataclass of them becomes options of a command.

May import: cli.exits, config, text.
Packages: typer.
"""

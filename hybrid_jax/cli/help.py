"""How help looks: commands under headings, options under those of their groups, and types in a shell's words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

TYPES = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "path": "PATH", "Path": "PATH"}
TYPE = re.compile(r"<(?:list\[)?(\w+)\]?>")
# typer puts words for a default in parentheses.
DEFAULT = re.compile(r"\[default: \((.*)\)\]$", re.DOTALL)


class Command(TyperCommand):
    """A command whose options stand under the titles of their groups."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What stands after the name of the command: "[OPTIONS] PROMPT..."."""
        arguments = [param for param in self.params if isinstance(param, TyperArgument)]
        words = [str(param.metavar or param.name) for param in arguments]
        words = [
            word if param.required else f"[{word}]"
            for word, param in zip(words, arguments, strict=True)
        ]
        return ["[OPTIONS]", *words]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments and options into the help: those of all groups come last."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if isinstance(param, TyperArgument):
                name = record[0].partition(" <")[0]
                sections["Arguments"].append((name, _in_words(record)[1]))
                continue
            title = getattr(param, "rich_help_panel", None) or "Options"
            sections.setdefault(title, []).append(_in_words(record))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def commands_under(headings: Mapping[str, Sequence[str]]) -> type[TyperGroup]:
    """A group that shows its commands under headings, each with the first sentence of its help, whatever the width.

    Args:
        headings: the names of the commands under each.
    """

    class Commands(TyperGroup):
        def format_commands(self, ctx: Any, formatter: Any) -> None:
            """Writes the commands into the help."""
            width = max(map(len, self.commands))
            for heading, names in headings.items():
                with formatter.section(heading):
                    rows = [(f"{name:<{width}}", _summary(self.commands[name])) for name in names]
                    formatter.write_dl(rows)

    return Commands


def _in_words(record: tuple[str, str]) -> tuple[str, str]:
    """A line of help without Python's names of types."""
    name, text = record
    return TYPE.sub(lambda found: TYPES.get(found[1], found[0]), name), DEFAULT.sub(
        r"[default: \1]", text
    )


def _summary(command: Any) -> str:
    """The first sentence of a command's help, without its full stop; nothing if Python runs without docstrings."""
    return (command.help or "").split("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip(".")

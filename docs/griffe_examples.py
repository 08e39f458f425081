"""Has the documentation site show docstrings as the parser of the site knows them.

Examples stand under "Examples:". Of arguments and attributes that share a line, each has a line of its own.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# "    a, b: what they are", with lines below that are indented further.
SHARED = re.compile(r"^( {4})((?:[a-zA-Z_]\w*, )+[a-zA-Z_]\w*): (.*(?:\n {5,}.*)*)", re.M)


class Examples(griffe.Extension):
    """Changes every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called with each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_parsed(obj.docstring.value)


def as_parsed(text: str) -> str:
    """A docstring, without its indentation, as the parser knows it.

    Example:
        >>> print(as_parsed("Args:\\n    a, b: two numbers.\\nExample:\\n    >>> 1"))
        Args:
            a: two numbers.
            b: two numbers.
        Examples:
            >>> 1
    """
    text = text.replace("\nExample:\n", "\nExamples:\n")
    apart = lambda found: "\n".join(
        f"{found[1]}{name}: {found[3]}" for name in found[2].split(", ")
    )
    return SHARED.sub(apart, text)

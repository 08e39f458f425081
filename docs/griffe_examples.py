"""Has the documentation site show examples of docstrings as code: the parser knows them as "Examples:"."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section in every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called with each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")

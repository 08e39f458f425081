"""What people see: lines of text below each other, and pieces of HTML for notebooks.

The HTML sets no colours but of marks, so that it suits dark and light themes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape

PALE = "opacity:.6"
MARK = "background:rgba(66,133,244,.25)"


def text_rows(rows: Mapping[str, str]) -> list[str]:
    """Names and values as lines, the values below each other."""
    width = max(map(len, rows))
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines, each column aligned to the right. The first row holds the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def html_table(
    rows: Sequence[Sequence[str]], headings: Sequence[str] = (), numbers: Collection[int] = (1,)
) -> str:
    """A table of text. `numbers` are the columns that stand to the right."""
    head = "".join(f"<th style='text-align:left'>{escape(text)}</th>" for text in headings)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td style='text-align:{'right' if column in numbers else 'left'}'>{escape(cell)}</td>"
            for column, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def text_block(*parts: tuple[str, str]) -> str:
    """Text as it stands, in parts, each with a style or an empty one."""
    inner = "".join(
        f"<span style='{style}'>{escape(text)}</span>" if style else escape(text)
        for text, style in parts
    )
    return f"<pre style='white-space:pre-wrap'>{inner}</pre>"


def bar(parts: Sequence[tuple[int, str, str]], total: int) -> str:
    """A bar of parts: how long each is of `total`, its style, and what it says when pointed at."""
    inner = "".join(
        f"<div title='{escape(said, quote=True)}' style='width:{100 * length / max(total, 1):.2f}%;{style}'></div>"
        for length, style, said in parts
        if length
    )
    border = "border:1px solid rgba(128,128,128,.6)"
    return f"<div style='display:flex;height:.8em;max-width:40em;{border}'>{inner}</div>"

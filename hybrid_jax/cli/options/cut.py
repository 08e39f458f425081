"""The options of a cut (SwiftKV), which several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

CutOption = Annotated[
    int | None,
    typer.Option(
        help="Number of layers before the cut; prompt tokens go through these only (SwiftKV)."
    ),
]
KVGroupOption = Annotated[
    int, typer.Option(help="Attention layers after the cut that share keys and values.")
]
StateGroupOption = Annotated[
    int, typer.Option(help="Recurrent layers after the cut that share a state.")
]

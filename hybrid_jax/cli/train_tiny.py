"""The command `train-tiny`: trains the small byte-level model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_jax.cli.exits import JsonOption, write_json
from hybrid_jax.train import TrainOptions


def train_tiny(
    out_dir: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Where the model goes.")],
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = TrainOptions.steps,
    minutes: Annotated[
        float | None, typer.Option(help="Wall-clock minutes for the whole run.")
    ] = TrainOptions.minutes,
    seed: Annotated[int, typer.Option(help="Seed of weights and data order.")] = TrainOptions.seed,
    resume: Annotated[bool, typer.Option(help="Go on with an earlier run in OUT_DIR.")] = True,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = TrainOptions.batch,
    context: Annotated[int, typer.Option(help="Tokens of a row.")] = TrainOptions.context,
    source: Annotated[
        list[Path] | None, typer.Option(help="Directory of .py files; may be repeated.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json of another model than the bundled one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a small byte-level model on Python sources.

    Install what it needs with: pip install 'hybrid_jax[train]'
    """
    from hybrid_jax.train import train_tiny as train

    record = train(
        out_dir,
        steps=steps,
        minutes=minutes,
        seed=seed,
        resume=resume,
        batch=batch,
        context=context,
        sources=source,
        config=config,
        progress=not as_json,
    )
    if as_json:
        write_json(record)

"""The command `run-batch`: a file of requests, answered line by line."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from hybrid_jax.cli.exits import Interrupted, JsonOption, note, write_json
from hybrid_jax.cli.options.groups import spreads
from hybrid_jax.cli.options.model import ModelOptions, TemplateOption, template_of
from hybrid_jax.cli.words import shell_words

SHOWN = 300  # characters of an error
REQUEST = (
    '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello"}}'
)


@spreads(engine=ModelOptions)
def run_batch(
    input: Annotated[
        Path, typer.Option("--input", "-i", help="File of requests: OpenAI's batch lines (JSONL).")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the answers.")],
    engine: ModelOptions,
    chat_template: TemplateOption = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            help="Answer with so many processes of this machine, each with a whole model, and with GPUs of its own if "
            "there are any. Lines with the same beginning go to the same process. With prefill=1,decode=2 one of them "
            "only computes prompts.",
            show_default="this process alone",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Address of a Ray cluster whose machines run the processes: auto, HOST:PORT, or local for a cluster "
            "on this machine.",
            show_default="no Ray",
        ),
    ] = None,
    fail_on_error: Annotated[
        bool, typer.Option("--fail-on-error", help="End with exit code 1 if a line got an error.")
    ] = False,
    max_errors: Annotated[
        int | None,
        typer.Option(
            help="Stop with exit code 1 once more lines than this got an error, or end with it if none are left. The "
            "same command with a higher number goes on from there.",
            show_default="no limit",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a file of requests, or go on where an interrupted run stopped.

    Lines with the same beginning are computed together. OUTPUT gets one answer for each line of INPUT, in the same
    order. Until all are there, they are in OUTPUT.partial. The exit code is 1 if no line of INPUT is a request.
    """
    from hybrid_jax import batch

    template = template_of(chat_template)
    try:
        summary = batch.run_batch(
            input,
            output,
            engine.model,
            chat_template=template,
            max_errors=max_errors,
            replicas=replicas,
            ray=ray,
            **engine.for_llm(),
        )
    except batch.BatchStopped as error:
        note(shell_words(str(error), {"max_errors": "--max-errors"}))
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        kept = batch.partial_path(output.resolve())
        if not kept.exists():
            raise
        raise Interrupted(
            f"interrupted; the lines so far are in {kept}, the same command goes on from there"
        ) from None
    no_requests = (
        f"run-batch: {input} holds no requests: none of its {summary.num_lines:,} lines has a custom_id "
        f"that can be read. A request looks like {REQUEST}; {output} says what is wrong with each line"
    )
    told = str(summary)
    if summary.num_errors == summary.num_lines:
        told += f"; every line got an error, the first one: {_first_error(output)}"
    note(told if summary.num_requests else no_requests)
    if as_json:
        write_json(summary.as_dict())
    most = 0 if fail_on_error else max_errors
    if not summary.num_requests or (most is not None and summary.num_errors > most):
        raise typer.Exit(1)


def _first_error(output: Path) -> str:
    """What the first line of an output says, which is an error line."""
    with output.open(encoding="utf-8") as lines:
        return textwrap.shorten(str(json.loads(next(lines))["error"]["message"]), SHOWN)

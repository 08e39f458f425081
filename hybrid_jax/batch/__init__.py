"""Batch files: lines of OpenAI's batch API in, lines of answers out.

May import: api, cache.tree, config, openai, ray, text.
Packages: numpy, rich.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

from hybrid_jax.api.arguments import checks_arguments
from hybrid_jax.api.llm import LLM
from hybrid_jax.api.options import BatchOptions
from hybrid_jax.api.progress_bar import ProgressOption, progress_of, unasked
from hybrid_jax.batch.input_file import InputFile
from hybrid_jax.batch.meter import Meter
from hybrid_jax.batch.partial import (
    BatchStopped,
    PartialOutput,
    partial_path,
    read_answer,
    remove_rest,
    sidecar_path,
    sorted_path,
)
from hybrid_jax.batch.responses import AnswerIds
from hybrid_jax.batch.run import Run
from hybrid_jax.batch.summary import BatchSummary, line_counts
from hybrid_jax.config.checks import is_integer

__all__ = ["BatchStopped", "BatchSummary", "partial_path", "run_batch"]


@checks_arguments
def run_batch(
    input_path: str | Path,
    output_path: str | Path,
    model: LLM | str | Path | None = None,
    *,
    chat_template: str | None = None,
    max_errors: int | None = None,
    progress: ProgressOption = None,
    **options: Unpack[BatchOptions],
) -> BatchSummary:
    """Answers every line of a batch file: one output line for each input line that is not blank, in the same order.

    The lines are computed in another order, so that prompts with the same beginning run one after the other.

    A line is {"custom_id": ..., "method": "POST", "url": ..., "body": ...} with the url /v1/chat/completions
    or /v1/completions. A line that cannot be answered gets an error line, and the others go on; `num_errors` of the
    result counts such lines. Without `max_tokens` a completion goes on until a stop or the longest length that model
    and memory allow.

    Until all lines are done, those that are finished stand in OUT.partial. After an interruption of any kind, the same
    call goes on from there and gives the same texts as an uninterrupted one. A finished output is left as it is,
    whatever the settings.

    Args:
        input_path, output_path: the files.
        model: an `LLM`, or what `LLM` takes as its model; None for the bundled one.
        chat_template: Jinja source, or the name of one of the model's templates, for chat lines.
        max_errors: stop once more lines than this got an error; None never stops.
        progress: a bar, as for `LLM`, or call this with (lines done, lines in all).
        **options: of `LLM`, if `model` is not an `LLM`. It is quiet unless they say otherwise. With `replicas` several
            processes answer; with `ray`, the address of a Ray cluster ("auto", "HOST:PORT" or "local"), actors there.
            Lines with the same beginning then go to the same replica. If one ends, the others answer its lines.

    Raises:
        ValueError, OSError: one of the files is not what it must be. Nothing was changed.
        BatchStopped: the output can no longer be written, or `max_errors` was exceeded. The same call goes on later.

    Example:
        >>> import json, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> body = {"prompt": "import ", "max_tokens": 4, "temperature": 0}
        >>> line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        >>> _ = (folder / "in.jsonl").write_text(json.dumps(line))
        >>> summary = run_batch(folder / "in.jsonl", folder / "out.jsonl", LLM())
        >>> summary.num_lines, summary.num_errors, summary.completion_tokens
        (1, 0, 4)
        >>> answer = json.loads((folder / "out.jsonl").read_text())
        >>> answer["response"]["body"]["choices"][0]["finish_reason"]
        'length'
    """
    source_path, output = Path(input_path), Path(os.path.realpath(output_path))
    if isinstance(model, LLM) and options:
        raise ValueError(f"run_batch: the LLM exists already, so {min(options)} comes too late")
    if max_errors is not None and (not is_integer(max_errors) or max_errors < 0):
        raise ValueError(f"run_batch: max_errors must be None or at least 0, got {max_errors!r}")
    _check_paths(source_path, output)
    source = InputFile.look_at(source_path)
    files: dict[str, Any] = {"input": str(input_path), "output": str(output_path)}
    if counts := _finished(output, source):
        return BatchSummary(**{**files, **counts}, already_finished=True)
    with ExitStack() as stack:
        partial_output = stack.enter_context(PartialOutput(output, source))
        if counts := _finished(output, source):  # by another run, while this one waited its turn
            return BatchSummary(**{**files, **counts}, already_finished=True)
        if isinstance(model, LLM):
            llm, name, quiet = model, model.model_config.family, model._quiet
        else:
            given: dict[str, Any] = {"quiet": True, **options}
            loading = False if callable(progress) else progress
            llm = stack.enter_context(_llm(model, progress=loading, **given))
            quiet = options.get("quiet", False)  # only a caller who says so wants no bar
            name = "bundled" if model is None else Path(model).name
        run = Run(
            llm,
            source,
            partial_output,
            chat_template=chat_template,
            model=name,
            max_errors=max_errors,
        )
        num_resumed = run.recover()
        meter = Meter(run.counts, lambda: llm.compile_s)
        done = run.counts["num_lines"]
        wanted = unasked(progress, quiet=quiet)
        shown = progress_of(wanted, "lines", *meter.columns(), done=done, total=source.num_lines)
        report = stack.enter_context(shown)
        run.run(report, meter)
        return BatchSummary(
            **{**files, **run.counts},
            num_resumed=num_resumed,
            seconds=meter.seconds,
            compile_s=meter.compile_s,
            tokens_per_s=meter.rate,
            peak_memory_bytes=llm.peak_memory_bytes,
            default_temperature=llm.get_default_sampling_params().temperature,
        )


def _llm(
    model: str | Path | None,
    *,
    ray: str | None = None,
    replicas: int | str | None = None,
    **options: Any,
) -> LLM:
    """An `LLM` here, in processes, or in actors."""
    if ray is None:
        return LLM(model, replicas=replicas, **options)
    from hybrid_jax.ray import start_llm

    count = 1 if replicas is None else replicas
    return start_llm(model, replicas=count, address=ray, **options)


def _check_paths(given: Path, output: Path) -> None:
    """Raises ValueError or FileNotFoundError where the output cannot be written, or would overwrite the input."""
    if output.exists() and not stat.S_ISREG(os.stat(output).st_mode):
        raise ValueError(f"run-batch: the output must be a regular file, got {output}")
    if not output.parent.is_dir():
        raise FileNotFoundError(
            f"run-batch: {output} cannot be written: there is no directory {output.parent}; make it first"
        )
    for path in (output, *(name(output) for name in (partial_path, sidecar_path, sorted_path))):
        if path.exists() and given.exists() and os.path.samefile(given, path):
            raise ValueError(
                f"run-batch: {given} is the input and would be overwritten as {path.name}; "
                "choose another output"
            )


def _finished(output: Path, source: InputFile) -> Counter[str] | None:
    """The counts of a finished output; None if there is none yet, or an empty file.

    Raises:
        ValueError: the output does not answer this input.
    """
    if not output.exists() or os.stat(output).st_size == 0:
        return None
    remedy = "delete it, or choose another output"
    with open(output, "rb") as file:
        num_lines = sum(1 for _ in file)
    if num_lines != source.num_lines:
        raise ValueError(
            f"run-batch: {output} exists and has {num_lines} lines, {source.path} has "
            f"{source.num_lines}; {remedy}"
        )
    counts: Counter[str] = Counter()
    with open(output, "rb") as file:
        for index, data in enumerate(file):
            answer = read_answer(data)
            if answer is None or answer.get("id") != AnswerIds(source.digest, index).line_id:
                raise ValueError(
                    f"run-batch: line {index + 1} of {output} is not the answer to request "
                    f"{index + 1} of {source.path}; {remedy}"
                )
            counts.update(line_counts(answer))
    remove_rest(output, source)  # a kill may have come just before this
    return counts

"""The command line: `hybrid-jax` and `python -m hybrid_jax`.

Results go to stdout, everything else to stderr. Exit code 0 on success, 2 for a caller's mistake, 130
after Ctrl-C, 1 for anything else.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hybrid_jax import __version__
from hybrid_jax.sizes import parse_size
from hybrid_jax.train.options import TrainOptions

PACKAGE = Path(__file__).resolve().parent
CALLERS_MISTAKES = (ValueError, NotImplementedError, OSError)

app = typer.Typer(
    name="hybrid-jax",
    help="Inference for hybrid language models in JAX.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

JsonOption = Annotated[
    bool, typer.Option("--json", help="One machine-readable object on stdout instead of text.")
]
ModelOption = Annotated[
    str | None, typer.Option(help="Model directory; the bundled small model by default.")
]
MemoryOption = Annotated[
    str | None,
    typer.Option(help="Memory for KV, states and rings: 5GB, 5GiB or bytes. Weights come on top."),
]
RowsOption = Annotated[int | None, typer.Option(help="Sequences that decode together.")]
LengthOption = Annotated[
    int | None, typer.Option(help="Longest sequence in tokens, prompt and output together.")
]
DtypeOption = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
CacheOption = Annotated[str, typer.Option(help="Prefix cache: lru or off.")]
ExactOption = Annotated[bool, typer.Option(help="Bit-identical results, slower.")]


@app.callback()
def _app() -> None:
    """Inference for hybrid language models in JAX."""


@app.command()
def version() -> None:
    """Prints the version."""
    print(__version__)


# --- generate -------------------------------------------------------------------------------------


@app.command()
def generate(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="Texts to continue; - reads stdin.")
    ],
    model: ModelOption = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most new tokens; until a stop or the longest that fits by default."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep this much probability.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling noise.")] = 0,
    n: Annotated[int, typer.Option("--n", help="Completions per prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the model's end token.")] = False,
    chat: Annotated[bool, typer.Option(help="Each prompt is a user's message.")] = False,
    dtype: DtypeOption = "auto",
    memory: MemoryOption = None,
    max_rows: RowsOption = None,
    max_model_len: LengthOption = None,
    cache: CacheOption = "lru",
    exact: ExactOption = False,
    stats: Annotated[bool, typer.Option(help="Rates and cache hits on stderr.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Continues each PROMPT; the text streams to stdout."""
    from hybrid_jax.llm import LLM  # loads jax

    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    llm = LLM(
        model,
        dtype=dtype,
        memory=memory,
        max_rows=max_rows,
        max_model_len=max_model_len,
        cache=cache,
        seed=seed,
        exact=exact,
        progress=sys.stderr.isatty(),
    )
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "stop": stop}
    params = replace(
        llm.get_default_sampling_params(),
        n=n,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        **{name: value for name, value in given.items() if value is not None},
    )
    if chat:
        texts = [llm.render_chat([{"role": "user", "content": text}]) for text in texts]
    if as_json:
        outputs = llm.generate(texts, params, progress=sys.stderr.isatty())
        _print_json({"outputs": [output.as_dict() for output in outputs], "stats": llm.stats()})
    else:
        outputs = _print_stream(llm.stream(texts, params), len(texts), n)
    if stats:
        _print_stats(outputs, llm)


def _print_stream(deltas, num_prompts: int, n: int) -> list:
    """Prints completions in order, the first unfinished one as it grows; returns the outputs."""
    order = [(prompt, index) for prompt in range(num_prompts) for index in range(n)]
    texts, done, outputs = dict.fromkeys(order, ""), set(), {}
    current, shown = 0, 0
    for delta in deltas:
        key = delta.prompt_index, delta.index
        texts[key] += delta.text
        if delta.finished():
            done.add(key)
        if delta.output is not None:
            outputs[delta.prompt_index] = delta.output
        while current < len(order):
            key = order[current]
            if shown == 0 and len(order) > 1 and (texts[key] or key in done):
                print(f"--- {current + 1} of {len(order)} ---")
            print(texts[key][shown:], end="", flush=True)
            shown = len(texts[key])
            if key not in done:
                break
            print(flush=True)
            current, shown = current + 1, 0
    return [outputs[index] for index in sorted(outputs)]


def _print_stats(outputs: list, llm) -> None:
    table = Table("prompt", "tokens", "cached", "new", "ttft ms", "prefill/s", "decode/s", box=None)
    for index, output in enumerate(outputs):
        metrics = output.metrics
        numbers = (metrics.prefill_tokens_per_s, metrics.decode_tokens_per_s)
        table.add_row(
            str(index + 1),
            str(metrics.num_prompt_tokens),
            str(metrics.num_cached_tokens),
            str(metrics.num_generation_tokens),
            "-" if metrics.ttft_s is None else f"{1000 * metrics.ttft_s:.1f}",
            *("-" if number is None else f"{number:,.0f}" for number in numbers),
        )
    console = Console(stderr=True)
    console.print(table)
    for name, value in llm.stats().items():
        console.print(f"{name}: {value}", highlight=False)


# --- run-batch ------------------------------------------------------------------------------------


@app.command()
def run_batch(
    input: Annotated[Path, typer.Option("--input", "-i", help="OpenAI batch lines (JSONL).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the answers go.")],
    model: ModelOption = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file, instead of the model's own chat template.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the noise of lines without a seed.")] = 0,
    dtype: DtypeOption = "auto",
    memory: MemoryOption = None,
    max_rows: RowsOption = None,
    max_model_len: LengthOption = None,
    cache: CacheOption = "lru",
    exact: ExactOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answers a batch file, line by line in order; goes on where an interrupted run stopped."""
    from hybrid_jax import batch  # loads jax

    try:
        summary = batch.run_batch(
            input,
            output,
            model,
            chat_template=chat_template and chat_template.read_text(encoding="utf-8"),
            progress=sys.stderr.isatty(),
            seed=seed,
            dtype=dtype,
            memory=memory,
            max_rows=max_rows,
            max_model_len=max_model_len,
            cache=cache,
            exact=exact,
        )
    except batch.BatchStopped as error:
        print(f"hybrid-jax: {_one_line(str(error))}", file=sys.stderr)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        kept = batch.partial_path(output.resolve())
        if kept.exists():
            kept = f"the lines so far are in {kept}, the same command goes on from there"
            print(f"hybrid-jax: interrupted; {kept}", file=sys.stderr)
        raise
    print(f"hybrid-jax: {summary}", file=sys.stderr)
    if as_json:
        _print_json(summary.as_dict())


# --- inspect --------------------------------------------------------------------------------------


@app.command()
def inspect(
    model: Annotated[
        str | None, typer.Argument(help="Model directory or config.json; the bundled one.")
    ] = None,
    memory: MemoryOption = None,
    max_rows: RowsOption = None,
    max_model_len: LengthOption = None,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32 or bfloat16.")] = "auto",
    grain: Annotated[int | None, typer.Option(help="Tokens between resume points.")] = None,
    page_tokens: Annotated[int | None, typer.Option(help="Tokens of one KV page.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Shows what a model costs and what fits; needs its config.json only."""
    from hybrid_jax.config import EngineConfig
    from hybrid_jax.report import inspect_model, read_config

    config = read_config(model if model is not None else PACKAGE / "bundled")
    if dtype == "auto":
        dtype = "float32" if config.dtype == "float32" else "bfloat16"
    given = {
        "memory": memory and parse_size(memory, name="memory"),
        "max_rows": max_rows,
        "max_model_len": max_model_len,
        "grain": grain,
        "page_tokens": page_tokens,
    }
    given = {name: value for name, value in given.items() if value is not None}
    report = inspect_model(config, EngineConfig(dtype=dtype, **given))
    if as_json:
        _print_json(report.as_dict() | {"cache": report.cache_summary()})
        return
    width = max(len(name) for name, _ in report.lines())
    for name, value in report.lines():
        print(f"{name:<{width}}  {value}")


# --- train-tiny -----------------------------------------------------------------------------------


@app.command()
def train_tiny(
    out_dir: Annotated[Path, typer.Argument(help="Where the model goes.")],
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = TrainOptions.steps,
    minutes: Annotated[
        float | None, typer.Option(help="Wall-clock minutes in all.")
    ] = TrainOptions.minutes,
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = TrainOptions.seed,
    resume: Annotated[bool, typer.Option(help="Continue an earlier run in OUT_DIR.")] = True,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = TrainOptions.batch,
    context: Annotated[int, typer.Option(help="Tokens of a row.")] = TrainOptions.context,
    source: Annotated[
        list[Path] | None, typer.Option(help="Directory of .py files; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Trains the small byte-level model on Python sources; needs the extra `train`."""
    from hybrid_jax.train import train_tiny as train

    try:
        record = train(
            out_dir,
            steps=steps,
            minutes=minutes,
            seed=seed,
            resume=resume,
            batch=batch,
            context=context,
            sources=source,
            progress=not as_json,
        )
    except ModuleNotFoundError as error:
        raise ValueError(
            f"train-tiny: {error.name} is not installed; pip install 'hybrid_jax[train]'"
        ) from error
    if as_json:
        _print_json(record)


# --- exits ----------------------------------------------------------------------------------------


def _print_json(value: dict) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="replace"
            )  # generated text must not fail on a narrow terminal
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(args=arguments or ["--help"], prog_name="hybrid-jax", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        code = _report(error)
    sys.exit(code if isinstance(code, int) else 0)


def _report(error: Exception) -> int:
    """One line for a caller's mistake, everything for a mistake of ours; returns the exit code."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's usage errors
        print(f"hybrid-jax: {_one_line(error.format_message())}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, OSError) and error.filename is not None:  # a file that was named
        print(f"hybrid-jax: {_one_line(f'{error.strerror}: {error.filename}')}", file=sys.stderr)
        return 2
    if isinstance(error, CALLERS_MISTAKES) and _raised_by_us(error):
        print(f"hybrid-jax: {_one_line(str(error))}", file=sys.stderr)
        return 2
    traceback.print_exception(error)
    return 1


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _raised_by_us(error: Exception) -> bool:
    """Whether the innermost frame is this package's: errors of libraries are not the caller's."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(PACKAGE)

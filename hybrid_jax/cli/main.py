"""The command line: `hybrid-jax` and `python -m hybrid_jax`.

Results go to stdout, everything else to stderr. Exit codes: 0 on success, 2 for a mistake of the caller, 130 after
Ctrl-C, and 1 for any other failure, such as a batch file without requests.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hybrid_jax import __version__
from hybrid_jax.byte_sizes import parse_size
from hybrid_jax.cli.cut_options import CutOption, KVGroupOption, StateGroupOption, check_groups
from hybrid_jax.cli.distill import distill
from hybrid_jax.cli.exits import (
    JsonOption,
    needs_extra,
    note,
    read_stdin,
    run,
    write,
    write_json,
    write_rows,
)
from hybrid_jax.cli.pool_sim import pool_sim
from hybrid_jax.cli.simulate import simulate
from hybrid_jax.cli.words import flags_of, shell_words
from hybrid_jax.config import resolve_dtype, with_inner_cut
from hybrid_jax.config.structured_outputs import StructuredOutputsParams
from hybrid_jax.machine import has_accelerator, wants_missing_gpu
from hybrid_jax.sizing.devices import CARDS
from hybrid_jax.train import TrainOptions

if TYPE_CHECKING:
    from hybrid_jax.api.llm import LLM
    from hybrid_jax.api.outputs import Delta, RequestOutput

REQUEST = (
    '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello"}}'
)
MOST_TOKENS = 256  # of a completion, unless an option or the model says otherwise
MODELS_OWN = "the model's, or off"  # the default of what generation_config.json may set

app = typer.Typer(
    name="hybrid-jax",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Model directory, or tiny_gated_delta or tiny_cut; the bundled small model by default."
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Memory for KV, states, rings and logits: 5GB, 5GiB or bytes. Weights come on top."
    ),
]
RowsOption = Annotated[int | None, typer.Option(help="Sequences that decode together.")]
LengthOption = Annotated[
    int | None, typer.Option(help="Longest sequence in tokens, prompt and output together.")
]
DtypeOption = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
KVDtypeOption = Annotated[
    str, typer.Option(help="auto, or fp8: keys and values of one byte; the text changes a little.")
]
CacheOption = Annotated[
    str, typer.Option(help="Prefix cache: adaptive, lru, marconi, ..., or off.")
]
SpeculationOption = Annotated[
    str,
    typer.Option(
        help="Speculative decoding: guesses the next tokens and checks several in one step. The text does not "
        "change. ngram, suffix, mtp (the model's own head), exit (a head on its cut), draft:DIRECTORY (a second "
        "model), or off."
    ),
]
ExactOption = Annotated[bool, typer.Option(help="Bit-identical results, slower.")]


app.command()(simulate)
app.command()(pool_sim)
app.command()(distill)


def _print_version(wanted: bool) -> None:
    if wanted:
        write(__version__)
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Inference for hybrid language models in JAX."""


@app.command()
def version(as_json: JsonOption = False) -> None:
    """Prints the version."""
    if as_json:
        write_json({"version": __version__, "jax": installed_version("jax")})
    else:
        write(__version__)


# --- generate -------------------------------------------------------------------------------------


@app.command()
def generate(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="Texts to continue; - reads stdin.")
    ],
    model: ModelOption = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most new tokens.",
            show_default=f"the model's, or {MOST_TOKENS}; less where the prompt leaves less room",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.", show_default="the model's, or 1")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep the k most likely tokens.", show_default=MODELS_OWN)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the likeliest tokens that have this much probability.",
            show_default=MODELS_OWN,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random sampling.")] = 0,
    n: Annotated[int, typer.Option("--n", help="Completions per prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with the JSON schema that the text must follow.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole text must match.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the model's end token.")] = False,
    chat: Annotated[bool, typer.Option(help="Each prompt is a user's message.")] = False,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVDtypeOption = "auto",
    memory: MemoryOption = None,
    max_rows: RowsOption = None,
    max_model_len: LengthOption = None,
    cache: CacheOption = "adaptive",
    speculation: SpeculationOption = "off",
    exact: ExactOption = False,
    stats: Annotated[bool, typer.Option(help="Rates and cache hits on stderr.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Continues each PROMPT; the text streams to stdout."""
    from hybrid_jax.api.llm import LLM  # loads jax
    from hybrid_jax.text.prompts import read_prompts

    write(end="", flush=True)  # if stdout takes nothing, this fails before anything is loaded
    texts = [read_stdin("generate") if prompt == "-" else prompt for prompt in prompts]
    form = _form(json_schema, regex)
    llm = LLM(
        model,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        memory=memory,
        max_rows=max_rows,
        max_model_len=max_model_len,
        cache=cache,
        speculation=speculation,
        seed=seed,
        exact=exact,
        quiet=not stats,
        progress=sys.stderr.isatty(),
    )
    given: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    given |= {"stop": stop, "max_tokens": max_tokens, "structured_outputs": form}
    params = replace(
        llm.get_default_sampling_params(),
        n=n,
        ignore_eos=ignore_eos,
        **{name: value for name, value in given.items() if value is not None},
    )
    _check_text(llm, model, chat)
    if n > 1 and params.greedy:
        note("note: at temperature 0 the completions of a prompt are all the same")
    if chat:
        read = [llm.render_chat([{"role": "user", "content": text}]) for text in texts]
    else:
        read = read_prompts(texts, llm.get_tokenizer(), vocab_size=llm.model_config.vocab_size)
    rooms = [llm.max_model_len - len(prompt.token_ids) for prompt in read]
    each = [params] * len(read)
    if params.max_tokens is None:  # the call itself refuses a prompt that leaves no room
        each = [replace(params, max_tokens=max(1, min(room, MOST_TOKENS))) for room in rooms]
    if as_json:
        outputs = llm.generate(read, each, progress=sys.stderr.isatty())
        found = {"outputs": [output.as_dict() for output in outputs]}
        write_json(found | {"temperature": params.temperature, "stats": llm.stats()})
    else:
        outputs = _print_stream(llm.stream(read, each), len(read), n)
    if stats:
        _print_stats(outputs, llm, params.engine_temperature)
    if params.max_tokens is None and any(map(_was_cut, outputs, rooms)):
        note(f"note: stopped at {MOST_TOKENS} new tokens; --max-tokens N allows more")


def _form(json_schema: Path | None, regex: str | None) -> StructuredOutputsParams | None:
    """The form of the text that the options ask for."""
    if json_schema is None:
        return None if regex is None else StructuredOutputsParams(regex=regex)
    if regex is not None:
        raise ValueError("--json-schema and --regex exclude each other; leave one out")
    schema = _text_of("--json-schema", json_schema)
    try:
        return StructuredOutputsParams(json=schema)
    except ValueError as error:
        text = str(error).removeprefix("StructuredOutputsParams: json ")
        raise ValueError(f"--json-schema {json_schema}: {text}") from error


def _text_of(option: str, path: Path) -> str:
    """The text of the file that an option names."""
    from hybrid_jax.text.prompts import check_unicode

    text = path.read_bytes().decode(errors="surrogateescape")
    check_unicode(f"{option} {path}", text)
    return text


def _check_text(llm: LLM, model: str | None, chat: bool) -> None:
    """ValueError if a model lacks what the command line needs in addition to `LLM`."""
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise ValueError(
            f"generate: {model} has no tokenizer.json, so it takes no text; put one beside its config.json"
        )
    if chat and "default" not in tokenizer.chat_templates:
        name = "the bundled model" if model is None else model
        raise ValueError(f"generate: --chat: {name} has no chat template; leave --chat out")


def _was_cut(output: RequestOutput, room: int) -> bool:
    """Whether `MOST_TOKENS` ended a completion for which there was more room."""
    ends = ((choice.finish_reason, len(choice.token_ids)) for choice in output.outputs)
    return room > MOST_TOKENS and ("length", MOST_TOKENS) in ends


def _print_stream(deltas: Iterable[Delta], num_prompts: int, n: int) -> list[RequestOutput]:
    """Prints completions in order, the first unfinished one while it grows. Returns the outputs."""
    order = [(prompt, index) for prompt in range(num_prompts) for index in range(n)]
    texts, done = dict.fromkeys(order, ""), set()
    outputs: dict[int, RequestOutput] = {}
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
                write(f"--- {current + 1} of {len(order)} ---")
            write(texts[key][shown:], end="", flush=True)
            shown = len(texts[key])
            if key not in done:
                break
            write(flush=True)
            current, shown = current + 1, 0
    return [outputs[index] for index in sorted(outputs)]


def _print_stats(outputs: list[RequestOutput], llm: LLM, temperature: float) -> None:
    table = Table(
        *("prompt", "tokens", "cached", "new", "ttft ms", "prefill/s", "decode/s", "a pass"),
        box=None,
    )
    for index, output in enumerate(outputs):
        metrics = output.metrics
        numbers = (metrics.prefill_tokens_per_s, metrics.decode_tokens_per_s)
        passed = metrics.tokens_per_verification
        table.add_row(
            str(index + 1),
            str(metrics.num_prompt_tokens),
            str(metrics.num_cached_tokens),
            str(metrics.num_generation_tokens),
            "-" if metrics.ttft_s is None else f"{1000 * metrics.ttft_s:.1f}",
            *("-" if number is None else f"{number:,.0f}" for number in numbers),
            "1" if passed is None else f"{passed:.2f}",
        )
    console = Console(stderr=True)
    console.print(table)
    console.print(f"temperature: {temperature:g}", highlight=False)
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
    seed: Annotated[int, typer.Option(help="Seed for lines that give none.")] = 0,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KVDtypeOption = "auto",
    memory: MemoryOption = None,
    max_rows: RowsOption = None,
    max_model_len: LengthOption = None,
    cache: CacheOption = "adaptive",
    speculation: SpeculationOption = "off",
    exact: ExactOption = False,
    fail_on_error: Annotated[
        bool, typer.Option("--fail-on-error", help="Exit code 1 if any line got an error.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Answers a batch file, or goes on where an interrupted run stopped.

    Lines with the same beginning are computed together. OUTPUT has one answer for each line of INPUT, in the same
    order. Until all are finished, they are in OUTPUT.partial. The exit code is 1 if no line of INPUT is a request.
    """
    from hybrid_jax import batch  # loads jax

    template = _template(chat_template)
    try:
        summary = batch.run_batch(
            input,
            output,
            model,
            chat_template=template,
            progress=sys.stderr.isatty(),
            seed=seed,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
            memory=memory,
            max_rows=max_rows,
            max_model_len=max_model_len,
            cache=cache,
            speculation=speculation,
            exact=exact,
        )
    except batch.BatchStopped as error:
        note(str(error))
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        kept = batch.partial_path(output.resolve())
        if kept.exists():
            note(
                f"interrupted; the lines so far are in {kept}, the same command goes on from there"
            )
        raise
    no_requests = (
        f"run-batch: {input} holds no requests: none of its {summary.num_lines:,} lines has a custom_id "
        f"that can be read. A request looks like {REQUEST}; {output} says what is wrong with each line"
    )
    note(str(summary) if summary.num_requests else no_requests)
    if as_json:
        write_json(summary.as_dict())
    if not summary.num_requests or (fail_on_error and summary.num_errors):
        raise typer.Exit(1)


def _template(path: Path | None) -> str | None:
    """The source of a chat template. It is checked before anything is loaded."""
    from hybrid_jax.text.tokenizer import compile_template

    if path is None:
        return None
    source = _text_of("--chat-template", path)
    if not source.strip():
        raise ValueError(f"--chat-template {path}: is empty; give a Jinja template")
    try:
        compile_template(source)
    except ValueError as error:
        text = str(error).removeprefix("chat template: ")
        raise ValueError(f"--chat-template {path}: is not a Jinja template: {text}") from error
    return source


# --- inspect --------------------------------------------------------------------------------------


@app.command()
def inspect(
    model: Annotated[
        str | None,
        typer.Argument(help="Model directory or config.json; the bundled model by default."),
    ] = None,
    memory: MemoryOption = None,
    max_rows: RowsOption = None,
    max_model_len: LengthOption = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, or auto: float32 on a CPU, on a GPU as stored.")
    ] = "auto",
    kv_cache_dtype: KVDtypeOption = "auto",
    grain: Annotated[int | None, typer.Option(help="Tokens between resume points.")] = None,
    page_tokens: Annotated[int | None, typer.Option(help="Tokens of one KV page.")] = None,
    cut: CutOption = None,
    kv_group: KVGroupOption = 1,
    state_group: StateGroupOption = 1,
    device: Annotated[
        str | None,
        typer.Option(
            help=f"Device that would run it: cpu, {', '.join(sorted(CARDS))}.",
            show_default="this machine",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Shows what a model costs and what fits. It reads only the config.json."""
    from hybrid_jax.cli.inspect_model import inspect_model, lines, read_config, table
    from hybrid_jax.models.files import BUNDLED
    from hybrid_jax.sizing.defaults import choose_settings
    from hybrid_jax.sizing.devices import card, host, installed_gpu

    config = read_config(model if model is not None else BUNDLED)
    check_groups(cut, kv_group, state_group)
    if cut is not None:
        config = with_inner_cut(config, cut, kv_group=kv_group, state_group=state_group)
    if device is not None:
        where = card(device)
    elif wanted := wants_missing_gpu():
        raise ValueError(
            f"JAX_PLATFORMS={wanted} asks for a GPU, and this machine has none; name a card with --device, or unset it"
        )
    else:
        where = installed_gpu() if has_accelerator() else host()
    dtype = resolve_dtype(dtype, config.dtype, on_cpu=where.is_host)
    given: dict[str, Any] = {
        "memory": None if memory is None else parse_size(memory, name="memory"),
        "max_rows": max_rows,
        "max_model_len": max_model_len,
        "grain": grain,
        "page_tokens": page_tokens,
        "kv_cache_dtype": kv_cache_dtype,
    }
    given = {name: value for name, value in given.items() if value is not None}
    choose = functools.partial(choose_settings, config, where, given, dtype=dtype)
    found = inspect_model(config, choose({}), where, choose)
    if found["remedy"] is not None:
        found["remedy"] = shell_words(found["remedy"], flags_of(app, ["inspect"]))
    if as_json:
        write_json(found)
        return
    write_rows(lines(found))
    if rows := table(found):
        write(
            "\nThe most sequences of one length, with a --max-rows for each, and where the memory goes:"
        )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            write("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


# --- train-tiny -----------------------------------------------------------------------------------


@app.command()
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
    """Trains the small byte-level model on Python sources; needs: pip install 'hybrid_jax[train]'."""
    from hybrid_jax.train import train_tiny as train

    with needs_extra("train"):
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


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    run(app, arguments or ["--help"])

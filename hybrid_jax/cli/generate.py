"""The command `generate`: continues texts, or answers single messages."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from hybrid_jax.cli.exits import (
    JsonOption,
    for_terminal,
    note,
    read_stdin,
    typed,
    write,
    write_json,
)
from hybrid_jax.cli.options.groups import spreads
from hybrid_jax.cli.options.model import (
    ModelOptions,
    TemplateOption,
    check_template,
    template_of,
    tokenizer_of,
)
from hybrid_jax.cli.options.sampling import SamplingOptions
from hybrid_jax.process.streams import forgiving

if TYPE_CHECKING:
    from hybrid_jax.api.llm import LLM
    from hybrid_jax.api.outputs import Delta, RequestOutput

MOST_TOKENS = 256  # of a completion, unless an option or the model says otherwise


@spreads(engine=ModelOptions, sampling=SamplingOptions)
def generate(
    prompts: Annotated[
        list[str],
        typer.Argument(metavar="PROMPT...", help="Texts to continue; - reads one from stdin."),
    ],
    engine: ModelOptions,
    sampling: SamplingOptions,
    n: Annotated[int, typer.Option("--n", help="How many completions of each prompt.")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: report this many of the likeliest tokens at each place."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for the tokens of the prompts.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take each prompt as the message of a user.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    chat_template: TemplateOption = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Show what the model takes, speed, cache hits and all counters on stderr.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue texts, and write the new text as it comes.

    An answer stops at 256 new tokens, unless --max-tokens or the model says otherwise. To talk with a model, use
    `hybrid-jax chat`.
    """
    from hybrid_jax.api.llm import LLM
    from hybrid_jax.text.prompts import read_prompts

    write(end="", flush=True)  # if stdout takes nothing, this fails before anything is loaded
    if not as_json and (logprobs is not None or prompt_logprobs is not None):
        raise ValueError("--logprobs and --prompt-logprobs are shown by --json only; add it")
    if not chat and (system is not None or chat_template is not None):
        raise ValueError("--system and --chat-template are for conversations; add --chat")
    texts = [read_stdin("generate") if prompt == "-" else typed(prompt) for prompt in prompts]
    form, template = sampling.form(), template_of(chat_template)
    llm = LLM(engine.model, quiet=not stats, **engine.for_llm())
    more = {"n": n, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    params = sampling.params(llm.get_default_sampling_params(), form, **more)
    tokenizer = tokenizer_of(llm, engine, "generate")
    if chat:
        check_template(tokenizer, template, engine, "generate: --chat")
    if n > 1 and params.greedy:
        note("note: at temperature 0 the completions of a prompt are all the same")
    if chat:
        opening = [] if system is None else [{"role": "system", "content": typed(system)}]
        conversations = [[*opening, {"role": "user", "content": text}] for text in texts]
        read = [llm.render_chat(messages, chat_template=template) for messages in conversations]
    else:
        size, longest = llm.model_config.vocab_size, llm.max_model_len
        read = read_prompts(texts, tokenizer, vocab_size=size, longest=longest)
    rooms = [llm.max_model_len - len(prompt.token_ids) for prompt in read]
    each = [params] * len(read)
    if params.max_tokens is None:  # the call itself refuses a prompt that leaves no room
        each = [replace(params, max_tokens=max(1, min(room, MOST_TOKENS))) for room in rooms]
    if as_json:
        outputs = llm.generate(read, each)
        found = {"outputs": [output.as_dict() for output in outputs]}
        write_json(found | {"temperature": params.temperature, "stats": llm.stats()})
    else:
        outputs = _print_stream(llm.stream(read, each), len(read), n)
    if stats:
        _print_stats(outputs, llm, params.engine_temperature)
    if params.max_tokens is None and any(map(_was_cut, outputs, rooms)):
        note(f"note: stopped at {MOST_TOKENS} new tokens; --max-tokens N allows more")


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
            write(for_terminal(texts[key][shown:]), end="", flush=True)
            shown = len(texts[key])
            if key not in done:
                break
            write(flush=True)
            current, shown = current + 1, 0
    return [outputs[index] for index in sorted(outputs)]


def _print_stats(outputs: list[RequestOutput], llm: LLM, temperature: float) -> None:
    columns = ("prompt", "tokens", "cached", "new", "ttft ms", "prefill/s", "decode/s", "a pass")
    table = Table(*columns, box=None)
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
    console = Console(file=forgiving(sys.stderr))
    console.print(table)
    console.print(f"temperature: {temperature:g}", highlight=False)
    console.print(str(llm.stats()), highlight=False, markup=False, soft_wrap=True)

"""The command `bench`: how fast a model runs here, in a minute or so."""

from __future__ import annotations

import platform
import random
import statistics
import time
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_jax import __version__
from hybrid_jax.byte_sizes import format_size
from hybrid_jax.cli.exits import JsonOption, write, write_json, write_rows
from hybrid_jax.cli.options.groups import spreads
from hybrid_jax.cli.options.model import ModelOptions

if TYPE_CHECKING:
    from hybrid_jax.api.llm import LLM

TIMES = 3  # each number is the median of so many runs
SHARED = 0.9  # of the prompts that hit
SHORT = 16  # tokens of the prompts behind which decoding is timed


@spreads(engine=ModelOptions)
def bench(
    engine: ModelOptions,
    prompt_tokens: Annotated[
        int, typer.Option(help="Length in tokens of the prompts that time the first token.")
    ] = 512,
    new_tokens: Annotated[
        int, typer.Option(help="New tokens to generate when decoding is timed.")
    ] = 64,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast a model runs on this machine.

    Prompts are random. Each number is the median of three runs, after one that compiles. --json is for comparisons.
    """
    from hybrid_jax.api.llm import LLM  # loads jax

    if prompt_tokens < 2:
        raise ValueError(f"bench: prompt_tokens must be at least 2, got {prompt_tokens}")
    start = time.perf_counter()
    with LLM(engine.model, quiet=True, **engine.for_llm()) as llm:
        loaded = time.perf_counter() - start
        # Tokens that come together with the first one have no time of their own.
        least = 2 * llm.engine_config.steps_per_dispatch + 1
        if new_tokens < least:
            raise ValueError(f"bench: new_tokens must be at least {least}, got {new_tokens}")
        longest = max(prompt_tokens + 1, SHORT + new_tokens)
        if longest > llm.max_model_len:
            raise ValueError(
                f"bench: prompt_tokens={prompt_tokens} and new_tokens={new_tokens} need sequences of {longest} tokens, "
                f"and the longest is {llm.max_model_len}; lower them"
            )
        found = (
            _about(llm, engine)
            | {"load_s": round(loaded, 3)}
            | _measure(llm, prompt_tokens, new_tokens)
        )
    if as_json:
        write_json(found)
        return
    write_rows(_lines(found))
    write()
    for line in _table(found["decode"]):
        write(line)


def _about(llm: LLM, options: ModelOptions) -> dict[str, Any]:
    """What is measured, and where."""
    config = llm.engine_config
    return {
        "model": options.name,
        "device": llm.device,
        "machine": f"{platform.machine()}, {platform.system()}",
        "versions": {
            "hybrid_jax": __version__,
            "jax": installed_version("jax"),
            "python": platform.python_version(),
        },
        "settings": {
            "dtype": config.dtype,
            "kv_cache_dtype": config.kv_dtype,
            "max_rows": config.max_rows,
            "cache": config.cache.policy,
            "exact": config.exact,
        },
    }


def _measure(llm: LLM, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """The numbers."""
    from hybrid_jax.config.sampling_params import SamplingParams

    rng = random.Random(0)

    def draw(count: int) -> list[int]:
        return rng.choices(range(llm.model_config.vocab_size), k=count)

    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    many = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)

    def first_token(prompt: list[int]) -> tuple[float, int]:
        [output] = llm.generate({"prompt_token_ids": prompt}, one)
        assert output.metrics.ttft_s is not None
        return output.metrics.ttft_s, output.num_cached_tokens

    shared = draw(int(SHARED * prompt_tokens))
    behind = lambda: shared + draw(prompt_tokens - len(shared))
    first_token(draw(prompt_tokens))  # compiles
    cold = [first_token(draw(prompt_tokens)) for _ in range(TIMES)]
    for _ in range(2):  # the second one leaves a checkpoint where the two part
        first_token(behind())
    first_token(behind())  # compiles
    warm = [first_token(behind()) for _ in range(TIMES)]
    ttft, hit = (statistics.median(seconds for seconds, _ in times) for times in (cold, warm))

    def decode(rows: int) -> dict[str, Any]:
        rates = []
        for number in range(TIMES + 1):
            prompts = [{"prompt_token_ids": draw(SHORT)} for _ in range(rows)]
            outputs = llm.generate(prompts, many)
            begun = max(output.metrics.first_token_time or 0.0 for output in outputs)
            ended = max(output.metrics.finished_time for output in outputs)
            drawn = sum(len(o.outputs[0].token_ids) - o.metrics.num_first_tokens for o in outputs)
            if number:  # the first compiles
                rates.append(drawn / (ended - begun))
        rate = statistics.median(rates)
        return {
            "rows": rows,
            "tokens_per_s": round(rate, 1),
            "ms_per_token": round(1000 * rows / rate, 3),
        }

    most = llm.engine_config.max_rows
    decoded = [decode(rows) for rows in sorted({1, most})]
    stats = llm.stats()
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "ttft_ms": round(1000 * ttft, 2),
        "prefill_tokens_per_s": round(prompt_tokens / ttft, 1),
        "cached_tokens": warm[-1][1],
        "cached_ttft_ms": round(1000 * hit, 2),
        "decode": decoded,
        "engine_bytes": stats["memory_bytes"],
        "peak_bytes": stats["peak_memory_bytes"],
    }


def _lines(found: dict[str, Any]) -> dict[str, str]:
    """The numbers in words."""
    settings, versions = found["settings"], found["versions"]
    peak = found["peak_bytes"]
    return {
        "model": f"{found['model']}, {settings['dtype']}, cache {settings['cache']}",
        "device": f"{found['device']}; jax {versions['jax']}, Python {versions['python']}",
        "loaded in": f"{found['load_s']:.1f} s",
        "first token": f"{found['ttft_ms']:.1f} ms for {found['prompt_tokens']} tokens of prompt, "
        f"{found['prefill_tokens_per_s']:,.0f} tokens/s",
        "with a hit": f"{found['cached_ttft_ms']:.1f} ms, {found['cached_tokens']} tokens from the prefix cache",
        "memory": f"{format_size(found['engine_bytes'])} for the engine, beside the weights"
        + ("" if peak is None else f"; {format_size(peak)} at most by the process"),
    }


def _table(decode: list[dict[str, Any]]) -> list[str]:
    rows = [("rows", "tokens/s", "ms a token")]
    rows += [
        (str(entry["rows"]), f"{entry['tokens_per_s']:,.0f}", f"{entry['ms_per_token']:.2f}")
        for entry in decode
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]

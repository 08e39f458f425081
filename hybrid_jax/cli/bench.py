"""The command `bench`: how fast a model runs here, in a minute or so."""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from dataclasses import replace
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_jax import __version__
from hybrid_jax.byte_sizes import format_size
from hybrid_jax.cli.exits import JsonOption, write, write_json, write_rows
from hybrid_jax.cli.options.groups import spreads
from hybrid_jax.cli.options.model import ModelOptions
from hybrid_jax.display import text_table

if TYPE_CHECKING:
    from hybrid_jax.api.llm import LLM

TIMES = 3  # each number is the median of so many runs
SHARED = 0.9  # of the prompts that hit
MOST_COMPLETIONS = 1024  # of one prompt
SHORT = 16  # tokens of the prompts after which decoding is timed


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
    from hybrid_jax.api.llm import LLM

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
        "machine": f"{platform.machine()}, {platform.system()}, {os.cpu_count()} processors",
        "versions": {
            "hybrid_jax": __version__,
            "jax": installed_version("jax"),
            "python": platform.python_version(),
        },
        "settings": {
            "dtype": config.dtype,
            "kv_cache_dtype": config.kv_dtype,
            "max_rows": config.max_rows,
            "max_model_len": llm.max_model_len,
            "steps_per_dispatch": config.steps_per_dispatch,
            "shapes": config.shapes,
            "cache": config.cache.policy,
            "speculation": config.speculation.method if config.speculation else "off",
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
    many = replace(one, max_tokens=new_tokens, ignore_eos=True)

    def first_token(prompt: list[int], params: SamplingParams = many) -> tuple[float, int]:
        [output] = llm.generate({"prompt_token_ids": prompt}, params)
        assert output.metrics.ttft_s is not None
        return output.metrics.ttft_s, output.num_cached_tokens

    def decode_rate(rows: int) -> float:
        # Completions of one prompt all start in the same plan, so every row is there from the first token to the last.
        prompt = {"prompt_token_ids": draw(SHORT)}
        [output] = llm.generate(prompt, replace(many, n=rows))
        metrics = output.metrics
        assert metrics.first_token_time is not None
        drawn = metrics.num_generation_tokens - metrics.num_first_tokens
        return drawn / (metrics.finished_time - metrics.first_token_time)

    if llm.engine_config.shapes == "coarse":
        llm.warmup()  # or larger programs serve until the right ones are compiled
    for params in (one, many):
        first_token(draw(prompt_tokens), params)  # compiles
    prefill = [first_token(draw(prompt_tokens), one)[0] for _ in range(TIMES)]
    cold = [first_token(draw(prompt_tokens))[0] for _ in range(TIMES)]
    shared = draw(int(SHARED * prompt_tokens))
    # The second one leaves a checkpoint where the two part, the third compiles what resumes there.
    for _ in range(3):
        first_token(shared + draw(prompt_tokens - len(shared)))
    warm = [first_token(shared + draw(prompt_tokens - len(shared))) for _ in range(TIMES)]
    decode = []
    for rows in sorted({1, min(llm.engine_config.max_rows, MOST_COMPLETIONS)}):
        decode_rate(rows)  # compiles
        rates = [decode_rate(rows) for _ in range(TIMES)]
        decode.append(
            {"rows": rows, **_spread("tokens_per_s", rates, 1)}
            | {"ms_per_token": round(1000 * rows / statistics.median(rates), 3)}
        )
    stats = llm.stats()
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        **_spread("ttft_ms", [1000 * seconds for seconds in cold], 2),
        **_spread("prefill_tokens_per_s", [prompt_tokens / seconds for seconds in prefill], 1),
        "cached_tokens": min(tokens for _, tokens in warm),
        **_spread("cached_ttft_ms", [1000 * seconds for seconds, _ in warm], 2),
        "decode": decode,
        "memory_bytes": stats["memory_bytes"],
        "peak_memory_bytes": stats["peak_memory_bytes"],
    }


def _spread(name: str, values: list[float], digits: int) -> dict[str, float]:
    """The median of some runs, and the least and the most."""
    found = {
        name: statistics.median(values),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }
    return {key: round(value, digits) for key, value in found.items()}


def _lines(found: dict[str, Any]) -> dict[str, str]:
    """The numbers in words."""
    settings, versions = found["settings"], found["versions"]
    peak = found["peak_memory_bytes"]
    return {
        "model": f"{found['model']}, {settings['dtype']}, cache {settings['cache']}",
        "device": f"{found['device']}; jax {versions['jax']}, Python {versions['python']}",
        "loaded in": f"{found['load_s']:.1f} s",
        "first token": f"{found['ttft_ms']:.1f} ms for {found['prompt_tokens']} tokens of prompt, "
        f"{found['prefill_tokens_per_s']:,.0f} tokens/s",
        "with a hit": f"{found['cached_ttft_ms']:.1f} ms, {found['cached_tokens']} tokens from the prefix cache",
        "memory": f"{format_size(found['memory_bytes'])} for the engine, beside the weights"
        + ("" if peak is None else f"; {format_size(peak)} at most by the process"),
    }


def _table(decode: list[dict[str, Any]]) -> list[str]:
    rows = [("rows", "tokens/s", "ms a token")]
    rows += [
        (str(entry["rows"]), f"{entry['tokens_per_s']:,.0f}", f"{entry['ms_per_token']:.2f}")
        for entry in decode
    ]
    return text_table(rows)

"""The command `inspect`: what a model costs and what fits."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import typer

from hybrid_jax.byte_sizes import parse_size
from hybrid_jax.cli.exits import JsonOption, write, write_json, write_rows
from hybrid_jax.cli.options.cut import CutOption, KVGroupOption, StateGroupOption, check_groups
from hybrid_jax.cli.options.model import KVDtypeOption, LengthOption, MemoryOption, RowsOption
from hybrid_jax.cli.words import flags_of_command, shell_words
from hybrid_jax.config import resolve_dtype, with_inner_cut
from hybrid_jax.machine import has_accelerator, wants_missing_gpu
from hybrid_jax.sizing.devices import CARDS


def inspect(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Directory of a model, a config.json, or a name that `simulate --help` lists.",
            show_default="the bundled small model",
        ),
    ] = None,
    memory: MemoryOption = None,
    max_rows: RowsOption = None,
    max_model_len: LengthOption = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of the weights: float32, bfloat16, or auto for float32 on a CPU and the stored one on a "
            "GPU."
        ),
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
    """Show whether a model fits, what it costs, and what `LLM()` would use. Only its config.json is read."""
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
        found["remedy"] = shell_words(found["remedy"], flags_of_command(context.command))
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

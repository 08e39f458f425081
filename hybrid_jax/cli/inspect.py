"""The command `inspect`: what a model costs and what fits."""

from __future__ import annotations

from typing import Annotated

import typer

from hybrid_jax.cli.exits import JsonOption, write, write_json
from hybrid_jax.cli.options.cut import CutOption, KVGroupOption, StateGroupOption
from hybrid_jax.cli.options.model import (
    CheckpointsOption,
    HostMemoryOption,
    KernelsOption,
    KVDtypeOption,
    LengthOption,
    MemoryOption,
    MeshOption,
    QuantizeOption,
    RowsOption,
)
from hybrid_jax.cli.words import flags_of_command, shell_words
from hybrid_jax.sizing.devices import cards


def inspect(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Directory of a model, a config.json, or a name that `simulate --help` lists.",
            show_default="the bundled small model",
        ),
    ] = None,
    memory: MemoryOption = None,
    host_memory: HostMemoryOption = None,
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
    quantize: QuantizeOption = None,
    kernels: KernelsOption = "auto",
    checkpoints: CheckpointsOption = "float32",
    mesh: MeshOption = None,
    grain: Annotated[int | None, typer.Option(help="Tokens between resume points.")] = None,
    page_tokens: Annotated[int | None, typer.Option(help="Tokens of one KV page.")] = None,
    cut: CutOption = None,
    kv_group: KVGroupOption = 1,
    state_group: StateGroupOption = 1,
    device: Annotated[
        str | None,
        typer.Option(
            help=f"Device that would run it: cpu, {', '.join(sorted(cards()))}.",
            show_default="this machine",
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="All memory of the device, such as 24GB: in place of what --device has, or of a GPU that is not in "
            "its list.",
        ),
    ] = None,
    capability: Annotated[
        str | None,
        typer.Option(
            help="Compute capability of a GPU that --device-memory tells, such as 8.9: it decides on kernels and FP8.",
            show_default="not known",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show whether a model fits, what it costs, and what `LLM()` would use. No weights are read."""
    from hybrid_jax.inspection.report import inspect_model

    found = inspect_model(
        model,
        device=device,
        device_memory=device_memory,
        memory=memory,
        host_memory=host_memory,
        max_rows=max_rows,
        max_model_len=max_model_len,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        quantize=quantize,
        kernels=kernels,
        checkpoints=checkpoints,
        mesh=mesh,
        grain=grain,
        page_tokens=page_tokens,
        cut=cut,
        kv_group=kv_group,
        state_group=state_group,
        capability=capability,
    )
    if found["remedy"] is not None:
        found["remedy"] = shell_words(found["remedy"], flags_of_command(context.command))
    if as_json:
        write_json(found)
    else:
        write(str(found))

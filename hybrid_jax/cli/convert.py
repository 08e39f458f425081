"""The command `convert`: a model as an orbax directory, as the engine holds it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hybrid_jax.cli.exits import JsonOption, note, write_json
from hybrid_jax.cli.options.model import QuantizeOption


def convert(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Directory of the model to convert.")
    ],
    out_dir: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory for the converted model.")
    ],
    dtype: Annotated[
        str,
        typer.Option(help="Dtype to store: float32, bfloat16, or auto for the one it has now."),
    ] = "auto",
    quantize: QuantizeOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier converted model in OUT.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model as an orbax directory, with its tokenizer.

    `LLM` and every command read such a directory as they read the original. An extra head that drafts tokens (MTP) is
    left out.
    """
    from hybrid_jax.api.progress_bar import progress_of
    from hybrid_jax.config.model_directory import left_out
    from hybrid_jax.models.files import model_folder
    from hybrid_jax.weights import load_model, save_orbax
    from hybrid_jax.weights.orbax import check_target

    check_target(out_dir, "convert")  # before the model is read
    if not overwrite and out_dir.is_dir() and any(out_dir.iterdir()):
        raise ValueError(
            f"convert: {out_dir} holds a model already; give --overwrite to replace it, or choose another directory"
        )
    start = time.perf_counter()
    with progress_of(None, "loading", unit=1e-6) as report:
        config, params = load_model(
            model,
            dtype=dtype,  # type: ignore[arg-type]  # it checks both
            quantize=quantize,  # type: ignore[arg-type]
            progress=report,
        )
    save_orbax(out_dir, config, params, tokenizer_from=model)
    num_bytes = sum(file.stat().st_size for file in out_dir.rglob("*") if file.is_file())
    seconds = time.perf_counter() - start
    for line in left_out(model_folder(model)):
        note(f"left out: {line}")
    note(f"the model is in {out_dir}; hybrid-jax generate --model {out_dir} PROMPT")
    if as_json:
        write_json(
            {
                "out": str(out_dir),
                "dtype": config.dtype,
                "bytes": num_bytes,
                "seconds": round(seconds, 3),
            }
        )

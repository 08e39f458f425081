"""`hybrid-jax pool-sim`: requests through an allocator of KV and states, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid_jax.cli.exits import POOLS, JsonOption, write_json, write_rows


def pool_sim(
    workload: Annotated[
        str,
        typer.Option(
            help="uniform_short, mixed_long, agentic_burst or sharegpt_replay, or a workload of the --trace file."
        ),
    ] = "mixed_long",
    allocator: Annotated[
        str | None,
        typer.Option(
            help="padded_unified, fixed_dual_mr05, fixed_dual:0.474, fixed_dual_sglang, avmp_static_mr05, "
            "avmp_dynamic_b128; other shares and batches in the same way. In honest mode also frames (the engine's "
            "own scheduler and memory), frames:64 (rings of 64 rows in the pool), frames:64@8 (of 8 tokens), "
            "frames_rings, frames_records, frames_raw (rings in frames), vllm_big_block, superblocks:16MiB, two_ended, "
            "ideal.",
            show_default="frames; in paper mode avmp_dynamic_b128",
        ),
    ] = None,
    model_spec: Annotated[
        str,
        typer.Option(
            help="The paper's models in the paper's sizes: jamba_1_5_mini, and one with larger states. A "
            "wrong name lists all. In honest mode also the known models of `simulate` that have one kind of attention "
            "and one of recurrent layers, such as qwen3_5_9b, or a .toml file."
        ),
    ] = "jamba_1_5_mini",
    pool: Annotated[str, typer.Option(help="Memory to share: 1GiB, 4GiB or bytes.")] = "4GiB",
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the workload.", show_default="the first of the published three"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Requests from a CSV file instead, with the columns workload, seed, request_id, prompt_len, "
            "gen_len and arrival_tick."
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="honest: a request that does not fit waits, and a preempted one computes its tokens again; paper: the "
            "published harness, in which running requests lose memory and do not notice."
        ),
    ] = "honest",
    as_json: JsonOption = False,
) -> None:
    """Run requests through an allocator of KV pages and recurrent states, and show what fits.

    Works only in a clone of the repository, because its allocators are in benchmarks/pools.
    """
    study = _study()
    result = study.run(
        workload=workload,
        allocator=allocator,
        model_spec=model_spec,
        pool=pool,
        seed=seed,
        trace=trace,
        mode=mode,
    )
    write_json(result.as_dict()) if as_json else write_rows(study.rows_of(result))


def _study() -> Any:
    """What runs the loads, which is no part of an installed package."""
    if not POOLS.is_dir():
        raise ValueError(
            "pool-sim: works only in a clone of the repository, because its allocators are in benchmarks/pools; "
            "clone it and run pip install -e . there"
        )
    from benchmarks.pools import report

    return report

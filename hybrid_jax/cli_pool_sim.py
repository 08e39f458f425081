"""`hybrid-jax pool-sim`: requests through an allocator of KV and states, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_jax.cli_exits import write, write_json
from hybrid_jax.sizes import format_size


def pool_sim(
    workload: Annotated[
        str,
        typer.Option(
            help="uniform_short, mixed_long, agentic_burst or sharegpt_replay, or one of the --trace file."
        ),
    ] = "mixed_long",
    allocator: Annotated[
        str,
        typer.Option(
            help="padded_unified, fixed_dual_mr05, fixed_dual:0.474, fixed_dual_sglang, avmp_static_mr05, "
            "avmp_dynamic_b128; other shares and batches in the same way."
        ),
    ] = "avmp_dynamic_b128",
    model_spec: Annotated[
        str, typer.Option(help="jamba_1_5_mini or mamba2_1b3.")
    ] = "jamba_1_5_mini",
    pool: Annotated[str, typer.Option(help="Memory: 1GiB, 4GiB or bytes.")] = "4GiB",
    seed: Annotated[
        int | None,
        typer.Option(help="Of the workload.", show_default="the first of the published three"),
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
            help="paper: the published harness, in which running requests lose memory and do not notice; honest: "
            "not there yet."
        ),
    ] = "honest",
    as_json: Annotated[
        bool, typer.Option("--json", help="One machine-readable object on stdout instead of text.")
    ] = False,
) -> None:
    """Runs requests through an allocator of KV pages and recurrent states, without a model."""
    from hybrid_jax.sim.baselines import make_allocator
    from hybrid_jax.sim.pool_geometry import parse_pool, published_geometry
    from hybrid_jax.sim.pool_loads import make_load, pick_load, read_loads
    from hybrid_jax.sim.pool_paper import run_paper

    if mode not in ("paper", "honest"):
        raise ValueError(f"--mode must be paper or honest, got {mode!r}")
    if mode == "honest":
        raise NotImplementedError("--mode honest is not supported yet; give --mode paper")
    geometry = published_geometry(model_spec)
    pool_bytes = parse_pool(pool, geometry)
    memory = make_allocator(allocator, geometry, pool_bytes)
    if trace is None:
        load = make_load(workload, seed)
    else:
        load = pick_load(read_loads(trace), workload, seed, trace.name)
    result = run_paper(load, memory, geometry, name=allocator, pool_bytes=pool_bytes)
    if as_json:
        write_json(result.as_dict())
    else:
        _print(result)


def _print(result) -> None:
    moves = (
        f"{result.rebalance_count:,} done, {format_size(result.migrated_bytes)}; "
        f"{result.rebalances_refused:,} refused; {format_size(result.wasted_bytes)} lost for ever"
    )
    rows = [
        ("allocator", f"{result.allocator}, {format_size(result.pool_bytes)}"),
        ("model", result.model_spec),
        ("workload", f"{result.workload}, seed {result.seed}, {result.requests:,} requests"),
        ("failed calls", f"{result.oom_count:,} of {result.allocate_calls:,}"),
        ("completed", f"{result.completed:,}, as the paper counts"),
        ("of those hollow", f"{result.hollow:,}; they lost memory while they ran"),
        ("completed intact", f"{result.intact:,}"),
        ("evictions", f"{result.evictions:,}, {result.pages_evicted:,} pages and states"),
        ("rebalances", moves),
        (
            "memory",
            f"{format_size(result.peak_bytes)} in use at most, {format_size(result.reserved_bytes)} reserved",
        ),
        ("processor time", f"{result.cpu_seconds:.2f} s"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        write(f"{name:<{width}}  {value}")

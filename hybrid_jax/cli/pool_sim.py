"""`hybrid-jax pool-sim`: requests through an allocator of KV and states, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_jax.byte_sizes import format_size
from hybrid_jax.cli.exits import JsonOption, write_json, write_rows

if TYPE_CHECKING:
    from hybrid_jax.sim.allocators.loads import PoolLoad, PoolResult
    from hybrid_jax.sim.allocators.paper_mode import PaperResult
    from hybrid_jax.sim.allocators.ticks import TickResult


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
    """Run requests through an allocator of KV pages and recurrent states, and show what fits."""
    from hybrid_jax.sim.allocators.loads import make_load, pick_load, read_loads
    from hybrid_jax.sim.allocators.model_sizes import model_sizes, parse_pool, published_sizes
    from hybrid_jax.sim.allocators.names import make_memory, make_published, run_beside_ideal
    from hybrid_jax.sim.allocators.paper_mode import run_paper

    if mode not in ("paper", "honest"):
        raise ValueError(f"--mode must be paper or honest, got {mode!r}")

    def load() -> PoolLoad:
        if trace is None:
            return make_load(workload, seed)
        return pick_load(read_loads(trace), workload, seed, trace.name)

    if mode == "paper":
        name = allocator or "avmp_dynamic_b128"
        layers = published_sizes(model_spec)
        pool_bytes = parse_pool(pool, layers)
        memory = make_published(name, layers, pool_bytes)
        paper = run_paper(load(), memory, layers, name=name, pool_bytes=pool_bytes)
        write_json(paper.as_dict()) if as_json else write_rows(_paper_rows(paper))
    else:
        name = allocator or "frames"
        model = model_sizes(model_spec)
        pool_bytes = parse_pool(pool, model.layers)
        make_memory(name, model, pool_bytes)  # a mistake in the name shows before the ideal runs
        honest = run_beside_ideal(load(), model, name=name, pool_bytes=pool_bytes)
        write_json(honest.as_dict()) if as_json else write_rows(_honest_rows(honest))


def _asked(result: PoolResult) -> dict[str, str]:
    return {
        "allocator": f"{result.allocator}, {format_size(result.pool_bytes)}",
        "model": result.model_spec,
        "workload": f"{result.workload}, seed {result.seed}, {result.requests:,} requests",
    }


def _paper_rows(result: PaperResult) -> dict[str, str]:
    return _asked(result) | {
        "failed calls": f"{result.oom_count:,} of {result.allocate_calls:,}",
        "completed": f"{result.completed:,}, as the paper counts",
        "of those hollow": f"{result.hollow:,}; they lost memory while they ran",
        "completed intact": f"{result.intact:,}",
        "evictions": f"{result.evictions:,}, {result.pages_evicted:,} pages and states",
        "rebalances": f"{result.rebalance_count:,} done, {format_size(result.migrated_bytes)}; "
        f"{result.rebalances_refused:,} refused; {format_size(result.wasted_bytes)} lost for ever",
        "memory": f"{format_size(result.peak_bytes)} in use at most, {format_size(result.reserved_bytes)} reserved",
        "processor time": f"{result.cpu_seconds:.2f} s",
    }


def _honest_rows(result: TickResult) -> dict[str, str]:
    return _asked(result) | {
        "tokens per tick": f"{result.tokens_per_tick:.2f}, {result.of_ideal:.4f} of the byte-fluid ideal's",
        "completed": f"{result.completed:,} in {result.makespan:,} ticks",
        "of those hollow": f"{result.hollow:,}; their memory was gone at the end",
        "infeasible": f"{result.infeasible:,}; the ideal refuses {result.ideal_infeasible:,}",
        "preempted": f"{result.preempted:,} times, {result.recomputed_tokens:,} tokens computed for nothing",
        "running": f"{result.mean_running:.1f} on average, {result.most_running:,} at most",
        "memory in use": f"{100 * result.utilisation:.1f} % of the budget, while others wait",
        "memory taken": f"{result.peak_footprint:.3f} of the budget; {100 * result.slot_padding:.2f} % of a state is "
        "padding",
        "moved": f"{format_size(result.migrated_bytes)} changed kind, {format_size(result.copied_bytes)} copied, "
        f"{format_size(result.wasted_bytes)} lost for ever, {format_size(result.leaked_bytes)} leaked",
        "folds": f"{result.folds_in_place:,} in place, {result.folds_to_new:,} to new memory",
        "prefixes": f"may end at multiples of {result.prefix_tokens:,} tokens",
        "processor time": f"{result.cpu_seconds:.2f} s, {result.allocate_calls:,} allocate calls",
    }

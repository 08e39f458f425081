"""What `hybrid-jax pool-sim` runs and shows."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pools.loads import PoolLoad, PoolResult, make_load, pick_load, read_loads
from benchmarks.pools.model_sizes import model_sizes, parse_pool, published_sizes
from benchmarks.pools.names import make_memory, make_published, run_beside_ideal
from benchmarks.pools.paper_mode import PaperResult, run_paper
from benchmarks.pools.ticks import TickResult
from hybrid_jax.byte_sizes import format_size


def run(
    *,
    workload: str,
    allocator: str | None,
    model_spec: str,
    pool: str,
    seed: int | None,
    trace: Path | None,
    mode: str,
) -> PaperResult | TickResult:
    """Runs a load through an allocator; arguments as of the command.

    Raises:
        ValueError: one of them is not known, or does not fit the others.
    """
    if mode not in ("paper", "honest"):
        raise ValueError(f"--mode must be paper or honest, got {mode!r}")

    def load() -> PoolLoad:
        if trace is None:
            return make_load(workload, seed)
        return pick_load(read_loads(trace), workload, seed, str(trace))

    if mode == "paper":
        name = allocator or "avmp_dynamic_b128"
        layers = published_sizes(model_spec)
        pool_bytes = parse_pool(pool, layers)
        memory = make_published(name, layers, pool_bytes)
        return run_paper(load(), memory, layers, name=name, pool_bytes=pool_bytes)
    name = allocator or "frames"
    model = model_sizes(model_spec)
    pool_bytes = parse_pool(pool, model.layers)
    make_memory(name, model, pool_bytes)  # a mistake in the name shows before the ideal runs
    return run_beside_ideal(load(), model, name=name, pool_bytes=pool_bytes)


def rows_of(result: PaperResult | TickResult) -> dict[str, str]:
    """A result for people."""
    return _paper_rows(result) if isinstance(result, PaperResult) else _honest_rows(result)


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

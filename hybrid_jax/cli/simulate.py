"""`hybrid-jax simulate`: a trace through a prefix cache, without a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hybrid_jax.byte_sizes import format_size, parse_size
from hybrid_jax.cli.exits import JsonOption, write, write_json, write_rows
from hybrid_jax.cli.options.cut import CutOption, KVGroupOption, StateGroupOption
from hybrid_jax.models.files import known_names

if TYPE_CHECKING:
    from hybrid_jax.sim.prefix_cache.in_flight import InFlightResult
    from hybrid_jax.sim.prefix_cache.request_order import CacheResult, Result


def simulate(
    trace: Annotated[
        Path, typer.Option(help="Requests, one JSON object per line; .gz is read as well.")
    ],
    model_spec: Annotated[
        str,
        typer.Option(
            help="paper_7b, paper_7b_real, paper_7b_float32, granite_4_h_small, a known model "
            f"({', '.join(known_names())}), also by the name of its repository on the hub, or the path of a .toml file."
        ),
    ] = "paper_7b",
    cut: CutOption = None,
    kv_group: KVGroupOption = 1,
    state_group: StateGroupOption = 1,
    policy: Annotated[
        str,
        typer.Option(
            help="none, vllm, sglang, lru, marconi, marconi-code, seglen, adaptive, optimal, placed, infinite, or "
            "alpha:X or alpha-code:X for a fixed weight."
        ),
    ] = "adaptive",
    capacity: Annotated[str, typer.Option(help="Memory of the cache: 5GB, 5GiB or bytes.")] = "5GB",
    clock: Annotated[
        str,
        typer.Option(
            help="order: each request is cached before the next is looked up; arrivals: requests come when the trace "
            "says and run side by side, through the engine's own scheduler."
        ),
    ] = "order",
    grain: Annotated[
        int | None,
        typer.Option(help="Tokens between resume points.", show_default="1; 32 with arrivals"),
    ] = None,
    max_rows: Annotated[
        int | None,
        typer.Option(help="Sequences that decode together, with arrivals.", show_default="64"),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of the host for what the cache evicts, with arrivals: 20GB, 20GiB or bytes.",
            show_default="none",
        ),
    ] = None,
    disk_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory on disk for what the cache has taken, with arrivals: 100GB, 100GiB or bytes.",
            show_default="none",
        ),
    ] = None,
    loads: Annotated[
        str,
        typer.Option(
            help="faster: what takes longer to load than to compute is computed, and not written to disk; always: all "
            "is written and loaded."
        ),
    ] = "faster",
    checkpoints: Annotated[
        str,
        typer.Option(help="How the cache keeps recurrent states: as the model has them, or int8."),
    ] = "float32",
    shapes: Annotated[
        str,
        typer.Option(
            help="fine or coarse: how many shapes steps are compiled for, with arrivals; prompts are padded to them."
        ),
    ] = "fine",
    limit: Annotated[int | None, typer.Option(help="Read only this many requests.")] = None,
    ttft_table: Annotated[
        Path | None, typer.Option(help="Measured times: CSV with the columns tokens and ms.")
    ] = None,
    bounds: Annotated[
        bool,
        typer.Option(
            help="Also run the optimal policy, which knows the future, and an unlimited cache; with --host-memory or "
            "--disk-memory the cache without them, too."
        ),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Run a trace of requests through a prefix cache, and show what it would have hit."""
    from hybrid_jax.sim.model_specs import load_spec
    from hybrid_jax.sim.prefix_cache.caches import make_cache
    from hybrid_jax.sim.prefix_cache.in_flight import (
        InFlightResult,
        cache_config_of,
        simulate_in_flight,
    )
    from hybrid_jax.sim.prefix_cache.request_order import simulate as run
    from hybrid_jax.sim.prefix_cache.timing import MeasuredTable
    from hybrid_jax.sim.prefix_cache.traces import read_trace

    for name, value in (("grain", grain), ("limit", limit), ("max-rows", max_rows)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if clock not in ("order", "arrivals"):
        raise ValueError(f"--clock must be order or arrivals, got {clock!r}")
    if clock == "arrivals" and ttft_table is not None:
        raise ValueError(f"--ttft-table goes with --clock order only, got {ttft_table}")
    if shapes not in ("fine", "coarse"):
        raise ValueError(f"--shapes must be fine or coarse, got {shapes!r}")
    if clock == "order" and shapes != "fine":
        raise ValueError(f"--shapes goes with --clock arrivals only, got {shapes}")
    for tier, size in (("host", host_memory), ("disk", disk_memory)):
        if clock == "order" and size is not None:
            raise ValueError(
                f"--{tier}-memory goes with --clock arrivals only, because the engine's plans move what it holds, got "
                f"{size}; add --clock arrivals"
            )
    if clock == "order" and max_rows is not None:
        raise ValueError(f"--max-rows goes with --clock arrivals only, got {max_rows}")
    if loads not in ("faster", "always"):
        raise ValueError(f"--loads must be faster or always, got {loads!r}")
    if loads == "always" and host_memory is None and disk_memory is None:
        raise ValueError("--loads goes with --host-memory or --disk-memory only, got always")
    if checkpoints not in ("float32", "int8"):
        raise ValueError(f"--checkpoints must be float32 or int8, got {checkpoints!r}")
    spec = load_spec(model_spec, cut=cut, kv_group=kv_group, state_group=state_group)
    narrow = spec.narrow_bytes if checkpoints == "int8" else 0
    if checkpoints == "int8" and not narrow:
        raise ValueError(
            f"--checkpoints int8 needs a model whose recurrent layers are known one by one, got {spec.name}"
        )
    num_bytes = parse_size(capacity, name="--capacity")
    below = 0 if host_memory is None else parse_size(host_memory, name="--host-memory")
    on_disk = 0 if disk_memory is None else parse_size(disk_memory, name="--disk-memory")
    timing = None if ttft_table is None else MeasuredTable(ttft_table)
    # A wrong policy shows before the trace is read.
    if clock == "arrivals":
        cache_config_of(policy)
    else:
        make_cache(policy, spec.costs, num_bytes, ())
    costs = spec.costs
    if narrow and clock == "order":
        costs = replace(costs, checkpoint_bytes=narrow)
    asked = (read_trace(trace, limit=limit), costs, policy, num_bytes)
    groups = {"kv group": kv_group, "state group": state_group}
    parts = [] if cut is None else [f"cut {cut}"]
    parts += [f"{kind} {size}" for kind, size in groups.items() if size > 1]
    parts += ["checkpoints int8"] * bool(narrow)
    name = ", ".join([spec.name, *parts])
    told: dict[str, Any] = {"model_spec": name, "bounds": bounds}
    result: InFlightResult | Result
    if clock == "arrivals":
        if max_rows is not None:
            told["max_rows"] = max_rows
        result = simulate_in_flight(
            *asked,
            decode=spec.decode,
            grain=grain or 32,
            shapes="coarse" if shapes == "coarse" else "fine",
            host_capacity=below,
            disk_capacity=on_disk,
            narrow_bytes=narrow,
            loads="always" if loads == "always" else "faster",
            **told,
        )
    else:
        result = run(*asked, grain=grain or 1, timing=timing, **told)
    if as_json:
        write_json(result.as_dict())
    elif isinstance(result, InFlightResult):
        _print_in_flight(result)
    else:
        _print(result)


def share(value: float) -> str:
    """A share as percent."""
    return f"{100 * value:.2f} %"


def _rows(result: CacheResult) -> dict[str, str]:
    """What both clocks tell."""
    distances = {
        "a clairvoyant hits": result.distance_to_optimal,
        "an endless cache hits": result.distance_to_infinite,
    }
    return {
        "policy": result.policy,
        "model": result.model_spec,
        "requests": f"{result.requests:,}, {result.input_tokens:,} prompt tokens",
        "token hit rate": share(result.token_hit_rate),
        **{n: f"{share(d)} of the tokens more" for n, d in distances.items() if d is not None},
        "FLOPs saved": share(result.flops_saved_rate),
        "memory": f"{format_size(result.used_max)} of {format_size(result.capacity)} used at most",
        "evictions": f"{result.evictions:,}",
        "processor time": f"{result.seconds:.2f} s",
    }


def _print_in_flight(result: InFlightResult) -> None:
    part = result.padded_tokens / max(1, result.prefill_tokens + result.padded_tokens)
    own = {
        "never fit": f"{result.infeasible:,}",
        "time to first token": _times(result.ttft_s),
        "time to last token": _times(result.latency_s),
        "padding": f"{result.padded_tokens:,} tokens beside {result.prefill_tokens:,} of prompts, {share(part)} of "
        f"what is computed, {result.padded_s:,.0f} s",
        "dispatches of prompts": f"{result.prefill_dispatches:,}",
        "device": result.timing,
        "span": f"{result.span_s:,.0f} s of the trace's time",
        **_tiers(result),
        "preemptions": f"{result.preemptions:,}",
        "waited for another's": f"{result.waits:,}",
    }
    write_rows(_rows(result) | own)


def _tiers(result: InFlightResult) -> dict[str, str]:
    """What came from where; nothing without the host's memory and the disk."""
    host, disk, moved, rows = result.host, result.disk, result.moved_bytes, {}
    if not host and not disk:
        return {}
    names = {"arena": "hits in the cache", "host": "in the host's memory", "disk": "on disk"}
    for tier, found in result.hits.items():
        tokens = f"{found.tokens:,} tokens, {share(found.token_hit_rate)}"
        rows[names[tier]] = f"{tokens}; {found.requests:,} requests"
    if host:
        rows["host memory"] = (
            f"{host['saves']:,} saves of {format_size(moved['to_host'])}, {host['loads']:,} loads of "
            f"{format_size(moved['from_host'])}"
        )
    if disk:
        rows["disk memory"] = (
            f"{disk['saves']:,} saves of {format_size(moved['to_disk'])}, {disk['loads']:,} loads of "
            f"{format_size(moved['from_disk'])}; writing took {result.written_s:,.1f} s, reading {result.read_s:,.1f} s"
        )
    rows["copies"] = f"{result.copied_s:,.1f} s"
    if (alone := result.alone) is not None:
        rows["the cache alone"] = (
            f"token hit rate {share(alone.token_hit_rate)}; time to first token {_times(alone.ttft_s)}"
        )
    return rows


def _print(result: Result) -> None:
    rows = _rows(result)
    rows["time to first token"] = f"{_times(result.ttft_s)} ({result.timing})"
    if result.alpha is not None:
        rows["alpha"] = f"{result.alpha:g}"
    write_rows(rows)
    table = Table("prompt tokens from", "requests", "token hit rate", box=None)
    for part in result.length_bins:
        table.add_row(f"{part.tokens:,}", f"{part.requests:,}", share(part.token_hit_rate))
    console = Console(highlight=False, soft_wrap=True)
    with console.capture() as shown:
        console.print(table)
    write(shown.get(), end="")


def _times(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {1000 * value:,.0f} ms" for name, value in seconds.items())

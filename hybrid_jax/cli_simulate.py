"""`hybrid-jax simulate`: a trace through a prefix cache, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hybrid_jax.cli_exits import write_json
from hybrid_jax.sizes import format_size, parse_size


def simulate(
    trace: Annotated[
        Path, typer.Option(help="Requests, one JSON object per line; .gz is read as well.")
    ],
    model_spec: Annotated[
        str, typer.Option(help="Model by name, or the path of a .toml file.")
    ] = "paper_7b",
    policy: Annotated[
        str, typer.Option(help="Cache policy by name, or alpha:X for a fixed weight.")
    ] = "sglang",
    capacity: Annotated[str, typer.Option(help="Memory of the cache: 5GB, 5GiB or bytes.")] = "5GB",
    grain: Annotated[int, typer.Option(help="Tokens between resume points.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Only so many requests.")] = None,
    ttft_table: Annotated[
        Path | None, typer.Option(help="Measured times: CSV with the columns tokens and ms.")
    ] = None,
    bounds: Annotated[
        bool, typer.Option(help="Also run the clairvoyant policy and the cache without bounds.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="One machine-readable object on stdout instead of text.")
    ] = False,
) -> None:
    """Runs a trace through a prefix cache in request order and shows what it would have hit."""
    from hybrid_jax.sim.model_specs import load_spec
    from hybrid_jax.sim.request_order import simulate as run
    from hybrid_jax.sim.timing import MeasuredTable
    from hybrid_jax.sim.traces import read_trace

    for name, value in (("grain", grain), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    spec = load_spec(model_spec)
    num_bytes = parse_size(capacity, name="--capacity")
    timing = None if ttft_table is None else MeasuredTable(ttft_table)
    result = run(
        read_trace(trace, limit=limit),
        spec.costs,
        policy,
        num_bytes,
        model_spec=spec.name,
        grain=grain,
        timing=timing,
        bounds=bounds,
    )
    if as_json:
        write_json(result.as_dict())
    else:
        _print(result)


def _print(result) -> None:
    console = Console(highlight=False, soft_wrap=True)
    share = lambda value: f"{100 * value:.2f} %"
    rows = [
        ("policy", result.policy + ("" if result.alpha is None else f", alpha {result.alpha:g}")),
        ("model", result.model_spec),
        ("requests", f"{result.requests:,}, {result.input_tokens:,} prompt tokens"),
        ("token hit rate", share(result.token_hit_rate)),
        *(
            (name, f"{share(distance)} of the tokens more")
            for name, distance in (
                ("a clairvoyant hits", result.distance_to_optimal),
                ("an endless cache hits", result.distance_to_infinite),
            )
            if distance is not None
        ),
        ("FLOPs saved", share(result.flops_saved_rate)),
        (
            "memory",
            f"{format_size(result.used_max)} of {format_size(result.capacity)} used at most",
        ),
        ("evictions", f"{result.evictions:,}"),
        ("time to first token", _times(result)),
        ("processor time", f"{result.seconds:.2f} s"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(f"{name:<{width}}  {value}")
    table = Table("prompt tokens from", "requests", "token hit rate", box=None)
    for part in result.length_bins:
        table.add_row(f"{part.tokens:,}", f"{part.requests:,}", share(part.token_hit_rate))
    console.print(table)


def _times(result) -> str:
    times = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in result.ttft_s.items())
    return f"{times} ({result.timing})"

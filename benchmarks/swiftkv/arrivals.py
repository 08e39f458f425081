"""What a cut would bring to a server: tokens per second and time to the first token, without a model.

    python benchmarks/swiftkv/arrivals.py [--json OUT] [--requests 200]

Requests with prompts of one length and 256 tokens of output go through the engine's own scheduler on virtual time
(`hybrid-jax simulate --clock arrivals`), at the rates that `gpu/hybrid_7b.py` measured on an H200: FLOPs of prefill at
58 % of the data sheet's, and bytes of decode at 58 % of what a copy moves. The prompts share nothing, and the memory
holds 100 GB of keys, values and states.

- All requests at once: tokens of prompts and outputs per second (as in figure 3 of SwiftKV, arXiv 2410.03960).
- Requests that arrive at random, at shares of the rate that the model without a cut can serve: the median time to the
  first token (figure 4).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import header, write_json
from hybrid_jax.sim.model_specs import ModelSpec, load_spec
from hybrid_jax.sim.prefix_cache.in_flight import InFlightResult, simulate_in_flight
from hybrid_jax.sim.prefix_cache.timing import DeviceModel
from hybrid_jax.sim.prefix_cache.traces import TraceRequest

OUTPUT = 256
MEMORY = 100 * 10**9
PROMPTS = (2048, 8192, 32768, 131072)
MEASURED = DeviceModel(flops_per_second=0.58 * 989e12, bytes_per_second=0.58 * 4.17e12)
SHARES = (0.5, 0.8, 1.0, 1.2)
MODELS: dict[str, dict[str, Any]] = {
    "llama_3_1_8b": {"cut": 16},
    "llama_3_1_8b, groups of 2": {"cut": 16, "kv_group": 2},
    "hybrid_7b": {"cut": 28},
    "hybrid_7b, groups of 2": {"cut": 28, "kv_group": 2, "state_group": 2},
    "nemotron_h_8b": {"cut": 26},
}


def trace(count: int, length: int, rate: float | None, seed: int = 0) -> list[TraceRequest]:
    """Requests that share nothing, at so many a second, or all at once."""
    rng = np.random.default_rng(seed)
    gaps = np.zeros(count) if rate is None else rng.exponential(1 / rate, count)
    return [
        TraceRequest(
            session_id=number,
            turn_id=0,
            arrival_s=float(arrival),
            prompt=rng.integers(0, 1 << 30, length, dtype=np.int32),
            output=np.zeros(OUTPUT, np.int32),
        )
        for number, arrival in enumerate(np.cumsum(gaps))
    ]


def served(spec: ModelSpec, requests: list[TraceRequest]) -> InFlightResult:
    return simulate_in_flight(
        requests, spec.costs, "none", MEMORY, decode=spec.decode, device=MEASURED
    )


def row(plain: ModelSpec, changed: ModelSpec, length: int, count: int) -> dict[str, Any]:
    """One model at one length of prompts, with and without a cut."""
    at_once = trace(count, length, None)
    tokens = count * (length + OUTPUT)
    rates = {
        name: tokens / served(spec, at_once).span_s
        for name, spec in (("without", plain), ("with", changed))
    }
    capacity = rates["without"] / (length + OUTPUT)
    first = {}
    for share in SHARES:
        arriving = trace(count, length, share * capacity)
        times = [served(spec, arriving).ttft_s["p50"] for spec in (plain, changed)]
        first[str(share)] = {"without": times[0], "with": times[1], "ratio": times[0] / times[1]}
    return {
        "tokens_per_second": rates | {"ratio": rates["with"] / rates["without"]},
        "first_token_s_by_load": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    given = parser.parse_args()
    report: dict[str, Any] = {"requests": given.requests, "output_tokens": OUTPUT, "models": {}}
    for name, how in MODELS.items():
        model = name.partition(",")[0]
        plain, changed = load_spec(model), load_spec(model, **how)
        report["models"][name] = how | {"prompts": {}}
        for length in PROMPTS:
            found = row(plain, changed, length, min(given.requests, 2_000_000 // length))
            report["models"][name]["prompts"][length] = found
            rates = found["tokens_per_second"]
            loads = ", ".join(
                f"{share}: {times['without']:.3g} s to {times['with']:.3g} s"
                for share, times in found["first_token_s_by_load"].items()
            )
            print(
                f"{name}, {length:,} tokens: {rates['without']:,.0f} to {rates['with']:,.0f} tokens/s "
                f"({rates['ratio']:.2f}x); first token at a load of {loads}",
                flush=True,
            )
    if given.json is not None:
        write_json(given.json, header() | report)


if __name__ == "__main__":
    main()

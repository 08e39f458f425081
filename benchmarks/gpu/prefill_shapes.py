"""What lists of prefill shapes cost on traces: the choice of the coarse shapes (`hybrid_jax/schedule/bucket.py`).

    python benchmarks/gpu/prefill_shapes.py [--json OUT] [--requests 1500] [--only TRACE,TRACE]

No GPU is needed. Each trace goes through the engine's own scheduler on virtual time, once with each list, with the
memory and the rows of an H200. Counted are the tokens that dispatches compute, padding included, and the dispatches.
A dispatch costs as much as DISPATCH_TOKENS tokens, so

    cost = tokens of prompts + padding + DISPATCH_TOKENS x dispatches,

in tokens. `cost_per_token` is its share per token of the prompts that was computed, since what is found in the cache
depends a little on when chunks end. `over` compares it with the first list. Beside the traces in `benchmarks/traces`
there are prompts of 1,000 to 32,000 tokens that find nothing in the cache ("new"), and the same where 90 % is found
("hit of 90 %").

Last comes what a hit of 90 % of 8,192 tokens takes with each list, as a share of a new prompt's time. It is computed
from two times that were measured on an H200 (`benchmarks/results/gpu/hybrid_7b_h200.json`): of a new prompt in one
dispatch of 8,192 tokens, and of a hit in one of 1,024. A straight line through both gives the time of a token, and of a
request with one dispatch. A further dispatch takes DISPATCH_TOKENS, or at most as long as that request without tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import ROOT, header, write_json
from hybrid_jax.config import EngineConfig
from hybrid_jax.schedule import bucket
from hybrid_jax.schedule.bucket import DISPATCH_TOKENS, shapes_of
from hybrid_jax.sim.model_specs import load_spec
from hybrid_jax.sim.prefix_cache.in_flight import simulate_in_flight
from hybrid_jax.sim.prefix_cache.traces import TraceRequest, read_trace

MODEL, MEMORY, ROWS, LONGEST = "hybrid_7b", 60 * 10**9, 256, 8192
TRACES = {
    "LMSYS": "lmsys_s1_sps0.5",
    "ShareGPT": "sharegpt_s1_sps1",
    "SWE-bench": "swebench_s1_sps5_art10",
    "Mooncake": "mooncake_conv_first1500",
}
MEASURED = ROOT / "benchmarks/results/gpu/hybrid_7b_h200.json"
MEASURED_SHAPE = 1024  # in which the measured hit ran, one of the fine shapes
HIT_TOKENS = 832  # of 8,192 tokens, after a hit of 90 %


@dataclass(frozen=True)
class List:
    """Tokens per row beside 8,192, rows of a dispatch that has several, and their tokens at most."""

    chunks: tuple[int, ...]
    several: int = 4
    budget: int = 2048

    @contextlib.contextmanager
    def taken(self) -> Iterator[bucket.Shapes]:
        """The coarse shapes are this list's."""
        changed = {
            "CHUNKS": self.chunks,
            "SEVERAL_ROWS": self.several,
            "TOKENS_OF_SEVERAL": self.budget,
        }
        shapes_of.cache_clear()
        try:
            with mock.patch.multiple(bucket, **changed):
                yield shapes_of(
                    EngineConfig(max_rows=ROWS, prefill_tokens=LONGEST, shapes="coarse")
                )
        finally:
            shapes_of.cache_clear()


LISTS = {
    "quarters": List((128, 512, 2048)),
    "quarters, one row": List((128, 512, 2048), several=1),
    "256, 1024": List((256, 1024)),
    "256, 1024, 4096": List((256, 1024, 4096)),
    "quarters and 1024": List((128, 512, 1024, 2048)),
    "quarters and 896": List((128, 512, 896, 2048)),
    "five of one ratio": List((128, 384, 1024, 2816)),
    "five around 896": List((128, 384, 896, 2560)),
    "five around 896, one row": List((128, 384, 896, 2560), several=1),
    "five around 896, long rows together": List((128, 384, 896, 2560), budget=4096),
    "halves": List((128, 256, 512, 1024, 2048, 4096)),
}


def drawn(cached: float, count: int, seed: int = 0) -> list[TraceRequest]:
    """Prompts of 1,000 to 32,000 tokens, one every second; before each one came that share of it, if any."""
    rng = np.random.default_rng(seed)
    requests: list[TraceRequest] = []

    def ask(session: int, turn: int, prompt: np.ndarray) -> None:
        requests.append(
            TraceRequest(
                session_id=session,
                turn_id=turn,
                arrival_s=float(len(requests)),
                prompt=prompt,
                output=np.zeros(16, np.int32),
            )
        )

    while len(requests) < count:
        length = int(np.exp(rng.uniform(np.log(1000), np.log(32_000))))
        prompt = rng.integers(0, 1 << 30, length, dtype=np.int32)
        session = len(requests)
        if cached:
            ask(session, 0, prompt[: int(cached * length)])
        ask(session, 1, prompt)
    return requests


def loads(count: int) -> dict[str, list[TraceRequest]]:
    """The requests of each trace."""
    folder = ROOT / "benchmarks/traces"
    named = {
        name: read_trace(folder / f"{file}.seg.jsonl.gz", limit=count)
        for name, file in TRACES.items()
    }
    return named | {"new": drawn(0.0, count), "hit of 90 %": drawn(0.9, count)}


def row(requests: list[TraceRequest], chosen: List) -> dict[str, Any]:
    """What one list costs on one trace."""
    spec = load_spec(MODEL)
    with chosen.taken():
        found = simulate_in_flight(
            requests,
            spec.costs,
            "adaptive",
            MEMORY,
            decode=spec.decode,
            max_rows=ROWS,
            prefill_tokens=LONGEST,
            shapes="coarse",
        )
    computed = found.prefill_tokens + found.padded_tokens
    return {
        "prompt_tokens": found.prefill_tokens,
        "padded_tokens": found.padded_tokens,
        "dispatches": found.prefill_dispatches,
        "cost_tokens": computed + DISPATCH_TOKENS * found.prefill_dispatches,
        "first_token_s": found.ttft_s["mean"],
    }


def hits(measured: dict[str, Any]) -> dict[str, Any]:
    """Of each list the time of a hit of 90 % of 8,192 tokens over that of a new prompt; computed, not measured.

    "least" has a further dispatch cost DISPATCH_TOKENS, "most" all that a request takes beside its tokens.
    """
    times = measured["ttft"][f"{LONGEST} tokens"]
    new, hit = (times[f"pallas {side}"]["seconds"]["median"] for side in ("cold", "hit"))
    token_s = (new - hit) / (LONGEST - MEASURED_SHAPE)
    request_s = new - LONGEST * token_s
    found: dict[str, Any] = {"token_us": 1e6 * token_s, "request_ms": 1e3 * request_s, "lists": {}}
    for name, chosen in LISTS.items():
        with chosen.taken() as shapes:
            sizes, left = [], HIT_TOKENS
            while left:
                first = shapes.first_chunk(left)
                sizes.append(shapes.prefill_of(first)[0])
                left -= first
        least = request_s + token_s * (sum(sizes) + DISPATCH_TOKENS * (len(sizes) - 1))
        most = request_s * len(sizes) + token_s * sum(sizes)
        found["lists"][name] = {"shapes": sizes, "least": least / new, "most": most / new}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--only", help="traces, by name, with commas between")
    given = parser.parse_args()
    traces = loads(given.requests)
    wanted = given.only.split(",") if given.only else list(traces)
    for trace in wanted:
        if trace not in traces:
            parser.error(f"--only: no trace {trace!r}; there are {', '.join(traces)}")
    report: dict[str, Any] = header() | {"model": MODEL, "requests": given.requests}
    report |= {"lists": {}, "traces": {}}
    for name, chosen in LISTS.items():
        with chosen.taken() as shapes:
            report["lists"][name] = {"shapes": shapes.prefill, "programs": len(shapes.prefill)}
    for trace, requests in traces.items():
        if trace not in wanted:
            continue
        report["traces"][trace] = rows = {}
        print(f"\n{trace}: list, programs, prompt tokens, padding, dispatches, cost per token")
        for name, chosen in LISTS.items():
            rows[name] = found = row(requests, chosen)
            found["cost_per_token"] = found["cost_tokens"] / found["prompt_tokens"]
            found["over"] = found["cost_per_token"] / rows["quarters"]["cost_per_token"]
            print(
                f"{name:38} {report['lists'][name]['programs']:2} {found['prompt_tokens']:12,} "
                f"{found['padded_tokens']:10,} {found['dispatches']:6,} {found['cost_per_token']:.4f} "
                f"{found['over']:.4f} {found['first_token_s']:.4f} s",
                flush=True,
            )
    report["hit"] = hits(json.loads(MEASURED.read_text()))
    print("\na hit of 90 % of 8,192 tokens over a new prompt, computed")
    for name, found in report["hit"]["lists"].items():
        print(f"{name:38} {found['shapes']} {found['least']:.3f} to {found['most']:.3f}")
    if given.json is not None:
        write_json(given.json, report)


if __name__ == "__main__":
    main()

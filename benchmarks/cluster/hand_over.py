"""Prompts computed apart from decoding, beside one engine: time to the first token, and steps while prompts run.

    python benchmarks/cluster/hand_over.py [--json benchmarks/results/cluster/hand_over.json] [--rounds 9] [--smoke]

On two simulated devices of one CPU, each with one of the cores if there are two. Three LLMs take turns: one engine,
two replicas, and one replica that computes prompts for another. Two things are measured:

1. The time to the first token of a new prompt of 4,064 tokens, alone. Through a hand-over it has the copies of the
   prefix and the last few tokens, computed again, on top.
2. The time between two dispatches of four texts that are being written, while prompts of 2,048 tokens come one after
   the other: its 95th percentile over its median.

Both sides share the machine's memory and its cores, so the second number is no more than a hint of what devices of
their own would do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file

import numpy as np

from benchmarks.common import header, quantiles, write_json
from hybrid_jax import LLM, SamplingParams

MESHES = {"one engine": None, "replicas": "dp=2", "hand-over": "prefill=1,decode=1"}
FIRST = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def prompt(rng: np.random.Generator, length: int) -> dict[str, list[int]]:
    """A prompt that nobody has had."""
    return {"prompt_token_ids": rng.integers(0, 256, length).tolist()}


def first_token_s(llm: LLM, rng: np.random.Generator, length: int) -> float:
    """Seconds to the first token of a new prompt."""
    [output] = llm.generate(prompt(rng, length), FIRST)
    assert output.metrics.ttft_s is not None
    return output.metrics.ttft_s


def gaps_beside(
    llm: LLM, rng: np.random.Generator, *, rows: int, length: int, tokens: int
) -> list[float]:
    """Seconds between the dispatches of rows that decode, while prompts are computed one after the other."""
    texts = [prompt(rng, 64) for _ in range(rows)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    stopping = threading.Event()

    def others() -> None:
        while not stopping.is_set():
            llm.generate(prompt(rng, length), FIRST)

    beside = threading.Thread(target=others)
    gaps: list[float] = []
    last = None
    for delta in llm.stream(texts, params):
        if delta.prompt_index:
            continue
        now = time.perf_counter()
        if last is None:
            beside.start()
        else:
            gaps.append(now - last)
        last = now
    stopping.set()
    beside.join()
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="one round of short prompts")
    args = parser.parse_args()
    flags = os.environ.get("XLA_FLAGS", "")  # read when jax first looks for devices
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=2"
    rounds = 1 if args.smoke else args.rounds
    long, between, tokens = (192, 160, 32) if args.smoke else (4064, 2048, 160)
    options = {"max_rows": 8, "quiet": True, "cache": "lru"}
    llms = {name: LLM(mesh=mesh, **options) for name, mesh in MESHES.items()}
    rng = np.random.default_rng(0)
    first: dict[str, list[float]] = {name: [] for name in llms}
    gaps: dict[str, list[float]] = {name: [] for name in llms}
    for number in range(rounds + 1):  # the first one compiles
        for name, llm in llms.items():
            seconds = first_token_s(llm, rng, long)
            found = gaps_beside(llm, rng, rows=4, length=between, tokens=tokens)
            if number or args.smoke:
                first[name].append(seconds)
                gaps[name] += found
    handed = llms["hand-over"].stats()
    report = header() | {
        "prompt_tokens": long,
        "first_token_s": {name: quantiles(values) for name, values in first.items()},
        "hand_over_over_one_engine": statistics.median(
            a / b for a, b in zip(first["hand-over"], first["one engine"], strict=True)
        ),
        "gaps_s": {
            name: quantiles(values) | {"p95": float(np.percentile(values, 95))}
            for name, values in gaps.items()
        },
        "p95_over_median": {
            name: float(np.percentile(values, 95)) / statistics.median(values)
            for name, values in gaps.items()
        },
        "handed_over_bytes_a_prompt": handed["handed_over_bytes"]
        / max(1, handed["handed_over_prefixes"]),
    }
    for name in llms:
        print(
            f"{name:12} first token {1e3 * statistics.median(first[name]):8.1f} ms, "
            f"dispatches {1e3 * statistics.median(gaps[name]):7.1f} ms apart, "
            f"95th percentile {report['p95_over_median'][name]:.2f} of the median"
        )
    print(f"first token, hand-over over one engine: {report['hand_over_over_one_engine']:.3f}")
    write_json(args.json, report)
    for llm in llms.values():
        llm.close()


if __name__ == "__main__":
    main()

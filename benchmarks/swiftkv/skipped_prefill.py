"""What a cut (SwiftKV) saves of the time to the first token, and what it costs a decode step, in the engine.

    python benchmarks/swiftkv/skipped_prefill.py [--rounds 7] [--tokens 1024 4096] [--json OUT]

A random Nemotron-H of 173 M parameters, 16 layers, with and without a cut in the middle, in one process and in turns.
Ratios are of the same round: above 1, the model with the cut is faster. Beside each stands the ratio of FLOPs, which is
the most that skipping could give.

- Time to the first token: one new prompt, from the moment it is given until its first token is there.
- A decode step: 8 rows decode; time from the moment all have a token until the first one ends.
- Log-probabilities of a prompt take all layers: then both models should take the same time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import header, quantiles, request, run, token_seconds, turns, write_json
from benchmarks.engine.random_models import nemotron_model
from hybrid_jax.config import CacheConfig, EngineConfig, with_cut
from hybrid_jax.costs import prefill_flops
from hybrid_jax.engine.engine import Engine
from hybrid_jax.models.cut import cut_params
from hybrid_jax.models.initialize import random_params

ROWS, DECODED, PROMPT = 8, 64, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    plain = nemotron_model()
    changed = with_cut(plain, len(plain.layers) // 2)
    params = random_params(plain, 0)
    settings = EngineConfig(
        max_rows=ROWS, max_model_len=max(given.tokens) + 64, cache=CacheConfig(policy="off")
    )
    engines = {
        "without": Engine(plain, params, settings),
        "with": Engine(changed, cut_params(params, changed), settings),
    }
    rng = np.random.default_rng(0)

    def prompt(count: int) -> list[int]:
        return rng.integers(0, plain.vocab_size, count).tolist()

    def first_token(count: int, **asked: Any) -> dict[str, Any]:
        sides: dict[str, Callable[[Any], float]] = {
            name: lambda tokens, engine=engine: run(engine, [request("a", tokens, 1, **asked)])
            for name, engine in engines.items()
        }
        return ratios(turns(given.rounds, sides, lambda: prompt(count)))

    def decoded() -> dict[str, Any]:
        sides = {name: token_seconds(engine, DECODED) for name, engine in engines.items()}
        return ratios(turns(given.rounds, sides, lambda: [prompt(PROMPT) for _ in range(ROWS)]))

    report: dict[str, Any] = {"cut": changed.cut, "layers": len(plain.layers), "first_token": {}}
    for count in given.tokens:
        flops = prefill_flops(plain, count) / prefill_flops(changed, count)
        found = first_token(count) | {"flops": flops}
        report["first_token"][count] = found
        show(f"first token, {count:,} tokens, FLOPs {flops:.2f}x", found)
    count = min(given.tokens)
    report["with_prompt_logprobs"] = first_token(count, prompt_logprobs=1)
    show(f"the same with prompt_logprobs, {count:,} tokens", report["with_prompt_logprobs"])
    report["decode"] = decoded()
    show(f"a decode step of {ROWS} rows", report["decode"])
    if given.json is not None:
        write_json(given.json, header() | report)


def ratios(values: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds of both sides, and how many times faster the model with the cut is."""
    pairs = zip(values["without"], values["with"], strict=True)
    return {
        **{name: quantiles(seconds) for name, seconds in values.items()},
        "ratio": quantiles([one / other for one, other in pairs]),
    }


def show(what: str, found: dict[str, Any]) -> None:
    ratio = found["ratio"]
    print(
        f"{what}: {ratio['median']:.3f}x [{ratio['p10']:.3f}, {ratio['p90']:.3f}], "
        f"{found['without']['median']:.4f} s to {found['with']['median']:.4f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()

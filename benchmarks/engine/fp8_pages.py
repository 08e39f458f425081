"""What keys and values in FP8 cost a decode step.

    python benchmarks/engine/fp8_pages.py [--rounds 7] [--json OUT]

The bundled model and a random Nemotron-H of 173 M parameters, in float32, each with and without
`kv_cache_dtype="fp8"`, in one process and in turns. Ratios are of the same round: above 1, FP8 takes longer. Time is
from the moment all rows have a token until the first one ends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import header, quantiles, token_seconds, turns, write_json
from benchmarks.engine.random_models import nemotron_model
from hybrid_jax.config import CacheConfig, EngineConfig, ModelConfig
from hybrid_jax.config.engine import KV_CACHE_DTYPES
from hybrid_jax.engine.engine import Engine
from hybrid_jax.models.initialize import random_params
from hybrid_jax.weights import BUNDLED, load_model

DECODED = 128
CASES = ((8, 64), (1, 1500))  # rows, tokens of each prompt


def models() -> dict[str, tuple[ModelConfig, dict]]:
    """By name."""
    config = nemotron_model()
    return {
        "bundled": load_model(BUNDLED, dtype="float32"),
        "nemotron_h_173m": (config, random_params(config, 0)),
    }


def ratios(engines: dict[str, Engine], draw: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Seconds of a token of each side, and how many times as long FP8 takes."""
    sides = {name: token_seconds(engine, DECODED) for name, engine in engines.items()}
    found = turns(rounds, sides, draw)
    pairs = zip(found["auto"], found["fp8"], strict=True)
    seconds = {name: quantiles(values) for name, values in found.items()}
    return seconds | {"ratio": quantiles([fp8 / auto for auto, fp8 in pairs])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rng, report = np.random.default_rng(0), []
    for name, (config, params) in models().items():
        settings = EngineConfig(max_rows=8, max_model_len=2048, cache=CacheConfig(policy="off"))
        engines = {
            kept: Engine(config, params, replace(settings, kv_cache_dtype=kept))
            for kept in KV_CACHE_DTYPES
        }
        for rows, length in CASES:

            def draw(rows: int = rows, length: int = length) -> list[list[int]]:
                return rng.integers(0, config.vocab_size, (rows, length)).tolist()  # noqa: B023

            found = {"model": name, "rows": rows, "prompt_tokens": length}
            found |= ratios(engines, draw, given.rounds)
            report.append(found)
            ratio = found["ratio"]
            print(
                f"{name}, rows {rows} of {length:,} tokens: {ratio['median']:.2f}x "
                f"[{ratio['p10']:.2f}, {ratio['p90']:.2f}] the time, "
                f"{1e3 * found['auto']['median']:.3f} to {1e3 * found['fp8']['median']:.3f} ms a token",
                flush=True,
            )
    if given.json is not None:
        write_json(given.json, header() | {"decoded": DECODED, "cases": report})


if __name__ == "__main__":
    main()

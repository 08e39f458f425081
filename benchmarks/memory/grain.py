"""What the length of the rings costs in time: decode and prefill with a grain of 8 to 64, and bytes by arithmetic.

    python benchmarks/memory/grain.py [--rounds 7] [--models bundled,wide] [--dtype float32] [--json FILE]

One engine for each grain, with the same weights, prompts and settings, in one process; a round starts with another
grain each. Inside the clock: everything from `Engine.add`, or for decoding from the moment that all rows have a token,
to the last token on the host. `over_32`: tokens per second over those of grain 32 in the same round, medians with 10th
and 90th percentile. `agree`: share of greedy tokens that are those of grain 32, up to the first other one of a row.

The bytes are no measurement: what a GPU has to move, from the layouts of real models (`grain_bytes.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file

from benchmarks.common import header, quantiles, request, run, run_decode, turns, write_json
from benchmarks.memory import grain_bytes
from hybrid_jax.config import CacheConfig, EngineConfig, ModelConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.models import config_from_hf
from hybrid_jax.models.initialize import random_params
from hybrid_jax.weights import BUNDLED, load_model

ROOT = Path(__file__).resolve().parents[2]
HYBRID_7B = ROOT / "configs/models/hybrid_7b/config.json"
GRAINS, STANDARD = (8, 16, 32, 64), 32
ROWS = 8
# A few layers of a Nemotron-H with its own heads, 128 x 64 with states of 128, between narrow matrices: the states of 8
# rows weigh half of the weights in bfloat16, as those of 64 rows do in the 8B model.
WIDE = {
    "hybrid_override_pattern": "M-M-*-M-",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}
STEPS = {"bundled": 256, "wide": 64}
PROMPT = {"bundled": 2048, "wide": 1024}


def model(name: str, dtype: str) -> tuple[ModelConfig, dict]:
    """The configuration and weights of one of the two."""
    if name == "bundled":
        return load_model(BUNDLED, dtype=dtype)
    config = config_from_hf(json.loads(HYBRID_7B.read_text()) | WIDE)
    return config, random_params(config, 0, dtype)


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(32, 127, length).tolist()


def decode_requests(prompts: list[list[int]], steps: int) -> list:
    return [request(f"d{row}", tokens, steps) for row, tokens in enumerate(prompts)]


def agreement(engines: dict[int, Engine], prompts: list[list[int]], steps: int) -> dict[int, float]:
    """Share of tokens before a row's first that differs from the standard grain's."""
    outputs = {}
    for grain, engine in engines.items():
        requests = decode_requests(prompts, steps)
        run(engine, requests)
        outputs[grain] = np.array([one.output.token_ids for one in requests])
    same = {grain: output == outputs[STANDARD] for grain, output in outputs.items()}
    return {grain: float(np.cumprod(each, axis=1).mean()) for grain, each in same.items()}


def measure(name: str, dtype: str, rounds: int) -> dict:
    config, params = model(name, dtype)
    # One step prefills all rows that decode together, whatever the grain.
    settings = {
        "max_rows": ROWS,
        "max_model_len": 2560,
        "memory": 400 << 20,
        "prefill_tokens": 1024,
    }
    engines = {
        grain: Engine(
            config,
            params,
            EngineConfig(grain=grain, dtype=dtype, cache=CacheConfig(policy="off"), **settings),
        )
        for grain in GRAINS
    }
    rng, steps, length = np.random.default_rng(0), STEPS[name], PROMPT[name]
    # Lengths that differ, so that rows do not fold together.
    draw = lambda: [prompt(rng, 96 + 5 * row) for row in range(ROWS)]

    def decode(prompts: list[list[int]], engine: Engine) -> float:
        seconds, tokens = run_decode(engine, decode_requests(prompts, steps))
        return tokens / seconds

    def prefill(tokens: list[int], engine: Engine) -> float:
        return length / run(engine, [request("p", tokens, 1)])

    sides = lambda call: {
        str(grain): lambda inputs, engine=engine: call(inputs, engine)
        for grain, engine in engines.items()
    }
    agree = agreement(engines, draw(), steps)
    rates = {
        "decode": turns(rounds, sides(decode), draw),
        "prefill": turns(rounds, sides(prefill), lambda: prompt(rng, length)),
    }
    return {"agree": agree, **{kind: over_standard(values) for kind, values in rates.items()}}


def over_standard(rates: dict[str, list[float]]) -> dict[str, dict]:
    """Tokens per second of each side, and their ratios round by round."""
    base = rates[str(STANDARD)]
    return {
        side: {
            "tokens_per_s": quantiles(values),
            "over_32": quantiles(list(np.divide(values, base))),
        }
        for side, values in rates.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", default="bundled,wide", help="'' for the bytes alone")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = {**header(), "dtype": options.dtype, "rows": ROWS, "rounds": options.rounds}
    for name in filter(None, options.models.split(",")):
        print(f"{name}, {options.dtype}", flush=True)
        found = report[name] = measure(name, options.dtype, options.rounds)
        for kind in ("decode", "prefill"):
            for grain, values in found[kind].items():
                rate, ratio = values["tokens_per_s"], values["over_32"]
                print(
                    f"  {kind:8} grain {grain:>2}  {rate['median']:8.0f} tokens/s  {ratio['median']:.3f}  "
                    f"[{ratio['p10']:.3f}, {ratio['p90']:.3f}]  agree {found['agree'][int(grain)]:.3f}"
                )
        write_json(options.json, report)
    report["bytes"] = grain_bytes.rows()
    print(grain_bytes.markdown())
    write_json(options.json, report)


if __name__ == "__main__":
    main()

"""Products of few rows on a CPU: machine code of our own beside XLA's products.

    python benchmarks/engine/cpu_products.py [--rounds 7] [--only decode] [--json OUT]

Two parts, each in turns in one process. `decode`: a random Nemotron-H of 173 M parameters writes tokens for 1 and for 8
rows; a ratio is of the same round, and above 1 our own products are faster. `products`: single products of the sizes of
that model, on so many matrices that no cache holds them, in GB of weights a second.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import header, quantiles, token_seconds, turns, write_json
from benchmarks.engine.random_models import nemotron_model
from hybrid_jax.config import XLA, Backend, CacheConfig, EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.kernel_choice import with_own_products
from hybrid_jax.models.initialize import random_params
from hybrid_jax.products.matrix import Matrix, product, product_transposed
from hybrid_jax.sizing.devices import Device

DTYPES = ("float32", "bfloat16")
ROWS = (1, 8)
DECODED, PROMPT = 64, 128
SIZES = {
    "[1024, 4096]": (1024, 4096),
    "[4096, 1024]": (4096, 1024),
    "head [32768, 1024]": (1024, 32768),
}
BYTES = 120 << 20  # of the matrices of a size
PARTS = ("decode", "products")


def decode(dtype: str, rounds: int) -> list[dict[str, Any]]:
    """Tokens a second of the model with each kind of products, and their ratio."""
    config = replace(nemotron_model(), dtype=dtype)
    settings = EngineConfig(
        dtype=dtype, max_rows=8, max_model_len=512, cache=CacheConfig(policy="off")
    )
    params = random_params(config, 0, dtype=dtype)
    engines = {
        name: Engine(config, params, replace(settings, kernels=kernels))
        for name, kernels in (("xla", "xla"), ("own", "auto"))
    }
    print(f"{dtype}: {engines['own'].about_products}", flush=True)
    rng, report = np.random.default_rng(0), []
    for rows in ROWS:
        draw = lambda rows=rows: rng.integers(0, config.vocab_size, (rows, PROMPT)).tolist()
        sides = {name: token_seconds(engine, DECODED) for name, engine in engines.items()}
        found = turns(rounds, sides, draw)
        pairs = zip(found["xla"], found["own"], strict=True)
        ratio = quantiles([xla / own for xla, own in pairs])
        rates = {name: quantiles([1 / each for each in times]) for name, times in found.items()}
        print(
            f"decode {dtype}, rows {rows}: {ratio['median']:.2f}x [{ratio['p10']:.2f}, {ratio['p90']:.2f}], "
            f"{rates['xla']['median']:.1f} to {rates['own']['median']:.1f} tokens/s, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        report.append({"dtype": dtype, "rows": rows, "ratio": ratio} | rates)
    return report


def products(dtype: str, rounds: int) -> list[dict[str, Any]]:
    """GB of weights a second of single products: the best, and the median."""
    own, _ = with_own_products(XLA, EngineConfig(), Device())
    report = []
    for name, (K, N) in SIZES.items():
        is_head = name.startswith("head")
        shape = (N, K) if is_head else (K, N)
        rng = np.random.default_rng(0)
        drawn = jnp.asarray(rng.standard_normal(shape, dtype=np.float32) / 32, dtype)
        weights = [drawn + i for i in range(max(1, BYTES // drawn.nbytes))]
        for rows in ROWS:
            x = jnp.asarray(rng.standard_normal((rows, K)), dtype)
            sides = {
                side: _program(backend, is_head) for side, backend in (("xla", XLA), ("own", own))
            }
            near = [np.asarray(run(x, drawn), np.float32) for run in sides.values()]
            assert np.allclose(*near, atol=0.05 * np.abs(near[0]).max()), "they disagree"
            times: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(rounds):
                for side, run in sides.items():
                    for weight in weights:
                        start = time.perf_counter()
                        run(x, weight).block_until_ready()
                        times[side].append(time.perf_counter() - start)
            rates = {
                side: {how: drawn.nbytes / pick(taken) / 1e9 for how, pick in PICKS.items()}
                for side, taken in times.items()
            }
            ratio = rates["own"]["median"] / rates["xla"]["median"]
            print(
                f"product {dtype} {name}, rows {rows}: {ratio:.2f}x, best / median "
                + ", ".join(
                    f"{s} {r['best']:.1f} / {r['median']:.1f} GB/s" for s, r in rates.items()
                )
                + f", load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            report.append({"dtype": dtype, "size": name, "rows": rows, "ratio": ratio} | rates)
    return report


PICKS = {"best": min, "median": np.median}


def _program(backend: Backend, is_head: bool):
    form = product_transposed if is_head else product
    return jax.jit(lambda x, weight: form(x, Matrix(weight, backend=backend)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    measure = {"decode": decode, "products": products}
    report = {
        part: [entry for dtype in DTYPES for entry in measure[part](dtype, given.rounds)]
        for part in PARTS
        if given.only in (None, part)
    }
    if given.json is not None:
        write_json(given.json, header() | report)


if __name__ == "__main__":
    main()

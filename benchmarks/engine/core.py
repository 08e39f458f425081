"""Speed of the bundled model: start-up, compilation, prefill, decode, and the host's share of decode.

    python benchmarks/engine/core.py [--json benchmarks/results/engine/core.json]

Inside the clock: everything from `Engine.add` to the last token on the host. The host's share is
1 - (time of the same decode steps in one compiled loop) / (engine wall time), both taken in turns in this
process. Medians with 10th and 90th percentiles.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import header, quantiles, request, run, run_decode, write_json
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine import pack
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.steps.step import PLAIN
from hybrid_jax.schedule import bucket
from hybrid_jax.weights import BUNDLED, load_model

PROMPT_LEN, NUM_STEPS = 128, 256


def prompts(rng: np.random.Generator, count: int, length: int) -> list[list[int]]:
    """Random printable bytes: no two share a prefix, so nothing is cached."""
    return rng.integers(32, 127, (count, length)).tolist()


def decode_requests(rng: np.random.Generator, rows: int) -> list:
    return [request(f"d{i}", p, NUM_STEPS) for i, p in enumerate(prompts(rng, rows, PROMPT_LEN))]


def compiled_loop(engine: Engine, rows: int):
    """The decode step as one dispatch of NUM_STEPS steps: a function that runs it and returns seconds."""
    runner, scheduler = engine.runner, engine.scheduler
    geometry, memory = engine.geometry, scheduler.memory
    decode = next(kind for kind in runner.kinds if kind.name == "decode")
    shape = bucket.DecodeBucket(rows, NUM_STEPS, decode.shapes.widths(decode.max_pages)[0])
    layout = runner.programs.layout("decode", shape)
    batch = np.zeros((rows, layout.size), np.int32)
    slots = [memory.slots.allocate() for _ in range(rows)]
    ids = [memory.slots.resolve(slot) for slot in slots]
    frames = []
    runner._write_slots(memory.slots.take_new())
    for row in range(rows):
        count = geometry.num_pages(PROMPT_LEN + NUM_STEPS)
        own = memory.frames.allocate(count * geometry.frames_per_page).reshape(count, -1)
        frames += own.reshape(-1).tolist()
        layout.set(batch, row, "checkpoint", PROMPT_LEN)
        layout.set(batch, row, "read_slot", ids[row])
        layout.set(batch, row, "fold_slot", ids[row])
        layout.set(batch, row, "num_tokens", NUM_STEPS)
        pack.set_pages(layout, batch, row, own)
        pack.set_sampling(layout, batch, row, request("x", [1], NUM_STEPS))
    step = runner.programs.get("decode", shape, PLAIN)

    def once() -> float:
        tokens = jax.numpy.full_like(runner.state.tokens, 97)
        lengths = jax.numpy.full_like(runner.state.lengths, PROMPT_LEN)
        runner.state = runner.state.replace(tokens=tokens, lengths=lengths)
        jax.block_until_ready(runner.state)
        start = time.perf_counter()
        count = np.int32(NUM_STEPS)
        runner.state, _, out = step(runner.params, runner.state, None, batch, count)
        taken = np.asarray(out.sampled.tokens)
        elapsed = time.perf_counter() - start
        assert (taken >= 0).all(), "a row stopped inside the compiled loop"
        return elapsed

    def release() -> None:
        memory.frames.release(frames)
        for slot in slots:
            memory.slots.release(slot)

    return once, release


def first_token(cache: str) -> dict[str, float]:
    """Import to first token in a new process whose compilation cache is the folder `cache`."""
    code = (
        "import time; t = time.perf_counter()\n"
        "from hybrid_jax import LLM, SamplingParams\n"
        "i = time.perf_counter(); llm = LLM(); l = time.perf_counter()\n"
        "llm.generate('def f(x):\\n', SamplingParams(temperature=0.0, max_tokens=1))\n"
        "e = time.perf_counter(); print(i - t, l - i, e - l, e - t)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": cache},
    )
    names = ("import_s", "load_s", "first_token_s", "total_s")
    return dict(zip(names, map(float, out.stdout.split()), strict=True))


def measure(rounds: int, dtype: str) -> dict:
    config, params = load_model(BUNDLED, dtype=dtype)
    engine = Engine(config, params, EngineConfig(dtype=dtype, max_model_len=4096))
    start = time.perf_counter()
    programs = engine.warm_ups()
    for program in programs:
        program.run()
    report: dict = {"warmup_s": time.perf_counter() - start, "shapes": len(programs)}
    rng = np.random.default_rng(0)
    for length in (512, 2048):
        prefill = lambda: run(engine, [request("p", prompts(rng, 1, length)[0], 1)])  # noqa: B023, E731
        prefill()
        times = [prefill() for _ in range(rounds)]
        report[f"prefill_{length}_tokens_per_s"] = quantiles([length / t for t in times])
    for rows in (1, 8):
        once, release = compiled_loop(engine, rows)
        once()
        decode = lambda: run_decode(engine, decode_requests(rng, rows))  # noqa: B023, E731
        decode()
        rates, shares, loops = [], [], []
        for _ in range(rounds):
            elapsed, tokens = decode()
            loop = once()
            per_token = loop / (rows * NUM_STEPS)
            rates.append(tokens / elapsed)
            loops.append(1 / per_token)
            shares.append(1 - per_token * tokens / elapsed)
        release()
        report[f"decode_b{rows}_tokens_per_s"] = quantiles(rates)
        report[f"loop_b{rows}_tokens_per_s"] = quantiles(loops)
        report[f"host_share_b{rows}"] = quantiles(shares)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        start = {"cold": first_token(cache), "warm": first_token(cache)}
    report = {
        **header(),
        "dtype": arguments.dtype,
        "start": start,
        **measure(arguments.rounds, arguments.dtype),
    }
    for name, value in report.items():
        if isinstance(value, dict) and "median" in value:
            value = f"{value['median']:.4g}  [{value['p10']:.4g}, {value['p90']:.4g}]"
        print(f"{name:28} {value}")
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()

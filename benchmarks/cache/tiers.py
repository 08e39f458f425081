"""The tier in the host's memory: copy rates, a decode step beside saves, prompts that never come back, first tokens.

    python benchmarks/cache/tiers.py [--json benchmarks/results/cache/tiers.json] [--png FILE] [--smoke]
    python benchmarks/cache/tiers.py --draw FILE.json --png FILE.png

A random Nemotron-H of 173 M parameters (`random_models.nemotron_model`). Sides are measured in turns in one process, in
medians with 10th and 90th percentiles. A copy reads and writes each byte once; rates are shares of what a copy of one
large array reaches here.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.cache import tier_pictures
from benchmarks.cache.tier_runs import (
    NUMBERS,
    SHARED,
    changing_plans,
    decode_beside,
    first_tokens,
    never_back,
    rates_beside,
)
from benchmarks.common import copy_rate, header, measure_or_draw, request, run
from benchmarks.engine.random_models import nemotron_model
from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.models.initialize import random_params
from hybrid_jax.schedule.plan import Plan, Transfer
from hybrid_jax.schedule.tiers.below import HOST


def rates(engine: Engine, num_frames: int, rounds: int) -> dict[str, Any]:
    """Bytes a second of saves and loads of so many frames, and their share of a copy's."""
    runner, size = engine.runner, engine.geometry.frame_bytes
    frames = np.arange(1, num_frames + 1, dtype=np.int32)
    transfer = Transfer(tier=HOST, arena=frames, other=frames)

    def save(_) -> float:
        start = time.perf_counter()
        runner.host_frames.save(runner.state, transfer)
        jax.block_until_ready(list(runner.host_frames.frames.values()))
        return 2 * num_frames * size / (time.perf_counter() - start)

    def load(_) -> float:
        start = time.perf_counter()
        runner.state = runner.host_frames.load(runner.state, transfer)
        jax.block_until_ready(runner.state.arena)
        return 2 * num_frames * size / (time.perf_counter() - start)

    def copy(_) -> float:
        return copy_rate(words=num_frames * size // 4, rounds=3)

    sides = {"save": save, "load": load, "copy": copy}
    values, share = rates_beside(rounds, sides, {"save": "copy", "load": "copy"})
    return {"frames": num_frames, "bytes_per_s": values, "share_of_copy": share}


def to_host(engine: Engine) -> None:
    """Everything in the arena goes below."""
    memory = engine.scheduler.memory
    memory.make_room(memory.frames.num_frames - 1)
    run(engine, [request(f"f{next(NUMBERS)}", [1] * 8, 1)])  # its plan takes the saves along


def measure(given: argparse.Namespace) -> dict[str, Any]:
    rounds = 2 if given.smoke else 9
    config = nemotron_model()
    params = random_params(config, 0)
    settings = EngineConfig(
        max_rows=8, max_model_len=SHARED + 256, cache=CacheConfig(loads="always")
    )
    small = replace(settings, memory=400 << 20, max_model_len=512)
    report: dict[str, Any] = header() | {"model": "nemotron_173m", "dtype": "float32"}
    engine = Engine(config, params, replace(settings, host_memory=2 << 30))
    report["frame_bytes"] = engine.geometry.frame_bytes
    report["checkpoint_frames"] = engine.geometry.state_frames
    report["rates"] = rates(engine, min(512, engine.sizes.num_frames - 1), rounds)
    print(report["rates"]["share_of_copy"], flush=True)
    num_frames = engine.geometry.state_frames + engine.geometry.frames_per_page
    frames = np.arange(1, 1 + num_frames, dtype=np.int32)
    transfer = Transfer(tier=HOST, arena=frames, other=frames)

    def save_frames(plan: Plan) -> None:
        plan.saves = [*plan.saves, transfer]

    report["decode_beside_saves"] = decode_beside(
        engine, lambda: changing_plans(save_frames), rounds, 64
    ) | {"frames_per_plan": num_frames}
    print("decode beside saves", report["decode_beside_saves"]["ratio"], flush=True)
    report["first_tokens"] = first_tokens(
        engine,
        2 if given.smoke else 5,
        tier="from the host",
        loaded="host_loaded_tokens",
        send_down=lambda: to_host(engine),
    )
    print(report["first_tokens"]["over_cold"], flush=True)
    engine.close()
    engines = {
        "off": Engine(config, params, small),
        "on": Engine(config, params, replace(small, host_memory=512 << 20)),
    }
    report["never_back"] = never_back(engines, rounds, 16, "host_saves")
    print("never back", report["never_back"]["ratio"], flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measure_or_draw(parser, measure, tier_pictures.draw_tier)


if __name__ == "__main__":
    main()

"""The tier in the host's memory: copy rates, a decode step beside saves, prompts that never come back, first tokens.

    python benchmarks/cache/tiers.py [--json benchmarks/results/cache/tiers.json] [--smoke]

A random Nemotron-H of 173 M parameters (`random_models.nemotron_model`). Sides are measured in turns in one process, in
medians with 10th and 90th percentiles. A copy reads and writes each byte once; rates are shares of what a copy of one
large array reaches here.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import (
    copy_rate,
    header,
    quantiles,
    request,
    run,
    run_decode,
    turns,
    write_json,
)
from benchmarks.engine.random_models import nemotron_model
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.runner import Runner
from hybrid_jax.models.initialize import random_params
from hybrid_jax.schedule.plan import Transfer
from hybrid_jax.schedule.tiers.below import HOST

SHARED, OWN = 4096, 64  # tokens of the prompt whose first token is waited for
NUMBERS = itertools.count()


def prompt_of(rng: np.random.Generator, length: int, vocab: int) -> list[int]:
    return rng.integers(0, vocab, length).tolist()


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

    found = turns(rounds, {"save": save, "load": load, "copy": copy}, lambda: None)
    values = {name: quantiles(each) for name, each in found.items()}
    share = {name: values[name]["median"] / values["copy"]["median"] for name in ("save", "load")}
    return {"frames": num_frames, "bytes_per_s": values, "share_of_copy": share}


@contextmanager
def saving(frames: np.ndarray) -> Iterator[None]:
    """Each plan copies these frames out of the arena."""
    dispatch = Runner._dispatch
    transfer = Transfer(tier=HOST, arena=frames, other=frames)

    def with_saves(self, plan):
        plan.saves = [*plan.saves, transfer]
        return dispatch(self, plan)

    with mock.patch.object(Runner, "_dispatch", with_saves):
        yield


def decode_beside(
    engine: Engine,
    saves: Callable[[], AbstractContextManager[None]],
    rounds: int,
    count: int,
) -> dict[str, Any]:
    """Seconds a token of 8 rows, alone and while each plan saves something."""
    vocab = engine.config.vocab_size

    def decode(prompts: list[list[int]]) -> float:
        asked = [request(f"d{next(NUMBERS)}", prompt, count) for prompt in prompts]
        seconds, tokens = run_decode(engine, asked)
        return seconds / tokens

    def beside(prompts: list[list[int]]) -> float:
        with saves():
            return decode(prompts)

    rng = np.random.default_rng(0)
    draw = lambda: [prompt_of(rng, 32, vocab) for _ in range(8)]  # noqa: E731
    found = turns(rounds, {"alone": decode, "beside saves": beside}, draw)
    values = {name: quantiles(each) for name, each in found.items()}
    ratio = values["beside saves"]["median"] / values["alone"]["median"]
    return {"seconds_per_token": values, "ratio": ratio}


def never_back(engines: dict[str, Engine], rounds: int, count: int, saves: str) -> dict[str, Any]:
    """Seconds of prompts that evict each other and never come back, without the tier and with it.

    Args:
        saves: the number in `Engine.stats` that counts what the tier has saved.
    """
    rng = np.random.default_rng(1)
    vocab = next(iter(engines.values())).config.vocab_size
    draw = lambda: [prompt_of(rng, 256, vocab) for _ in range(count)]  # noqa: E731

    def side(engine: Engine):
        return lambda prompts: run(
            engine, [request(f"n{next(NUMBERS)}", prompt, 8) for prompt in prompts]
        )

    before = {name: engine.stats() for name, engine in engines.items()}
    found = turns(rounds, {name: side(engine) for name, engine in engines.items()}, draw)
    values = {name: quantiles(each) for name, each in found.items()}
    moved = engines["on"].stats()[saves] - before["on"][saves]
    ratio = values["on"]["median"] / values["off"]["median"]
    return {"seconds": values, "ratio": ratio, "saves": moved}


def first_tokens(engine: Engine, rounds: int) -> dict[str, Any]:
    """Seconds to the first token behind a shared prefix: cold, from the arena, and from the host's memory."""
    rng, vocab = np.random.default_rng(2), engine.config.vocab_size
    memory = engine.scheduler.memory

    def ask(prompt: list[int]) -> float:
        return run(engine, [request(f"f{next(NUMBERS)}", prompt, 1)])

    def cold(prompt: list[int]) -> float:
        engine.reset_prefix_cache()
        return ask([*prompt, *prompt_of(rng, OWN, vocab)])

    def of_arena(prompt: list[int]) -> float:
        engine.reset_prefix_cache()
        ask(prompt)
        return ask([*prompt, *prompt_of(rng, OWN, vocab)])

    def of_host(prompt: list[int]) -> float:
        engine.reset_prefix_cache()
        ask(prompt)
        memory.make_room(memory.frames.num_frames - 1)  # all of it goes below
        ask(prompt_of(rng, 8, vocab))  # its plan takes the saves along
        before = engine.stats()["host_loaded_tokens"]
        seconds = ask([*prompt, *prompt_of(rng, OWN, vocab)])
        assert engine.stats()["host_loaded_tokens"] > before
        return seconds

    sides = {"cold": cold, "from the arena": of_arena, "from the host": of_host}
    found = turns(rounds, sides, lambda: prompt_of(rng, SHARED + 1, vocab))
    values = {name: quantiles(each) for name, each in found.items()}
    over = {name: values[name]["median"] / values["cold"]["median"] for name in values}
    return {"shared_tokens": SHARED, "seconds": values, "over_cold": over}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="few rounds, to see that it works")
    given = parser.parse_args()
    rounds = 2 if given.smoke else 9
    config = nemotron_model()
    params = random_params(config, 0)
    settings = EngineConfig(max_rows=8, max_model_len=SHARED + 256)
    small = replace(settings, memory=400 << 20, max_model_len=512)
    report: dict[str, Any] = header() | {"model": "nemotron_173m", "dtype": "float32"}
    engine = Engine(config, params, replace(settings, host_memory=2 << 30))
    report["frame_bytes"] = engine.geometry.frame_bytes
    report["checkpoint_frames"] = engine.geometry.state_frames
    report["rates"] = rates(engine, min(512, engine.sizes.num_frames - 1), rounds)
    print(report["rates"]["share_of_copy"], flush=True)
    frames = engine.geometry.state_frames + engine.geometry.frames_per_page
    report["decode_beside_saves"] = decode_beside(
        engine, lambda: saving(np.arange(1, 1 + frames, dtype=np.int32)), rounds, 64
    ) | {"frames_per_plan": frames}
    print("decode beside saves", report["decode_beside_saves"]["ratio"], flush=True)
    report["first_tokens"] = first_tokens(engine, 2 if given.smoke else 5)
    print(report["first_tokens"]["over_cold"], flush=True)
    engine.close()
    engines = {
        "off": Engine(config, params, small),
        "on": Engine(config, params, replace(small, host_memory=2 << 30)),
    }
    report["never_back"] = never_back(engines, rounds, 16, "host_saves")
    print("never back", report["never_back"]["ratio"], flush=True)
    if given.json is not None:
        write_json(given.json, report)


if __name__ == "__main__":
    main()

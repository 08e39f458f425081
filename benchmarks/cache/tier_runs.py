"""What `tiers.py` and `disk.py` measure in the same way, each with its own tier below the arena."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.common import quantiles, request, run, run_decode, turns
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.runner import Runner
from hybrid_jax.schedule.plan import Plan

SHARED, OWN = 4096, 64  # tokens of the prompt whose first token is waited for
NUMBERS = itertools.count()


def prompt_of(rng: np.random.Generator, length: int, vocab: int) -> list[int]:
    return rng.integers(0, vocab, length).tolist()


def rates_beside(
    rounds: int, sides: dict[str, Callable[[Any], float]], beside: dict[str, str]
) -> tuple[dict[str, Any], dict[str, float]]:
    """Bytes a second of each side, and the shares that some reach of another.

    Args:
        sides: as in `turns`. beside: sides, and the one that each is compared with.
    """
    found = turns(rounds, sides, lambda: None)
    values = {name: quantiles(each) for name, each in found.items()}
    median = lambda name: values[name]["median"]  # noqa: E731
    return values, {name: median(name) / median(other) for name, other in beside.items()}


@contextmanager
def changing_plans(change: Callable[[Plan], None]) -> Iterator[None]:
    """Each plan is changed before it is dispatched."""
    dispatch = Runner._dispatch

    def changed(self, plan):
        change(plan)
        return dispatch(self, plan)

    with mock.patch.object(Runner, "_dispatch", changed):
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


def never_back(
    engines: dict[str, Engine], rounds: int, count: int, saves: str, filling: int = 3
) -> dict[str, Any]:
    """Seconds of prompts that evict each other and never come back, without the tier and with it.

    Args:
        saves: the number in `Engine.stats` that counts what the tier has saved.
        filling: rounds before the clock runs, after which the tier is full. To touch memory for the first time takes a
            virtual machine 20 times as long as to copy into it.
    """
    rng = np.random.default_rng(1)
    vocab = next(iter(engines.values())).config.vocab_size
    draw = lambda: [prompt_of(rng, 256, vocab) for _ in range(count)]  # noqa: E731

    def side(engine: Engine):
        return lambda prompts: run(
            engine, [request(f"n{next(NUMBERS)}", prompt, 8) for prompt in prompts]
        )

    for _ in range(filling):
        for engine in engines.values():
            side(engine)(draw())
    before = {name: engine.stats() for name, engine in engines.items()}
    found = turns(rounds, {name: side(engine) for name, engine in engines.items()}, draw)
    values = {name: quantiles(each) for name, each in found.items()}
    moved = engines["on"].stats()[saves] - before["on"][saves]
    ratio = values["on"]["median"] / values["off"]["median"]
    return {"seconds": values, "ratio": ratio, "saves": moved}


def first_tokens(
    engine: Engine,
    rounds: int,
    *,
    tier: str,
    loaded: str,
    send_down: Callable[[], None],
    settle: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Seconds to the first token behind a shared prefix: cold, from the arena, and from a tier into an empty arena.

    Args:
        tier: its name in the report.
        loaded: the number in `Engine.stats` that counts the tokens that came from there.
        send_down: empties the arena, whose prefixes are in the tier then.
        settle: what is done after a prompt, outside of the clock.
    """
    rng, vocab = np.random.default_rng(2), engine.config.vocab_size

    def ask(prompt: list[int]) -> float:
        return run(engine, [request(f"f{next(NUMBERS)}", prompt, 1)])

    def fill(prompt: list[int]) -> None:
        engine.reset_prefix_cache()
        ask(prompt)
        settle()

    def cold(prompt: list[int]) -> float:
        engine.reset_prefix_cache()
        seconds = ask(prompt_of(rng, len(prompt) + OWN, vocab))
        settle()
        return seconds

    def of_arena(prompt: list[int]) -> float:
        fill(prompt)
        return ask([*prompt, *prompt_of(rng, OWN, vocab)])

    def of_tier(prompt: list[int]) -> float:
        fill(prompt)
        send_down()
        before = engine.stats()[loaded]
        seconds = ask([*prompt, *prompt_of(rng, OWN, vocab)])
        assert engine.stats()[loaded] - before >= SHARED - engine.geometry.grain
        return seconds

    sides = {"cold": cold, "from the arena": of_arena, tier: of_tier}
    found = turns(rounds, sides, lambda: prompt_of(rng, SHARED + 1, vocab))
    values = {name: quantiles(each) for name, each in found.items()}
    over = {name: values[name]["median"] / values["cold"]["median"] for name in values}
    return {"shared_tokens": SHARED, "seconds": values, "over_cold": over}

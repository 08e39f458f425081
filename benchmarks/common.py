"""What the benchmarks share: requests, timed runs, statistics, and the header of a result file."""

from __future__ import annotations

import argparse
import functools
import json
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cache.figures.plots import why_not
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.schedule.request import Request

ROOT = Path(__file__).resolve().parent.parent
READ_LINE = 4096  # words


def request(name: str, prompt: list[int], max_tokens: int, **sampling) -> Request:
    """A request, greedy unless `sampling` says otherwise, that takes exactly `max_tokens` tokens."""
    sampling = {"temperature": 0.0, **sampling}
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    return Request(request_id=name, prompt=prompt, params=params, seed=0, max_tokens=max_tokens)


def run(engine: Engine, requests: list[Request]) -> float:
    """All requests to their end; seconds."""
    start = time.perf_counter()
    for one in requests:
        engine.add(one)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def run_decode(engine: Engine, requests: list[Request]) -> tuple[float, int]:
    """Seconds and tokens from the moment every request has tokens until the first one ends; runs to the end."""
    count = lambda: sum(len(one.output.token_ids) for one in requests)  # noqa: E731
    for one in requests:
        engine.add(one)
    while any(not one.output.token_ids for one in requests):
        engine.step()
    before, start = count(), time.perf_counter()
    while all(one.output.finish_reason is None for one in requests):
        engine.step()
    elapsed, tokens = time.perf_counter() - start, count() - before
    while engine.has_work:
        engine.step()
    return elapsed, tokens


def token_seconds(engine: Engine, count: int) -> Callable[[list[list[int]]], float]:
    """From prompts to the seconds of each of `count` tokens that an engine decodes for them, as in `run_decode`."""

    def call(prompts: list[list[int]]) -> float:
        asked = [request(str(i), prompt, count) for i, prompt in enumerate(prompts)]
        seconds, tokens = run_decode(engine, asked)
        return seconds / tokens

    return call


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    low, high = np.percentile(values, [10, 90])
    return {"median": statistics.median(values), "p10": float(low), "p90": float(high)}


def turns(
    rounds: int, sides: dict[str, Callable[[Any], float]], draw: Callable[[], Any]
) -> dict[str, list[float]]:
    """What each side makes of the same inputs, in rounds that start with another side each.

    Args:
        rounds: measurements of each side, after one that does not count.
        sides: by name; each takes what `draw` returned.
        draw: makes the inputs of a round.
    """
    for name, call in sides.items():
        start = time.perf_counter()
        call(draw())
        print(f"  {name}: first call {time.perf_counter() - start:.1f} s", flush=True)
    values: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        inputs = draw()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            values[name].append(sides[name](inputs))
    return values


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device reaches: bytes read plus written a second by a copy, bfloat16 operations a second."""

    copy: float
    matmul: float

    def floor(self, num_bytes: float, flops: float) -> float:
        """Seconds that no version can beat by much: of the bytes or of the FLOPs, whichever takes longer."""
        return max(num_bytes / self.copy, flops / self.matmul)


def measure_ceilings(*, words: int, size: int, rounds: int) -> Ceilings:
    """What a copy of `words` and a square product of random bfloat16 reach."""
    copy = copy_rate(words=words, rounds=rounds)
    a, b = (
        jax.random.normal(key, (size, size), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0), 2)
    )
    return Ceilings(copy=copy, matmul=2.0 * size**3 / least_seconds(rounds, jnp.dot, a, b))


def copy_rate(*, words: int, rounds: int) -> float:
    """Bytes a second, read plus written: the better of a device copy and a kernel that reads and writes as much."""
    x = jax.random.bits(jax.random.key(0), (words,))
    return 8.0 * words / min(least_seconds(rounds, call, x) for call in (jnp.copy, jnp.invert))


def read_rate(*, words: int, rounds: int) -> float:
    """Bytes a second, read alone: the better of a sum and of the sums of lines."""
    x = jax.random.bits(jax.random.key(0), (words // READ_LINE, READ_LINE))
    sums = (functools.partial(jnp.sum, axis=axis, dtype=x.dtype) for axis in (None, 1))
    return 4.0 * x.size / min(least_seconds(rounds, call, x) for call in sums)


def least_seconds(rounds: int, call: Callable, *arrays: jax.Array) -> float:
    """Seconds of a call, jitted. The best of `rounds`, of which the first is left out."""
    run, seconds = jax.jit(call), []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(8):
            out = run(*arrays)
        out.block_until_ready()
        seconds.append((time.perf_counter() - start) / 8)
    return min(seconds[1:])


def device_answers() -> bool:
    """Whether anything can still be computed: after some errors nothing can, for the rest of the process."""
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception:
        return False
    return True


def header() -> dict[str, str]:
    """Device, versions and commit of a measurement; without git the commit is unknown."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = "unknown"
    if shutil.which("git"):
        described = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        commit = described.stdout.strip() or commit
    return {
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def measure_or_draw(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    draw: Callable[[dict[str, Any], Path], None],
) -> None:
    """Runs a script that measures and writes a report, or draws one that was written before.

    Args:
        parser: with options of the script's own; it gets `--json`, `--png`, `--draw` and `--smoke`.
        measure: makes the report. draw: writes its picture.
    """
    parser.add_argument("--json", type=Path, help="the numbers")
    parser.add_argument("--png", type=Path, help="a picture of them")
    parser.add_argument(
        "--draw", type=Path, metavar="JSON", help="measure nothing, and draw these earlier numbers"
    )
    parser.add_argument("--smoke", action="store_true", help="few rounds, to see that it works")
    given = parser.parse_args()
    if given.draw and not given.png:
        parser.error("--draw needs --png, the file to draw to")
    if given.draw and given.json:
        parser.error("--draw measures nothing, so leave out --json")
    if given.png and (missing := why_not()):
        parser.error(missing)
    report = json.loads(given.draw.read_text()) if given.draw else measure(given)
    write_json(given.json, report)
    if given.png:
        draw(report, given.png)


def write_json(path: Path | None, report: dict) -> None:
    """Writes a report where a path is given; a process that is killed meanwhile leaves the old one."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(report, indent=1) + "\n")
        new.replace(path)

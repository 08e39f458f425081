"""Requests for studies of allocators: lengths and arrival ticks, no tokens. Four seeded loads, or a CSV file.

And what the result of every study says."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

COUNTS = Path(__file__).parent / "data" / "sharegpt_prompt_tokens.json"
COLUMNS = ["workload", "seed", "request_id", "prompt_len", "gen_len", "arrival_tick"]
LEAST = {"prompt_len": 1, "gen_len": 1}  # 0 elsewhere
MOST = {"prompt_len": 1 << 22, "gen_len": 1 << 22}  # 10^15 elsewhere


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolLoad:
    """Requests in the order of their numbers, 0 and up.

    Attributes:
        workload, seed: which.
        prompt_lens, gen_lens: int64 tokens, one at least.
        arrivals: int64 ticks.
    """

    workload: str
    seed: int
    prompt_lens: np.ndarray
    gen_lens: np.ndarray
    arrivals: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_lens)

    def asked(self, allocator: str, model_spec: str, pool_bytes: int) -> dict[str, Any]:
        """What a result says of what was run, but for the mode."""
        return {
            "workload": self.workload,
            "allocator": allocator,
            "model_spec": model_spec,
            "pool_bytes": pool_bytes,
            "seed": self.seed,
            "requests": len(self),
        }


@dataclass(frozen=True, kw_only=True)
class PoolResult:
    """What a result says in every mode, each in its own sense.

    Attributes:
        mode, workload, allocator, model_spec, pool_bytes, seed: what was run.
        requests: requests that came. completed: requests that ran to their end.
        oom_count: times that there was no memory.
        hollow: completed requests whose memory was gone.
        evictions: times that a running request lost its memory and went on.
        rebalance_count, migrated_bytes: moves of capacity between the kinds.
        allocate_calls: calls for memory. peak_bytes: most bytes at once. cpu_seconds: of the run.
    """

    mode: str
    workload: str
    allocator: str
    model_spec: str
    pool_bytes: int
    seed: int
    requests: int
    oom_count: int
    completed: int
    hollow: int
    evictions: int
    rebalance_count: int
    migrated_bytes: int
    allocate_calls: int
    peak_bytes: int
    cpu_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


class BadLoad(ValueError):
    """A line of a file has the wrong form; the message names the line."""


Drawn = tuple[np.ndarray, np.ndarray, np.ndarray]  # prompt lengths, lengths to generate, arrivals
Draw = Callable[[np.random.Generator, int], Drawn]


def _uniform_short(rng: np.random.Generator, num: int) -> Drawn:
    prompt = rng.integers(128, 1025, num)
    return prompt, rng.integers(64, 257, num), np.arange(num)


def _mixed_long(rng: np.random.Generator, num: int) -> Drawn:
    is_long = rng.random(num) < 0.2
    short = rng.integers(512, 4097, num)
    prompt = np.where(is_long, rng.integers(16384, 65537, num), short)
    return prompt, rng.integers(128, 513, num), np.arange(num)


def _agentic_burst(rng: np.random.Generator, num: int) -> Drawn:
    arrivals = np.ceil(np.cumsum(rng.exponential(0.1, num))).astype(np.int64)  # ten a tick
    prompt = np.clip(rng.lognormal(8.5, 1.0, num).astype(np.int64), 64, 65536)
    return prompt, rng.integers(64, 257, num), arrivals


def _sharegpt_replay(rng: np.random.Generator, num: int) -> Drawn:
    counts = np.array(json.loads(COUNTS.read_text(encoding="utf-8")))
    prompt = np.clip(rng.choice(counts, num), 16, 4096)
    gen = np.clip(rng.lognormal(4.5, 1.0, num).astype(np.int64), 32, 2048)
    return prompt, gen, np.arange(num)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How requests are drawn, each array in one call.

    Attributes:
        seed: the first of the three that were published.
        num_requests: of a load.
        draw: (generator, number) -> prompt lengths, lengths to generate, arrival ticks.
    """

    seed: int
    num_requests: int
    draw: Draw


WORKLOADS = {
    "uniform_short": Workload(seed=1, num_requests=512, draw=_uniform_short),
    "mixed_long": Workload(seed=2, num_requests=256, draw=_mixed_long),
    "agentic_burst": Workload(seed=3, num_requests=256, draw=_agentic_burst),
    "sharegpt_replay": Workload(seed=4, num_requests=512, draw=_sharegpt_replay),
}


def make_load(workload: str, seed: int | None = None) -> PoolLoad:
    """Draws a load.

    Args:
        workload: one of WORKLOADS.
        seed: of the draws; None for the workload's first.

    Raises:
        ValueError: no such workload, or a seed below 0.
    """
    if workload not in WORKLOADS:
        raise ValueError(
            f"pool-sim: no workload {workload!r}; known are {', '.join(WORKLOADS)}, or one of a --trace file"
        )
    kind = WORKLOADS[workload]
    seed = kind.seed if seed is None else seed
    if seed < 0:
        raise ValueError(f"--seed must be a whole number of at least 0, got {seed}")
    return _load(workload, seed, kind.draw(np.random.default_rng(seed), kind.num_requests))


def read_loads(path: Path | str) -> dict[tuple[str, int], PoolLoad]:
    """The loads of a CSV file, by workload and seed.

    Args:
        path: a file, gzipped if it ends in .gz, with the columns workload, seed, request_id, prompt_len, gen_len,
            arrival_tick.

    Raises:
        FileNotFoundError: no such file. BadLoad: a line that is not a request, or a file without requests.
    """
    path = Path(path)
    found: dict[tuple[str, int], list[list[int]]] = {}
    for number, fields in _lines(path):
        try:
            key, request = _request(fields)
            requests = found.setdefault(key, [])
            if request[0] != len(requests):
                raise ValueError(
                    f"request_id must be {len(requests)}, the next of {key[0]} seed {key[1]}, got {request[0]}"
                )
        except ValueError as error:
            raise BadLoad(f"{path}, line {number}: {error}") from error
        requests.append(request)
    if not found:
        raise BadLoad(f"{path}: a trace must hold at least one request, got none")
    return {key: _load(*key, np.array(requests).T[1:]) for key, requests in found.items()}


def pick_load(
    loads: dict[tuple[str, int], PoolLoad], workload: str, seed: int | None, name: str
) -> PoolLoad:
    """One load of a file. Without a seed it is the first one of the workload."""
    seeds = [known for other, known in loads if other == workload]
    if not seeds:
        known = ", ".join(sorted({other for other, _ in loads}))
        raise ValueError(f"pool-sim: no workload {workload!r} in {name}; known are {known}")
    if seed is not None and seed not in seeds:
        known = ", ".join(map(str, seeds))
        raise ValueError(f"--seed: no seed {seed} of {workload} in {name}; known are {known}")
    return loads[workload, seeds[0] if seed is None else seed]


def _load(workload: str, seed: int, columns: Iterable[np.ndarray]) -> PoolLoad:
    whole: list[np.ndarray] = [column.astype(np.int64) for column in columns]
    prompt, gen, arrivals = whole
    return PoolLoad(
        workload=workload, seed=seed, prompt_lens=prompt, gen_lens=gen, arrivals=arrivals
    )


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Numbers and fields of the lines after the header."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            lines = csv.reader(file)
            header = next(lines, None)
            if header is not None and header != COLUMNS:
                raise BadLoad(
                    f"{path}, line 1: columns must be {','.join(COLUMNS)}, got {','.join(header)[:80]!r}"
                )
            for fields in lines:
                if fields:
                    yield lines.line_num, fields
    except (UnicodeDecodeError, csv.Error, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise BadLoad(f"{path}: cannot be read as text: {error}") from error


def _request(fields: list[str]) -> tuple[tuple[str, int], list[int]]:
    if len(fields) != len(COLUMNS):
        raise ValueError(f"must have {len(COLUMNS)} columns, got {len(fields)}")
    if not fields[0]:
        raise ValueError("workload must be a name, got ''")
    numbers = zip(COLUMNS[1:], fields[1:], strict=True)
    seed, *request = (_whole(text, name) for name, text in numbers)
    return (fields[0], seed), request


def _whole(text: str, name: str) -> int:
    least, most = LEAST.get(name, 0), MOST.get(name, 10**15)
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 16 else -1
    if not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {text[:40]!r}")
    return value

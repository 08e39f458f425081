"""Cells of a cache study drawn at random: what is asked, of which model, with how much memory.

A seed gives one cell. Its load is chats, agents, questions about documents or a part of Mooncake's log, or two of
these, one after the other or both at once. Every number that describes a load is drawn anew, over wider ranges than
those after the files in traces/. Only the log was recorded.

Wide cells are drawn over the ranges where a policy can lose most: mostly chats, of 2 to 60 turns whose lengths spread
by a sigma of 0.2 to 2, arrivals over three orders, and capacities from 2 % to 80 % of what a cache that never evicts
would hold. Their model is the Marconi paper's, in the paper's bytes or in real ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from benchmarks.cache.figures.loads import COMMITTED, FOLDER
from hybrid_jax.sim.prefix_cache.traces import Segments, TraceRequest, read_trace

REQUESTS = (800, 2000)  # of a cell; with fewer, single long prompts decide which policy is ahead
MOST_TOKENS = 32_768  # of a prompt and its output
SHARES = (1 / 24, 1 / 2)  # of what a cache that never evicts would hold
WIDE_SHARES = (0.02, 0.8)
SPECS = {  # and how likely each is; in the paper's bytes more was lost than in others
    "paper_7b": 0.25,
    "jamba_1_5_mini": 0.125,
    "codestral_mamba_7b": 0.125,
    "nemotron_h_8b": 0.125,
    "paper_7b_real": 0.125,
    "qwen3_next_80b": 0.125,
    "llama_3_1_8b": 0.125,
}
WIDE_SPECS = {"paper_7b": 0.5, "paper_7b_real": 0.5}
FIRST_SEGMENT = 1 << 30  # the log's own are smaller

Spans = list[list[int]]  # [segment, tokens]
Session = Iterator[
    tuple[float, Spans, Spans]
]  # of every turn: seconds to wait before it, prompt, output


@dataclass(frozen=True, kw_only=True)
class DrawnCell:
    """What a seed gives.

    Attributes:
        seed: gives the requests as well.
        loads: (name, drawn numbers) of each part.
        order: "alone", "then" (the second part follows the first) or "and" (both at once).
        first: share of the requests that the first part makes. requests: of all parts; a log may have fewer.
        spec: name of the model. share: capacity, as a share of what a cache that never evicts would hold.
    """

    seed: int
    loads: tuple[tuple[str, dict[str, float]], ...]
    order: str
    first: float
    requests: int
    spec: str
    share: float

    @property
    def name(self) -> str:
        """Names of the loads, and how they meet."""
        return f" {self.order} ".join(name for name, _ in self.loads)

    def told(self) -> dict[str, Any]:
        """What was drawn, for a row of results."""
        told = asdict(self) | {"trace": self.name}
        return {
            key: told[key]
            for key in ("seed", "trace", "spec", "share", "requests", "first", "loads")
        }


def draw_cell(seed: int) -> DrawnCell:
    """The cell of one seed."""
    rng = np.random.default_rng([seed, 0])
    order = str(rng.choice(["alone", "then", "and"], p=[0.55, 0.3, 0.15]))
    names = rng.choice(list(DRAWS), size=1 if order == "alone" else 2, p=[0.5, 0.2, 0.15, 0.15])
    return DrawnCell(
        seed=seed,
        loads=tuple((str(name), DRAWS[str(name)](rng)) for name in names),
        order=order,
        first=1.0 if order == "alone" else round(rng.uniform(0.3, 0.7), 2),
        requests=int(_between(rng, *REQUESTS)),
        spec=str(rng.choice(list(SPECS), p=list(SPECS.values()))),
        share=_between(rng, *SHARES),
    )


def draw_wide_cell(seed: int) -> DrawnCell:
    """The wide cell of one seed."""
    rng = np.random.default_rng([seed, 2])
    order = str(rng.choice(["alone", "then", "and"], p=[0.6, 0.2, 0.2]))
    draws = {"chats": draw_wide_chats, "agents": draw_agents, "documents": draw_documents}
    names = rng.choice(list(draws), size=1 if order == "alone" else 2, p=[0.7, 0.15, 0.15])
    return DrawnCell(
        seed=seed,
        loads=tuple((str(name), draws[str(name)](rng)) for name in names),
        order=order,
        first=1.0 if order == "alone" else round(rng.uniform(0.3, 0.7), 2),
        requests=int(_between(rng, *REQUESTS)),
        spec=str(rng.choice(list(WIDE_SPECS), p=list(WIDE_SPECS.values()))),
        share=_between(rng, *WIDE_SHARES),
    )


def draw_trace(cell: DrawnCell) -> list[TraceRequest]:
    """The requests of a cell, in order."""
    rng, new, segments = np.random.default_rng([cell.seed, 1]), count(FIRST_SEGMENT), Segments()
    first = round(cell.first * cell.requests)
    parts = [
        _log(rng, drawn, size)
        if name == "log"
        else sessions_of(LOADS[name](rng, drawn, new), rng, drawn, size, segments)
        for (name, drawn), size in zip(cell.loads, (first, cell.requests - first), strict=False)
    ]
    if cell.order == "and":  # over the same time
        parts = [_moved(part, scale=1 / max(1e-9, part[-1].arrival_s)) for part in parts]
        return sorted(
            (request for part in parts for request in part), key=lambda one: one.arrival_s
        )
    if cell.order == "then":
        parts[1] = _moved(parts[1], start=parts[0][-1].arrival_s)
    return [request for part in parts for request in part]


def _moved(
    part: list[TraceRequest], *, scale: float = 1.0, start: float = 0.0
) -> list[TraceRequest]:
    return [replace(one, arrival_s=start + scale * one.arrival_s) for one in part]


def sessions_of(
    session: Callable[[], Session],
    rng: np.random.Generator,
    drawn: dict[str, float],
    size: int,
    segments: Segments,
) -> list[TraceRequest]:
    """So many requests of some users, each of whom starts a new session when one ends."""
    users = int(drawn["users"])
    coming: list[tuple[float, int, int, int, Session, Spans, Spans]] = []
    serial, made = count(), []

    def ask(at: float, number: int, turn: int, turns: Session) -> None:
        for pause, prompt, output in turns:
            heapq.heappush(coming, (at + pause, next(serial), number, turn, turns, prompt, output))
            return
        ask(at + rng.exponential(drawn["between"]), next(serial), 0, session())

    for _ in range(users):
        ask(rng.uniform(0, drawn["ramp"]), next(serial), 0, session())
    while len(made) < size:
        at, _, number, turn, turns, prompt, output = heapq.heappop(coming)
        made.append(
            TraceRequest(
                session_id=number,
                turn_id=turn,
                arrival_s=at,
                prompt=segments.tokens(prompt, "prompt"),
                output=segments.tokens(output, "output"),
            )
        )
        ask(at, number, turn + 1, turns)
    return made


# --- what is drawn for a load, and its sessions -----------------------------------------------------


def _between(rng: np.random.Generator, least: float, most: float) -> float:
    """Any octave is as likely as another."""
    return float(f"{least * (most / least) ** rng.random():.3g}")


def _uniform(rng: np.random.Generator, least: float, most: float) -> float:
    return round(rng.uniform(least, most), 2)


def _length(rng: np.random.Generator, median: float, sigma: float, most: int = 12_000) -> int:
    return int(min(most, max(4.0, median * math.exp(rng.normal(0, sigma)))))


def _users(rng: np.random.Generator, most: float = 200) -> dict[str, float]:
    """How many at once, seconds over which they come at first, and between two sessions of one of them."""
    return {
        "users": int(_between(rng, 5, most)),
        "ramp": _between(rng, 1, 3000),
        "between": _between(rng, 1, 3000),
    }


def draw_chats(rng: np.random.Generator) -> dict[str, float]:
    return _users(rng) | {
        "turns least": int(rng.integers(1, 25)),
        "turns more": _between(rng, 1, 30),
        "asked": _between(rng, 10, 400),
        "asked sigma": _uniform(rng, 0.3, 2.5),
        "answered": _between(rng, 50, 600),
        "answered sigma": _uniform(rng, 0.3, 2),
        "session sigma": _uniform(rng, 0, 1.5),
        "pause sigma": _uniform(rng, 0, 2.5),
        "most": int(_between(rng, 2500, MOST_TOKENS)),
        "systems": int(rng.integers(0, 4)),
        "system": int(_between(rng, 50, 2000)),
        "again": _uniform(rng, 0, 0.25) if rng.random() < 0.5 else 0.0,
    }


def draw_wide_chats(rng: np.random.Generator) -> dict[str, float]:
    """Chats whose number of turns, spread of lengths and arrivals are drawn over wide ranges."""
    turns = _between(rng, 2, 60)
    least = max(1, int(turns * rng.random()))
    return draw_chats(rng) | {
        "users": int(_between(rng, 4, 300)),
        "ramp": _between(rng, 10, 10_000),
        "between": _between(rng, 1, 1000),
        "turns least": least,
        "turns more": round(turns - least, 2),
        "asked sigma": _uniform(rng, 0.2, 2),
        "answered sigma": _uniform(rng, 0.2, 2),
        "pause sigma": _uniform(rng, 0.2, 2),
    }


def chats(rng: np.random.Generator, drawn: dict[str, float], new: count) -> Callable[[], Session]:
    """Conversations with their whole history, of which some turns are taken back before the next."""
    systems = [[next(new), int(drawn["system"])] for _ in range(int(drawn["systems"]))]

    def session() -> Session:
        factor = math.exp(rng.normal(0, drawn["session sigma"]))
        history = [systems[rng.integers(len(systems))]] if systems else []
        for turn in range(int(drawn["turns least"] + rng.exponential(drawn["turns more"]))):
            asked = [next(new), _length(rng, factor * drawn["asked"], drawn["asked sigma"])]
            answered = [
                next(new),
                _length(rng, factor * drawn["answered"], drawn["answered sigma"]),
            ]
            if turn and _tokens([*history, asked, answered]) > drawn["most"]:
                return
            pause = asked[1] / 2 * math.exp(rng.normal(0, drawn["pause sigma"])) if turn else 0.0
            yield pause, [*history, asked], [answered]
            if rng.random() >= drawn["again"]:
                history = [*history, asked, answered]

    return session


def draw_agents(rng: np.random.Generator) -> dict[str, float]:
    return _users(rng) | {
        "pause": _between(rng, 2, 30),
        "system": int(_between(rng, 200, 4000)),
        "issue": _between(rng, 200, 5000),
        "observed": _between(rng, 100, 1500),
        "observed sigma": _uniform(rng, 0.3, 1.2),
        "written": _between(rng, 60, 400),
        "turns least": int(rng.integers(3, 25)),
        "turns more": _between(rng, 1, 20),
        "kept": int(rng.choice([3, 5, 8, 1000])),
    }


def agents(rng: np.random.Generator, drawn: dict[str, float], new: count) -> Callable[[], Session]:
    """Agents that keep their latest observations only: from some turn on the oldest one goes before each new turn."""
    system, kept = [next(new), int(drawn["system"])], int(drawn["kept"])

    def session() -> Session:
        past: list[Spans] = []
        seen = [next(new), _length(rng, drawn["issue"], 0.3)]
        for turn in range(int(drawn["turns least"] + rng.exponential(drawn["turns more"]))):
            prompt = [system, *(span for turns in past for span in turns), seen]
            written = [next(new), _length(rng, drawn["written"], 0.6)]
            if turn and _tokens([*prompt, written]) > MOST_TOKENS:
                return
            yield float(rng.poisson(drawn["pause"])) if turn else 0.0, prompt, [written]
            past.append([seen, written])
            if len(past) > kept + 1:  # the first is the issue
                past[-kept - 1] = past[-kept - 1][1:]
            seen = [next(new), _length(rng, drawn["observed"], drawn["observed sigma"])]

    return session


def draw_documents(rng: np.random.Generator) -> dict[str, float]:
    return _users(rng, most=40) | {
        "documents": int(_between(rng, 5, 400)),
        "zipf": _uniform(rng, 0, 1.3),
        "document": _between(rng, 300, 8000),
        "document sigma": _uniform(rng, 0, 1),
        "questions": _between(rng, 0.5, 8),
        "asked": _between(rng, 20, 400),
        "answered": _between(rng, 20, 400),
        "system": int(_between(rng, 20, 1000)),
    }


def documents(
    rng: np.random.Generator, drawn: dict[str, float], new: count
) -> Callable[[], Session]:
    """Questions about documents, some of which are asked about more than others; none goes on from an answer."""
    system, number = [next(new), int(drawn["system"])], int(drawn["documents"])
    texts = [
        [next(new), _length(rng, drawn["document"], drawn["document sigma"])] for _ in range(number)
    ]
    weights = np.arange(1.0, number + 1) ** -drawn["zipf"]

    def session() -> Session:
        text = texts[rng.choice(number, p=weights / weights.sum())]
        for turn in range(1 + int(rng.exponential(drawn["questions"]))):
            asked = [next(new), _length(rng, drawn["asked"], 0.8)]
            answered = [next(new), _length(rng, drawn["answered"], 0.8)]
            yield asked[1] / 2 if turn else 0.0, [system, text, asked], [answered]

    return session


def draw_log(rng: np.random.Generator) -> dict[str, float]:
    return {"start": _uniform(rng, 0, 1), "sessions": _uniform(rng, 0.4, 1)}


def _log(rng: np.random.Generator, drawn: dict[str, Any], size: int) -> list[TraceRequest]:
    """Requests of the committed log from some place on, of a share of its sessions; so many at most."""
    known = read_trace(FOLDER / COMMITTED["log"].file)
    names = list(dict.fromkeys(one.session_id for one in known))
    taken = {name for name in names if rng.random() < drawn["sessions"]}
    kept = [one for one in known if one.session_id in taken]
    start = int(drawn["start"] * max(0, len(kept) - size))
    part = kept[start : start + size]
    return _moved(part, start=-part[0].arrival_s)


def _tokens(spans: Spans) -> int:
    return sum(length for _, length in spans)


LOADS = {"chats": chats, "agents": agents, "documents": documents}
DRAWS = {"chats": draw_chats, "agents": draw_agents, "documents": draw_documents, "log": draw_log}

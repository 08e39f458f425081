"""Our policies beside the published simulator on the very same traces."""

from __future__ import annotations

from benchmarks.cache.figures.figure import Figure, Table
from benchmarks.cache.figures.models import PAPER_7B, REAL_7B
from benchmarks.cache.figures.published import (
    CODE,
    EXACT,
    LONGEST_PREFIX,
    SAME_TRACES,
    place,
)
from benchmarks.cache.figures.runs import Runs, Setup

POINT = 1.0
OVER_BUDGET = "it holds up to 3.1 times its budget"
MISCOUNTED = "it miscounts what an eviction frees"
OTHER_WINDOW = "it miscounts what an eviction frees, and tunes on a window from the first request"
OTHER_BYTES = "bytes really freed here, state and edge there"


def _unequal(name: str, policy: str) -> str | None:
    """Why the bytes of the published run cannot be ours; None where they are the same."""
    if policy == "vllm":
        return OVER_BUDGET if name == "chat" else None
    if policy == "sglang":
        return MISCOUNTED if name == "agents" else None
    return {"marconi-code": OTHER_WINDOW, "alpha:1": OTHER_BYTES}.get(policy)


def _row(runs: Runs, name: str, gigabytes: float, policy: str, theirs: float, model=PAPER_7B):
    where = place(name, gigabytes)
    ours = runs.percent(where, policy, model)
    return {
        "load": name,
        "GB": gigabytes,
        "model": model.name,
        "policy": policy,
        "published, %": theirs,
        "ours, %": ours,
        "points": round(ours - theirs, 2),
        "within 1 point": "yes" if abs(ours - theirs) <= POINT else "no",
        "bytes differ because": _unequal(name, policy),
    }


def _printed(runs: Runs) -> list[dict]:
    return [
        _row(runs, name, gigabytes, policy, theirs)
        for (name, gigabytes), numbers in SAME_TRACES.items()
        for policy, theirs in zip(CODE, numbers, strict=True)
        if theirs is not None and policy != "best alpha"
    ]


def _exact(runs: Runs) -> list[dict]:
    models = {"7b": PAPER_7B, "real": REAL_7B}
    rows = [
        _row(runs, name, gigabytes, policy, theirs, models[model])
        for name, gigabytes, model, policy, theirs in EXACT
    ]
    bounds = [_row(runs, name, 1, "infinite", bound) for name, bound in LONGEST_PREFIX.items()]
    return rows + [row | {"GB": None} for row in bounds]


def check(runs: Runs, setup: Setup) -> Figure:
    """Hit rates where somebody else's code was run on the committed traces."""
    printed, exact = _printed(runs), _exact(runs)
    equal = [row for row in (*printed, *exact) if row["bytes differ because"] is None]
    within = sum(row["within 1 point"] == "yes" for row in equal)
    return Figure(
        name="check",
        title="The published simulator on the same traces",
        paper="Hit rates of the authors' code (commit 0801661) on the committed traces, and of the same rules with "
        "bytes counted exactly.",
        ours=f"{within} of {len(equal)} hit rates whose bytes are counted the same way are within one point.",
        differences="Where bytes differ, the last column says how; the published cache overruns its budget after 3 to "
        "44 % of the requests, ours never does. The one that is off all the same (alpha-code:1 on chat with 5 GB) "
        "moves by 1.5 points with how finely efficiencies are told apart; the rest is not explained.",
        tables=[
            Table(title="As published", rows=printed),
            Table(title="With bytes counted exactly", rows=exact),
        ],
    )

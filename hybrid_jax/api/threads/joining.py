"""How the answers of several engines become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hybrid_jax.cache.tree.node import MAX_NODES, NodeLine
from hybrid_jax.schedule.history import PastRequests

Numbers = dict[str, int | float]
# Numbers that are those of all replicas already: of the one folder on disk, and whether something happened at all.
SHARED = ("disk_files", "disk_bytes", "disk_writes_failed")


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0


# Rates, made anew of sums.
RATES: dict[str, Callable[[Numbers], float]] = {
    "cache_token_hit_rate": lambda sums: _ratio(
        sums["cache_hit_tokens"], sums["cache_lookup_tokens"]
    ),
    "tokens_per_verification": lambda sums: _ratio(
        sums["verifications"] + sums["accepted_draft_tokens"], sums["verifications"]
    ),
}
# A share is the mean of those of the replicas, each of which counts by this number.
WEIGHTS = {"drafting_share": "decode_steps"}


def joined_stats(answers: Sequence[Numbers]) -> Numbers:
    """Counters and sizes are sums. The peak of running sequences is one too: the most that each replica ever held.

    Example:
        >>> one, two = ({"cache_hit_tokens": hits, "cache_lookup_tokens": 100} for hits in (10, 60))
        >>> rate = {"cache_token_hit_rate": 0.0}
        >>> joined_stats([one | rate, two | rate])["cache_token_hit_rate"]
        0.35
    """
    sums: Numbers = {name: sum(answer[name] for answer in answers) for name in answers[0]}
    for name in SHARED:
        if name in sums:
            sums[name] = max(answer[name] for answer in answers)
    for name, weight in WEIGHTS.items():
        if name in sums:
            weighted = sum(answer[name] * answer[weight] for answer in answers)
            sums[name] = _ratio(weighted, sums[weight])
    return sums | {name: rate(sums) for name, rate in RATES.items() if name in sums}


def joined_words(answers: Sequence[str]) -> str:
    """What several engines say of themselves, once if it is the same."""
    return "; ".join(dict.fromkeys(answers))


def joined_description(answers: Sequence[str]) -> str:
    """A line on the memory of each replica."""
    same = len(set(answers)) == 1
    return f"{answers[0]}, on each of {len(answers)} replicas" if same else "; ".join(answers)


def joined_nodes(
    answers: Sequence[list[tuple[NodeLine, list[int]]] | None],
) -> list[tuple[NodeLine, list[int]]] | None:
    """The nodes of the trees, one tree after the other."""
    trees = [nodes for nodes in answers if nodes is not None]
    return [node for nodes in trees for node in nodes][:MAX_NODES] if trees else None


def joined_past(answers: Sequence[PastRequests | None]) -> PastRequests | None:
    """The requests of each replica, which are replayed on their own."""
    found = [past for past in answers if past is not None]
    return replace(found[0], others=tuple(found[1:])) if found else None


def largest(answers: Sequence[int | None]) -> int | None:
    """The largest number, of those that are known."""
    return max((answer for answer in answers if answer is not None), default=None)


def nothing(answers: Sequence[Any]) -> None:
    """Of answers that say nothing."""

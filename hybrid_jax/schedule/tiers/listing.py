"""What the tiers below the arena have of each node of the tree, for a listing of the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hybrid_jax.cache.tree.node import ARENA, DISK, HOSTS_MEMORY, Node, TierLine
from hybrid_jax.schedule.tiers.below import Below
from hybrid_jax.schedule.tiers.on_disk import OnDisk


def tiers_below(
    below: Below | None, on_disk: OnDisk | None
) -> Callable[[Node], tuple[TierLine, ...]]:
    """A function that says of a node what lower tiers have of it. It holds until the next plan is made."""
    down = {} if below is None else below.on_the_way
    names = set() if on_disk is None else on_disk.on_the_way

    def of(node: Node) -> tuple[TierLine, ...]:
        host = () if below is None else _in_host(node, below.number, down)
        return (*host, *(() if on_disk is None else _on_disk(node, on_disk, names)))

    return of


def _in_host(node: Node, tier: int, down: dict[Node, bool]) -> Iterator[TierLine]:
    has, resumes = node.has(tier), node.has_checkpoint(tier)
    if has:
        count = len(node.held[tier].pages)
        arena = node.held[ARENA].pages if node.has(ARENA) else ()
        alike = (len(arena), node.has_checkpoint(ARENA)) == (count, resumes)
        what = f"{count} page{'s' * (count != 1)}{' and a checkpoint' * resumes} in {HOSTS_MEMORY}"
        yield TierLine(HOSTS_MEMORY, resumes, False, f"in {HOSTS_MEMORY} too" if alike else what)
    if node in down and not (has and resumes >= down[node]):
        what = "checkpoint on its way" if has else "on its way"
        yield TierLine(HOSTS_MEMORY, down[node], True, f"{what} to {HOSTS_MEMORY}")


def _on_disk(node: Node, on_disk: OnDisk, names: set[str]) -> Iterator[TierLine]:
    """The disk is asked by the prefix up to the node's end, for it knows no nodes."""
    tokens = np.concatenate([part.tokens for part in node.path()])
    chain = on_disk.disk.chain(tokens)
    if on_disk.disk.has(chain, node.end):
        yield TierLine(DISK, True, False, "on disk")
    elif on_disk.disk.is_coming(chain, node.end) or chain.name(node.end) in names:
        yield TierLine(DISK, True, True, f"on its way to {DISK}")

"""What the tiers below the arena have of each node of the tree, for a listing of the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


def _in_host(node: Node, tier: int, down: dict[Node, tuple[int, bool]]) -> Iterator[TierLine]:
    has, resumes = node.has(tier), node.has_checkpoint(tier)
    if has:
        count = len(node.held[tier].pages)
        arena = node.held[ARENA].pages if node.has(ARENA) else ()
        alike = (len(arena), node.has_checkpoint(ARENA)) == (count, resumes)
        what = f"{count} page{'s' * (count != 1)}{' and a checkpoint' * resumes} in {HOSTS_MEMORY}"
        yield TierLine(
            HOSTS_MEMORY, node.end, resumes, False, f"in {HOSTS_MEMORY} too" if alike else what
        )
    if node in down:
        end, checkpoint = down[node]
        what = "checkpoint on its way" if has else "on its way"
        mark = f"{what} to {HOSTS_MEMORY}{_up_to(node, end)}"
        yield TierLine(HOSTS_MEMORY, end, checkpoint, True, mark)


def _on_disk(node: Node, on_disk: OnDisk, names: set[str]) -> Iterator[TierLine]:
    """The disk is asked by the prefixes that end on the node's span, the longest first, for it knows no nodes."""
    disk, grain = on_disk.disk, on_disk.grain
    chain = disk.chain(node.prefix())
    there = disk.find(chain, node.start, node.end, held=0)
    if there:
        yield TierLine(DISK, there, True, False, "on disk" + _up_to(node, there))
    for end in range(node.end - node.end % grain, max(node.start, there), -grain):
        if disk.is_coming(chain, end) or chain.name(end) in names:
            yield TierLine(DISK, end, True, True, f"on its way to {DISK}{_up_to(node, end)}")
            return


def _up_to(node: Node, end: int) -> str:
    return "" if end == node.end else f" up to {end}"

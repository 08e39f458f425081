"""A second tier of integers below an arena: what goes from one to the other are numbers of frames."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid_jax.cache.pools.frames import FrameAllocator, given
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.pools.windows import page_holds
from hybrid_jax.cache.tree.node import ARENA, Node
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.cache.tree.tier import Tier

SECOND = 1


@dataclass(kw_only=True, eq=False)
class Copy:
    """A prefix on its way from one tier into another, with one hold on all that it has there.

    Attributes:
        tier: number of the tier that it goes into.
        tokens: int32[n] the prefix; n is a multiple of grain.
        pages, slot: of it in that tier.
        source, target: int32[k] frames to copy.
        node: of a load, where it ends; pinned until the copy is given up.
    """

    tier: int
    tokens: np.ndarray
    pages: np.ndarray
    slot: int
    source: np.ndarray
    target: np.ndarray
    node: Node | None = None


def second_tier(arena: Tier, num_frames: int, max_slots: int) -> Tier:
    """An empty tier below an arena, with pages and checkpoints like those."""
    frames = FrameAllocator(num_frames)
    slots = SlotTable(frames, lengths=arena.slots.lengths, max_slots=max_slots)
    pages = page_holds(frames, arena.pages.page_tokens, arena.pages.windows)
    return Tier(frames, slots, pages, number=SECOND)


def copy_of(tree: RadixTree, node: Node, length: int, *, source: int, into: int) -> Copy | None:
    """Takes room in a tier for what another has of the first `length` tokens of a path to one of its nodes.

    What the tier has already is held, not copied.

    Returns:
        None if there is no room; then nothing was taken.
    """
    tier, path = tree.tiers[into], node.path()
    tokens = np.concatenate([part.tokens for part in path])[:length]  # room may join nodes of it
    page, there = tier.pages.page_tokens, [part for part in path if part.has(into)]
    listed = tree.pages_to(node, length, source)
    pages = np.zeros_like(listed)
    if there and page and (whole := min(there[-1].end, length) // page):
        pages[:whole] = tree.pages_to(there[-1], whole * page, into)
        pages[listed == 0] = 0  # what no window reads from there on
    tier.frames.retain(given(pages))
    missing = (listed > 0) & (pages == 0)
    num_frames, num_slots = int(np.count_nonzero(missing)), int(tree.needs_slots)
    if not tree.make_room(num_frames + num_slots * max(tier.slots.lengths), num_slots, tier=into):
        tier.frames.release(given(pages))
        return None
    old, target = listed[missing], tier.frames.allocate(num_frames)
    pages[missing] = target
    slot = tier.slots.allocate() if num_slots else 0
    if slot:
        old = np.append(old, tree.tiers[source].slots.frames(node.slots[source]))
        target = np.append(target, tier.slots.frames(slot))
    old, target = old.astype(np.int32), target.astype(np.int32)
    return Copy(tier=into, tokens=tokens, pages=pages, slot=slot, source=old, target=target)


def save(tree: RadixTree, node: Node) -> Copy | None:
    """What the arena is about to evict, on its way into the second tier; None if it is there, or has no room."""
    tokens = np.concatenate([part.tokens for part in node.path()])
    here, below = tree.match(tokens, least=0).found
    if below.hit_len >= here.hit_len:
        return None
    return copy_of(tree, here.node, here.hit_len, source=ARENA, into=SECOND)


def load(tree: RadixTree, tokens: np.ndarray) -> Copy | None:
    """What the second tier has of a prompt beyond the arena's hit, on its way there; None if that is nothing."""
    match = tree.match(tokens)
    hit = match.found[SECOND]
    if hit.hit_len <= match.hit_len:
        return None
    node = tree.boundary(hit.node, hit.hit_len)
    tree.pin(node)
    found = copy_of(tree, node, hit.hit_len, source=SECOND, into=ARENA)
    if found is None:
        tree.unpin(node)
    else:
        found.node = node
    return found


def publish(tree: RadixTree, copy: Copy) -> None:
    """The frames are copied: from now on prompts find the prefix."""
    tree.fill(copy.tokens, copy.pages, copy.slot, tier=copy.tier)
    give_up(tree, copy)


def give_up(tree: RadixTree, copy: Copy) -> None:
    """Lets go of what a copy holds."""
    tier = tree.tiers[copy.tier]
    tier.frames.release(given(copy.pages))
    if copy.slot:
        tier.slots.release(copy.slot)
    if copy.node is not None:
        tree.unpin(copy.node)

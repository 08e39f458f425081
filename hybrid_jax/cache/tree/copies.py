"""Prefixes on their way from one tier into another: room there, and which frames to copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hybrid_jax.cache.pools.frames import FrameAllocator, OutOfFrames, given
from hybrid_jax.cache.pools.handles import MAX_ID
from hybrid_jax.cache.pools.slots import OutOfSlots, SlotTable
from hybrid_jax.cache.pools.windows import page_holds
from hybrid_jax.cache.tree.eviction import EvictionPolicy
from hybrid_jax.cache.tree.node import ARENA, Node
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.cache.tree.tier import Tier


@dataclass(kw_only=True, eq=False)
class Copy:
    """A prefix on its way into a tier, with one hold on all that it has there.

    Attributes:
        into: number of the tier.
        tokens: int32[n] the prefix; n is a multiple of grain.
        pages, slot: of it in that tier.
        missing: bool like pages, which of them come.
        target: int32[k] the frames to write: those of missing pages, row by row, then those of the checkpoint.
        source: int32[k] frames of the tier that they are copied from; empty if they come from elsewhere.
    """

    into: int
    tokens: np.ndarray
    pages: np.ndarray
    slot: int
    missing: np.ndarray
    target: np.ndarray
    source: np.ndarray


def tier_below(
    arena: Tier, num_frames: int, policy: EvictionPolicy | None = None, *, number: int
) -> Tier:
    """An empty tier of frames with pages and checkpoints like those of an arena.

    Args:
        num_frames: frames, of which one is never used.
        policy, number: as in `Tier`.
    """
    frames, lengths = FrameAllocator(num_frames), pools_of(arena)[1].lengths
    max_slots = min(1 + (num_frames - 1) // max(1, min(lengths)), MAX_ID + 1)
    slots = SlotTable(frames, lengths=lengths, max_slots=max_slots)
    pages = page_holds(frames, arena.pages.page_tokens, arena.pages.windows)
    return Tier(frames, slots, pages, policy, number=number)


def pools_of(tier: Tier) -> tuple[FrameAllocator, SlotTable]:
    """Frames and slots of a tier that has frames; a simulated one may have bytes that are only counted."""
    assert isinstance(tier.frames, FrameAllocator) and isinstance(tier.slots, SlotTable), tier
    return tier.frames, tier.slots


def copy_of(tree: RadixTree, node: Node, length: int, *, source: int, into: int) -> Copy | None:
    """Takes room in a tier for what another has of the first `length` tokens of a path to one of its nodes.

    What the tier has already is held, not copied.

    Returns:
        None if there is no room; then nothing was taken.
    """
    tokens = node.prefix()[:length]
    listed = tree.pages_to(node, length, source)
    form, state = 0, tuple[int, ...]()
    if tree.needs_slots:
        _, slots = pools_of(tree.tiers[source])
        state = slots.frames(node.slots[source])
        form = slots.lengths.index(len(state))
    copy = room_for(tree, tokens, listed > 0, into=into, form=form)
    if copy is not None:
        pages = listed[copy.missing]
        copy.source = np.append(pages, state).astype(np.int32)
        tree.tiers[into].pages.copied(tree.tiers[source].pages, pages, copy.pages[copy.missing])
    return copy


def shared_pages(
    tree: RadixTree, tokens: np.ndarray, wanted: np.ndarray, tier: int
) -> tuple[np.ndarray, np.ndarray]:
    """What a tier has of the pages of a prefix, and what it lacks.

    Args:
        wanted: bool[pages, frames_per_page] which frames a row reads that goes on after the prefix.

    Returns:
        Frame ids of the whole pages that are there, int32 like `wanted` with 0 elsewhere, and bool which are missing.
    """
    node, whole = whole_pages(tree, tokens, tier)
    pages: np.ndarray = np.zeros(wanted.shape, np.int32)
    if whole:
        pages[:whole] = tree.pages_to(node, whole * tree.tiers[tier].pages.page_tokens, tier)
        pages[~wanted] = 0  # what no window reads from there on
        pages[tree.tiers[tier].pages.lacking(pages, len(tokens))] = 0
    return pages, wanted & (pages == 0)


def whole_pages(tree: RadixTree, tokens: np.ndarray, tier: int) -> tuple[Node, int]:
    """The deepest node of a tier on the path of some tokens, and how many whole pages of them it has there."""
    (node, known_len), page = tree.reach(tokens), tree.tiers[tier].pages.page_tokens
    while not node.has(tier):
        node = node.above
    return node, min(node.end, known_len) // page if page else 0


def room_for(
    tree: RadixTree, tokens: np.ndarray, wanted: np.ndarray, *, into: int, form: int
) -> Copy | None:
    """Takes room in a tier for a prefix that comes from elsewhere. What the tier has already is held.

    Args:
        tokens: int32[n] the prefix. wanted: as in `shared_pages`. form: of its checkpoint.

    Returns:
        None if there is no room; then nothing was taken.
    """
    tier = tree.tiers[into]
    frames, slots = pools_of(tier)
    pages, missing = shared_pages(tree, tokens, wanted, into)
    num_frames, num_slots = int(np.count_nonzero(missing)), int(tree.needs_slots)
    undo: list[Callable[[], None]] = []
    try:
        shared = given(pages)
        frames.retain(shared)
        undo.append(lambda: frames.release(shared))
        room = num_frames + num_slots * slots.lengths[form]
        if room + len(shared) > frames.num_frames - 1:  # whatever is evicted
            raise OutOfFrames(f"{tier.number}: has {frames.num_frames - 1} frames")
        if not tree.make_room(room, num_slots, tier=into):
            raise OutOfFrames(f"{tier.number}: needs {room} frames")
        target = frames.allocate(num_frames)
        undo.append(lambda: frames.release(target))
        slot = slots.allocate(form) if num_slots else 0
    except (OutOfFrames, OutOfSlots, MemoryError):  # a copy is never needed
        for give_back in undo:
            give_back()
        return None
    pages[missing] = target
    if slot:
        target = np.append(target, slots.frames(slot))
    nothing: np.ndarray = np.zeros(0, np.int32)
    return Copy(
        into=into,
        tokens=tokens,
        pages=pages,
        slot=slot,
        missing=missing,
        target=target.astype(np.int32),
        source=nothing,
    )


def to_save(tree: RadixTree, node: Node, into: int) -> tuple[Node, int] | None:
    """What another tier lacks of what the arena is about to evict: where it ends, and its tokens; None for nothing."""
    if tree.needs_slots:  # then the entry is the checkpoint at the node's end
        resumes = [
            node.has_checkpoint(tier) and tree.readable(node, tier) for tier in (ARENA, into)
        ]
        if resumes != [True, False]:
            return None
        return node, node.end
    tokens = node.prefix()
    found = tree.match(tokens, least=0).found
    here = found[ARENA]
    if found[into].hit_len >= here.hit_len:
        return None
    return here.node, here.hit_len


def take_over(tree: RadixTree, before: RadixTree, tier: int) -> None:
    """Gives an empty tier all that the same tier of another tree has, in the same frames.

    The other tree stays as it is.
    """
    frames, slots = pools_of(tree.tiers[tier])
    _, old_slots = pools_of(before.tiers[tier])
    whole: list[np.ndarray] = [np.zeros(0, np.intp)]
    entries = []
    for node in before.root.walk():
        length = node.end - node.end % tree.grain
        ends = node.has_checkpoint(tier) if tree.needs_slots else node.has(tier)
        if ends and length:
            tokens = node.prefix()[:length]
            pages = before.pages_to(node, length, tier)
            states = np.array(
                old_slots.frames(node.slots[tier]) if tree.needs_slots else (), np.intp
            )
            entries.append((tokens, pages, states))
            whole += [given(pages), states]
    taken = np.unique(np.concatenate(whole))
    frames.claim(taken)
    tree.tiers[tier].pages.copied(before.tiers[tier].pages, taken, taken)
    for tokens, pages, states in entries:
        slot = slots.claim(states) if states.size else 0
        tree.fill(tokens, pages, slot, tier=tier)
        if slot:
            slots.release(slot)
    of_slots = [states for *_, states in entries]
    frames.release(np.setdiff1d(taken, np.concatenate([np.zeros(0, np.intp), *of_slots])))


def publish(tree: RadixTree, copy: Copy) -> Node:
    """The frames are copied: from now on prompts find the prefix. Returns the node where it ends."""
    node = tree.fill(copy.tokens, copy.pages, copy.slot, tier=copy.into)
    give_up(tree, copy)
    return node


def give_up(tree: RadixTree, copy: Copy) -> None:
    """Lets go of what a copy holds."""
    frames, slots = pools_of(tree.tiers[copy.into])
    frames.release(given(copy.pages))
    if copy.slot:
        slots.release(copy.slot)

"""Prefixes of the arena as frames that somebody copies, and prefixes that come from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_jax.cache.tree.copies import give_up, pools_of, publish, room_for
from hybrid_jax.cache.tree.node import ARENA, Node
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.geometry import Geometry
from hybrid_jax.schedule.plan import Incoming
from hybrid_jax.tiers.parcel import FramePlace, Frames


def wanted_frames(geometry: Geometry, position: int) -> np.ndarray:
    """Which frames of pages a row reads that goes on at `position`: bool[pages, frames_per_page]."""
    wanted: np.ndarray = np.ones((geometry.num_pages(position), geometry.frames_per_page), bool)
    for group in geometry.windowed:
        wanted[: geometry.first_page(group, position), group.frames] = False
    return wanted


def _begin_inside(geometry: Geometry, position: int) -> np.ndarray:
    """Which frames hold the first token that a window sees from `position` on, and others before it.

    What comes from elsewhere lacks those. The result is bool[pages, frames_per_page].
    """
    found: np.ndarray = np.zeros((geometry.num_pages(position), geometry.frames_per_page), bool)
    for group in geometry.windowed:
        assert group.window is not None, group
        page, inside = divmod(max(position - group.window + 1, 0), geometry.page_tokens)
        if inside and page < len(found):
            found[page, group.frames] = True
    return found


def places_in(mask: np.ndarray) -> list[FramePlace]:
    """The places where a mask is true, page by page."""
    return [(int(page), int(column)) for page, column in np.argwhere(mask)]


def frames_of(tree: RadixTree, node: Node, length: int, places: Sequence[FramePlace]) -> np.ndarray:
    """The arena's frames int32[n] at some places of a prefix that ends at a node, then those of its checkpoint."""
    pages = tree.pages_to(node, length)
    frames = [int(pages[place]) for place in places]
    if tree.needs_slots:
        frames += pools_of(tree.arena)[1].frames(node.slots[ARENA])
    return np.array(frames, np.int32)


def arrive(
    tree: RadixTree, geometry: Geometry, tokens: np.ndarray, frames: Frames
) -> tuple[Node, Incoming] | None:
    """Takes room in the arena for a prefix that comes from elsewhere, and puts it into the tree.

    Args:
        tokens: int32[n] the prefix. frames: of it, at least those that the arena lacks.

    Returns:
        The node where it ends, and what is to be written before anything reads there. None if there is no room, or
        frames are missing; then nothing was taken.
    """
    form = len(geometry.checkpoint_frames) - 1  # that of the cache
    copy = room_for(tree, tokens, wanted_frames(geometry, len(tokens)), into=ARENA, form=form)
    if copy is None:
        return None
    places = places_in(copy.missing)
    if not set(places) <= set(frames.pages):  # the arena has evicted meanwhile what it had
        give_up(tree, copy)
        return None
    partly = copy.missing & _begin_inside(geometry, len(tokens))
    tree.arena.pages.lack_beginnings(copy.pages[partly], len(tokens))
    return publish(tree, copy), Incoming(arena=copy.target, words=frames.words(places))

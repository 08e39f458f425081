"""A prefix tree over small pools, for tests of one behaviour at a time."""

import numpy as np

from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.pools.windows import page_holds
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.cache.tree.tier import Tier

GRAIN = 8


class Pools:
    """A tree over small pools, and a row's way of filling it."""

    def __init__(
        self, page_tokens=16, needs_slots=True, num_frames=200, groups=1, policy=None, windows=(),
        state_frames=2, max_slots=50, **options,
    ):  # fmt: skip
        self.frames = FrameAllocator(num_frames)
        lengths = (state_frames if needs_slots else 0,)
        self.slots = SlotTable(self.frames, lengths=lengths, max_slots=max_slots)
        self.groups = groups
        store = page_holds(self.frames, page_tokens, windows)
        self.tree = RadixTree(
            [Tier(self.frames, self.slots, store, policy)],
            grain=GRAIN,
            needs_slots=needs_slots,
            **options,
        )

    def pages(self, length):
        count = self.tree.arena.pages.num_pages(length)
        return self.frames.allocate(count * self.groups).reshape(count, self.groups)

    def insert(self, tokens):
        """Fills a prefix as a finished row does: hands everything over and keeps nothing."""
        pages = self.pages(len(tokens))
        slot = self.slots.allocate() if self.tree.needs_slots else 0
        node = self.tree.fill(np.array(tokens), pages, slot)
        self.frames.release(pages)
        if slot:
            self.slots.release(slot)
        self.check()
        return node

    def match(self, tokens, owner=""):
        return self.tree.match(np.array(tokens), owner)

    def check(self):
        self.frames.check_invariants()
        self.slots.check_invariants()
        self.tree.check_invariants()


def evict(tree, num_frames):
    """Evicts the least valuable entries until that many more frames are free; how many became free."""
    before = tree.arena.frames.num_free
    tree.make_room(before + num_frames)
    return tree.arena.frames.num_free - before


def is_stored(cache, whole):
    """Whether a simulated cache has a prompt and its output, as far as a resume point can lie."""
    length = len(whole) // cache.grain * cache.grain
    return (
        length > 0
        and cache.tree.match(np.array(whole[:length], np.int32), least=0).hit_len == length
    )


def seq(*parts):
    return [token for start, count in parts for token in range(start, start + count)]

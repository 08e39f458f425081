"""Checkpoints on their way into the cache's narrow form, and out of it into a row's own.

All of this is integers. A plan narrows first, then it saves, loads and widens, and then its rows run. So what a plan
narrows is there for everything else in it, and the memory that it is read from may be given to the plan's rows.

- The checkpoint of a sequence that ends is narrowed by the next plan, in place: its first frames stay, and the others
  are free once that plan is being made.
- One that a row goes on from is narrowed into another slot. The plan that is being made may still write the checkpoint,
  so the plan after it narrows it. Until then nobody may overwrite it, and until the plan is made nothing may evict the
  entry: what is saved of it in that plan would be read before it is there.
"""

from __future__ import annotations

import numpy as np

from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.tree.node import ARENA, Node
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.schedule.holds import Holds
from hybrid_jax.schedule.plan import Plan, Recast

ROWS, NARROW = 0, 1  # forms of checkpoints, in the order of `Geometry.checkpoint_frames`


class Narrowing:
    """Notes what plans narrow and widen, and holds what must stay until then.

    Args:
        frames, slots, tree: the pools of the arena, and who keeps narrow checkpoints.
        holds: has the counters.

    Attributes:
        held_slots, held_frames: what is held until the next plan is begun.
        planning: whether a plan is being made.
    """

    def __init__(
        self, frames: FrameAllocator, slots: SlotTable, tree: RadixTree, holds: Holds
    ) -> None:
        self._frames, self._slots, self._tree, self._holds = frames, slots, tree, holds
        self.held_slots: list[int] = []
        self.held_frames: list[np.ndarray] = []
        self.planning = False
        self._due: list[Recast] = []  # for the plan that is made now, or next
        self._later: list[Recast] = []  # for the one after it
        self._widened: list[Recast] = []
        self._pinned: list[Node] = []

    def begin_plan(self) -> None:
        """A plan is being made. It reads all that is held, before anything else, so the holds go."""
        for slot in self.held_slots:
            self._slots.release(slot)
        for frames in self.held_frames:
            self._frames.release(frames)
        self.held_slots, self.held_frames, self.planning = [], [], True

    def end_plan(self, plan: Plan) -> None:
        """Tells a plan that is made what it narrows and widens."""
        plan.narrowed, self._due, self._later = self._due, self._later, []
        plan.widened, self._widened = self._widened, []
        for node in self._pinned:
            self._tree.unpin(node)
        self._pinned, self.planning = [], False

    @property
    def is_due(self) -> bool:
        """Whether the cache has checkpoints that the next plan narrows: their frames are still those of rows."""
        return bool(self._due)

    def entry(self, tokens: np.ndarray) -> int:
        """The checkpoint that the cache has at the end of a prefix; 0 for none."""
        node, known_len = self._tree.reach(tokens)
        return node.slots.get(ARENA, 0) if node.end == known_len == len(tokens) else 0

    def into_new(self, slot: int, narrow: int, node: Node) -> None:
        """Has a checkpoint narrowed into a slot that the tree has taken at a node; others go on from the checkpoint."""
        recast = Recast(source=self._listed(slot), target=self._listed(narrow))
        self._slots.retain(slot)
        self.held_slots.append(slot)
        self._holds.counters.narrowed_checkpoints += 1
        if not self.planning:
            self._due.append(recast)
            return
        self._later.append(recast)
        self._tree.pin(node)
        self._pinned.append(node)

    def in_place(self, slot: int) -> None:
        """Has a checkpoint narrowed in its own slot, which nobody but the tree holds any more."""
        source, rest = self._listed(slot), self._slots.shrink(slot, NARROW)
        self._due.append(Recast(source=source, target=self._listed(slot)))
        self._holds.counters.narrowed_checkpoints += 1
        if self.planning:
            self._frames.release(rest)
        else:
            self.held_frames.append(rest)

    def widen(self, narrow: int, slot: int) -> None:
        """Has the plan that is being made widen a checkpoint into a row's slot; both are held until it is made."""
        self._widened.append(Recast(source=self._listed(narrow), target=self._listed(slot)))
        self._holds.counters.widened_checkpoints += 1

    def _listed(self, slot: int) -> np.ndarray:
        return np.array(self._slots.frames(slot), np.int32)

    def check_invariants(self) -> None:
        """AssertionError if a plan was left unfinished, or the tree has a checkpoint that is not narrow."""
        assert not (self._later or self._widened or self._pinned or self.planning), (
            "narrowing: a plan was left unfinished"
        )
        wide, narrow = self._slots.lengths
        for recast in self._due:
            sizes = len(recast.source), len(recast.target)
            assert sizes == (wide, narrow), f"narrowing: {sizes} frames, {(wide, narrow)} expected"
        lengths = {self._slots.length(slot) for slot in self._tree.arena.slot_nodes}
        assert lengths <= {narrow}, f"narrowing: checkpoints of {lengths} frames in the cache"

"""The tier below the arena, as plans see it: what the arena evicts goes there, and comes back for a prompt that asks.

All of this is integers. The copies are the runner's: those of a plan are made before its rows run. A prefix on its way
down is found by nobody until the results of its plan are in, for only then is the copy sure to be there. A prefix on
its way up may be used by the same plan, because the device runs in order.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass

import numpy as np

from hybrid_jax.cache.pools.frames import given
from hybrid_jax.cache.pools.pages import PageHolds
from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.cache.tree.copies import (
    Copy,
    copy_of,
    give_up,
    pools_of,
    publish,
    shared_pages,
    to_save,
)
from hybrid_jax.cache.tree.node import ARENA, HOSTS_MEMORY, Match, Node
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.costs import Costs
from hybrid_jax.schedule.plan import Plan, Transfer
from hybrid_jax.schedule.sequence import Queued
from hybrid_jax.schedule.tiers.speeds import Speeds

HOST = 1  # number of the tier


@dataclass
class TierCounters:
    """What went between the arena and the tier below it since the engine began.

    Attributes:
        saves, saved_frames: prefixes that went down, and the frames copied for them.
        saves_dropped: those that were too much for one plan to copy. saves_without_room: those that did not fit there.
        loads, loaded_frames, loaded_tokens: prefixes that came up, the frames copied for them, and the tokens that the
            arena did not have.
        hit_tokens: how many of these tokens prompts skipped in the end.
        loads_without_room: hits below that the arena had no room for.
        loads_slower: hits below that were computed, because that takes less time.
    """

    saves: int = 0
    saved_frames: int = 0
    saves_dropped: int = 0
    saves_without_room: int = 0
    loads: int = 0
    loaded_frames: int = 0
    loaded_tokens: int = 0
    hit_tokens: int = 0
    loads_without_room: int = 0
    loads_slower: int = 0


class Below:
    """Moves prefixes between the arena and the tier below it.

    Args:
        tree: over both. number: of the tier.
        most_frames: once a plan saves so many, what is evicted further is dropped.
        costs: of the model. frame_bytes: of a frame.
        speeds: says what is loaded; None to load whatever is there.

    Attributes:
        counters: what happened so far.
        saves, loads: what the plan that is being made copies.
    """

    def __init__(
        self,
        tree: RadixTree,
        *,
        number: int = HOST,
        most_frames: int,
        costs: Costs,
        frame_bytes: int,
        speeds: Speeds | None = None,
    ) -> None:
        self._tree, self.number, self._most_frames = tree, number, most_frames
        self._costs, self._frame_bytes, self._speeds = costs, frame_bytes, speeds
        self.counters = TierCounters()
        self.saves: list[Copy] = []
        self.loads: list[Copy] = []
        self._saved_frames = 0  # of `saves`
        self._pinned: list[Node] = []  # where loads end
        self._in_flight: deque[tuple[Plan, list[Copy]]] = deque()

    # --- while a plan is made ---------------------------------------------------------------------

    def keep(self, tree: RadixTree, node: Node, tier: int) -> None:
        """Is told of each eviction, while all of it is in place."""
        if tier != ARENA:
            return
        wanted = to_save(tree, node, self.number)
        if wanted is None:
            return
        if self._saved_frames >= self._most_frames:
            self.counters.saves_dropped += 1
            return
        copy = copy_of(tree, *wanted, source=ARENA, into=self.number)
        if copy is None:
            self.counters.saves_without_room += 1
            return
        self.saves.append(copy)
        self._saved_frames += len(copy.source)

    def fetch(self, queued: Queued, match: Match) -> bool:
        """Has the plan that is being made load what the tier has of a prompt beyond the arena's hit.

        Until the plan is made, no tier may evict that. Otherwise a save of the same plan could be written over what is
        still to be read, or read what is not there yet.

        Args:
            queued: how the prompt waits. match: its look-up.

        Returns:
            Whether the prompt must be looked up again, because the arena has changed.
        """
        hit, tree, counters = match.found[self.number], self._tree, self.counters
        if hit.hit_len <= match.hit_len:
            return False
        if queued.slower.get(HOSTS_MEMORY) == hit.hit_len:
            return False
        if not self._saves_time(match):
            counters.loads_slower += HOSTS_MEMORY not in queued.slower
            queued.slower[HOSTS_MEMORY] = hit.hit_len
            return False
        node = tree.boundary(hit.node, hit.hit_len)
        tree.pin(node)
        copy = copy_of(tree, node, hit.hit_len, source=self.number, into=ARENA)
        if copy is None:
            tree.unpin(node)
            counters.loads_without_room += 1
            return True
        publish(tree, copy)
        self.loads.append(copy)
        self._pinned.append(node)
        counters.loads += 1
        counters.loaded_frames += len(copy.source)
        counters.loaded_tokens += hit.hit_len - match.hit_len
        return True

    def _saves_time(self, match: Match) -> bool:
        if self._speeds is None:
            return True
        tree, hit = self._tree, match.found[self.number]
        length = hit.hit_len
        tokens = hit.node.prefix()[:length]
        _, missing = shared_pages(
            tree, tokens, tree.pages_to(hit.node, length, self.number) > 0, ARENA
        )
        num_frames = int(np.count_nonzero(missing))
        if tree.needs_slots:
            num_frames += len(
                pools_of(tree.tiers[self.number])[1].frames(hit.node.slots[self.number])
            )
        flops = self._costs.flops(length, start=match.hit_len)
        return self._speeds.choose(HOSTS_MEMORY, num_frames * self._frame_bytes, flops)

    def end_plan(self, plan: Plan) -> None:
        """Tells a plan that is made what it copies."""
        for node in self._pinned:
            self._tree.unpin(node)
        self._pinned, self._saved_frames = [], 0
        saves, loads, self.saves, self.loads = self.saves, self.loads, [], []
        plan.saves = [Transfer(tier=self.number, arena=c.source, other=c.target) for c in saves]
        plan.loads = [Transfer(tier=self.number, arena=c.target, other=c.source) for c in loads]
        if saves:
            self._in_flight.append((plan, saves))

    # --- afterwards -------------------------------------------------------------------------------

    def received(self, plan: Plan) -> None:
        """The results of a plan are in, so what it has saved is there."""
        if not self._in_flight or self._in_flight[0][0] is not plan:
            return
        _, saves = self._in_flight.popleft()
        for copy in saves:
            publish(self._tree, copy)
            self.counters.saves += 1
            self.counters.saved_frames += len(copy.source)

    def forget(self) -> None:
        """Lets go of all that is on its way down, because the tree is about to forget everything."""
        for copies in (self.saves, *(saves for _, saves in self._in_flight)):
            for copy in copies:
                give_up(self._tree, copy)
        self.saves, self._saved_frames = [], 0
        self._in_flight.clear()

    # --- looking at it ----------------------------------------------------------------------------

    @property
    def on_the_way(self) -> dict[Node, tuple[int, bool]]:
        """Of the nodes of which something is on its way down: up to which token, and whether a checkpoint comes there.

        What is evicted is joined with what is known after it, so that may be before the node's end.
        """
        found: dict[Node, tuple[int, bool]] = {}
        for copy in (*self.saves, *(copy for _, saves in self._in_flight for copy in saves)):
            length = len(copy.tokens)
            for node in self._tree.reach(copy.tokens)[0].path():
                here = min(node.end, length), node.end >= length and bool(copy.slot)
                if here[1] or not node.has(self.number):
                    found[node] = max(found.get(node, here), here)
        return found

    def check_invariants(self) -> None:
        """Recounts who holds what of the tier: the tree, and what is on its way down."""
        tier = self._tree.tiers[self.number]
        frames, slots = pools_of(tier)
        assert isinstance(tier.pages, PageHolds), tier.pages
        frames.check_invariants()
        slots.check_invariants()
        on_the_way = [*self.saves, *(copy for _, saves in self._in_flight for copy in saves)]
        held = Counter(tier.pages.as_dict())
        of_slots = Counter(list(tier.slot_nodes))
        for copy in on_the_way:
            held.update(given(copy.pages).tolist())
            of_slots.update([copy.slot] if copy.slot else [])
        for slot in of_slots:
            held.update(slots.frames(slot))
        numbers = range(1, frames.num_frames)
        agree(
            "below",
            frame_holders=({n: frames.holders(n) for n in numbers}, {n: held[n] for n in numbers}),
            slot_holders=({slot: slots.holders(slot) for slot in of_slots}, dict(of_slots)),
            slots=(slots.num_held, len(of_slots)),
        )

    def stats(self, frame_bytes: int) -> dict[str, int | float]:
        """Present numbers, and the counters."""
        frames, slots = pools_of(self._tree.tiers[self.number])
        return {
            "num_frames": frames.num_frames - 1,
            "free_frames": frames.num_free,
            "checkpoints": slots.num_held,
            "bytes": frames.num_held * frame_bytes,
            **asdict(self.counters),
        }

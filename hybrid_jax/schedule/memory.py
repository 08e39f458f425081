"""What the scheduler does with frames: the pools, the prefix tree, and what each sequence holds of them.

Some holds must outlast their last use by a sequence: within one plan, memory that any row still reads must not be
given to another row. `advance` and `take_copies` keep such holds until `end_plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hybrid_jax.cache.policy.table import make_policy
from hybrid_jax.cache.policy.value import wanted_checkpoints
from hybrid_jax.cache.pools.frames import FrameAllocator, given
from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.cache.pools.slots import SlotTable
from hybrid_jax.cache.pools.windows import page_holds
from hybrid_jax.cache.tree.copies import take_over, tier_below
from hybrid_jax.cache.tree.node import ARENA, Match, Node
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.cache.tree.tier import Tier
from hybrid_jax.config import CacheConfig
from hybrid_jax.config.plans import SAVED_BYTES
from hybrid_jax.costs import Costs, frame_costs
from hybrid_jax.geometry import Geometry
from hybrid_jax.schedule.history import History
from hybrid_jax.schedule.holds import Holds
from hybrid_jax.schedule.narrowing import NARROW, ROWS, Narrowing
from hybrid_jax.schedule.plan import Plan
from hybrid_jax.schedule.sequence import Announced, HeldMemory, Page, Phase, Sequence
from hybrid_jax.schedule.tiers.below import HOST, Below
from hybrid_jax.schedule.tiers.on_disk import OnDisk
from hybrid_jax.schedule.tiers.speeds import Speeds
from hybrid_jax.tiers.disk import Prefixes

WRITTEN_BYTES = 128 << 20  # as SAVED_BYTES, for the disk: it waits in memory until it is written


class Memory:
    """Frames, slots and the prefix tree of one engine.

    Args:
        geometry: page and checkpoint sizes in frames.
        num_frames: frames of the arena, the sink included.
        max_slots: slots of the device's table, the empty slot 0 included.
        cache: the engine's cache settings. With the policy "off" there is no prefix tree, and every prompt is computed
            in full.
        host_frames: frames of the tier below the arena, of which one is never used; 0 for no such tier.
        disk: the tier on disk, or None.
        costs: the model's costs; None for what the geometry alone tells.
        speeds: says what is loaded from lower tiers; None to load whatever is there.

    Attributes:
        holds: what sequences hold of the pools; all that they take and give back goes through it.
        below: what the plan that is being made copies between the arena and the tier below it; None without one.
        on_disk: the same of the tier on disk.
        narrowing: what plans narrow and widen; None where the cache keeps checkpoints as rows have them.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_frames: int,
        max_slots: int,
        cache: CacheConfig,
        host_frames: int = 0,
        disk: Prefixes | None = None,
        costs: Costs | None = None,
        speeds: Speeds | None = None,
    ):
        self.geometry = geometry
        costs = frame_costs(geometry) if costs is None else costs
        self.frames = FrameAllocator(num_frames)
        lengths = geometry.checkpoint_frames
        self.slots = SlotTable(self.frames, lengths=lengths, max_slots=max_slots)
        windows = [(group.window, group.frames) for group in geometry.windowed if group.window]
        self.page_holds = page_holds(self.frames, geometry.page_tokens, windows)
        self.tree: RadixTree | None = None
        self.history: History | None = None
        self.below: Below | None = None
        self.on_disk: OnDisk | None = None
        if cache.policy != "off":
            policy = make_policy(cache.policy, costs)
            tiers = [Tier(self.frames, self.slots, self.page_holds, policy)]
            if host_frames:
                tiers.append(tier_below(tiers[ARENA], host_frames, policy.again(), number=HOST))
            self.tree = RadixTree(
                tiers,
                grain=geometry.grain,
                needs_slots=geometry.has_state,
                max_known_tokens=cache.history_tokens,
            )
            self.history = History(
                self.tree,
                cache.policy,
                grain=geometry.grain,
                costs=costs,
                capacity=(num_frames - 1) * geometry.frame_bytes,
            )
            self.tree.sink = self._evicted
            most = lambda num_bytes: max(1, num_bytes // geometry.frame_bytes)
            if host_frames:
                self.below = Below(
                    self.tree,
                    number=HOST,
                    most_frames=most(SAVED_BYTES),
                    costs=costs,
                    frame_bytes=geometry.frame_bytes,
                    speeds=speeds,
                )
            if disk is not None:
                self.on_disk = OnDisk(
                    self.tree,
                    geometry,
                    disk,
                    most_frames=most(WRITTEN_BYTES),
                    costs=costs,
                    speeds=speeds,
                )
        self.holds = Holds(self.frames, self.slots, self.tree)
        self.narrowing: Narrowing | None = None
        if self.tree is not None and geometry.narrow is not None:
            self.narrowing = Narrowing(self.frames, self.slots, self.tree, self.holds)
        self._later_frames: list[npt.ArrayLike] = []
        self._later_slots: list[int] = []

    def _evicted(self, tree: RadixTree, node: Node, tier: int) -> None:
        """Tells the other tiers of an eviction, while all of it is in place."""
        for other in (self.below, self.on_disk):
            if other is not None:
                other.keep(tree, node, tier)

    # --- room -----------------------------------------------------------------------------------

    def make_room(
        self,
        page_frames: int,
        num_slots: int = 0,
        *,
        keep: Node | None = None,
        needed: bool = True,
        form: int = ROWS,
    ) -> bool:
        """Evicts until so many frames and slots of a form are free, but nothing that `keep` needs.

        Returns False if the tree cannot give enough, which counts as a shortage if they are `needed`.
        """
        num_frames = page_frames + num_slots * self.slots.lengths[form]
        if self.frames.num_free >= num_frames and self.slots.num_free >= num_slots:
            return True
        before, fits = self.holds.frames_by_kind(), False
        if self.tree is not None:
            if keep is not None:
                self.tree.pin(keep)
            try:
                fits = self.tree.make_room(num_frames, num_slots)
            finally:
                if keep is not None:
                    self.tree.unpin(keep)
        after, counters = self.holds.frames_by_kind(), self.holds.counters
        counters.evicted_page_frames += before[0] - after[0]
        counters.evicted_checkpoint_frames += before[1] - after[1]
        counters.memory_shortages += needed and not fits
        return fits

    def thin_out(self) -> bool:
        """Gives up what the tree alone holds behind windows, for a lone row that is stuck; False for nothing."""
        before = self.holds.frames_by_kind()
        found = self.tree is not None and self.tree.thin_out()
        self.holds.counters.evicted_page_frames += before[0] - self.holds.frames_by_kind()[0]
        return found

    # --- admission ------------------------------------------------------------------------------

    def start(self, sequence: Sequence, match: Match | None, *, alone: bool) -> int | None:
        """Takes what a sequence needs to compute its prompt: the shared prefix, pages for the rest, its checkpoint.

        Of layers with a window it takes the pages that its longest chunk needs; `grow_chunk` takes the others.

        Args:
            sequence: one without memory.
            match: its look-up in the tree; None if there is none, or to compute everything.
            alone: no other sequence runs. Then this one must fit: it needs no spare page, and the shared prefix is
                given up if there is no room beside it. What a plan loads can go only after that plan.

        Returns:
            Tokens of the shared prefix, or None if there is no room; then nothing was taken.
        """
        hit_len = self._start(sequence, match, reserve=not alone)
        if hit_len is None and alone and not self.loads:
            self.make_room(self.frames.num_frames - 1)  # everything goes
            if match is not None and self.tree is not None:
                match = self.tree.match(sequence.looked_up)  # loads nothing
            hit_len = self._start(sequence, match, reserve=False)
            assert hit_len is not None, (
                f"memory: {self.frames.num_free} of {self.frames.num_frames - 1} frames free, "
                f"{self.geometry.row_frames(sequence.limit - 1)} needed at most by a sequence that is alone"
            )
        return hit_len

    @property
    def loads(self) -> bool:
        """Whether the plan that is being made loads something, which can go only after that plan."""
        on_disk = self.on_disk is not None and self.on_disk.loads
        return on_disk or (self.below is not None and bool(self.below.loads))

    def _start(self, sequence: Sequence, match: Match | None, *, reserve: bool) -> int | None:
        geometry, held = self.geometry, sequence.held
        hit_len = match.hit_len if match is not None else 0
        shared = geometry.num_pages(hit_len)
        # The hit may end inside a page that another row goes on writing. This row then copies it to its first new page.
        inside = geometry.has_pages and hit_len % geometry.page_tokens != 0
        kept = shared - inside
        fresh = self._pages(geometry.num_pages(sequence.goal) - kept)
        for group in geometry.windowed:
            end = geometry.first_page(group, hit_len) + (group.max_pages or len(fresh))
            fresh[max(end - kept, 0) :, group.frames] = False
        widens = self.narrowing is not None and hit_len > 0
        own = widens or self._will_checkpoint(sequence, hit_len)
        page_frames = int(np.count_nonzero(fresh)) + reserve * geometry.frames_per_page
        if not self._room_for(page_frames, own, match if hit_len else None):
            return None
        # From here to `acquire` nothing is evicted, so the match still holds.
        (new, own_slot), slot = self._take(fresh, own), 0
        if match is not None:
            pages, slot = self.holds.acquire(match)
            if inside:
                held.copies = [(as_page(pages[-1]), as_page(new[0]))]
                self.page_holds.copied(self.page_holds, pages[-1], new[0])
            new = np.concatenate((pages[:kept], new)) if hit_len else new
        held.pages = new
        if self.narrowing is not None and slot:
            self.narrowing.widen(slot, own_slot)
            self._later_slots.append(slot)
            slot, own_slot = own_slot, 0
        held.slot = held.real_slot = slot
        held.reserved_slot = own_slot
        held.real_checkpoint = hit_len
        self.arrived(sequence)
        return hit_len

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[Page, Page]] | None:
        """Gives `child` what it needs to go on after the prompt that `parent` has computed in this plan.

        Both hold the checkpoint and the full pages. If the prompt ends inside a page, that page is copied.

        Args:
            parent: a sequence whose prompt ends in this plan, with no step planned after the prompt.
            child: a sequence without memory.

        Returns:
            The (source, target) pages to copy, or None if there is no room for this and for the next steps; then
            nothing was taken.
        """
        geometry, held, of_parent = self.geometry, child.held, parent.held
        full, inside = divmod(parent.goal, geometry.page_tokens) if geometry.has_pages else (0, 0)
        page_frames = (bool(inside) + 1) * geometry.frames_per_page
        own_slot = self._will_checkpoint(child, of_parent.real_checkpoint)
        if not self._room_for(page_frames, own_slot):
            return None
        own, held.reserved_slot = self._take(self._pages(int(inside > 0)), own_slot)
        shared = of_parent.pages[:full]
        self.holds.retain_frames(shared)
        held.pages = np.concatenate((shared, own))
        copies = [(as_page(of_parent.pages[full]), as_page(own[0]))] if inside else []
        if inside:
            self.page_holds.copied(self.page_holds, of_parent.pages[full], own[0])
        self.holds.retain_slot(of_parent.slot)
        held.slot = held.real_slot = of_parent.slot
        held.real_checkpoint = of_parent.real_checkpoint
        return copies

    def _will_checkpoint(self, sequence: Sequence, start: int) -> bool:
        """Whether the sequence will write a checkpoint of its own after `start`, by its prompt or by a fold."""
        return self.geometry.has_state and sequence.limit - 1 > start + self.geometry.grain

    def _room_for(self, pages: int, own_slot: bool, hit: Match | None = None) -> bool:
        """Makes room for page frames and a slot, beside the memory of a hit.

        Evicts nothing if evicting everything except the hit would still not be enough.
        """
        asked = pages + own_slot * self.geometry.state_frames
        holds = self.holds
        if asked > self.frames.num_free:
            kept = holds.num_frames_of(hit) if hit is not None else 0
            if asked + kept > self.frames.num_frames - 1 - holds.num_frames:
                holds.counters.memory_shortages += 1
                return False
        return self.make_room(pages, own_slot, keep=hit.node if hit is not None else None)

    def _pages(self, count: int) -> np.ndarray:
        """Whole pages for `_take`: bool[count, frames_per_page]."""
        return np.ones((count, self.geometry.frames_per_page), bool)

    def _take(self, wanted: np.ndarray, own_slot: bool = False) -> tuple[np.ndarray, int]:
        """Takes new pages and, if asked for, a slot (else 0): both, or it raises.

        The pages are int32[n, frames_per_page], with a frame wherever `wanted` is true, and else 0.
        """
        slot = self.holds.allocate_slot() if own_slot else 0
        try:
            frames = self.holds.allocate_frames(int(np.count_nonzero(wanted)))
            pages: np.ndarray = np.zeros(wanted.shape, np.int32)
            pages[wanted] = frames
            return pages, slot
        except BaseException:
            self.holds.release_slot(slot)
            raise

    # --- growth ---------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Takes pages for up to `num_tokens` tokens; returns how many tokens the pages cover, perhaps fewer."""
        page_tokens, held = self.geometry.page_tokens, sequence.held
        if not page_tokens:
            return num_tokens
        # One page after the other: a little memory still lets the row take some steps.
        covered, new, per_page = len(held.pages) * page_tokens, 0, self.geometry.frames_per_page
        while covered < num_tokens and self.make_room((new + 1) * per_page):
            covered += page_tokens
            new += 1
        if new:
            own, _ = self._take(self._pages(new))
            held.pages = np.concatenate((held.pages, own))
        return covered

    def grow_chunk(self, sequence: Sequence, end: int) -> bool:
        """Takes the frames of layers with a window that a chunk up to `end` writes; False if there is no room."""
        geometry, pages = self.geometry, sequence.held.pages
        if not geometry.windowed:
            return True
        wanted: np.ndarray = np.zeros(pages.shape, bool)
        for group in geometry.windowed:
            part = slice(geometry.first_page(group, sequence.position), geometry.num_pages(end))
            wanted[part, group.frames] = pages[part, group.frames] == 0
        if not wanted.any():
            return True
        if not self.make_room(int(np.count_nonzero(wanted))):
            return False
        sequence.held.pages = pages + self._take(wanted)[0]
        return True

    def give_back(self, sequence: Sequence, *, later: bool = False) -> None:
        """Gives back the pages that no window of a sequence reads any more, nor a prompt that will go on from it.

        Args:
            later: a plan that is being made still reads them.
        """
        geometry, held = self.geometry, sequence.held
        if not geometry.windowed:
            return
        pages, resumed = held.pages, self._resumed(sequence)
        firsts = [geometry.first_page(group, resumed) for group in geometry.windowed]
        if firsts == held.first_pages:
            return
        gone: np.ndarray = np.zeros_like(pages)
        for group, first in zip(geometry.windowed, firsts, strict=True):
            gone[:first, group.frames] = pages[:first, group.frames]
        held.pages, held.first_pages = pages - gone, firsts
        if later:
            self._later_frames.append(gone)
        else:
            self.holds.release_frames(gone)

    def _resumed(self, sequence: Sequence) -> int:
        """The first position that the sequence, or a prompt that begins like it, may go on from.

        In exact mode its windows begin at its checkpoint, with or without a state; elsewhere they begin later.

        The next prompt may lack the last tokens: a stop string ends the text before them, or a chat template strips
        them. With recurrent layers it then needs a state before them. Else pages are enough, and one grain more of them
        is cheap.
        """
        held = sequence.held
        if self.geometry.has_state:
            return held.kept_checkpoint if held.kept_slot else held.real_checkpoint
        decodes = sequence.phase in (Phase.DECODE, Phase.STOPPING) and self.tree is not None
        return max(held.real_checkpoint - decodes * self.geometry.grain, 0)

    def plan_fold(self, sequence: Sequence) -> bool:
        """Finds the slot that a decoding sequence's next fold writes; False if there is none."""
        slot = self.slot_to_write(sequence)
        if slot is not None:
            sequence.held.slot = slot
        return slot is not None

    def slot_to_write(self, sequence: Sequence) -> int | None:
        """Where the sequence's next checkpoint goes: its present slot if it is the only holder, else another slot.

        The reserved slot is used first, then a new one. If there is no room for a new one, the sequence takes its
        checkpoint back from the tree. None if nothing helps. A sequence whose text may be cut leaves its present slot
        as it is, if there is room.
        """
        if not self.geometry.has_state:
            return 0
        held, slot = sequence.held, sequence.held.slot
        # Nobody else reads it, so a fold may overwrite it, and the reserve goes to others.
        if slot and self.slots.holders(slot) == 1:
            if not (self._keeps_present(sequence) and self._has_other_slot(sequence)):
                self.give_back_reserve(sequence)
                return slot
        if held.reserved_slot:
            slot, held.reserved_slot = held.reserved_slot, 0
            return slot
        if self.make_room(0, 1):
            return self.holds.allocate_slot()
        # If the tree is the other holder, its entry counts less than a row that could not go on.
        if slot and self.slots.holders(slot) == 2 and self.tree is not None:
            if self.tree.disown(slot):
                return slot
        return None

    def _keeps_present(self, sequence: Sequence) -> bool:
        """Whether the text of a decoding sequence may yet end before its next checkpoint."""
        held = sequence.held
        # A plan in flight that may fold has said where to, perhaps into the present slot. By the ring the device knows
        # whether it has folded, and then reads what the plan at hand names: that must be the same slot.
        folds = self.geometry.checkpoint(sequence.position) > held.real_checkpoint
        planned = folds or held.slot != held.real_slot or held.kept_slot
        return sequence.phase is Phase.DECODE and sequence.may_be_cut and not planned

    def _has_other_slot(self, sequence: Sequence) -> bool:
        """Whether there is a slot beside the present one. What waiting prompts may use is not evicted for it."""
        if sequence.held.reserved_slot:
            return True
        if self.tree is not None and len(self.tree.expected):
            free = self.frames.num_free >= self.geometry.state_frames
            return free and self.slots.num_free > 0
        return self.make_room(0, 1, needed=False)

    def give_back_reserve(self, sequence: Sequence) -> None:
        """Releases the slot that was reserved for the sequence's next checkpoint, and the one before the last."""
        self.holds.release_slot(sequence.held.reserved_slot)
        sequence.held.reserved_slot = 0
        self.let_go_kept(sequence.held)

    def let_go_kept(self, held: HeldMemory) -> None:
        """Releases the checkpoint before a sequence's last one, if it was kept."""
        self.holds.release_slot(held.kept_slot)
        held.kept_slot = held.kept_checkpoint = 0

    def advance(self, sequence: Sequence, checkpoint: int, slot: int) -> None:
        """Notes that a chunk in this plan leaves a checkpoint; the old one is kept until the plan's end."""
        held = sequence.held
        if slot != held.slot and held.slot:
            self._later_slots.append(held.slot)
        held.slot = held.real_slot = slot
        held.real_checkpoint = checkpoint

    def take_copies(self, sequence: Sequence) -> list:
        """Hands out the page copies of a sequence's first chunk; their sources are released after the plan."""
        copies, sequence.held.copies = sequence.held.copies, []
        if copies:
            self._later_frames.append(_sources(copies))
        return copies

    def begin_plan(self) -> None:
        """A plan is being made."""
        if self.narrowing is not None:
            self.narrowing.begin_plan()

    def end_plan(self, plan: Plan) -> None:
        """Releases what was kept for this plan's rows only.

        Tells the plan what it copies between tiers and forms, and which slots the device table lacks.
        """
        for frames in self._later_frames:
            self.holds.release_frames(frames)
        for slot in self._later_slots:
            self.holds.release_slot(slot)
        self._later_frames, self._later_slots = [], []
        if self.below is not None:
            self.below.end_plan(plan)
        if self.on_disk is not None:
            self.on_disk.end_plan(plan)
        if self.narrowing is not None:
            self.narrowing.end_plan(plan)
        plan.new_slots = self.slots.take_new()

    # --- results --------------------------------------------------------------------------------

    def settle(self, sequence: Sequence) -> None:
        """Moves a sequence's checkpoint on to its real position, which results have just changed.

        The ring folds before the first token past a grain boundary is fed.
        """
        held = sequence.held
        if sequence.phase is not Phase.STOPPING:
            self.let_go_kept(held)  # the text goes on after the results before these
        if sequence.real_position > held.real_checkpoint + self.geometry.grain:
            checkpoint = self.geometry.checkpoint(sequence.real_position)
            if self.geometry.has_state:
                folds = (checkpoint - held.real_checkpoint) // self.geometry.grain
                to_new = held.real_slot != held.slot
                self.holds.counters.folds_to_new += to_new
                self.holds.counters.folds_in_place += folds - to_new
            old, held.real_slot = held.real_slot, held.slot
            before, held.real_checkpoint = held.real_checkpoint, checkpoint
            if old and old != held.slot and sequence.may_be_cut and not held.kept_slot:
                held.kept_slot, held.kept_checkpoint = old, before
            elif old != held.slot:
                # A plan in flight may name it too, but the row has folded by then and reads the later one.
                self.holds.release_slot(old)
        self.give_back(sequence)

    # --- the prefix tree ------------------------------------------------------------------------

    def wanted(self, sequence: Sequence) -> list[int]:
        """Positions on the rest of a sequence's prompt at which a checkpoint is worth making."""
        end_node = sequence.announced.end_node
        if self.tree is None or end_node is None:
            return []
        branches, ends = self.tree.branch_points(end_node)
        return wanted_checkpoints(
            prompt_len=sequence.goal,
            after=sequence.position,
            grain=self.geometry.grain,
            branch_points=[*branches, *sequence.request.cache_breakpoints],
            prompt_ends=ends,
        )

    def announce(self, sequence: Sequence) -> None:
        """Makes a sequence's prompt known to the tree until it is computed, and marks it as expected while it waits."""
        if self.history is None or self.tree is None:
            return
        end_node = self.history.announce(sequence)
        expected = sequence.uses_cache and sequence.phase is Phase.WAITING
        sequence.announced = Announced(end_node=end_node, expected=expected)
        if expected:
            self.tree.expected.add(end_node, sequence.arrival)

    def arrived(self, sequence: Sequence) -> None:
        """Ends the mark as expected: the sequence has what it needs from the tree, or no longer wants it."""
        announced = sequence.announced
        if announced.expected and self.tree is not None and announced.end_node is not None:
            announced.expected = False
            self.tree.expected.remove(announced.end_node)

    def promise(self, sequence: Sequence) -> None:
        """Tells the tree which checkpoints a sequence's prefill will leave, if that may have changed."""
        if sequence.phase is not Phase.PREFILL:
            return
        tree, announced = self.tree, sequence.announced
        if tree is None or announced.end_node is None or announced.version == tree.version:
            return
        announced.version, announced.wanted = tree.version, self.wanted(sequence)
        for position in announced.wanted:
            tree.promise(sequence.owner, announced.end_node, position)

    def withdraw(self, sequence: Sequence) -> None:
        """Takes back a sequence's announcement and promises, because its prompt is computed or given up."""
        if self.tree is None:
            return
        self.tree.withdraw(sequence.owner)
        end_node = sequence.announced.end_node
        if end_node is not None:
            self.arrived(sequence)
            self.tree.conclude(end_node)
            sequence.announced = Announced()

    def foretell(self, sequence: Sequence) -> None:
        """Tells the tree where an aborted sequence may leave a checkpoint, once its plans in flight are received.

        Prompts that go on from there then wait for it.
        """
        if self.tree is None:
            return
        last = self.geometry.checkpoint(sequence.position)
        if not self.geometry.has_state:
            last = self.geometry.align(sequence.position)
        last = min(last, self.geometry.align(len(sequence.tokens)))
        if last:
            node = self.tree.announce(sequence.first_tokens(last))
            first = max(self._saved(sequence), self.geometry.grain)
            for position in range(first, last + 1, self.geometry.grain):
                self.tree.promise(sequence.owner, node, position)
            self.tree.conclude(node)
        if sequence.real_position >= sequence.goal:
            tokens = sequence.first_tokens(len(sequence.tokens))
            self.tree.ended(tokens, self._saved(sequence))

    def _saved(self, sequence: Sequence) -> int:
        """How many tokens of a sequence can go into the tree, after the plans received so far."""
        if self.geometry.has_state:
            return sequence.held.real_checkpoint
        return self.geometry.align(sequence.real_position)

    def publish(self, sequence: Sequence, left: list[int] | None = None) -> Node | None:
        """Puts what a sequence has computed, up to its real checkpoint, into the tree; returns the node there.

        Args:
            left: for a sequence that lets go of its checkpoint, as in `_leave`; None for one that goes on from it.
        """
        length, held = self._saved(sequence), sequence.held
        if self.tree is None or not length:
            return None
        tokens = sequence.first_tokens(length)
        self._note(sequence, tokens)
        if left is None:
            return self._fill(tokens, held.pages, held.real_slot)
        return self._leave(tokens, held.pages, held.real_slot, left)

    def _fill(self, tokens: np.ndarray, pages: np.ndarray, slot: int) -> Node | None:
        """Puts a prefix into the tree with a checkpoint that sequences go on from.

        Returns:
            The node, or None if there is no room for a narrow checkpoint. Outside a plan no room is made for it: the
            next plan saves what is evicted after it has narrowed.
        """
        tree, narrowing = self.tree, self.narrowing
        assert tree is not None, "memory: no tree to fill"
        if narrowing is None:
            return tree.fill(tokens, pages, slot)
        if there := narrowing.entry(tokens):
            return tree.fill(tokens, pages, there)
        room = tree.arena.has_free(self.slots.lengths[NARROW], 1)
        if not room and narrowing.planning:
            room = self.make_room(0, 1, needed=False, form=NARROW)
        if not room:
            self.holds.counters.narrow_without_room += 1
            return None
        narrow = self.slots.allocate(NARROW)
        node = tree.fill(tokens, pages, narrow)
        narrowing.into_new(slot, narrow, node)
        self.slots.release(narrow)
        return node

    def _leave(
        self, tokens: np.ndarray, pages: np.ndarray, slot: int, left: list[int]
    ) -> Node | None:
        """Puts a prefix into the tree with a checkpoint that its sequence lets go of.

        Args:
            left: what the tree took as it is. It is narrowed once nobody else holds it.
        """
        tree = self.tree
        assert tree is not None, "memory: no tree to fill"
        if self.narrowing is not None and self.slots.holders(slot) > 1:
            return self._fill(tokens, pages, slot)
        node = tree.fill(tokens, pages, slot)
        if self.narrowing is not None and slot in tree.arena.slot_nodes:
            left.append(slot)
        return node

    def _note(self, sequence: Sequence, tokens: np.ndarray) -> None:
        """Has what the tree takes of a sequence written to the disk."""
        if self.on_disk is not None:
            self.on_disk.note(sequence, tokens)

    def finish(self, sequence: Sequence, *, for_good: bool = True) -> None:
        """Takes all that a sequence holds. What can be reused goes to the tree, and the rest back to the pools.

        Nothing can be reused of what a damaged sequence has computed.

        Args:
            for_good: the sequence ends; otherwise it will wait again.
        """
        held, whole = sequence.held, not sequence.in_flight.damaged
        left: list[int] = []
        if for_good and whole and held.kept_slot and self.tree is not None:
            kept = sequence.first_tokens(held.kept_checkpoint)
            self._note(sequence, kept)
            self._leave(kept, held.pages, held.kept_slot, left)
        node = self.publish(sequence, left) if whole else None
        if not whole and self.tree is not None:
            self.tree.drop_path(sequence.prompt, sequence.request.hit.num_tokens)
        if for_good and self.history is not None:
            self.history.ended(sequence, node, saved=self._saved(sequence) if whole else None)
        self.holds.release_frames(held.pages)
        self.holds.release_frames(_sources(held.copies))
        self.holds.release_slot(held.real_slot)
        if held.slot != held.real_slot:
            self.holds.release_slot(held.slot)
        self.give_back_reserve(sequence)
        if self.narrowing is not None:
            for slot in left:
                self.narrowing.in_place(slot)
        sequence.held = HeldMemory()

    def reset_tree(self, sequences: Iterable[Sequence]) -> None:
        """Empties the prefix tree; sequences go on with what they hold, and their prompts are announced again."""
        if self.below is not None:
            self.below.forget()
        if self.on_disk is not None:
            self.on_disk.forget_all()
        if self.tree is not None:
            self.tree.reset()
        for sequence in sequences:
            if sequence.announced.end_node is not None:
                self.announce(sequence)

    def take_over(self, before: Memory) -> None:
        """Keeps what lies below the arena of a memory whose arena is lost, unless a change of it was broken off."""
        if self.below is None or before.below is None or self.tree is None or before.tree is None:
            return
        self.below.counters = before.below.counters
        try:
            before.tree.check_invariants()
            before.below.check_invariants()
        except Exception:
            return
        take_over(self.tree, before.tree, HOST)

    # --- looking at it --------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float]:
        """Present numbers and counters of frames, checkpoints and the prefix cache."""
        tree, cache = self.tree, {}
        if tree is not None:
            cache = {f"cache_{name}": v for name, v in tree.counters.as_dict().items()}
            cache["cache_nodes"] = tree.num_nodes
        if self.below is not None:
            below = self.below.stats(self.geometry.frame_bytes)
            cache |= {f"host_{name}": value for name, value in below.items()}
        if self.on_disk is not None:
            disk = self.on_disk.disk
            kind = "disk" if disk.is_disk else "handed_over"
            cache |= {f"{kind}_{name}": value for name, value in disk.stats().items()}
        return self.holds.stats(self.geometry.frame_bytes) | cache

    def check_invariants(self, sequences: list[Sequence]) -> None:
        """Recounts who holds which frame and slot, of these sequences and the tree; raises AssertionError with both
        numbers when they differ."""
        self.frames.check_invariants()
        self.slots.check_invariants()
        later = self._later_frames or self._later_slots or self.loads
        assert not later, "memory: a plan was left unfinished"
        all_held = [sequence.held for sequence in sequences]
        frames = Counter(frame for held in all_held for frame in given(held.pages).tolist())
        frames.update(frame for held in all_held for frame in _sources(held.copies))
        slots = Counter(
            slot
            for held in all_held
            for slot in (*{held.slot, held.real_slot}, held.kept_slot, held.reserved_slot)
            if slot
        )
        agree(
            "holds",
            live_page_frames=(self.holds.page_frames, len(frames)),
            live_checkpoints=(self.holds.num_slots, len(slots)),
        )
        if self.below is not None:
            self.below.check_invariants()
        agree(
            "holds",
            rows_with_narrow_checkpoints=(
                [slot for slot in slots if self.slots.length(slot) != self.slots.lengths[ROWS]],
                [],
            ),
        )
        if self.narrowing is not None:
            self.narrowing.check_invariants()
            slots.update(self.narrowing.held_slots)
            frames.update([n for frames in self.narrowing.held_frames for n in frames.tolist()])
        if self.tree is not None:
            self.tree.check_invariants()
            frames.update(self.page_holds.as_dict())
            slots.update(list(self.tree.arena.slot_nodes))
        for slot in slots:
            frames.update(self.slots.frames(slot))
        numbers = range(self.frames.num_frames)
        frame_holders = {frame: self.frames.holders(frame) for frame in numbers}
        agree(
            "memory",
            slots=(self.slots.num_held, len(slots)),
            slot_holders=({slot: self.slots.holders(slot) for slot in slots}, slots),
            frame_holders=(frame_holders, {frame: frames[frame] for frame in numbers}),
        )


def _sources(copies: list[tuple[Page, Page]]) -> list[int]:
    """The frames that page copies read; a sequence lists none twice."""
    return [frame for source, _ in copies for frame in source if frame]


def as_page(frames: np.ndarray) -> Page:
    """One row of a sequence's pages."""
    return tuple(frames.tolist())

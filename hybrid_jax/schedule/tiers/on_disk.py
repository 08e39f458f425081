"""The tier on disk, as plans see it: what the tree has taken is written, and comes back for a prompt that asks.

What a sequence has put into the tree is copied by a later plan, once its numbers are known to be finite. What is
evicted before that is copied by the plan that evicts it. Prompts are looked up by names of their prefixes, not in the
tree. A prompt waits while its prefix is read, and others go on. Then its plan copies the frames into the arena.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Set
from enum import Enum

import numpy as np

from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.cache.tree.copies import pools_of, shared_pages, whole_pages
from hybrid_jax.cache.tree.node import ARENA, DISK, OTHER_ENGINE, Match, Node
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.costs import Costs
from hybrid_jax.geometry import Geometry, cached_checkpoint_bytes
from hybrid_jax.schedule.plan import Incoming, Outgoing, Plan
from hybrid_jax.schedule.sequence import Phase, Queued, Sequence
from hybrid_jax.schedule.tiers.arrivals import arrive, frames_of, places_in, wanted_frames
from hybrid_jax.schedule.tiers.speeds import Speeds
from hybrid_jax.tiers.chain import Chain
from hybrid_jax.tiers.disk import Prefixes, Read
from hybrid_jax.tiers.parcel import FramePlace

MOST_READS = 4  # prefixes that are being read, or lie in the host's memory until their prompts run
MOST_TRIES = 3  # of a prompt, when files are damaged or what was there above is gone
MOST_WAITING = 4096  # prefixes that are to be written
A_WHILE_S = 0.05  # that a plan waits for a thread, if there is nothing else to do


class Fetched(Enum):
    """What came of asking for a prompt: nothing, something that is being read, or a hit in the arena.

    Without room for what was read, nothing came of it, but the tiers above have evicted for it.
    """

    NOTHING = "nothing"
    READING = "reading"
    NO_ROOM = "no room"
    LOADED = "loaded"


class OnDisk:
    """Moves prefixes between the arena and the disk.

    Args:
        tree: over the arena. geometry, disk: the engine's.
        most_frames: once a plan copies so many out, the rest waits; what is evicted then is dropped.
        costs: of the model. speeds: says what is loaded; None to load whatever is there.
    """

    def __init__(
        self,
        tree: RadixTree,
        geometry: Geometry,
        disk: Prefixes,
        *,
        most_frames: int,
        costs: Costs,
        speeds: Speeds | None = None,
    ) -> None:
        self._tree, self._geometry, self.disk = tree, geometry, disk
        self._most_frames, self._costs = most_frames, costs
        self._speeds = speeds if disk.is_disk else None
        self._unsettled: dict[Sequence, list[np.ndarray]] = {}
        self._waiting: dict[str, tuple[Chain, np.ndarray]] = {}  # by name, first come first
        self._saves: list[Outgoing] = []
        self._saved_frames = 0  # of these
        self._loads: list[Incoming] = []
        self._names: set[str] = set()  # that the plan that is being made will write
        self._pinned: list[Node] = []
        self._wanted_later: list[np.ndarray] = []  # after the plan that is being made
        self._reads: list[Read] = []
        self._without_room: set[Read] = set()  # of these

    # --- saving ---------------------------------------------------------------------------------

    @property
    def where(self) -> str:
        """Where what it loads comes from, in words."""
        return DISK if self.disk.is_disk else OTHER_ENGINE

    def note(self, sequence: Sequence, tokens: np.ndarray) -> None:
        """Notes that the tree has taken a prefix of a sequence."""
        if self.disk.early(self.disk.chain(tokens), len(tokens)):
            self._wanted_later.append(tokens)  # this plan writes it
            return
        self._unsettled.setdefault(sequence, []).append(tokens)

    def settle(self, sequence: Sequence) -> None:
        """Has what a sequence has computed written, if its numbers are known to be finite by now.

        They are once a token was drawn from what comes after them: what is not finite gives no token.
        """
        noted = self._unsettled.pop(sequence, [])
        if sequence.in_flight.damaged:
            return
        rest = []
        for tokens in noted:
            if len(sequence.tokens) > max(len(tokens), sequence.goal):
                self._want(tokens)
            else:
                rest.append(tokens)
        if rest and sequence.phase is not Phase.DONE:
            self._unsettled[sequence] = rest

    def seated(self, sequence: Sequence, hit_len: int) -> None:
        """A waiting sequence goes on after so many tokens of its prompt, which the arena has.

        They count as used on disk. If they are not there, perhaps because others took their place, a later plan writes
        them again.
        """
        self.forget(sequence)
        if not hit_len or not self.disk.writing:
            return
        tokens = sequence.prompt[:hit_len]
        chain = self.disk.chain(tokens)
        save = self.disk.wants(chain, hit_len)
        if save is not None and (self._tree.needs_slots or save.ends):
            self._wanted_later.append(tokens)
        else:
            self.disk.use(chain, hit_len)

    def _want(self, tokens: np.ndarray) -> None:
        if not self.disk.writing:
            return
        chain, length = self.disk.chain(tokens), len(tokens)
        if self._speeds is not None:
            num_bytes, flops = self._costs.prefix_bytes(length), self._costs.flops(length)
            if not self._speeds.is_sooner(DISK, num_bytes, flops):
                self.disk.counters.saves_slower += 1
                return
        if len(self._waiting) < MOST_WAITING:
            self._waiting[chain.name(length)] = chain, tokens
        else:
            self.disk.counters.saves_dropped += 1

    def keep(self, tree: RadixTree, node: Node, tier: int) -> None:
        """Is told of each eviction, while all of it is in place."""
        if tier != ARENA or not self._waiting:
            return
        tokens = node.prefix()
        found = self._waiting.pop(self.disk.chain(tokens).name(len(tokens)), None)
        if found is not None and not self._save(*found):
            self.disk.counters.saves_dropped += 1

    def _save(self, chain: Chain, tokens: np.ndarray, coming: Set[int] = frozenset()) -> bool:
        """Has the plan that is being made copy a prefix; False if it cannot.

        Args:
            coming: frames that the plan writes after it has made its copies. What is evicted is in none of them.
        """
        length, tree = len(tokens), self._tree
        save = self.disk.wants(chain, length, self._names)
        if save is None:
            return True
        room = self.disk.has_room and self._saved_frames < self._most_frames
        found = tree.match(tokens, least=0).found[ARENA]
        if found.hit_len != length or not room:
            return False
        frames = frames_of(tree, found.node, length, save.places)
        if found.node.pins or not coming.isdisjoint(frames.tolist()):
            return False  # it is not there yet when it would be copied
        self._names |= save.names
        give = functools.partial(self.disk.save, save)
        self._saves.append(Outgoing(arena=frames, give=give))
        self._saved_frames += len(frames)
        return True

    # --- loading --------------------------------------------------------------------------------

    def fetch(self, sequence: Sequence, match: Match) -> Fetched:
        """Has a prompt's prefix read if the disk has more of it than the tiers above, and then loaded.

        Args:
            match: its look-up.
        """
        queued, above = sequence.queued, max(found.hit_len for found in match.found)
        if above < queued.above:  # tiers above have given something away while it waited
            queued.num_reads = 0
        queued.above = above
        if queued.read is None:
            if queued.num_reads >= MOST_TRIES:
                return Fetched.NOTHING
            found = self._look(queued, sequence.looked_up, above)
            if found is None:
                queued.num_reads = MOST_TRIES
                return Fetched.NOTHING
            if self.disk.is_disk and len(self._reads) >= MOST_READS:
                return Fetched.READING
            queued.num_reads += 1
            queued.read = self.disk.read(*found)
            self._reads.append(queued.read)
        read = queued.read
        if not read.done:
            return Fetched.READING
        tokens = sequence.looked_up[: read.position]
        missing = self._missing(tokens)
        if read.failed or not set(missing) <= set(read.frames.pages):
            self.forget(sequence)
            return self.fetch(sequence, match)
        if self._speeds is not None and read not in self._without_room:
            self._speeds.loaded(DISK, read.num_bytes, read.seconds)
        if match.hit_len < read.position and not self._arrive(read, tokens, match):
            self.disk.counters.loads_without_room += read not in self._without_room
            self._without_room.add(read)  # until there is room, or the prompt begins without it
            return Fetched.NO_ROOM
        queued.num_reads = MOST_TRIES
        self.forget(sequence)
        return Fetched.LOADED if match.hit_len < read.position else Fetched.NOTHING

    def _look(
        self, queued: Queued, prompt: np.ndarray, above: int
    ) -> tuple[Chain, int, list[FramePlace]] | None:
        """What is to be read for a prompt, of which the tiers above have so many tokens; None for nothing."""
        chain, tree = self.disk.chain(prompt), self._tree
        held = whole_pages(tree, prompt, ARENA)[1] * self._geometry.page_tokens
        position = self.disk.find(chain, above, len(prompt) - 1, held=held)
        if not position or queued.slower.get(DISK) == position:
            return None
        missing = self._missing(prompt[:position])
        if not self._chooses(position, above, len(missing)):
            self.disk.counters.loads_slower += 1
            queued.slower[DISK] = position
            return None
        return chain, position, missing

    def _missing(self, tokens: np.ndarray) -> list[FramePlace]:
        """The places of frames of pages that the arena lacks of a prefix."""
        wanted = wanted_frames(self._geometry, len(tokens))
        return places_in(shared_pages(self._tree, tokens, wanted, ARENA)[1])

    def _chooses(self, position: int, above: int, num_frames: int) -> bool:
        if self._speeds is None:
            return True
        geometry = self._geometry
        num_bytes = num_frames * geometry.frame_bytes + cached_checkpoint_bytes(geometry)
        return self._speeds.choose(DISK, num_bytes, self._costs.flops(position, start=above))

    def _arrive(self, read: Read, tokens: np.ndarray, match: Match) -> bool:
        """Has the plan that is being made copy what was read into the arena; False if there is no room."""
        tree, counters = self._tree, self.disk.counters
        arrived = arrive(tree, self._geometry, tokens, read.frames)
        if arrived is None:
            return False
        node, come = arrived
        tree.pin(node)
        self._pinned.append(node)
        self._loads.append(come)
        counters.loads += 1
        counters.loaded_bytes += read.num_bytes
        counters.loaded_tokens += read.position - match.hit_len
        return True

    # --- around plans ---------------------------------------------------------------------------

    def end_plan(self, plan: Plan) -> None:
        """Tells a plan that is made what it copies, with some of what waits to be written."""
        written = self._written(plan) if self._waiting else ()
        coming = {frame for frames in written for frame in frames.tolist()}
        while self._waiting and self.disk.has_room and self._saved_frames < self._most_frames:
            name = next(iter(self._waiting))
            if not self._save(*self._waiting.pop(name), coming):
                self.disk.counters.saves_dropped += 1
        for node in self._pinned:
            self._tree.unpin(node)
        plan.to_disk, plan.from_disk = self._saves, self._loads
        self._saves, self._loads, self._pinned, self._names = [], [], [], set()
        self._saved_frames = 0
        for tokens in self._wanted_later:
            self._want(tokens)
        self._wanted_later = []

    def _written(self, plan: Plan) -> Iterator[np.ndarray]:
        """Frames of the cache that a plan writes after its copies: what it loads, and what its chunks publish."""
        yield from (load.arena for load in plan.loads)
        yield from (load.arena for load in self._loads)
        _, slots = pools_of(self._tree.arena)
        size = self._geometry.page_tokens
        for chunk in plan.prefill:
            if size:
                yield chunk.pages[chunk.start // size :].ravel()
            if chunk.write_slot:
                yield np.array(slots.frames(chunk.sequence.held.real_slot))

    @property
    def loads(self) -> bool:
        """Whether the plan that is being made loads something."""
        return bool(self._loads)

    @property
    def has_saves(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._waiting) and self.disk.writing

    def wait(self) -> bool:
        """Waits a while for what is read or written; returns whether a prompt may go on."""
        for read in self._reads:
            if not read.told:
                read.told = read.wait(A_WHILE_S)
                return read.told
        if self.has_saves:
            self.disk.wait_for_room(A_WHILE_S)
        return False

    @property
    def grain(self) -> int:
        """Tokens between positions where prompts can resume."""
        return self._geometry.grain

    @property
    def on_the_way(self) -> set[str]:
        """Names of prefixes that wait to be copied out, or for their numbers to be known to be finite."""
        unsettled = [tokens for found in self._unsettled.values() for tokens in found]
        return {*self._waiting, *(self.disk.chain(x).name(len(x)) for x in unsettled)}

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence asks for nothing any more."""
        if sequence.queued.read is not None:
            self._reads.remove(sequence.queued.read)
            self._without_room.discard(sequence.queued.read)
            sequence.queued.read = None

    def forget_all(self) -> None:
        """Writes nothing of what waits, because the tree is about to forget everything."""
        self._unsettled.clear()
        self._wanted_later.clear()
        self._waiting.clear()

    # --- looking at it ----------------------------------------------------------------------------

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        """Recounts what is read for these sequences, which wait, and checks that no plan was left unfinished.

        Raises:
            AssertionError: something differs; the message has both.
        """
        assert not (self._loads or self._pinned), "on disk: a plan was left unfinished"
        named = {name: chain.name(len(tokens)) for name, (chain, tokens) in self._waiting.items()}
        read_for = {sequence.queued.read for sequence in waiting} - {None}
        agree(
            "on disk",
            reads=(set(self._reads), read_for),
            reads_listed=(len(self._reads), len(read_for)),
            names=(named, {name: name for name in named}),
            unsettled_but_done=([s.owner for s in self._unsettled if s.phase is Phase.DONE], []),
        )

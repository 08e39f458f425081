"""Which sequences run, and which come next: waiting ones are seated in order of arrival, as rows and memory allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.cache.tree.node import HOSTS_MEMORY, Match
from hybrid_jax.config import EngineConfig
from hybrid_jax.schedule.bucket import shapes_of
from hybrid_jax.schedule.memory import Memory
from hybrid_jax.schedule.plan import SchedulerCounters
from hybrid_jax.schedule.sequence import Phase, Sequence
from hybrid_jax.schedule.tiers.on_disk import Fetched
from hybrid_jax.schedule.turn import Turn


class Seats:
    """Ring rows, and the sequences in them by age.

    Attributes:
        rows: the sequence of each ring row, or None.
        running: the sequences that have a row, oldest first.
    """

    def __init__(self, max_rows: int):
        self.rows: list[Sequence | None] = [None] * max_rows
        self.running: list[Sequence] = []

    @property
    def num_free(self) -> int:
        """Rows without a sequence."""
        return self.rows.count(None)

    def take(self, sequence: Sequence, position: int) -> None:
        """Gives a waiting sequence the lowest free row; `position` tokens of its prompt need no prefill."""
        sequence.phase = Phase.PREFILL
        sequence.stand_at(position)
        sequence.row = self.rows.index(None)
        self.rows[sequence.row] = sequence
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.arrival)

    def leave(self, sequence: Sequence) -> None:
        """Frees a sequence's row."""
        self.rows[sequence.row] = None
        self.running.remove(sequence)

    def close_holes(self, sizes: Iterable[int]) -> list[tuple[int, int]]:
        """Moves the highest decoding sequences into free lower rows, if that makes the decode shape smaller.

        Args:
            sizes: rows of decode shapes.

        Returns:
            (source, target) rows of the moves, in their order.
        """
        moves = []
        free = (row for row, sequence in enumerate(self.rows) if sequence is None)
        target = next(free, len(self.rows))
        for sequence in reversed([sequence for sequence in self.rows if sequence is not None]):
            source = sequence.row
            # The shape is that of the highest row. Between two of its sizes, a move would gain nothing.
            if not any(target < size <= source for size in sizes):
                break
            if sequence.phase is Phase.DECODE:
                self.rows[source], self.rows[target], sequence.row = None, sequence, target
                moves.append((source, target))
                target = next(free, len(self.rows))
        return moves

    def check_invariants(self) -> None:
        """Checks that every running sequence sits in the row that it names, and that nothing else sits in a row."""
        seated = {row: sequence for row, sequence in enumerate(self.rows) if sequence is not None}
        agree(
            "scheduler",
            rows=(list(seated), [s.row for s in seated.values()]),
            seated=(
                sorted(s.arrival for s in seated.values()),
                [s.arrival for s in self.running],
            ),
            seated_but_not_running=([s.owner for s in self.running if not s.running], []),
        )


class Admission:
    """The queue, and the way from it into a row.

    Args:
        memory, engine, counters, seats: those of the scheduler.

    Attributes:
        waiting: sequences without a row, first come first; preempted ones in front.
        patience: how many later requests may overtake one that waits for a checkpoint.
    """

    def __init__(
        self, memory: Memory, engine: EngineConfig, counters: SchedulerCounters, seats: Seats
    ):
        self.memory, self.counters, self.seats = memory, counters, seats
        self.waiting: deque[Sequence] = deque()
        self.patience = 8 * engine.max_rows
        self._forks = shapes_of(engine).forks

    def admit(self, turn: Turn) -> None:
        """Seats waiting requests in free rows, first come first, and plans their first chunks.

        It passes over requests that wait for a checkpoint. It also passes over requests that will fork, but keeps a row
        free for each of them.
        """
        admitted: list[Sequence] = []
        passed: list[Sequence] = []
        num_free = self.seats.num_free
        computing = self._sibling_groups_computed(turn)
        for sequence in self.waiting:
            if num_free <= 0 or turn.full:
                break
            if sequence.forks_from in computing:
                passed.append(sequence)
                num_free -= 1
                continue
            queued, match = sequence.queued, None
            patient = queued.num_overtaken < self.patience
            if self.memory.tree is not None and sequence.uses_cache:
                # As long as the promise stands there is no need to look the prompt up again.
                if patient and queued.waits_for is not None and queued.waits_for.promised_by:
                    passed.append(sequence)
                    continue
                match = self.memory.tree.match(sequence.looked_up, sequence.owner)
                if patient and match.pending is not None:
                    self.counters.waits += queued.waits_for is not match.pending
                    queued.waits_for = match.pending
                    passed.append(sequence)
                    continue
                match, found = self._fetch(sequence, match)
                if found is Fetched.READING:
                    passed.append(sequence)
                    continue
            hit_len = self.memory.start(sequence, match, alone=not self.seats.running)
            if hit_len is None:
                break  # not the next one: small requests would take the memory that a large one waits for
            loaded, where = self._came(sequence, hit_len)
            if self.memory.on_disk is not None:
                self.memory.on_disk.seated(sequence, hit_len)
            if sequence.request.is_new:
                hit, history = sequence.request.hit, self.memory.history
                hit.num_tokens = hit_len
                hit.look_up = (
                    history.explain(sequence, match, hit_len, loaded=loaded, loaded_from=where)
                    if history
                    else None
                )
            for earlier in passed:
                earlier.queued.num_overtaken += 1
            admitted.append(sequence)
            self.seats.take(sequence, hit_len)
            num_free -= 1
            if sequence.sibling_group is not None:
                computing = self._sibling_groups_computed(turn)
            # Before its chunk, which ends at a checkpoint that is wanted; and those behind it see what will come.
            self.memory.promise(sequence)
            turn.chunk(sequence)
        for sequence in admitted:
            self.waiting.remove(sequence)

    def _fetch(self, sequence: Sequence, match: Match) -> tuple[Match, Fetched]:
        """Has the plan load what lower tiers have of a prompt; returns its look-up, and what came of asking the disk.

        What the host's memory has is loaded only if the disk has no more.
        """
        memory, found = self.memory, Fetched.NOTHING
        tree = memory.tree
        assert tree is not None, "admission: there is no tree"
        if memory.on_disk is not None:
            found = memory.on_disk.fetch(sequence, match)
        length = match.hit_len
        if found in (Fetched.LOADED, Fetched.NO_ROOM):  # the arena has changed
            match = tree.match(sequence.looked_up, sequence.owner)
        where = HOSTS_MEMORY
        if memory.on_disk is not None and found is Fetched.LOADED:
            where = memory.on_disk.where
        there = found in (Fetched.READING, Fetched.LOADED)
        if not there and memory.below is not None:
            length = match.hit_len
            if memory.below.fetch(sequence.queued, match):
                match = tree.match(sequence.looked_up, sequence.owner)
        if match.hit_len > length:
            sequence.queued.came_from, sequence.queued.came_after = where, length
        return match, found

    def _came(self, sequence: Sequence, hit_len: int) -> tuple[int, str]:
        """How many tokens of a hit were copied into the arena for a prompt that is seated, and from where; counts them.

        The copies may be those of an earlier plan, in which there was no room for the prompt.
        """
        queued, memory = sequence.queued, self.memory
        where, queued.came_from = queued.came_from, ""
        loaded = max(hit_len - queued.came_after, 0) if where else 0
        if memory.on_disk is not None and where == memory.on_disk.where:
            memory.on_disk.disk.counters.hit_tokens += loaded
        elif where and memory.below is not None:
            memory.below.counters.hit_tokens += loaded
        return loaded, where if loaded else ""

    def look_again(self) -> None:
        """Looks every waiting prompt up at the next turn, because what some wait for is no longer in the tree."""
        for sequence in self.waiting:
            sequence.queued.waits_for = None

    def _sibling_groups_computed(self, turn: Turn) -> set[str]:
        """Groups in which one sequence computes the prompt now, so that the others will fork from it."""
        if not self._forks:
            return set()
        leaders = [s for s in self.seats.running if s.phase is Phase.PREFILL] + turn.ended
        return {s.sibling_group for s in leaders if s.sibling_group is not None}

    def fork(self, turn: Turn) -> None:
        """Seats waiting siblings of the sequences whose prompts end in this plan, as far as rows and memory allow."""
        computed = {s.sibling_group: s for s in turn.ended if s.sibling_group is not None}
        if not self._forks or not computed:
            return
        for sequence in list(self.waiting):
            parent = computed.get(sequence.forks_from or "")
            if parent is None:
                continue
            if not self.seats.num_free:
                break
            copies = self.memory.fork(parent, sequence)
            if copies is None:
                break
            self.waiting.remove(sequence)
            if self.memory.on_disk is not None:
                self.memory.on_disk.forget(sequence)
            self.seats.take(sequence, parent.goal)
            hit, of_parent = sequence.request.hit, parent.request.hit
            if sequence.request.is_new:
                hit.num_tokens, hit.look_up = of_parent.num_tokens, of_parent.look_up
            turn.fork(parent, sequence, copies)

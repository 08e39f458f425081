"""Resume points as the reuse statistics see them: what each is, and what became of it.

A point is where a checkpoint was or would have been cached: the end of a sequence, or where paths part. It stays
known as long as its tokens are, cached or not, so that what is learned does not depend on what is evicted.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from hybrid_jax.cache.policy.reuse import LIVED, LOST, STEPS, USED, LifeTables
from hybrid_jax.cache.tree.node import Node

UPDATE_EVERY = 32  # requests
TYPICAL_AGE = 32.0  # of a reuse, on the clock
GAP_MEMORY = 50  # reuses over which the typical gap is taken
END, BRANCH, OTHER, DECLARED = range(4)
FRESH, CONTINUED, PARTED = range(3)
SAME_PATH = 0.5  # share of a prompt that must be known before it counts as related to what is known
# Share of a prompt that may lie between a point and the branch that still goes on from it.
SAME_PLACE = 0.02
DEAD = 0.001  # of the parents' hazard
MAX_RUN, MAX_PARTED_RUN = 8, 2


@dataclass(eq=False, slots=True)
class Point:
    """One resume point.

    Attributes:
        node: it stands at the node's end; None once its tokens are forgotten.
        kind: END of a sequence, BRANCH where paths part, DECLARED by a caller as a shared prefix, or OTHER.
        relation: how the request that made it related to what was known: FRESH, CONTINUED or PARTED.
        detail: an end's run of such requests one after the other, a branch's share of the prompt in fifths.
        hits: how often it was used.
        split: 0, or 1 + the position, in fifths, at which a later path left its own.
        depth: octaves of its position.
        since: when it was last used or made, on the clock; request: the same in requests.
        life: number of the present life, which a use, a loss or a branch ends; 0 for none. Outdated events name an
            older one.
        life_class: its class in the present life.
        step: part of an age bin that its age is in.
    """

    node: Node | None = field(repr=False)
    kind: int
    relation: int
    detail: int
    depth: int
    hits: int = 0
    split: int = 0
    since: float = 0.0
    request: int = 0
    life: int = 0
    life_class: int = 0
    step: int = 0

    @property
    def features(self) -> tuple:
        """What its class is made of, the most telling first."""
        what = (self.kind, min(self.hits, 2), self.split > 0)
        detail = self.detail
        if self.split:
            detail = self.split
        elif self.kind == BRANCH and self.hits >= 2:
            detail = min(9, 4 + int(math.log2(self.hits)))
        return what, (self.relation, detail), self.depth

    @property
    def prior(self) -> float:
        """Factor on how likely a use is before anything was seen.

        A point that a later path left above it, or an end that was used already, is expected to be dead.
        """
        return DEAD if self.split or (self.kind == END and self.hits) else 1.0


@dataclass(frozen=True, kw_only=True)
class Relation:
    """How a prompt relates to what was known: FRESH, CONTINUED or PARTED, and the run it is part of."""

    kind: int
    run: int


class Points:
    """All points of one tree, their clock and their life tables.

    Attributes:
        tables: what was learned.
    """

    def __init__(self) -> None:
        self.tables = LifeTables()
        self._moved: list[dict[Node, None]] = []
        self._clock = 0.0
        self._request = 0
        self._mean_log_gap, self._num_gaps = 0.0, 0
        self._serial = 0
        # For each step the lives that have not come to it: (since, life, point), in the order in which they began.
        # Nothing comes after the last step, so the queue after it keeps none.
        self._coming: list[deque[tuple[float, int, Point]]] = [deque() for _ in self.tables.steps]
        self._coming.append(deque(maxlen=0))

    def watch(self) -> dict[Node, None]:
        """Nodes whose point changes its class or age bin from now on, until the caller empties it.

        Each is there once, and forgotten ones are not, so it stays small even if nothing is ever evicted.
        """
        self._moved.append({})
        return self._moved[-1]

    def next_request(self) -> None:
        """Lets time pass; every so many requests the tables are updated, so that every index may change."""
        self._request += 1
        gap = math.exp(self._mean_log_gap) if self._num_gaps else TYPICAL_AGE
        self._clock += TYPICAL_AGE / gap
        self._grow_older()
        if not self._request % UPDATE_EVERY:
            self.tables.update()

    def _grow_older(self) -> None:
        """Moves the lives that have come to a step on to the next."""
        now, queues = self._clock + 1, self._coming
        moved: dict[Node, None] = {}
        for step, age in enumerate(self.tables.steps):
            coming, born_by = queues[step], now - age
            while coming and coming[0][0] <= born_by:
                life = coming.popleft()
                _, number, point = life
                if point.life == number and point.node is not None:
                    if step % STEPS == 0:
                        self.tables.count(point.life_class, step // STEPS - 1, LIVED)
                    point.step = step
                    queues[step + 1].append(life)
                    moved[point.node] = None
        for watched in self._moved:
            watched.update(moved)

    # --- what happens to points -----------------------------------------------------------------

    def relate(self, last: Node | None, known_len: int, num_tokens: int) -> Relation:
        """How a prompt relates to what is known.

        Args:
            last: the deepest node with a point on its path, None without one.
            known_len: tokens of it that are known. num_tokens: all its tokens.
        """
        if known_len < SAME_PATH * num_tokens:
            return Relation(kind=FRESH, run=0)
        point = None if last is None else last.note
        near = last is not None and known_len - last.end < SAME_PLACE * num_tokens
        if point is not None and point.kind == END and near:
            run = point.detail if point.relation == CONTINUED else 0
            return Relation(kind=CONTINUED, run=min(run + 1, MAX_RUN))
        again = point is not None and point.relation == PARTED
        return Relation(kind=PARTED, run=MAX_PARTED_RUN if again else 1)

    def use(self, node: Node, *, timed: bool = True) -> None:
        """A request resumed here, or would have, had it been cached.

        Args:
            timed: the gap since the last use counts for the clock.
        """
        point = node.note
        self._end(point, USED)
        if timed and not (point.kind == BRANCH and point.hits >= 2):
            gap = max(1, self._request - point.request)
            self._num_gaps += 1
            weight = 1 / min(self._num_gaps, GAP_MEMORY)
            self._mean_log_gap += weight * (math.log(gap) - self._mean_log_gap)
        point.hits += 1
        self._begin(node)

    def add(self, node: Node, relation: Relation, kind: int, *, share: float = 0.0) -> None:
        """A checkpoint is, or would be, wanted at this node.

        A point that stands there already becomes a branch where paths part, and counts as used if a sequence ends.

        Args:
            relation: of the request that wants it.
            kind: END, BRANCH, DECLARED or OTHER.
            share: of the prompt that lies above a branch.
        """
        point = node.note
        if point is None or point.kind == OTHER:
            if point is not None:
                self._end(point, LOST)
                point.node = None
            node.note = Point(
                node=node,
                kind=kind,
                relation=relation.kind,
                detail=min(4, int(5 * share)) if kind == BRANCH else relation.run,
                depth=1 + int(math.log2(node.end + 1)),
            )
            self._begin(node)
        elif kind == BRANCH:
            point.kind = BRANCH
        elif kind == END:
            self._end(point, USED)
            point.hits += 1
            self._begin(node)

    def part(self, node: Node, position: int) -> None:
        """A later path has parted from this node's at `position`, above it."""
        point = node.note
        if not point.split:
            self._end(point, LOST)
            point.split = 1 + min(4, int(5 * position / node.end))
            self._begin(node)

    def forget(self, node: Node) -> None:
        """The node's tokens are known no more."""
        if node.note is not None:
            self._end(node.note, LOST)
            node.note.node = node.note = None
            for watched in self._moved:
                watched.pop(node, None)

    def _begin(self, node: Node) -> None:
        point = node.note
        self._serial += 1
        point.life, point.since, point.request = self._serial, self._clock, self._request
        point.life_class, point.step = self.tables.class_of(point.features, point.prior), 0
        self._coming[1].append((point.since, point.life, point))
        for watched in self._moved:
            watched[node] = None

    def _end(self, point: Point, how: int) -> None:
        if point.life:
            point.life = 0
            age_bin = self.tables.bin_of(1.0 + (self._clock - point.since))
            self.tables.count(point.life_class, age_bin, how)

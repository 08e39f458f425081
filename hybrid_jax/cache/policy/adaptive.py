"""Eviction by learned reuse: what has the least to gain per byte and unit of time goes first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from hybrid_jax.cache.policy.points import BRANCH, DECLARED, END, FRESH, OTHER, Points, Relation
from hybrid_jax.cache.policy.value import align_down, freed_bytes, saved_tokens
from hybrid_jax.cache.tree.eviction import EvictionPolicy
from hybrid_jax.cache.tree.node import Node, branch_point
from hybrid_jax.costs import Costs

if TYPE_CHECKING:
    from hybrid_jax.cache.tree.radix import RadixTree

STEPS_PER_OCTAVE = 8  # savings per byte are rounded to 9 %
SAVINGS_EXPONENT = 2 / 3
SHARED = (BRANCH, DECLARED)  # kinds of points that many prompts have in common


class Adaptive(EvictionPolicy):
    """Orders nodes by (tokens spared / bytes freed) ** SAVINGS_EXPONENT * index of their point.

    The index is the most uses per unit of time to be had from a point of that class and age (`reuse.LifeTables`).
    Nodes of one class, age step and (rounded) ratio share a queue, in which the one that came first goes first: a
    victim is found among the queues, however many nodes there are.

    Args:
        costs: of the model.
        points: of the tree, if another tier's order has them already.

    Attributes:
        points: all resume points of the tree, and what was learned.
        moved: as `Points.watch`.
    """

    learns = True

    def __init__(self, costs: Costs, points: Points | None = None):
        self.costs = costs
        self.points = Points() if points is None else points
        self.moved = self.points.watch()
        self.candidates: dict[Node, int] = {}  # the row of its queue
        self._rows: dict[tuple[int, int, int], int] = {}
        self._keys: list[tuple[int, int, int]] = []
        self._members: list[dict[Node, None]] = []
        self._free: list[int] = []
        # Of each queue's class and step, in the table of indices as one row.
        self._cells: np.ndarray = np.zeros(64, np.intp)
        self._values = np.full(64, np.inf)  # inf: no members

    def again(self) -> Adaptive:
        return Adaptive(self.costs, self.points)

    def add(self, node: Node) -> None:
        resumable = node.has_checkpoint(self.tier) or not self.costs.checkpoint_bytes
        if node.note is None and resumable:
            self.points.add(node, Relation(kind=FRESH, run=0), OTHER)
        freed = freed_bytes(node, self.costs, self.tier)
        ratio = saved_tokens(node, self.tier) / max(1, freed)
        level = round(STEPS_PER_OCTAVE * math.log2(ratio)) if ratio > 0 else -(1 << 16)
        self._put(node, self.candidates.get(node), level)

    def _put(self, node: Node, old: int | None, level: int) -> None:
        """Into the queue of its class, step and level, and out of the one it was in."""
        point = node.note  # None: pages whose checkpoint is about to come
        key = (0, 0, level) if point is None else (point.life_class, point.step, level)
        row = self._rows.get(key)
        if row is None:
            row = self._new_row(key)
        elif row == old:
            return
        if old is not None:
            self._take(node, old)
        self.candidates[node] = row
        self._members[row][node] = None

    def _new_row(self, key: tuple[int, int, int]) -> int:
        if self._free:
            row = self._free.pop()
            self._keys[row] = key
        else:
            row = len(self._keys)
            self._keys.append(key)
            self._members.append({})
            if row == len(self._values):
                self._cells = np.concatenate((self._cells, np.zeros(row, np.intp)))
                self._values = np.concatenate((self._values, np.full(row, np.inf)))
        self._rows[key] = row
        life_class, step, level = key
        self._cells[row] = life_class * len(self.points.tables.steps) + step
        self._values[row] = 2.0 ** (SAVINGS_EXPONENT * level / STEPS_PER_OCTAVE)
        return row

    def discard(self, node: Node) -> None:
        row = self.candidates.pop(node, None)
        if row is not None:
            self._take(node, row)

    def _take(self, node: Node, row: int) -> None:
        del self._members[row][node]
        if not self._members[row]:
            del self._rows[self._keys[row]]
            self._values[row] = np.inf
            self._free.append(row)

    def pop(self) -> Node | None:
        self.catch_up()
        if not self.candidates:
            return None
        used = len(self._keys)
        index: np.ndarray = self.points.tables.index.reshape(-1).take(self._cells[:used])
        row = int((self._values[:used] * index).argmin())
        node = next(iter(self._members[row]))
        self.discard(node)
        return node

    def catch_up(self) -> None:
        """Moves the nodes whose points grew older, or are of another class, to where they belong."""
        for node in self.moved:
            row = self.candidates.get(node)
            if row is not None:
                self._put(node, row, self._keys[row][2])  # its level is what it was
        self.moved.clear()

    def forget(self, node: Node) -> None:
        """The node's tokens are forgotten."""
        self.points.forget(node)

    def keeps(self, node: Node) -> bool:
        """Whether a point stands at the node's end."""
        return node.note is not None

    def asked(
        self, tree: RadixTree, end_node: Node, known_len: int, declared: Iterable[int] = ()
    ) -> Relation:
        """A prompt came: notes what it uses, where it parts from what is known, and how it relates to it.

        It uses the deepest point on its path. If that was evicted and it resumes from a branch further up, it uses
        the branch as well.

        Args:
            tree: where it was announced.
            end_node: the node at its end.
            known_len: tokens of it that were known before.
            declared: numbers of its leading tokens that others will share, as its caller says.
        """
        points, num_tokens = self.points, end_node.end
        points.next_request()
        path = end_node.path()
        last, resumed = self._deepest(path, min(known_len, num_tokens - 1))
        relation = points.relate(last, known_len, num_tokens)
        if last is not None:
            points.use(last)
        if resumed is not last and resumed is not None and resumed.note.kind in SHARED:
            points.use(resumed, timed=False)
        parts = branch_point(end_node, known_len)
        if parts is not None:
            if len(parts.children) == 2:
                self._part(parts, path)
            position = align_down(known_len, tree.grain)
            if position:
                branch = tree.boundary(end_node, position)
                points.add(branch, relation, BRANCH, share=known_len / num_tokens)
        for count in declared:
            if position := align_down(count, tree.grain):
                points.add(tree.boundary(end_node, position), relation, DECLARED)
        return relation

    def _deepest(self, path: list[Node], reach: int) -> tuple[Node | None, Node | None]:
        """The deepest node of a path with a point, up to `reach`, and the deepest of them that some tier has."""
        last = None
        for node in reversed(path):
            if node.note is not None and node.end <= reach:
                last = last or node
                if node.slots if self.costs.checkpoint_bytes else node.held:
                    return last, node
        return last, None

    def ended(self, node: Node, relation: Relation) -> None:
        """A sequence ends at this node; `relation` is what `asked` made of its prompt."""
        self.points.add(node, relation, END)

    def _part(self, node: Node, path: list[Node]) -> None:
        """Tells the points on the older path below `node` that a later path has left it here."""
        new = path[path.index(node) + 1]
        below = next(child for child in node.children.values() if child is not new)
        while True:
            if below.note is not None:
                self.points.part(below, node.end)
            if len(below.children) != 1:
                return
            (below,) = below.children.values()

"""Which cached entry goes first: an ordered set of candidates behind one small interface."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Protocol


class EvictionPolicy(Protocol):
    """Keeps the tree's candidates in order; every operation is O(log n).

    The tree calls `add` when a node becomes a candidate or its standing changed (it was used, its content
    grew), `discard` of any node that is none, `pop` to take the least valuable one out, and `forget` when a node
    left the tree, candidate or not.

    Attributes:
        leaves_only: nodes with cached children are no candidates; their checkpoints stay until the children went.
        touches_path: a use refreshes all nodes from the root, not the resume point alone.
        learns: it wants to hear of every prompt and every end, and weighs new entries against old ones. What it knows
            of a node it may keep in `Node.note`.
    """

    leaves_only: bool = False
    touches_path: bool = False
    learns: bool = False

    def add(self, node: Any) -> None: ...

    def discard(self, node: Any) -> None: ...

    def pop(self) -> Any | None: ...

    def forget(self, node: Any) -> None: ...

    def __contains__(self, node: Any) -> bool: ...

    def __len__(self) -> int: ...

    def asked(self, tree: Any, end_node: Any, known_len: int, declared: Iterable[int] = ()) -> Any:
        """A prompt came. What is returned comes back with `ended`.

        Args:
            tree: where it was announced. end_node: the node at its end.
            known_len: tokens of it that were known before.
            declared: numbers of its leading tokens that others will share, as its caller says.
        """

    def ended(self, node: Any, relation: Any) -> None:
        """A sequence ends at this node; `relation` is what `asked` made of its prompt."""


class OrderedCandidates:
    """A set ordered by `key`, smallest first: a heap whose outdated entries are skipped when they surface."""

    def __init__(self, key: Callable[[Any], Any]):
        self._key = key
        self._heap: list[tuple[Any, int, Any]] = []
        self._current: dict[Any, tuple[Any, int, Any]] = {}  # the valid entry of each node
        self._serial = 0

    def add(self, node: Any) -> None:
        """Inserts the node, or moves it to where its key says now."""
        key = self._key(node)
        current = self._current.get(node)
        if current is not None and current[0] == key:
            return
        self._serial += 1
        entry = self._current[node] = (key, self._serial, node)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 2 * len(self._current):
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)

    def discard(self, node: Any) -> None:
        self._current.pop(node, None)

    def forget(self, node: Any) -> None:
        """The node left the tree for good; nothing is kept of those that did."""

    def first(self) -> Any | None:
        """The node with the smallest key; None when there is none."""
        heap, current = self._heap, self._current
        while heap:
            node = heap[0][2]
            if current.get(node) is heap[0]:
                return node
            heapq.heappop(heap)
        return None

    def pop(self) -> Any | None:
        """Removes and returns the node with the smallest key; None when there is none."""
        node = self.first()
        if node is not None:
            heapq.heappop(self._heap)
            del self._current[node]
        return node

    def __contains__(self, node: Any) -> bool:
        return node in self._current

    def __len__(self) -> int:
        return len(self._current)


class LeastRecentlyUsed(OrderedCandidates, EvictionPolicy):
    """The node whose resume point was used longest ago goes first.

    Args:
        leaves_only: of whole paths the ends alone, and a use refreshes the path: as SGLang's tree does it.
    """

    def __init__(self, *, leaves_only: bool = False) -> None:
        super().__init__(key=attrgetter("last_use"))
        self.leaves_only = self.touches_path = leaves_only

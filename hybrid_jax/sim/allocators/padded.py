"""One pool of pages that hold a state each, whatever is in them."""

from __future__ import annotations

from collections import OrderedDict

from hybrid_jax.sim.allocators.pool_geometry import PoolGeometry
from hybrid_jax.sim.allocators.pools import Counters


class PaddedUnified:
    """Every page, of KV or of a state, takes the larger size of the two.

    On shortage the request that was given a page longest ago loses all of its pages. Nobody tells it: when it departs
    it gives back all numbers it was ever given, and those that are in use again belong to others.

    Args:
        geometry: sizes of a page and of a state.
        pool_bytes: the budget.
    """

    def __init__(self, geometry: PoolGeometry, pool_bytes: int):
        self.page_bytes = max(geometry.page_bytes, geometry.state_bytes)
        self.num_pages = pool_bytes // self.page_bytes
        self.counters = Counters()
        self.reserved_bytes = pool_bytes
        self.free = list(range(self.num_pages - 1, -1, -1))  # the next one last
        self.owners: dict[int, int] = {}  # page in use -> request
        self.held: OrderedDict[int, dict[int, None]] = OrderedDict()  # who was given one last, last
        self.given: dict[int, list[int]] = {}  # all numbers that a request believes to hold

    @property
    def used_bytes(self) -> int:
        return len(self.owners) * self.page_bytes

    def allocate(self, request: int, kind: int, num_units: int, calls: int = 1) -> int:
        if len(self.free) >= calls * num_units:  # as the calls would, one by one
            self._take(request, calls * num_units)
            return 0
        return sum(not self._allocate(request, num_units) for _ in range(calls))

    def release(self, request: int) -> None:
        self.note_peak()
        for page in self.given.pop(request, ()):
            owner = self.owners.pop(page, None)
            if owner is None:  # evicted and free, or given twice
                continue
            self.free.append(page)
            pages = self.held[owner]
            del pages[page]
            if not pages:
                del self.held[owner]

    def note_peak(self) -> None:
        """Called before memory becomes free: in between its use only rises."""
        self.counters.peak_bytes = max(self.counters.peak_bytes, self.used_bytes)

    def check_invariants(self) -> None:
        """Every page is free or in use, once, and held by its owner."""
        pages = sorted([*self.free, *self.owners])
        held = {page: request for request, pages in self.held.items() for page in pages}
        if pages != list(range(self.num_pages)) or held != self.owners:
            raise AssertionError(
                f"padded pool: {len(self.free)} pages free, {len(self.owners)} in use, "
                f"{len(held)} held, of {self.num_pages} pages"
            )

    def _allocate(self, request: int, num_units: int) -> bool:
        if len(self.free) < num_units:
            self._evict_one(request)
            if len(self.free) < num_units:
                return False
        self._take(request, num_units)
        return True

    def _take(self, request: int, num_units: int) -> None:
        pages = self.free[: -num_units - 1 : -1]
        del self.free[-num_units:]
        new = dict.fromkeys(pages, request)
        self.owners |= new
        self.held.setdefault(request, {}).update(dict.fromkeys(pages))
        self.held.move_to_end(request)
        self.given.setdefault(request, []).extend(pages)

    def _evict_one(self, asker: int) -> None:
        if not self.held:
            return
        self.note_peak()
        victim, pages = self.held.popitem(last=False)
        for page in pages:
            del self.owners[page]
        self.free += pages
        self.counters.count_eviction(victim, asker, len(pages))

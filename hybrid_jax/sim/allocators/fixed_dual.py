"""Two pools of fixed sizes, one for each kind of memory."""

from __future__ import annotations

from hybrid_jax.sim.allocators.pool_geometry import PoolGeometry
from hybrid_jax.sim.allocators.pools import KV, STATE, Counters, UnitPool


class FixedDual:
    """A share of the bytes is for states, the rest for KV, for ever.

    On shortage one request loses all it has in that pool: the one that was given something there longest ago, even if
    it is the one that asks. Nobody tells it.

    Args:
        geometry: sizes of a page and of a state.
        pool_bytes: the budget.
        state_share: of the budget, for states.
    """

    def __init__(self, geometry: PoolGeometry, pool_bytes: int, state_share: float):
        state_bytes = int(pool_bytes * state_share)
        self.pools = (
            UnitPool((pool_bytes - state_bytes) // geometry.page_bytes, geometry.page_bytes),
            UnitPool(state_bytes // geometry.state_bytes, geometry.state_bytes),
        )
        self.counters = Counters()
        self.pool_bytes = self.reserved_bytes = pool_bytes

    @property
    def used_bytes(self) -> int:
        return self.pools[KV].used_bytes + self.pools[STATE].used_bytes

    def allocate(self, request: int, kind: int, num_units: int, calls: int = 1) -> int:
        pool = self.pools[kind]
        if len(pool.free) >= calls * num_units:  # as the calls would, one by one
            pool.take(request, calls * num_units)
            return 0
        return sum(not self._allocate(request, kind, num_units) for _ in range(calls))

    def release(self, request: int) -> None:
        self.note_peak()
        for pool in self.pools:
            pool.give_back(request)

    def note_peak(self) -> None:
        """Called before memory becomes free: in between its use only rises."""
        self.counters.peak_bytes = max(self.counters.peak_bytes, self.used_bytes)

    def check_invariants(self) -> None:
        """Both pools add up, and are no larger than the budget."""
        for pool in self.pools:
            pool.check_invariants()
        size = sum(pool.num_units * pool.unit_bytes for pool in self.pools)
        if size > self.pool_bytes:
            raise AssertionError(f"pools: {size} bytes in units, of {self.pool_bytes} bytes")

    def _allocate(self, request: int, kind: int, num_units: int) -> bool:
        pool = self.pools[kind]
        if len(pool.free) < num_units:
            self._evict_one(pool, request)
            if len(pool.free) < num_units:
                return False
        pool.take(request, num_units)
        return True

    def _evict_one(self, pool: UnitPool, asker: int) -> None:
        self.note_peak()
        evicted = pool.evict_oldest()
        if evicted is not None:
            victim, num_units = evicted
            self.counters.count_eviction(victim, asker, num_units)

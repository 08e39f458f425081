"""Asymmetric virtual memory paging as published (arXiv 2605.22416): two pools, and capacity that moves between them."""

from __future__ import annotations

from collections import deque

from hybrid_jax.sim.allocators.fixed_dual import FixedDual
from hybrid_jax.sim.allocators.pool_geometry import PoolGeometry
from hybrid_jax.sim.allocators.pools import KV, STATE, UnitPool

BALANCED, KV_PRESSURED, STATE_PRESSURED = "BALANCED", "KV_PRESSURED", "STATE_PRESSURED"
LOG_LEN = 128  # transitions that are remembered
LOW, HIGH = 0.05, 0.30  # free shares of a pool: pressured below, able to give above
MIN_INTERVAL = 1000  # operations between rebalances


class Avmp(FixedDual):
    """`FixedDual`, and on a shortage that eviction does not end, a batch of the other pool's units changes its kind.

    Only the last units of a pool can go, and only if all of them are free. Bytes that make no whole unit of the other
    kind are lost. Each pool has a store of the whole budget, so twice the budget is reserved.

    Thresholds and interval hold for rebalances that are not forced. The published allocator forces every one, so they
    shape `state` and `transitions` alone; a study that varies them finds equal results.

    Args:
        geometry, pool_bytes, state_share: as `FixedDual` has them.
        batch: units of the giving pool that one rebalance moves; None turns it off.
        low, high: free shares of a pool.
        min_interval: operations between rebalances.

    Attributes:
        num_ops: calls so far.
        state: BALANCED, KV_PRESSURED or STATE_PRESSURED.
        transitions: the last ones, (number of the call, from, to); num_transitions counts all.
        throttled: rebalances that thresholds or interval stopped.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        pool_bytes: int,
        state_share: float,
        *,
        batch: int | None = None,
        low: float = LOW,
        high: float = HIGH,
        min_interval: int = MIN_INTERVAL,
    ):
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"avmp: thresholds must be 0 <= low <= high <= 1, got {low:g} and {high:g}"
            )
        super().__init__(geometry, pool_bytes, state_share)
        self.reserved_bytes = 2 * pool_bytes
        self.batch, self.low, self.high, self.min_interval = batch, low, high, min_interval
        self.num_ops = self.num_transitions = self.throttled = 0
        self.state = BALANCED
        self.transitions: deque[tuple[int, str, str]] = deque(maxlen=LOG_LEN)
        self._last_rebalance: int | None = None

    def allocate(self, request: int, kind: int, num_units: int, calls: int = 1) -> int:
        pool = self.pools[kind]
        if len(pool.free) >= calls * num_units:
            pool.take(request, calls * num_units)
            self.num_ops += calls
            if self.compute_state() != self.state:
                self._find_transition(kind, num_units, calls)
            return 0
        failed = 0
        for _ in range(calls):
            self.num_ops += 1
            failed += not self._allocate(request, kind, num_units)
            self._observe(self.num_ops)
        return failed

    def release(self, request: int) -> None:
        super().release(request)
        self.num_ops += 1
        self._observe(self.num_ops)

    def rebalance(self, recipient: int, *, forced: bool = False) -> bool:
        """Moves one batch of capacity to a kind; False, and nothing changes, if that was refused."""
        if self.batch is None or not (forced or self._may_rebalance(recipient)):
            return False
        giving, taking = self.pools[1 - recipient], self.pools[recipient]
        donor_bytes = self.batch * giving.unit_bytes
        gained, wasted = divmod(donor_bytes, taking.unit_bytes)
        if not giving.shrink(self.batch):
            self.counters.rebalances_refused += 1
            return False
        if (taking.num_units + gained) * taking.unit_bytes > self.pool_bytes:
            giving.grow(self.batch)  # as published; one budget for both never comes here
            self.counters.rebalances_refused += 1
            return False
        taking.grow(gained)
        self.counters.rebalances += 1
        self.counters.migrated_bytes += donor_bytes - wasted
        self.counters.wasted_bytes += wasted
        self._last_rebalance = self.num_ops
        self._observe(self.num_ops)
        return True

    def compute_state(self, kv_more: int = 0, state_more: int = 0) -> str:
        """Which pool is short of memory that the other has, as it is or with so many more units free."""
        kv, state = self._free_share(KV, kv_more), self._free_share(STATE, state_more)
        if kv < self.low and state > self.high:
            return KV_PRESSURED
        if state < self.low and kv > self.high:
            return STATE_PRESSURED
        return BALANCED

    def _allocate(self, request: int, kind: int, num_units: int) -> bool:
        pool = self.pools[kind]
        if self._take(pool, request, num_units):
            return True
        self._evict_one(pool, request)
        if self._take(pool, request, num_units):
            return True
        return self.rebalance(kind, forced=True) and self._take(pool, request, num_units)

    def _take(self, pool: UnitPool, request: int, num_units: int) -> bool:
        if len(pool.free) < num_units:
            pool.free.reverse()  # all were popped, and pushed back in the order in which they came
            return False
        pool.take(request, num_units)
        return True

    def _may_rebalance(self, recipient: int) -> bool:
        wanted = KV_PRESSURED if recipient == KV else STATE_PRESSURED
        last = self._last_rebalance
        waited = last is None or self.num_ops - last >= self.min_interval
        if waited and self.compute_state() == wanted:
            return True
        self.throttled += 1
        return False

    def _free_share(self, kind: int, more: int) -> float:
        pool = self.pools[kind]
        return (len(pool.free) + more) / pool.num_units if pool.num_units else 0.0

    def _observe(self, op: int) -> None:
        state = self.compute_state()
        if state != self.state:
            self.transitions.append((op, self.state, state))
            self.num_transitions += 1
            self.state = state

    def _find_transition(self, kind: int, num_units: int, calls: int) -> None:
        """Logs the change of state at the call that made it: as one pool only drained, there was one change."""
        target = self.compute_state()
        for later in range(calls - 1, -1, -1):  # calls that came after
            more = later * num_units
            if self.compute_state(*((more, 0) if kind == KV else (0, more))) == target:
                return self._observe(self.num_ops - later)

"""Allocators that hand out equal units, in honest use: they refuse where the published ones take from who runs."""

from __future__ import annotations

from hybrid_jax.sim.allocators.avmp import Avmp
from hybrid_jax.sim.allocators.fixed_dual import FixedDual
from hybrid_jax.sim.allocators.honest_memory import HonestCounters
from hybrid_jax.sim.allocators.honest_models import HonestModel
from hybrid_jax.sim.allocators.pools import KV, STATE, UnitPool


class UnitsMemory:
    """KV in units of one pool, states in units of another, or of the same one.

    Args:
        pools: for KV and for states; the same object twice for one pool.
        step_tokens, step_units: KV grows by so many tokens, which take so many units.
        state_units: of one request's state.
        reserved_bytes: taken from the device.
    """

    def __init__(
        self,
        pools: tuple[UnitPool, UnitPool],
        *,
        step_tokens: int,
        step_units: int,
        state_units: int,
        reserved_bytes: int,
    ):
        self.counters = HonestCounters()
        self.pools, self.reserved_bytes = pools, reserved_bytes
        self.step_tokens = self.prefix_tokens = step_tokens
        self.step_units, self.state_units = step_units, state_units
        self.slot_bytes = state_units * pools[STATE].unit_bytes

    @property
    def shared(self) -> bool:
        return self.pools[KV] is self.pools[STATE]

    @property
    def used_bytes(self) -> int:
        return sum(pool.used_bytes for pool in self.pools[: 1 if self.shared else 2])

    def fits_alone(self, num_tokens: int) -> bool:
        kv, state = self._units(num_tokens), self.state_units
        if self.shared:
            return kv + state <= self.pools[KV].num_units
        return kv <= self.pools[KV].num_units and state <= self.pools[STATE].num_units

    def admit(self, request: int, num_tokens: int) -> bool:
        kv, state = self._units(num_tokens), self.state_units
        self.counters.allocate_calls += self.step_units + state
        if not self._has_room(kv, state):
            return False
        self.pools[KV].take(_key(request, KV), kv)
        self.pools[STATE].take(_key(request, STATE), state)
        return True

    def grow(self, request: int, num_tokens: int) -> bool:
        more = self._units(num_tokens) - self._held(request, KV)
        if more <= 0:
            return True
        self.counters.allocate_calls += self.step_units
        if not self._has_room(more, 0):
            return False
        self.pools[KV].take(_key(request, KV), more)
        return True

    def release(self, request: int) -> None:
        for kind, pool in enumerate(self.pools):
            pool.give_back(_key(request, kind))

    def holds(self, request: int) -> tuple[int, bool]:
        steps = self._held(request, KV) // self.step_units
        return steps * self.step_tokens, self._held(request, STATE) == self.state_units

    def row_bytes(self, num_rows: int) -> int:
        return 0

    def check_invariants(self) -> None:
        for pool in self.pools:
            pool.check_invariants()

    def _held(self, request: int, kind: int) -> int:
        return len(self.pools[kind].held.get(_key(request, kind), ()))

    def _units(self, num_tokens: int) -> int:
        return -(-num_tokens // self.step_tokens) * self.step_units

    def _has_room(self, kv: int, state: int) -> bool:
        if self.shared:
            return kv + state <= len(self.pools[KV].free)
        return kv <= len(self.pools[KV].free) and state <= len(self.pools[STATE].free)


def _key(request: int, kind: int) -> int:
    """Of a request's units of one kind, which may lie in one pool with the other."""
    return 2 * request + kind


def fixed_dual(model: HonestModel, pool_bytes: int, state_share: float) -> UnitsMemory:
    """A share of the bytes for states, the rest for KV, layer by layer."""
    return UnitsMemory(
        FixedDual(model.layers, pool_bytes, state_share).pools, **_by_layer(model, pool_bytes)
    )


def padded_unified(model: HonestModel, pool_bytes: int) -> UnitsMemory:
    """One pool, every page of a layer as large as a state of a layer."""
    unit = max(model.layers.page_bytes, model.layers.state_bytes)
    pool = UnitPool(pool_bytes // unit, unit)
    return UnitsMemory((pool, pool), **_by_layer(model, pool_bytes))


def vllm_big_block(model: HonestModel, pool_bytes: int) -> UnitsMemory:
    """One pool, attention blocks of so many tokens that one takes at least as much as a layer's state.

    Layers are grouped, as many in a group as there are attention layers; a block serves a group, and the state of a
    group of recurrent layers takes one.
    """
    layers = model.layers
    tokens = layers.page_tokens * -(-layers.state_bytes // layers.page_bytes)
    unit = tokens * model.token_bytes
    pool = UnitPool(pool_bytes // unit, unit)
    return UnitsMemory(
        (pool, pool),
        step_tokens=tokens,
        step_units=1,
        state_units=-(-layers.num_states // layers.num_pages_each),
        reserved_bytes=pool_bytes,
    )


def _by_layer(model: HonestModel, reserved_bytes: int) -> dict[str, int]:
    return {
        "step_tokens": model.layers.page_tokens,
        "step_units": model.layers.num_pages_each,
        "state_units": model.layers.num_states,
        "reserved_bytes": reserved_bytes,
    }


class AvmpMemory(UnitsMemory):
    """AVMP where nobody may be evicted: on a shortage one rebalance of each kind that is short, and then a refusal.

    Args:
        model, pool_bytes: sizes.
        state_share: of the bytes, at the start.
        batch: units that a rebalance takes from the other pool; None for none.
    """

    def __init__(
        self, model: HonestModel, pool_bytes: int, state_share: float, batch: int | None = None
    ):
        self.avmp = Avmp(model.layers, pool_bytes, state_share, batch=batch)
        super().__init__(self.avmp.pools, **_by_layer(model, self.avmp.reserved_bytes))

    def fits_alone(self, num_tokens: int) -> bool:
        if self.avmp.batch is None:
            return super().fits_alone(num_tokens)
        sizes = zip((self._units(num_tokens), self.state_units), self.pools, strict=True)
        return sum(units * pool.unit_bytes for units, pool in sizes) <= self.avmp.pool_bytes

    def _has_room(self, kv: int, state: int) -> bool:
        for kind, units in ((KV, kv), (STATE, state)):
            pool = self.pools[kind]
            if len(pool.free) < units:
                self._rebalance(kind)
                if len(pool.free) < units:
                    return False
        return super()._has_room(kv, state)

    def _rebalance(self, kind: int) -> None:
        self.avmp.num_ops += 1
        self.avmp.rebalance(kind, forced=True)
        counters = self.avmp.counters
        self.counters.rebalances = counters.rebalances
        self.counters.rebalances_refused = counters.rebalances_refused
        self.counters.migrated_bytes = counters.migrated_bytes
        self.counters.wasted_bytes = counters.wasted_bytes

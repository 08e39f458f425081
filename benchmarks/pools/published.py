"""The published allocators as they were published: on a shortage they take memory from requests that still run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.pools.model_sizes import LayerSizes
from hybrid_jax.cache.pools.recount import agree

KV, STATE = 0, 1  # kinds of memory: pages of keys and values, recurrent states


@dataclass(kw_only=True)
class Counters:
    """What an allocator did.

    Attributes:
        allocate_calls: calls for memory, by the allocator's own count. Paper mode counts them itself.
        evictions: times that a running request lost all it had in a pool; self_evictions: times that it was the one
            that asked. pages_evicted: units lost that way. victims: requests that lost some.
        rebalances, rebalances_refused: moves of capacity between the kinds, done and refused.
        migrated_bytes, wasted_bytes: capacity that changed its kind, and that was lost for ever while doing so.
        copied_bytes: moved to make room.
        folds_in_place, folds_to_new: checkpoints written over the last one, and to new memory.
        peak_bytes: most bytes of units in use at once. Only paper mode keeps it.
    """

    allocate_calls: int = 0
    evictions: int = 0
    self_evictions: int = 0
    pages_evicted: int = 0
    victims: set[int] = field(default_factory=set)
    rebalances: int = 0
    rebalances_refused: int = 0
    migrated_bytes: int = 0
    wasted_bytes: int = 0
    copied_bytes: int = 0
    folds_in_place: int = 0
    folds_to_new: int = 0
    peak_bytes: int = 0


class UnitPool:
    """Units of one size, by number. The unit that became free last goes out first.

    Attributes:
        free: numbers of the free units, the next one last.
        held: request -> its units as they were allocated. The request that was given some last stands last.
    """

    def __init__(self, num_units: int, unit_bytes: int):
        self.num_units, self.unit_bytes = num_units, unit_bytes
        self.free = list(range(num_units - 1, -1, -1))
        self.held: OrderedDict[int, list[int]] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """Bytes of the units in use."""
        return (self.num_units - len(self.free)) * self.unit_bytes

    def take(self, request: int, num_units: int) -> Iterable[int]:
        """Gives units that are free, as the caller has checked; returns their numbers."""
        free = self.free
        units = free[: -num_units - 1 : -1]
        del free[-num_units:]
        mine = self.held.get(request)
        if mine is None:
            self.held[request] = units
        else:
            mine += units
            self.held.move_to_end(request)
        return units

    def give_back(self, request: int) -> None:
        """All units of a request become free."""
        self.free += self.held.pop(request, ())

    def evict_oldest(self) -> tuple[int, int] | None:
        """Frees the units of the request that was given some longest ago; returns (request, units), or None."""
        if not self.held:
            return None
        victim, units = self.held.popitem(last=False)
        self.free += units
        return victim, len(units)

    def shrink(self, num_units: int) -> bool:
        """Gives up the units of the highest numbers; False, and nothing changes, if one of them is in use."""
        smaller = self.num_units - num_units
        if num_units > len(self.free):  # also keeps `smaller` from falling below 0
            return False
        kept = [unit for unit in self.free if unit < smaller]
        if len(self.free) - len(kept) != num_units:
            return False
        self.free, self.num_units = kept, smaller
        return True

    def grow(self, num_units: int) -> None:
        """New units of the next numbers become free; the highest of them goes out first."""
        self.free += range(self.num_units, self.num_units + num_units)
        self.num_units += num_units

    def check_invariants(self) -> None:
        """Every unit is free or held by one request, once; raises AssertionError with both lists."""
        units = sorted(self.free + [unit for held in self.held.values() for unit in held])
        agree("pool", units=(list(range(self.num_units)), units))


class StaleNumbersPool(UnitPool):
    """A pool whose requests give back every number they were ever given, whoever has it by then.

    Attributes:
        owners: unit in use -> request.
        given: request -> all numbers that it believes to hold.
    """

    def __init__(self, num_units: int, unit_bytes: int):
        super().__init__(num_units, unit_bytes)
        self.owners: dict[int, int] = {}
        self.given: dict[int, list[int]] = {}

    def take(self, request: int, num_units: int) -> Iterable[int]:
        units = super().take(request, num_units)
        self.owners |= dict.fromkeys(units, request)
        self.given.setdefault(request, []).extend(units)
        return units

    def give_back(self, request: int) -> None:
        lost: dict[int, set[int]] = {}
        for unit in self.given.pop(request, ()):
            owner = self.owners.pop(unit, None)
            if owner is not None:  # else it was evicted and is free, or was given twice
                self.free.append(unit)
                lost.setdefault(owner, set()).add(unit)
        for owner, units in lost.items():
            self.held[owner] = [unit for unit in self.held[owner] if unit not in units]
            if not self.held[owner]:
                del self.held[owner]

    def evict_oldest(self) -> tuple[int, int] | None:
        for unit in next(iter(self.held.values()), ()):
            del self.owners[unit]
        return super().evict_oldest()

    def check_invariants(self) -> None:
        super().check_invariants()
        held = {unit: request for request, units in self.held.items() for unit in units}
        agree("pool", owners=(self.owners, held))


class FixedDual:
    """A share of the bytes is for states, the rest for KV, for ever.

    On shortage one request loses all it has in that pool: the one that was given something there longest ago, even if
    it is the one that asks. Nobody tells it. A failed call leaves a request what it held.

    Args:
        layers: sizes of a page and of a state.
        pool_bytes: the budget.
        state_share: of the budget, for states.

    Attributes:
        pools: for KV and for states; the same one twice if both share it.
        counters: what happened so far.
        reserved_bytes: memory that the allocator takes from the device, whatever is in use.
    """

    def __init__(self, layers: LayerSizes, pool_bytes: int, state_share: float):
        state_bytes = int(pool_bytes * state_share)
        self.pools = (
            UnitPool((pool_bytes - state_bytes) // layers.page_bytes, layers.page_bytes),
            UnitPool(state_bytes // layers.state_bytes, layers.state_bytes),
        )
        self.counters = Counters()
        self.pool_bytes = self.reserved_bytes = pool_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the units in use."""
        return sum(pool.used_bytes for pool in dict.fromkeys(self.pools))

    def allocate(self, request: int, kind: int, num_units: int, calls: int = 1) -> int:
        """Makes equal calls for so many units each, one after the other; returns how many of them failed."""
        return sum(not self._allocate(request, kind, num_units) for _ in range(calls))

    def release(self, request: int) -> None:
        """Takes back all that a request holds."""
        self._note_peak()
        for pool in dict.fromkeys(self.pools):
            pool.give_back(request)

    def check_invariants(self) -> None:
        """The pools add up, and are no larger than the budget; raises AssertionError with both numbers."""
        pools = dict.fromkeys(self.pools)
        for pool in pools:
            pool.check_invariants()
        size = sum(pool.num_units * pool.unit_bytes for pool in pools)
        assert size <= self.pool_bytes, f"pools: {size} bytes in units, of {self.pool_bytes} bytes"

    def _note_peak(self) -> None:
        """Called before memory becomes free. In between, what is in use only rises."""
        self.counters.peak_bytes = max(self.counters.peak_bytes, self.used_bytes)

    def _allocate(self, request: int, kind: int, num_units: int) -> bool:
        pool = self.pools[kind]
        if self._take(pool, request, num_units):
            return True
        self._evict_one(pool, request)
        return self._take(pool, request, num_units)

    def _take(self, pool: UnitPool, request: int, num_units: int) -> bool:
        if len(pool.free) < num_units:
            return False
        pool.take(request, num_units)
        return True

    def _evict_one(self, pool: UnitPool, asker: int) -> None:
        self._note_peak()
        evicted = pool.evict_oldest()
        if evicted is not None:
            victim, num_units = evicted
            self.counters.evictions += 1
            self.counters.pages_evicted += num_units
            self.counters.self_evictions += victim == asker
            self.counters.victims.add(victim)


class PaddedUnified(FixedDual):
    """One pool for both kinds: every page, of KV or of a state, takes the larger size of the two.

    A request that lost its pages gives back their numbers all the same when it departs, though they belong to others
    by then.

    Args:
        layers: sizes of a page and of a state.
        pool_bytes: the budget.
    """

    def __init__(self, layers: LayerSizes, pool_bytes: int):
        super().__init__(layers, pool_bytes, 0)
        unit = max(layers.page_bytes, layers.state_bytes)
        self.pools = (StaleNumbersPool(pool_bytes // unit, unit),) * 2


class Avmp(FixedDual):
    """Asymmetric virtual memory paging (arXiv 2605.22416): `FixedDual`, and capacity that moves between the pools.

    On a shortage that eviction does not end, a batch of the other pool's units changes its kind. Only the last units
    of a pool can go, and only if all of them are free. Bytes that make no whole unit of the other kind are lost. Each
    pool has a store of the whole budget, so twice the budget is reserved.

    The published allocator also has thresholds and a least interval. Only a rebalance that is not forced asks them, and
    it forces every one, so they are left out here.

    Args:
        layers, pool_bytes, state_share: as `FixedDual` has them.
        batch: units of the giving pool that one rebalance moves; None turns it off.
    """

    def __init__(
        self, layers: LayerSizes, pool_bytes: int, state_share: float, *, batch: int | None = None
    ):
        super().__init__(layers, pool_bytes, state_share)
        self.reserved_bytes = 2 * pool_bytes
        self.batch = batch

    def rebalance(self, recipient: int) -> bool:
        """Moves one batch of capacity to a kind; False, and nothing changes, if that was refused."""
        if self.batch is None:
            return False
        giving, taking = self.pools[1 - recipient], self.pools[recipient]
        if not giving.shrink(self.batch):
            self.counters.rebalances_refused += 1
            return False
        donor_bytes = self.batch * giving.unit_bytes
        gained, wasted = divmod(donor_bytes, taking.unit_bytes)
        taking.grow(gained)
        self.counters.rebalances += 1
        self.counters.migrated_bytes += donor_bytes - wasted
        self.counters.wasted_bytes += wasted
        return True

    def _allocate(self, request: int, kind: int, num_units: int) -> bool:
        if super()._allocate(request, kind, num_units):
            return True
        return self.rebalance(kind) and self._take(self.pools[kind], request, num_units)

    def _take(self, pool: UnitPool, request: int, num_units: int) -> bool:
        taken = super()._take(pool, request, num_units)
        if not taken:
            pool.free.reverse()  # all were popped, and pushed back in the order in which they came
        return taken

"""What every allocator of a pool study has: kinds of memory, counters, one interface; and pools of equal units."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Protocol

KV, STATE = 0, 1  # kinds of memory: pages of keys and values, recurrent states


@dataclass(frozen=True, kw_only=True)
class PoolResult:
    """What any harness says of a run, each in its own sense.

    Attributes:
        mode, workload, allocator, model_spec, pool_bytes, seed: what was run.
        requests: that came. completed: that ran to their end.
        oom_count: times that there was no memory.
        hollow: completed, though their memory was gone.
        evictions: times that a running request lost its memory and went on.
        rebalance_count, migrated_bytes: moves of capacity between the kinds.
        allocate_calls: for memory. peak_bytes: most bytes at once. cpu_seconds: of the run.
    """

    mode: str
    workload: str
    allocator: str
    model_spec: str
    pool_bytes: int
    seed: int
    requests: int
    oom_count: int
    completed: int
    hollow: int
    evictions: int
    rebalance_count: int
    migrated_bytes: int
    allocate_calls: int
    peak_bytes: int
    cpu_seconds: float

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


@dataclass(kw_only=True)
class Counters:
    """What an allocator did.

    Attributes:
        evictions: times that a running request lost all it had in a pool; self_evictions: times that it was the one
            that asked. pages_evicted: units lost that way. victims: requests that lost some.
        rebalances, rebalances_refused: moves of capacity between the kinds, done and refused.
        migrated_bytes, wasted_bytes: capacity that changed its kind, and that was lost for ever while doing so.
        peak_bytes: most bytes of units in use at once.
    """

    evictions: int = 0
    self_evictions: int = 0
    pages_evicted: int = 0
    victims: set[int] = field(default_factory=set)
    rebalances: int = 0
    rebalances_refused: int = 0
    migrated_bytes: int = 0
    wasted_bytes: int = 0
    peak_bytes: int = 0

    def count_eviction(self, victim: int, asker: int, num_units: int) -> None:
        self.evictions += 1
        self.pages_evicted += num_units
        self.self_evictions += victim == asker
        self.victims.add(victim)


class Allocator(Protocol):
    """Memory for requests, of two kinds, under one budget of bytes.

    A harness asks and gives back; whether running requests may be evicted is the allocator's own rule, and every such
    eviction is in the counters. A failed call leaves a request what it held.

    Attributes:
        counters: what happened so far.
        reserved_bytes: memory that the allocator takes from the device, whatever is in use.
    """

    counters: Counters
    reserved_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes of the units in use."""
        ...

    def allocate(self, request: int, kind: int, num_units: int, calls: int = 1) -> int:
        """As many equal calls, one after the other, for so many units each; returns how many of them failed."""
        ...

    def release(self, request: int) -> None:
        """Takes back all that a request holds."""
        ...


class UnitPool:
    """Units of one size, by number; what became free last goes out first.

    Attributes:
        free: numbers of the free units, the next one last.
        held: request -> its units as they were allocated; who was given some last stands last.
    """

    def __init__(self, num_units: int, unit_bytes: int):
        self.num_units, self.unit_bytes = num_units, unit_bytes
        self.free = list(range(num_units - 1, -1, -1))
        self.held: OrderedDict[int, list[int]] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return (self.num_units - len(self.free)) * self.unit_bytes

    def take(self, request: int, num_units: int) -> None:
        """Gives units that are free; the caller has checked that they are."""
        free = self.free
        units = free[: -num_units - 1 : -1]
        del free[-num_units:]
        mine = self.held.get(request)
        if mine is None:
            self.held[request] = units
        else:
            mine += units
            self.held.move_to_end(request)

    def give_back(self, request: int) -> None:
        """All units of a request become free."""
        self.free += self.held.pop(request, ())

    def evict_oldest(self) -> tuple[int, int] | None:
        """Frees the units of who was given some longest ago; returns (request, units), or None if none holds any."""
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
        """Every unit is free or held by one request, once."""
        units = sorted(self.free + [unit for held in self.held.values() for unit in held])
        if units != list(range(self.num_units)):
            raise AssertionError(
                f"pool: {len(units)} units free or held, of {self.num_units} units"
            )

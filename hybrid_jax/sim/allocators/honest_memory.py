"""What an allocator is to a harness that never takes memory from a running request behind its back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hybrid_jax.sim.allocators.honest_models import HonestModel


@dataclass(kw_only=True)
class HonestCounters:
    """What an allocator did.

    Attributes:
        allocate_calls: for one layer or one group of layers, as the allocator is built.
        copied_bytes, copies, most_copied_bytes: moved to make room, in so many times, and the most at once.
        rebalances, rebalances_refused, migrated_bytes, wasted_bytes: as AVMP counts them.
        folds_in_place, folds_to_new: checkpoints written over the last one, and to new memory.
    """

    allocate_calls: int = 0
    copied_bytes: int = 0
    copies: int = 0
    most_copied_bytes: int = 0
    rebalances: int = 0
    rebalances_refused: int = 0
    migrated_bytes: int = 0
    wasted_bytes: int = 0
    folds_in_place: int = 0
    folds_to_new: int = 0


class HonestMemory(Protocol):
    """KV and a state for each of many requests, under one budget of bytes.

    Who is refused keeps what it has. Nobody loses anything but by `release`.

    Attributes:
        counters: what happened so far.
        step_tokens: KV grows by so many tokens at once.
        prefix_tokens: a shared prefix can end at multiples of this.
        slot_bytes: what one request's state takes, padding included.
        reserved_bytes: taken from the device at the start.
    """

    counters: HonestCounters
    step_tokens: int
    prefix_tokens: int
    slot_bytes: int
    reserved_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes that are not free."""
        ...

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens could have the empty pool."""
        ...

    def admit(self, request: int, num_tokens: int) -> bool:
        """Gives KV for so many tokens and a state, both or nothing."""
        ...

    def grow(self, request: int, num_tokens: int) -> bool:
        """Gives KV for so many tokens in all, and does what else is due up to there."""
        ...

    def release(self, request: int) -> None:
        """Takes back all that a request holds."""
        ...

    def holds(self, request: int) -> tuple[int, bool]:
        """Tokens whose KV a request still has, and whether it has its state."""
        ...

    def row_bytes(self, num_rows: int) -> int:
        """Memory beside the pool while so many requests run."""
        ...


class Ideal:
    """Bytes that flow: nothing is padded, no unit is in the way, only the sum counts.

    Args:
        model, pool_bytes: sizes.
        step_tokens: KV grows by so many tokens at once.
    """

    def __init__(self, model: HonestModel, pool_bytes: int, *, step_tokens: int):
        self.counters = HonestCounters()
        self.step_tokens = self.prefix_tokens = step_tokens
        self.slot_bytes, self.reserved_bytes = model.state_bytes, pool_bytes
        self._step_bytes = step_tokens * model.token_bytes
        self._steps: dict[int, int] = {}  # of each request
        self._free_bytes = pool_bytes

    @property
    def used_bytes(self) -> int:
        return self.reserved_bytes - self._free_bytes

    def fits_alone(self, num_tokens: int) -> bool:
        return self._bytes(self._num_steps(num_tokens)) <= self.reserved_bytes

    def admit(self, request: int, num_tokens: int) -> bool:
        steps = self._num_steps(num_tokens)
        self.counters.allocate_calls += 2
        if self._bytes(steps) > self._free_bytes:
            return False
        self._free_bytes -= self._bytes(steps)
        self._steps[request] = steps
        return True

    def grow(self, request: int, num_tokens: int) -> bool:
        steps = self._num_steps(num_tokens)
        more = (steps - self._steps[request]) * self._step_bytes
        self.counters.allocate_calls += 1
        if more > self._free_bytes:
            return False
        self._free_bytes -= more
        self._steps[request] = steps
        return True

    def release(self, request: int) -> None:
        self._free_bytes += self._bytes(self._steps.pop(request))

    def holds(self, request: int) -> tuple[int, bool]:
        steps = self._steps.get(request)
        return (0, False) if steps is None else (steps * self.step_tokens, True)

    def row_bytes(self, num_rows: int) -> int:
        return 0

    def _num_steps(self, num_tokens: int) -> int:
        return -(-num_tokens // self.step_tokens)

    def _bytes(self, num_steps: int) -> int:
        return num_steps * self._step_bytes + self.slot_bytes

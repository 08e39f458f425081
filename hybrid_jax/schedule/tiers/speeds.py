"""Whether a prefix comes from a lower tier sooner than it is computed, by what both took lately.

Until something was measured, prefixes are loaded. Now and then one is loaded although that seems slower, so that a
wrong measurement does not last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hybrid_jax.cache.tree.node import DISK, HOSTS_MEMORY

FADING = 0.9  # how much all earlier measurements count when a new one comes
TRIAL = 16  # of so many loads that seem slower, one is made
TIMED = (
    64  # of so many copies from the host's memory, one is timed, because the engine waits for it
)


@dataclass
class Rate:
    """An amount a second, as measured lately.

    Attributes:
        amount, seconds: sums over measurements, in which earlier ones fade.
    """

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Takes in one measurement."""
        self.amount = FADING * self.amount + amount
        self.seconds = FADING * self.seconds + seconds

    def seconds_of(self, amount: float) -> float | None:
        """How long an amount takes; None if nothing is known."""
        return amount * self.seconds / self.amount if self.amount > 0 else None


class Speeds:
    """FLOPs a second that an engine computes of prompts, and bytes a second that it gets from each tier.

    Args:
        prompts: what is known of prompts, if anything. tiers: of tiers, by name.

    Example:
        >>> speeds = Speeds(prompts=Rate(100.0, 1.0), tiers={DISK: Rate(10.0, 1.0)})
        >>> speeds.is_sooner(DISK, 20, flops=300), speeds.is_sooner(DISK, 20, flops=100)
        (True, False)
    """

    def __init__(
        self, prompts: Rate | None = None, tiers: Mapping[str, Rate] | None = None
    ) -> None:
        self._prompts = Rate() if prompts is None else prompts
        self._tiers = {HOSTS_MEMORY: Rate(), DISK: Rate()} | dict(tiers or {})
        self._refused, self._loads = Counter[str](), Counter[str]()
        self._due = False

    def computed(self, flops: float, seconds: float) -> None:
        """Some of a prompt was computed in so many seconds."""
        self._prompts.add(flops, seconds)

    def loaded(self, tier: str, num_bytes: float, seconds: float) -> None:
        """Some bytes came from a tier in so many seconds."""
        self._tiers[tier].add(num_bytes, seconds)

    def is_sooner(self, tier: str, num_bytes: float, flops: float) -> bool:
        """Whether a prefix comes sooner from a tier than it is computed; it does where a speed is not known.

        Args:
            num_bytes: that are copied for it. flops: that it spares.
        """
        loading = self._tiers[tier].seconds_of(num_bytes)
        computing = self._prompts.seconds_of(flops)
        return loading is None or computing is None or loading < computing

    def choose(self, tier: str, num_bytes: float, flops: float) -> bool:
        """Whether a prefix is to be loaded; to be asked once for each. The arguments are those of `is_sooner`."""
        tried = not self.is_sooner(tier, num_bytes, flops)
        if tried:
            self._refused[tier] += 1
            if self._refused[tier] % TRIAL:
                return False
        self._loads[tier] += 1
        # The first load may compile programs, so it tells nothing.
        self._due |= tier == HOSTS_MEMORY and (tried or self._loads[tier] % TIMED == 2)
        return True

    def take_due(self) -> bool:
        """Whether the next copy from the host's memory is to be timed; the next call says no."""
        due, self._due = self._due, False
        return due

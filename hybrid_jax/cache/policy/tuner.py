"""Marconi's alpha, found by replaying what was asked (arXiv 2411.19379, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from hybrid_jax.cache.policy.flop_aware import FlopAware
from hybrid_jax.cache.policy.simulated import SimulatedCache

ALPHAS = tuple(tenth / 10 for tenth in range(21))


class AlphaTuner:
    """Sets a policy's alpha once, after a bootstrap period that begins with the first eviction.

    Until then alpha stays 0. The period lasts `bootstrap` times as many requests as came before the first eviction.
    Then all requests are replayed for every alpha. A replay starts from the very first request: up to the first
    eviction every alpha makes the same cache, so this equals a snapshot of it. The best alpha has the highest token
    hit rate in the period; of equals it is the smallest.

    Args:
        policy: whose alpha is set.
        replay: makes an empty cache like the real one, with the policy it is given.
        bootstrap: length of the period, as above; 5 to 15 in the paper.
        pace: requests replayed for every one that is observed after the period, all alphas together; None
            replays everything at once.
        max_before: most requests before the first eviction that are kept, the latest of them; None keeps all. A
            replay then starts from less than the real cache held, and the period is that much shorter.
    """

    def __init__(
        self,
        policy: FlopAware,
        replay: Callable[[FlopAware], SimulatedCache],
        *,
        bootstrap: int = 5,
        pace: int | None = None,
        max_before: int | None = None,
    ):
        self.policy, self._replay, self._bootstrap = policy, replay, bootstrap
        self._pace, self._max_before = pace, max_before
        self._replays: Iterator[None] | None = None
        self._log: list[tuple[np.ndarray, np.ndarray]] | None = []
        self._first_eviction: int | None = None

    @property
    def tuned(self) -> bool:
        """The bootstrap period is over and alpha is set."""
        return self._log is None

    def observe(self, prompt: np.ndarray, whole: np.ndarray, *, evictions: int) -> None:
        """Notes a request that is finished, and how many evictions there were so far."""
        if self._log is None:
            return
        if self._replays is None:
            self._log.append((prompt, whole))
            if self._first_eviction is None:
                if self._max_before is not None:
                    del self._log[: -self._max_before]
                if evictions:
                    self._first_eviction = len(self._log)
            first = self._first_eviction
            if first is not None and len(self._log) >= first * (1 + self._bootstrap):
                self._replays = self._tune(self._log, first)
        if self._replays is not None:
            for _ in islice(self._replays, self._pace):
                pass

    def _tune(
        self, log: list[tuple[np.ndarray, np.ndarray]], first_eviction: int
    ) -> Iterator[None]:
        """Replays the log for every alpha, a request a step, and sets the best."""
        hits: np.ndarray = np.zeros(len(ALPHAS), np.int64)
        for place, alpha in enumerate(ALPHAS):
            cache = self._replay(self.policy.with_alpha(alpha))
            for number, (prompt, whole) in enumerate(log):
                hit_len = cache.request(prompt, whole)
                if number >= first_eviction:
                    hits[place] += hit_len
                yield
        self.policy.alpha = ALPHAS[int(np.argmax(hits))]
        self._log = None

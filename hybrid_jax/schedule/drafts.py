"""Counts of drafts that were judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class DraftCounts:
    """How many windows had so many draft tokens, of which so many were accepted.

    Attributes:
        windows: by (draft tokens, accepted ones).
        depth: how many draft tokens of a window can be accepted at most.

    Example:
        >>> counts = DraftCounts(depth=3)
        >>> counts.add([(3, 1), (3, 3)])
        >>> counts.verifications, counts.draft_tokens, counts.accepted_by_position
        (2, 6, (2, 1, 1))
    """

    windows: Counter[tuple[int, int]] = field(default_factory=Counter)
    depth: int = 0

    def add(self, windows: Iterable[tuple[int, int]]) -> None:
        """Adds windows, each as (draft tokens, accepted ones)."""
        self.windows.update(windows)

    @property
    def verifications(self) -> int:
        """Windows judged."""
        return self.windows.total()

    @property
    def draft_tokens(self) -> int:
        """Draft tokens judged."""
        return sum(drafted * n for (drafted, _), n in self.windows.items())

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens that became tokens of the output."""
        return sum(accepted * n for (_, accepted), n in self.windows.items())

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """For each place after the row's own token, how many drafts there were accepted. A tree has its depths."""
        return tuple(
            sum(n for (_, accepted), n in self.windows.items() if accepted > place)
            for place in range(self.depth)
        )

    def as_dict(self) -> dict[str, int | float]:
        """The counts by the names that `stats()` has for them."""
        drawn = self.accepted_tokens + self.verifications
        return {
            "verifications": self.verifications,
            "draft_tokens": self.draft_tokens,
            "accepted_draft_tokens": self.accepted_tokens,
            "tokens_per_verification": drawn / self.verifications if self.verifications else 0.0,
            **{
                f"accepted_at_{place}": count
                for place, count in enumerate(self.accepted_by_position, 1)
            },
        }

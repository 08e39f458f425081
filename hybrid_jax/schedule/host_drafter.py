"""Drafters that run on the host, by name. Their drafts come with a plan, which waits for all results before it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Protocol

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.schedule.suffix import Draft, SuffixDrafter


class HostDrafter(Protocol):
    """A way to draft the next tokens of sequences, which have names."""

    def draft(self, name: str, tokens: Tokens[int], most: int) -> Draft:
        """Up to `most` tokens that may follow a sequence's tokens, which begin with those of earlier calls."""

    def ended(self, name: str) -> None:
        """The sequence will ask no more; another may have its name later."""


HOST_DRAFTERS: dict[str, Callable[[SpeculationConfig], HostDrafter]] = {"suffix": SuffixDrafter}


def host_drafter_of(config: SpeculationConfig | None) -> HostDrafter | None:
    """The host's drafter of an engine with this setting; None if the device drafts, or nobody."""
    if config is None or config.method not in HOST_DRAFTERS:
        return None
    return HOST_DRAFTERS[config.method](config)

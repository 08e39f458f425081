"""Speculative decoding: who guesses the next tokens, and how many at a time."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_jax.config.checks import flags, integers, must, one_of, positive
from hybrid_jax.config.other_names import refuses_other_names

METHODS = ("ngram",)
MAX_DRAFTS = 30  # a window's tokens are the bits of an int32


@refuses_other_names
@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Tokens are guessed, and one pass over the weights checks several guesses at once. The output does not change.

    Attributes:
        method: who guesses. "ngram": what followed the last few tokens where they stood before, in prompt or output.
        num_tokens: guesses that one pass checks. One token more may come of a pass, drawn behind the last right guess.
        ngram_min, ngram_max: how many last tokens must be found again at least, and how many are compared at most. The
            longest match counts, and of these the latest.
        adaptive: a pass checks no guesses while so few are right that plain decoding would be faster.

    Example:
        >>> SpeculationConfig(method="ngram", num_tokens=3).window
        4
    """

    method: str = "ngram"
    num_tokens: int = 4
    ngram_min: int = 2
    ngram_max: int = 4
    adaptive: bool = True

    @property
    def window(self) -> int:
        """Tokens of a row that one pass feeds at most: the one drawn last, and the guesses behind it."""
        return 1 + self.num_tokens

    @property
    def keeps_history(self) -> bool:
        """Whether the device keeps the tokens of each row."""
        return self.method == "ngram"

    def __post_init__(self) -> None:
        one_of(self, "method", METHODS)
        integers(self, "num_tokens", "ngram_min", "ngram_max")
        flags(self, "adaptive")
        positive(self, "num_tokens", "ngram_min")
        must(self, "num_tokens", self.num_tokens <= MAX_DRAFTS, f"at most {MAX_DRAFTS}")
        good = self.ngram_min <= self.ngram_max
        must(self, "ngram_max", good, f"at least ngram_min {self.ngram_min}")

"""What limits the tokens of a completion while it grows: a grammar, words that must not appear, allowed tokens.

`Constraints` makes them from sampling parameters. The engine asks each of them which tokens may come next.

May import: config, text.
Packages: llguidance, numpy, tokenizers.
"""

from hybrid_jax.constraints.make import Constraints, TokenLimits
from hybrid_jax.constraints.token_constraint import TokenConstraint

__all__ = ["Constraints", "TokenConstraint", "TokenLimits"]

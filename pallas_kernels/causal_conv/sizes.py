"""How the outputs of a mixer's in_proj lie in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.records import RecordSizes


@dataclass(frozen=True, kw_only=True)
class Sizes(RecordSizes):
    """Sizes of a token's projection z [M P] | x [M P] | B [G R] | C [G R] | dt [M]; x | B | C is convolved.

    Attributes:
        conv_width: W, taps of the convolution.
        dt_limits: (low, high) bounds of a step size after softplus.
    """

    conv_width: int = 4
    dt_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def projected_size(self) -> int:
        return self.inner_size + self.conv_size + self.num_heads

    @property
    def history(self) -> int:
        """Columns before a token that its output depends on."""
        return self.conv_width - 1

    def split(self, projected: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The convolution's inputs [..., E] and those of the step sizes [..., M]."""
        cuts = [self.inner_size, self.inner_size + self.conv_size]
        _, xBC, dt = jnp.split(projected, cuts, axis=-1)
        return xBC, dt

"""How the outputs of a mixer's in_proj lie in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a token's projection z [M P] | x [M P] | B [G R] | C [G R] | dt [M]; x | B | C is convolved.

    Attributes:
        num_heads, head_dim, num_groups, state_size: M, P, G, R.
        conv_width: W, taps of the convolution.
        dt_limits: (low, high) bounds of a step size after softplus.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int = 4
    dt_limits: tuple[float, float] = (0.0, math.inf)

    @property
    def inner_size(self) -> int:
        """M P."""
        return self.num_heads * self.head_dim

    @property
    def shared_size(self) -> int:
        """G R."""
        return self.num_groups * self.state_size

    @property
    def record_size(self) -> int:
        return self.inner_size + self.shared_size

    @property
    def conv_size(self) -> int:
        """E."""
        return self.inner_size + 2 * self.shared_size

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


def floats(array: jax.Array) -> jax.Array:
    """Floats as they are; unsigned integers are the bits of bfloat16 or float32."""
    if not jnp.issubdtype(array.dtype, jnp.unsignedinteger):
        return array
    return jax.lax.bitcast_convert_type(
        array, {2: jnp.bfloat16, 4: jnp.float32}[array.dtype.itemsize]
    )


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x as a ring of this dtype keeps it; the inverse of `floats`."""
    if not jnp.issubdtype(dtype, jnp.unsignedinteger):
        return x.astype(dtype)
    x = x.astype({2: jnp.bfloat16, 4: jnp.float32}[jnp.dtype(dtype).itemsize])
    return jax.lax.bitcast_convert_type(x, dtype)

"""How the records of a recurrence lie in memory."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Records:
    """Sizes of a token's record, x [M, P] and then B [G, R], and of the states it adds to.

    Attributes:
        num_heads, head_dim, num_groups, state_size: M, P, G, R.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def size(self) -> int:
        return self.inner_size + self.num_groups * self.state_size

    @property
    def head_words(self) -> int:
        """Words of one head's float32 state."""
        return self.head_dim * self.state_size

    @classmethod
    def of(cls, x: jax.Array, B: jax.Array) -> Records:
        """Sizes of x [..., M, P] and B [..., G, R]."""
        return cls(
            num_heads=x.shape[-2],
            head_dim=x.shape[-1],
            num_groups=B.shape[-2],
            state_size=B.shape[-1],
        )


def split_records(xB: jax.Array, records: Records) -> tuple[jax.Array, jax.Array]:
    """Ring records or their bits [..., M P + G R] to x [..., M, P] and B [..., G, R]."""
    if xB.dtype in (jnp.uint16, jnp.uint32):
        float_of = {2: jnp.bfloat16, 4: jnp.float32}[xB.dtype.itemsize]
        xB = jax.lax.bitcast_convert_type(xB, float_of)
    x, B = jnp.split(xB, [records.inner_size], axis=-1)
    lead = xB.shape[:-1]
    return (
        x.reshape(*lead, records.num_heads, records.head_dim),
        B.reshape(*lead, records.num_groups, records.state_size),
    )

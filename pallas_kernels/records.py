"""How a token's projection and its record lie in memory, and states in frames: Mamba-2's and the gated delta net's."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.checkpoint import pack_states, unpack_states
from pallas_kernels.operands import floats
from pallas_kernels.plan import over_limit
from pallas_kernels.triton import NOWHERE, power_of_two

MAX_STATE_SIZE = 256  # columns; kernels take as many channels of a state at once as registers hold


@dataclass(frozen=True, kw_only=True)
class RecordSizes:
    """Sizes of a token's record, x [M, P] and then B [G, R], and of the states it adds to.

    Attributes:
        num_heads, head_dim, num_groups, state_size: M, P, G, R.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int

    def __post_init__(self) -> None:
        sizes = (self.num_heads, self.head_dim, self.num_groups, self.state_size)
        if min(sizes) < 1 or self.num_heads % self.num_groups:
            raise ValueError(
                f"{type(self).__name__}: num_heads must be a multiple of num_groups, and all sizes positive, "
                f"got {self.num_heads} and {self.num_groups} of {self.head_dim} and {self.state_size}"
            )

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
        """M P + G R: x and B."""
        return self.inner_size + self.shared_size

    @property
    def conv_size(self) -> int:
        """E: x, B and C, which are convolved."""
        return self.record_size + self.shared_size

    @property
    def head_words(self) -> int:
        """Words of one head's float32 state."""
        return self.head_dim * self.state_size

    @property
    def dimensions(self) -> dict[str, int]:
        """The sizes by the names that arrays are annotated with (`arguments.check`)."""
        return {
            "M": self.num_heads,
            "G": self.num_groups,
            "MP": self.inner_size,
            "GR": self.shared_size,
            "record": self.record_size,
            "E": self.conv_size,
        }

    def why_unsupported(self) -> str | None:
        """Why no kernel takes states of this size, or None."""
        return over_limit(("a state must have at most {} columns", MAX_STATE_SIZE, self.state_size))

    @property
    def state_elements(self) -> int:
        """Elements of a head's state as a kernel holds it, both sides padded to powers of two."""
        return power_of_two(self.head_dim) * power_of_two(self.state_size)

    def per_frame(self, arena: jax.Array) -> int:
        """Whole heads in a frame of uint32[U, W]."""
        return min(arena.shape[1] // self.head_words, self.num_heads)

    @staticmethod
    def of(x: jax.Array, B: jax.Array) -> RecordSizes:
        """Sizes of x [..., M, P] and B [..., G, R]."""
        return RecordSizes(
            num_heads=x.shape[-2],
            head_dim=x.shape[-1],
            num_groups=B.shape[-2],
            state_size=B.shape[-1],
        )


@dataclass(frozen=True, kw_only=True)
class ProjectionLayout(RecordSizes):
    """How a token's projection lies in memory: z [M P] | x [M P] | B [G R] | C [G R] | dt [M]; x | B | C is convolved.

    Attributes:
        conv_width: W, taps of the convolution.
        dt_limits: (low, high) bounds of a step size after softplus.
        delta: a gated delta net's, with v in place of x, k of B, and q of C; after dt come M more columns, of which
            sigmoid makes the rates of writing.
        within: (first column, columns in all) of what is convolved in a projection that has no z in front, and may have
            columns of others: after a model's cut. None for z in front and nothing else.
    """

    conv_width: int = 4
    dt_limits: tuple[float, float] = (0.0, math.inf)
    delta: bool = False
    within: tuple[int, int] | None = None

    @property
    def dimensions(self) -> dict[str, int]:
        own = {"W": self.conv_width, "before": self.history, "columns": self.projected_size}
        return super().dimensions | own

    @property
    def conv_start(self) -> int:
        """The first column of what is convolved."""
        return self.inner_size if self.within is None else self.within[0]

    @property
    def projected_size(self) -> int:
        """Columns of what in_proj gives for a token."""
        if self.within is not None:
            return self.within[1]
        return self.conv_start + self.conv_size + self.num_heads * (2 if self.delta else 1)

    @property
    def history(self) -> int:
        """Columns before a token that its output depends on."""
        return self.conv_width - 1

    def split(self, projected: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The convolution's inputs [..., E] and those of the step sizes [..., M]."""
        ends = itertools.accumulate((self.conv_start, self.conv_size, self.num_heads))
        _, xBC, dt, _ = jnp.split(projected, list(ends), axis=-1)
        return xBC, dt


def split_records(xB: jax.Array, records: RecordSizes) -> tuple[jax.Array, jax.Array]:
    """Ring records or their bits [..., M P + G R] to x [..., M, P] and B [..., G, R]."""
    xB = floats(xB)
    x, B = jnp.split(xB, [records.inner_size], axis=-1)
    lead = xB.shape[:-1]
    return (
        x.reshape(*lead, records.num_heads, records.head_dim),
        B.reshape(*lead, records.num_groups, records.state_size),
    )


def read_states(
    arena: jax.Array, frames: jax.Array, exists: jax.Array, records: RecordSizes
) -> jax.Array:
    """float32[B, M, P, R] from frames int32[B, n] of an arena; zeros where `exists` bool[B] is false."""
    words = arena[frames, : records.per_frame(arena) * records.head_words]
    state = unpack_states(words, records.num_heads, records.head_words)
    state = state.reshape(*state.shape[:2], records.head_dim, records.state_size)
    return jnp.where(exists.astype(bool)[:, None, None, None], state, 0.0)


def write_states(
    arena: jax.Array, frames: jax.Array, state: jax.Array, records: RecordSizes
) -> jax.Array:
    """The arena with float32[B, M, P, R] in frames int32[B, n]; the words after a frame's heads stay."""
    state = state.reshape(*state.shape[:2], -1)
    words = pack_states(state, frames.shape[1], records.per_frame(arena))
    return arena.at[frames, : words.shape[-1]].set(words)


def state_words(
    records: RecordSizes, place: jax.Array | int, p: jax.Array, r: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Words of the elements p, r of a head's state in its frame, and which of them exist; for kernels.

    Args:
        place: number of the head in its frame.
    """
    exists = (p < records.head_dim) & (r < records.state_size)
    words = place * records.head_words + p * records.state_size + r
    if r.size > records.state_size:
        # A word of padding is also one of the next channel's.
        words = jnp.where(exists, words, NOWHERE)
    return words, exists


def check_groups(
    where: str, groups: int, heads: int, of_groups: str = "B", of_heads: str = "x"
) -> None:
    """Checks that the groups of B and C divide the heads of x; or those of other arrays, by their names."""
    if heads % groups:
        raise ValueError(
            f"{where}: groups of {of_groups} must divide the heads of {of_heads}, got {groups} and {heads}"
        )


def check_frames(
    where: str,
    arena: jax.Array,
    name: str,
    frames: jax.Array,
    records: RecordSizes,
    *,
    first: int = 0,
    last: int | None = None,
) -> None:
    """Checks that columns `first` .. `last` of a table hold all heads of a layer."""
    if first < 0:
        raise ValueError(f"{where}: first_frame must be at least 0, got {first}")
    columns = len(range(frames.shape[1])[first:last])
    held = arena.shape[1] // records.head_words * columns
    if held < records.num_heads:
        raise ValueError(
            f"{where}: {name} must hold {records.num_heads} heads of each of {frames.shape[0]} rows, got {held} in "
            f"{columns} frames of {arena.shape[1]} words, of {frames.shape}; give a layer more frames, or larger ones"
        )


def check_rings(where: str, rings: jax.Array, layer: int, rows: int) -> None:
    """Checks that rings [L, B', ...] have this layer and so many rows."""
    if not 0 <= layer < rings.shape[0] or rows > rings.shape[1]:
        raise ValueError(
            f"{where}: layer {layer} and {rows} rows must lie within the rings {rings.shape[:2]}"
        )

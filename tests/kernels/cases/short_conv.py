"""Named shapes for the tests and the benchmarks of the gated short convolution."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.operands import stored


@dataclass(frozen=True, kw_only=True)
class Case:
    """A chunk or a window.

    Attributes:
        name: says what the shape is for.
        tokens, channels, width: T, E, W. lengths: tokens of each row that exist. biased: with a bias.
        parts: of the projection of a window, 0 for a whole one.
        first: tokens of a window that the ring has already; None for 0 everywhere.
        ends: tokens of a chunk before its checkpoint; None for `lengths`.
        tree: ancestors of each token as bits, the same for all rows, or None.
        gated: with gates, or with SiLU.
    """

    name: str
    tokens: int
    channels: int = 20
    width: int = 3
    lengths: tuple[int, ...]
    biased: bool = False
    parts: int = 0
    first: tuple[int, ...] | None = None
    ends: tuple[int, ...] | None = None
    tree: tuple[int, ...] | None = None
    gated: bool = True

    @property
    def columns(self) -> int:
        """Columns of the projection."""
        return (3 if self.gated else 2) * self.channels

    @property
    def rows(self) -> int:
        """B, rows of the batch."""
        return len(self.lengths)


CHUNKS = (
    Case(name="chunk", tokens=37, lengths=(37, 5, 0), ends=(32, 0, 0), biased=True),
    Case(name="short_chunk", tokens=1, lengths=(1, 1), ends=(1, 0), width=4, channels=7),
    Case(name="silu", tokens=19, lengths=(19, 3), ends=(0, 1), width=4, biased=True, gated=False),
)
WINDOWS = (
    Case(name="decode", tokens=1, lengths=(1, 0, 1), biased=True),
    Case(name="decode_in_parts", tokens=1, lengths=(1, 1), parts=3, width=4),
    Case(name="verify", tokens=4, lengths=(4, 2, 0, 4), channels=7),
    Case(name="whole_ring", tokens=32, lengths=(32, 9, 20), first=(0, 8, 3), width=2),
    Case(name="tree", tokens=5, lengths=(5, 5), tree=(1, 3, 5, 11, 16), biased=True),
    Case(name="silu", tokens=2, lengths=(2, 1), parts=2, width=4, biased=True, gated=False),
)
LAYERS, LAYER = 2, 1


def make_chunk_inputs(case: Case, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arguments of `short_conv`."""
    draw = _drawn(seed, dtype)
    return {
        "projected": draw(case.rows, case.tokens, case.columns),
        "history": draw(case.rows, case.width - 1, case.channels),
        "weight": draw(case.width, case.channels),
        "bias": draw(case.channels) if case.biased else None,
        "lengths": jnp.asarray(case.lengths, jnp.int32),
    }


def make_window_inputs(case: Case, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arrays of `ShortWindow`; the ring has a row and two columns to spare."""
    draw = _drawn(seed, dtype)
    size = (case.rows, case.tokens, case.columns)
    columns = case.width - 1 + case.tokens + 2
    parts = [_drawn(seed + i, "float32")(*size) for i in range(case.parts)]
    first = case.first or (0,) * case.rows
    ring = draw(LAYERS, case.rows + 1, columns, case.channels)
    tree = None if case.tree is None else jnp.tile(jnp.int32(case.tree), (case.rows, 1))
    return {
        "projected": jnp.stack(parts) if parts else draw(*size),
        "weight": draw(case.width, case.channels),
        "bias": draw(case.channels) if case.biased else None,
        "conv": stored(ring, _bits(dtype)),
        "first": jnp.asarray(first, jnp.int32),
        "num_valid": jnp.asarray(case.lengths, jnp.int32),
        "ancestors": tree,
    }


def make_tail_inputs(case: Case, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arrays of `ShortTail`; frames lie in shuffled order, with spare ones between."""
    draw, rng = _drawn(seed, dtype), np.random.default_rng(seed)
    words = LAYERS * -(-(case.width - 1) * case.channels * jnp.dtype(dtype).itemsize // 4)
    frame_words = max(4, words // 2 + 1)
    frames = rng.permutation(np.arange(1, 2 * case.rows + 4))[: 2 * case.rows]
    ring = draw(LAYERS, case.rows + 2, case.width + 3, case.channels)
    ends = case.lengths if case.ends is None else case.ends
    return {
        "arena": jnp.asarray(rng.integers(0, 2**32, (2 * case.rows + 4, frame_words), np.uint32)),
        "conv": stored(ring, _bits(dtype)),
        "projected": draw(case.rows, case.tokens, case.columns),
        "history": stored(draw(case.rows, case.width - 1, case.channels), _bits(dtype)),
        "frames": jnp.asarray(frames.reshape(case.rows, 2), jnp.int32),
        "rows": jnp.asarray(rng.permutation(case.rows + 1)[: case.rows], jnp.int32),
        "lengths": jnp.asarray(case.lengths, jnp.int32),
        "state_lengths": jnp.asarray(ends, jnp.int32),
    }


def _bits(dtype: str) -> jnp.dtype:
    return jnp.dtype("uint32" if dtype == "float32" else "uint16")


def _drawn(seed: int, dtype: str):
    rng = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

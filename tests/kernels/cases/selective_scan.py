"""Named shapes for the tests and the benchmarks of the selective scan."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `selective_scan`.

    Attributes:
        name: says what the shape is for.
        rows, tokens, channels, size: B, T, E, R.
        lengths: valid tokens per row; None for all.
        kept: for each row, the numbers of tokens after which states are wanted.
    """

    name: str
    rows: int = 2
    tokens: int
    channels: int = 12
    size: int = 5
    lengths: tuple[int, ...] | None = None
    kept: tuple[tuple[int, ...], ...] | None = None


CASES = (
    Case(name="one_token", tokens=1),
    Case(name="tiles_and_a_bit", tokens=21, kept=((0, 8, 21), (1, 9, 20))),
    Case(name="padding", rows=3, tokens=16, lengths=(16, 3, 0), kept=((16,), (3,), (0,))),
    Case(name="window_of_a_few", tokens=5, lengths=(5, 2), kept=((1, 2, 3, 4, 5),) * 2),
    Case(name="one_channel", tokens=9, channels=1, size=1),
)


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """One call of `selective_chunk` or `selective_window`.

    Attributes:
        name: says what the shape is for.
        tokens, channels, size: T, E, R. lengths: tokens of each row that exist.
        ends: tokens of a chunk before its checkpoint; None for `lengths`.
        first: tokens of a window that are not new; None for 0 everywhere.
        exists: rows with a checkpoint. loads: rows of a window that begin at it; None for no row.
        copies: of the state in a ring. keeps: a window keeps the states after all tokens.
        parts: of the products of a window, 0 for whole ones.
        tree: ancestors of each token as bits, the same for all rows, or None.
    """

    name: str
    tokens: int
    channels: int = 20
    size: int = 5
    lengths: tuple[int, ...]
    ends: tuple[int, ...] | None = None
    first: tuple[int, ...] | None = None
    exists: tuple[bool, ...] = (True, False, True, True)
    loads: tuple[bool, ...] | None = None
    copies: int = 1
    keeps: bool = False
    parts: int = 0
    tree: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """B, rows of the batch."""
        return len(self.lengths)


CHUNKS = (
    EngineCase(name="chunk", tokens=21, lengths=(21, 5, 0), ends=(16, 0, 0), size=16, channels=70),
    EngineCase(name="short_chunk", tokens=1, lengths=(1, 1), ends=(1, 0), channels=7, copies=3),
)
WINDOWS = (
    EngineCase(name="decode", tokens=1, lengths=(1, 0, 1), channels=70, size=16),
    EngineCase(name="decode_in_parts", tokens=1, lengths=(1, 1), parts=3, copies=6),
    EngineCase(name="verify", tokens=4, lengths=(4, 2, 0, 4), copies=6, keeps=True),
    EngineCase(
        name="whole_ring",
        tokens=32,
        lengths=(32, 9, 20, 20),
        first=(0, 8, 3, 0),
        loads=(True, False, False, True),
    ),
    EngineCase(name="tree", tokens=5, lengths=(5, 4), tree=(1, 3, 5, 11, 16), copies=6, keeps=True),
)
LAYERS, LAYER, FIRST_FRAME = 2, 1, 1


def make_chunk_inputs(case: EngineCase, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arrays of `SelectiveChunk`; frames lie in shuffled order, with spare ones between."""
    rng, inputs = np.random.default_rng(seed), _make_layer(case, seed, dtype)
    arena, frames = _make_arena(case, rng, 2)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    return inputs | {
        "arena": arena,
        "read": frames[0],
        "write": frames[1],
        "exists": jnp.asarray(case.exists[: case.rows]),
        "rows": jnp.asarray(rng.permutation(case.rows + 1)[: case.rows], jnp.int32),
        "copies": jnp.asarray(rng.integers(0, case.copies, case.rows), jnp.int32),
        "lengths": lengths,
        "state_lengths": lengths if case.ends is None else jnp.asarray(case.ends, jnp.int32),
    }


def make_window_inputs(case: EngineCase, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arrays of `SelectiveWindow`; the ring has a row to spare."""
    rng, inputs = np.random.default_rng(seed), _make_layer(case, seed, dtype)
    if case.parts:
        for name in ("projected", "dt"):
            shape = (case.parts, *inputs[name].shape)
            inputs[name] = jnp.asarray(rng.standard_normal(shape, np.float32))
    arena, frames = _make_arena(case, rng, 1)
    tree = None if case.tree is None else jnp.asarray([case.tree] * case.rows, jnp.int32)
    return inputs | {
        "arena": arena,
        "frames": frames[0],
        "exists": jnp.asarray(case.exists[: case.rows]),
        "base": jnp.asarray(rng.integers(0, 100, case.rows), jnp.int32),
        "first": jnp.asarray(case.first or (0,) * case.rows, jnp.int32),
        "num_valid": jnp.asarray(case.lengths, jnp.int32),
        "loads": None if case.loads is None else jnp.asarray(case.loads),
        "ancestors": tree,
    }


def _make_layer(case: EngineCase, seed: int, dtype: str) -> dict:
    """What both have: the tokens' inputs, the layer's weights, and the rings."""
    rng, lead = np.random.default_rng(seed + 1), (case.rows, case.tokens)
    channels, size = case.channels, case.size

    def normal(*shape: int, kind: str = "float32") -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal(shape, np.float32), kind)

    return {
        "x": normal(*lead, channels, kind=dtype),
        "dt": normal(*lead, channels, kind=dtype),
        "BC": normal(*lead, 2 * size, kind=dtype),
        "projected": normal(*lead, 2 * channels, kind=dtype),
        "A_log": jnp.asarray(rng.uniform(-3, 2, (channels, size)), jnp.float32),
        "D": normal(channels),
        "dt_bias": jnp.asarray(rng.uniform(-3, 0, channels), jnp.float32),
        "state": normal(LAYERS, case.rows + 2, case.copies, channels * size),
    }


def _make_arena(case: EngineCase, rng: np.random.Generator, count: int):
    """Frames of a third of a layer's channels, and those int32[count, B, F] of `count` checkpoints a row."""
    per_frame = -(-case.channels // 3)
    per_row = FIRST_FRAME + -(-case.channels // per_frame)
    total = count * case.rows * per_row
    ids = 1 + rng.permutation(total + 3)[:total].reshape(count, case.rows, per_row)
    states = rng.standard_normal((total + 4, per_frame * case.size + 1), np.float32)
    return jnp.asarray(states.view(np.uint32)), jnp.asarray(ids, jnp.int32)


def make_inputs(case: Case, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arguments of `selective_scan`; x, B and C in `dtype`, the rest float32."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    lead, sizes = (case.rows, case.tokens), (case.channels, case.size)
    inputs = {
        "x": normal(*lead, case.channels).astype(dtype),
        "dt": jnp.asarray(np.exp(rng.uniform(-5, 1, (*lead, case.channels))), jnp.float32),
        "A": jnp.asarray(-np.exp(rng.uniform(-2, 3, sizes)), jnp.float32),
        "B": normal(*lead, case.size).astype(dtype),
        "C": normal(*lead, case.size).astype(dtype),
        "state": normal(case.rows, *sizes),
    }
    if case.lengths is not None:
        inputs["valid"] = jnp.arange(case.tokens) < jnp.asarray(case.lengths)[:, None]
    if case.kept is not None:
        inputs["kept"] = jnp.asarray(case.kept, jnp.int32)
    return inputs

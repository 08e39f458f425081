"""Named shapes for the tests and the benchmark of the window and the fold."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `ssd_window`.

    Attributes:
        name: says what the shape is for.
        slots: S, records the ring has room for.
        tokens: T, new tokens per row.
        heads, width, groups, size: M, P, G, R.
        starts: ring slot of each row's first new token; its length is the number of rows.
        num_valid: new tokens that count; None for T everywhere.
    """

    name: str
    slots: int = 32
    tokens: int
    heads: int = 2
    width: int = 8
    groups: int = 1
    size: int = 16
    starts: tuple[int, ...]
    num_valid: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """B, rows of the batch."""
        return len(self.starts)

    @property
    def valid(self) -> tuple[int, ...]:
        """New tokens that count, per row."""
        return (self.tokens,) * self.rows if self.num_valid is None else self.num_valid


CASES = (
    Case(name="decode", tokens=1, starts=(0, 13, 31), heads=6, groups=2),
    Case(name="decode_with_idle_rows", tokens=1, starts=(31, 5, 0), num_valid=(1, 0, 0)),
    Case(name="verify", tokens=4, slots=35, starts=(0, 9, 31, 28), num_valid=(4, 2, 1, 4), heads=3),
    Case(
        name="whole_ring",
        tokens=32,
        starts=(0, 0, 0, 0),
        num_valid=(32, 1, 17, 0),
        heads=6,
        groups=3,
        width=12,
        size=24,
    ),
    Case(name="one_head_one_state", tokens=4, starts=(7,), heads=1, width=1, size=1),
)


def make_inputs(case: Case, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arguments of `ssd_window` for a case; x, B and C in `dtype`, the rest float32.

    Every slot and every query holds plausible values, those that do not count included.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    steps = np.exp(rng.uniform(np.log(1e-3), 0, (case.rows, case.slots, case.heads)))
    return {
        "state": normal(case.rows, case.heads, case.width, case.size),
        "x": normal(case.rows, case.slots, case.heads, case.width).astype(dtype),
        "dt": jnp.asarray(steps, jnp.float32),
        "A": jnp.asarray(-rng.uniform(1, 16, case.heads), jnp.float32),
        "B": normal(case.rows, case.slots, case.groups, case.size).astype(dtype),
        "C": normal(case.rows, case.tokens, case.groups, case.size).astype(dtype),
        "starts": jnp.asarray(case.starts, jnp.int32),
        "num_valid": jnp.asarray(case.valid, jnp.int32),
    }

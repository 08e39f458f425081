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

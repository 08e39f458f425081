"""Named shapes for the tests and the benchmark of the scan."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `ssd_scan`.

    Attributes:
        name: says what the shape is for.
        rows, tokens, heads, width, groups, size: B, T, M, P, G, R.
        lengths: valid tokens per row; None for all.
        state_lengths: tokens the returned state covers; None for `lengths`.
        initial_state: start from a random state and not from zeros.
    """

    name: str
    rows: int = 1
    tokens: int
    heads: int = 2
    width: int = 8
    groups: int = 1
    size: int = 16
    lengths: tuple[int, ...] | None = None
    state_lengths: tuple[int, ...] | None = None
    initial_state: bool = False


CASES = (
    Case(name="one_token", rows=2, tokens=1, initial_state=True),
    Case(name="one_short_of_a_tile", tokens=63, heads=6, groups=2),
    Case(name="one_tile", tokens=64, heads=1, width=4),
    Case(name="one_past_a_tile", tokens=65, heads=3, initial_state=True),
    Case(name="several_tiles_odd_heads", rows=2, tokens=200, heads=5, width=12, size=24),
    Case(
        name="ragged_rows_and_an_empty_one",
        rows=4,
        tokens=130,
        heads=6,
        groups=3,
        lengths=(130, 64, 0, 37),
        initial_state=True,
    ),
    Case(
        name="tail_within_a_tile",
        rows=5,
        tokens=160,
        heads=4,
        groups=2,
        lengths=(160, 64, 97, 20, 33),
        state_lengths=(128, 32, 96, 0, 32),
        initial_state=True,
    ),
    Case(name="state_size_1", tokens=20, heads=2, width=1, size=1, initial_state=True),
    Case(name="state_in_blocks", tokens=70, heads=2, width=12, size=200, initial_state=True),
    Case(name="group_per_head", tokens=70, heads=4, groups=4, width=16, size=128),
)


def make_inputs(case: Case, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arguments of `ssd_scan` for a case; x, B and C in `dtype`, the rest float32.

    Step sizes spread over three decades and rates over 1 to 16, as in published models.
    """
    rng = np.random.default_rng(seed)
    lead, bc = (case.rows, case.tokens), (case.rows, case.tokens, case.groups, case.size)

    def normal(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    inputs = {
        "x": normal(*lead, case.heads, case.width),
        "dt": jnp.asarray(np.exp(rng.uniform(np.log(1e-3), 0, (*lead, case.heads))), jnp.float32),
        "A": jnp.asarray(-rng.uniform(1, 16, case.heads), jnp.float32),
        "B": normal(*bc),
        "C": normal(*bc),
    }
    if case.initial_state:
        shape = (case.rows, case.heads, case.width, case.size)
        inputs["initial_state"] = jnp.asarray(rng.standard_normal(shape, np.float32))
    for name in ("lengths", "state_lengths"):
        if getattr(case, name) is not None:
            inputs[name] = jnp.asarray(getattr(case, name), jnp.int32)
    return inputs

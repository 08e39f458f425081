"""Named shapes for the tests and the benchmark of the gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `gated_rmsnorm`.

    Attributes:
        name: says what the shape is for.
        lead: leading axes. size: M P. groups: blocks.
        behind: columns of the gate behind z.
        large: from a real model, for benchmarks; unit tests leave it out.
    """

    name: str
    lead: tuple[int, ...] = (2, 3)
    size: int
    groups: int = 1
    behind: int = 0
    large: bool = False


CASES = (
    Case(name="one_block", size=64),
    Case(name="blocks_in_a_projection", size=96, groups=4, behind=50),
    Case(name="odd_blocks", lead=(5,), size=60, groups=3, behind=3),
    Case(name="block_that_is_no_power_of_two", lead=(1, 2), size=1536),
    Case(name="one_element", lead=(3, 1, 1), size=2, groups=2),
    Case(name="nemotron_h_8b", lead=(64, 1), size=8192, groups=8, behind=10368, large=True),
    Case(name="granite_4_h_small", lead=(2, 512), size=8192, behind=8576, large=True),
)
SMALL_CASES = tuple(case for case in CASES if not case.large)


def make_inputs(
    case: Case, *, seed: int = 0, dtype: str = "float32", y_dtype: str | None = None
) -> dict:
    """Random arrays of `gated_rmsnorm` for a case; the outputs of the recurrence in `y_dtype`."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    return {
        "y": normal(*case.lead, case.size).astype(y_dtype or dtype),
        "gate": normal(*case.lead, case.size + case.behind).astype(dtype),
        "weight": normal(case.size).astype(dtype),
    }

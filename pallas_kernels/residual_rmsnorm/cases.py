"""Named shapes for the tests and the benchmark of the residual sum and norm."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `residual_rmsnorm`.

    Attributes:
        name: says what the shape is for.
        lead: leading axes. size: D.
        parts: of the update, or 0 where it is whole.
        multiplier: factor on the update.
        masked: some tokens are not real.
        large: from a real model, for benchmarks; unit tests leave it out.
    """

    name: str
    lead: tuple[int, ...] = (2, 3)
    size: int
    parts: int = 0
    multiplier: float = 1.0
    masked: bool = False
    large: bool = False


CASES = (
    Case(name="one_token", lead=(1, 1), size=64),
    Case(name="multiplier", lead=(5,), size=192, multiplier=0.22),
    Case(name="odd_sizes", lead=(3, 1), size=77, masked=True),
    Case(name="padding", size=100, masked=True, multiplier=0.22),
    Case(name="parts", lead=(4, 1), size=96, parts=8),
    Case(name="one_part", lead=(4, 1), size=96, parts=1, masked=True),
    Case(name="odd_parts_and_padding", size=1531, parts=3, multiplier=0.3, masked=True),
    Case(name="hybrid_7b", lead=(64, 1), size=4096, parts=8, masked=True, large=True),
    Case(name="hybrid_7b_prompt", lead=(2, 2048), size=4096, masked=True, large=True),
)
SMALL_CASES = tuple(case for case in CASES if not case.large)


def make_inputs(
    case: Case, *, seed: int = 0, dtype: str = "float32", h_dtype: str | None = None
) -> dict:
    """Random arrays of `residual_rmsnorm` for a case; the residual stream in `h_dtype`."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    h, update = normal(*case.lead, case.size), normal(*case.lead, case.size).astype(dtype)
    if case.parts:
        update = normal(case.parts, *case.lead, case.size) / case.parts**0.5
    valid = None
    if case.masked:
        valid = jnp.asarray(rng.random(case.lead) < 0.6).at[(0,) * len(case.lead)].set(False)
    weight = normal(case.size).astype(dtype)
    return {"h": h.astype(h_dtype or dtype), "update": update, "weight": weight, "valid": valid}

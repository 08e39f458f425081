"""Named shapes for the tests and the benchmarks of the norms."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class GatedCase:
    """One call of `gated_rmsnorm`.

    Attributes:
        name: says what the shape is for.
        lead: leading axes. size: M P. groups: blocks.
        behind: columns of the gate after z.
        norm_before_gate: as in `gated_rmsnorm`. shared: one weight for all blocks.
        large: from a real model, for benchmarks; unit tests leave it out.
    """

    name: str
    lead: tuple[int, ...] = (2, 3)
    size: int
    groups: int = 1
    behind: int = 0
    norm_before_gate: bool = False
    shared: bool = False
    large: bool = False


GATED_CASES = (
    GatedCase(name="one_block", size=64),
    GatedCase(name="blocks_in_a_projection", size=96, groups=4, behind=50),
    GatedCase(name="odd_blocks", lead=(5,), size=60, groups=3, behind=3),
    GatedCase(name="block_that_is_no_power_of_two", lead=(1, 2), size=1536),
    GatedCase(name="norm_first", size=96, groups=4, behind=50, norm_before_gate=True, shared=True),
    GatedCase(name="norm_first_of_one_block", lead=(5,), size=60, norm_before_gate=True),
    GatedCase(name="one_element", lead=(3, 1, 1), size=2, groups=2),
    GatedCase(name="nemotron_h_8b", lead=(64, 1), size=8192, groups=8, behind=10368, large=True),
    GatedCase(name="granite_4_h_small", lead=(2, 512), size=8192, behind=8576, large=True),
    GatedCase(
        name="qwen3_next",
        lead=(64, 1),
        size=4096,
        groups=32,
        behind=8256,
        norm_before_gate=True,
        shared=True,
        large=True,
    ),
)
SMALL_GATED_CASES = tuple(case for case in GATED_CASES if not case.large)


def make_gated_inputs(
    case: GatedCase, *, seed: int = 0, dtype: str = "float32", y_dtype: str | None = None
) -> dict:
    """Random arrays of `gated_rmsnorm` for a case; the outputs of the recurrence in `y_dtype`."""
    rng = np.random.default_rng(seed)
    normal = functools.partial(_normal, rng)
    return {
        "y": normal(*case.lead, case.size).astype(y_dtype or dtype),
        "gate": normal(*case.lead, case.size + case.behind).astype(dtype),
        "weight": normal(case.size // case.groups if case.shared else case.size).astype(dtype),
    }


@dataclass(frozen=True, kw_only=True)
class ResidualCase:
    """One call of `residual_rmsnorm`.

    Attributes:
        name: says what the shape is for.
        lead: leading axes. size: D.
        parts: of the update, or 0 where it is whole.
        multiplier: factor on the update.
        masked: some tokens are not real.
        float32_weight: whatever the dtype of the rest.
        large: from a real model, for benchmarks; unit tests leave it out.
    """

    name: str
    lead: tuple[int, ...] = (2, 3)
    size: int
    parts: int = 0
    multiplier: float = 1.0
    masked: bool = False
    float32_weight: bool = False
    large: bool = False


RESIDUAL_CASES = (
    ResidualCase(name="one_token", lead=(1, 1), size=64),
    ResidualCase(name="multiplier", lead=(5,), size=192, multiplier=0.22),
    ResidualCase(name="odd_sizes", lead=(3, 1), size=77, masked=True),
    ResidualCase(name="padding", size=100, masked=True, multiplier=0.22),
    ResidualCase(name="parts", lead=(4, 1), size=96, parts=8),
    ResidualCase(name="float32_weight", size=80, parts=2, masked=True, float32_weight=True),
    ResidualCase(name="float32_weight_of_one_update", size=80, float32_weight=True),
    ResidualCase(name="one_part", lead=(4, 1), size=96, parts=1, masked=True),
    ResidualCase(name="odd_parts_and_padding", size=1531, parts=3, multiplier=0.3, masked=True),
    ResidualCase(name="hybrid_7b", lead=(64, 1), size=4096, parts=8, masked=True, large=True),
    ResidualCase(name="hybrid_7b_prompt", lead=(2, 2048), size=4096, masked=True, large=True),
)
SMALL_RESIDUAL_CASES = tuple(case for case in RESIDUAL_CASES if not case.large)


def make_residual_inputs(
    case: ResidualCase, *, seed: int = 0, dtype: str = "float32", h_dtype: str | None = None
) -> dict:
    """Random arrays of `residual_rmsnorm` for a case; the residual stream in `h_dtype`."""
    rng = np.random.default_rng(seed)
    normal = functools.partial(_normal, rng)
    h, update = normal(*case.lead, case.size), normal(*case.lead, case.size).astype(dtype)
    if case.parts:
        update = normal(case.parts, *case.lead, case.size) / case.parts**0.5
    valid = None
    if case.masked:
        valid = jnp.asarray(rng.random(case.lead) < 0.6).at[(0,) * len(case.lead)].set(False)
    weight = normal(case.size).astype("float32" if case.float32_weight else dtype)
    return {"h": h.astype(h_dtype or dtype), "update": update, "weight": weight, "valid": valid}


def _normal(rng: np.random.Generator, *shape: int) -> jnp.ndarray:
    return jnp.asarray(rng.standard_normal(shape, np.float32))

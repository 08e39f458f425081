"""Named shapes for the tests and the benchmark of the convolution over prompts and over windows."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from pallas_kernels.operands import stored
from pallas_kernels.records import ProjectionLayout

NEMOTRON_H_8B = ProjectionLayout(num_heads=128, head_dim=64, num_groups=8, state_size=128)
GRANITE_4_H_TINY = ProjectionLayout(num_heads=48, head_dim=64, num_groups=1, state_size=128)
QWEN3_NEXT = ProjectionLayout(  # and Qwen3.5
    num_heads=32, head_dim=128, num_groups=16, state_size=128, delta=True
)
SMALL = ProjectionLayout(num_heads=4, head_dim=8, num_groups=2, state_size=16)
UNEVEN = ProjectionLayout(
    num_heads=6, head_dim=5, num_groups=3, state_size=7, conv_width=3, dt_limits=(0.1, 1.0)
)

UNGATED = replace(SMALL, within=(9, 130))  # after a model's cut


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `causal_conv`.

    Attributes:
        name: says what the shape is for.
        layout: of the layer. biased: the convolution has a bias.
        tokens: T. lengths: tokens of each row that exist.
    """

    name: str
    layout: ProjectionLayout = SMALL
    biased: bool = True
    tokens: int
    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        """B, rows of the batch."""
        return len(self.lengths)


@dataclass(frozen=True, kw_only=True)
class WindowCase:
    """One call of `causal_conv_window`.

    Attributes:
        name, layout, biased: as in `Case`.
        tokens: T. slots: S, records a ring has room for.
        starts, first, num_valid: of each row.
        spare_rows, spare_columns: B' - B and T' - T of the rings. layers, layer: L, and the one that is used.
        tree: ancestors of each token as bits, the same for all rows, or None.
    """

    name: str
    layout: ProjectionLayout = SMALL
    biased: bool = True
    tokens: int
    slots: int = 32
    starts: tuple[int, ...]
    first: tuple[int, ...]
    num_valid: tuple[int, ...]
    spare_rows: int = 1
    spare_columns: int = 0
    layers: int = 2
    layer: int = 1
    tree: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """B, rows of the batch."""
        return len(self.starts)


CASES = (
    Case(name="lengths_around_the_taps", tokens=20, lengths=(20, 0, 1, 2, 3)),
    Case(name="edges_of_a_tile", tokens=33, lengths=(15, 16, 17, 33), biased=False),
    Case(name="nothing_even", tokens=7, lengths=(7, 4), layout=UNEVEN),
    Case(name="one_token", tokens=1, lengths=(1, 0)),
    Case(name="without_gates", tokens=40, lengths=(40, 7), layout=UNGATED),
)
WINDOW_CASES = (
    WindowCase(
        name="decode", tokens=1, starts=(0, 13, 31), first=(0,) * 3, num_valid=(1,) * 3, layer=0
    ),
    WindowCase(
        name="decode_with_inert_rows",
        tokens=1,
        starts=(7, 40, -5),
        first=(0, 0, 0),
        num_valid=(1, 0, -3),
        layout=UNEVEN,
        spare_columns=2,
        layers=3,
    ),
    WindowCase(
        name="two_tokens",  # fewer than the history: part of it stays
        tokens=2,
        slots=33,
        starts=(31, 0, 4),
        first=(0, 1, 0),
        num_valid=(2, 2, 1),
        biased=False,
    ),
    WindowCase(
        name="verify",
        tokens=5,
        slots=36,
        starts=(0, 9, 31, 28, 3),
        first=(0, 2, 0, 4, 3),
        num_valid=(5, 5, 3, 5, 3),
        spare_columns=3,
        spare_rows=2,
    ),
    WindowCase(
        name="uneven_verify",
        tokens=6,
        slots=37,
        starts=(2, 31),
        first=(1, 0),
        num_valid=(6, 5),
        layout=UNEVEN,
    ),
    WindowCase(
        name="verify_without_gates",
        tokens=5,
        slots=36,
        starts=(0, 9, 31),
        first=(0, 2, 0),
        num_valid=(5, 5, 3),
        layout=UNGATED,
    ),
    WindowCase(
        name="whole_ring",
        tokens=32,
        starts=(0,) * 4,
        first=(0, 31, 7, 0),
        num_valid=(32, 32, 20, 0),
    ),
    WindowCase(
        name="tree",
        tokens=7,
        slots=38,
        starts=(0, 31, 5),
        first=(0, 0, 1),
        num_valid=(7, 5, 7),
        # A root with two children, a chain below one of them, and a token that stands alone.
        tree=(0b1, 0b11, 0b101, 0b1011, 0b11011, 0b111011, 0b1000000),
    ),
)


def _normal(rng: np.random.Generator, dtype: str, *shape: int) -> jnp.ndarray:
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def _weights(rng: np.random.Generator, layout: ProjectionLayout, biased: bool, dtype: str) -> dict:
    normal = functools.partial(_normal, rng, dtype)
    return {
        "weight": normal(layout.conv_width, layout.conv_size),
        "bias": normal(layout.conv_size) if biased else None,
        "dt_bias": jnp.asarray(rng.uniform(-4, 1, layout.num_heads), jnp.float32),
    }


def make_inputs(case: Case, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arguments of `causal_conv` for a case; tokens past the lengths hold plausible values too."""
    rng = np.random.default_rng(seed)
    layout, normal = case.layout, functools.partial(_normal, rng, dtype)
    return {
        "projected": normal(case.rows, case.tokens, layout.projected_size),
        "history": normal(case.rows, layout.history, layout.conv_size),
        "lengths": jnp.asarray(case.lengths, jnp.int32),
        **_weights(rng, layout, case.biased, dtype),
    }


def make_window_inputs(case: WindowCase, *, seed: int = 0, dtype: str = "float32") -> dict:
    """Random arguments of `causal_conv_window` for a case; rings as bits, plausible values everywhere."""
    rng = np.random.default_rng(seed)
    layout, normal = case.layout, functools.partial(_normal, rng, dtype)
    bits = jnp.uint16 if dtype == "bfloat16" else jnp.uint32
    lead = (case.layers, case.rows + case.spare_rows)
    columns = layout.history + case.tokens + case.spare_columns
    ancestors = None
    if case.tree is not None:
        ancestors = jnp.broadcast_to(jnp.asarray(case.tree, jnp.int32), (case.rows, case.tokens))
    return {
        "projected": normal(case.rows, case.tokens, layout.projected_size),
        "conv": stored(normal(*lead, columns, layout.conv_size), bits),
        "xB": stored(normal(*lead, case.slots, layout.record_size), bits),
        "dt": jnp.asarray(rng.uniform(0, 1, (*lead, case.slots, layout.num_heads)), jnp.float32),
        "starts": jnp.asarray(case.starts, jnp.int32),
        "first": jnp.asarray(case.first, jnp.int32),
        "num_valid": jnp.asarray(case.num_valid, jnp.int32),
        "ancestors": ancestors,
        **_weights(rng, layout, case.biased, dtype),
    }

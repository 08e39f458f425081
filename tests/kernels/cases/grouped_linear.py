"""Named shapes for the tests and the benchmark of mix_experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_linear.api import MATRICES
from pallas_kernels.grouped_linear.reference import Activation


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `mix_experts`.

    Attributes:
        tokens, top_k, num_experts, width, hidden: S, k, X, Z and F.
        idle: the last so many experts are visited by no token. invalid: the last so many tokens visit none.
        same: every token visits the same experts.
        large: the shape of a real model, for benchmarks; unit tests leave it out.
    """

    name: str
    tokens: int
    top_k: int = 2
    num_experts: int = 5
    width: int = 24
    hidden: int = 20
    kind: Activation = "gated_silu"
    biased: bool = False
    idle: int = 0
    invalid: int = 0
    same: bool = False
    large: bool = False


def _models() -> tuple[Case, ...]:
    """Shapes of models, each with few tokens, many, and a long prompt; docs/explain/kernels.md says what they are."""
    models = {
        "granite_4_h_tiny": {"num_experts": 64, "top_k": 6, "width": 1536, "hidden": 512},
        "nemotron_3_nano": {
            **{"num_experts": 128, "top_k": 6, "width": 2688, "hidden": 1856},
            "kind": "relu2",
        },
        "qwen3_next": {"num_experts": 512, "top_k": 10, "width": 2048, "hidden": 512},
        "jamba_mini": {"num_experts": 16, "top_k": 2, "width": 4096, "hidden": 14336},
    }
    sizes = (64, 8192, 1)
    return tuple(
        Case(name=f"{name}_{tokens}", tokens=tokens, large=True, **shape)
        for tokens in sizes
        for name, shape in models.items()
    )


CASES = (
    Case(name="few_tokens", tokens=9),
    Case(name="lone_token", tokens=1),
    Case(name="lone_token_with_biases", tokens=1, kind="relu2", biased=True),
    Case(name="inner_in_parts", tokens=3, width=300, biased=True),
    Case(name="lone_token_in_parts", tokens=1, width=300, kind="relu2"),
    Case(name="relu2_with_biases", tokens=9, kind="relu2", biased=True),
    Case(name="blocks_that_are_not_full", tokens=12, width=70, hidden=75, top_k=3),
    Case(name="one_expert_for_all", tokens=37, top_k=1, same=True, num_experts=8),
    Case(name="every_expert_for_all", tokens=20, top_k=5),
    Case(name="invalid_tokens", tokens=18, invalid=7, idle=1),
    Case(name="no_visits", tokens=6, invalid=6),
    Case(name="lone_token_without_visits", tokens=1, invalid=1),
    Case(name="many_idle_experts", tokens=4, num_experts=40, idle=30, top_k=3),
    *_models(),
)
SMALL_CASES = tuple(case for case in CASES if not case.large)


def shapes_of(case: Case, dtype: str = "float32") -> dict[str, jax.ShapeDtypeStruct]:
    """The arguments of a case that hold numbers."""
    columns, experts = MATRICES[case.kind] * case.hidden, case.num_experts
    shapes = {
        "x": (case.tokens, case.width),
        "up": (experts, case.width, columns),
        "down": (experts, case.hidden, case.width),
    }
    if case.biased:
        shapes |= {"up_bias": (experts, columns), "down_bias": (experts, case.width)}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def scale_of(name: str, shape: tuple[int, ...]) -> float:
    """A standard deviation that keeps what experts make as large as what they are given."""
    return shape[1] ** -0.5 if name in ("up", "down") else 1.0


def make_inputs(case: Case, dtype: str = "float32", *, seed: int = 0) -> dict:
    """Random arguments of `mix_experts` for a case."""
    rng = np.random.default_rng(seed)
    inputs = {}
    for name, like in shapes_of(case, dtype).items():
        drawn = scale_of(name, like.shape) * rng.standard_normal(like.shape, np.float32)
        inputs[name] = jnp.asarray(drawn, dtype)
    busy = case.num_experts - case.idle
    draw: Callable[[], np.ndarray] = functools.partial(rng.permutation, busy)
    first = draw()
    ids = np.stack([(first if case.same else draw())[: case.top_k] for _ in range(case.tokens)])
    ids[case.tokens - case.invalid :] = case.num_experts
    weights = rng.dirichlet(np.ones(case.top_k), case.tokens)
    return inputs | {
        "ids": jnp.asarray(ids, jnp.int32),
        "weights": jnp.asarray(weights, jnp.float32),
    }

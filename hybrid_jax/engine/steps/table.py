"""The kinds of steps that an engine has, in the order in which the dispatches of a plan run."""

from __future__ import annotations

from typing import Any

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.steps.decode import Decode
from hybrid_jax.engine.steps.exact import Exact
from hybrid_jax.engine.steps.fork import Fork
from hybrid_jax.engine.steps.kind import StepKind
from hybrid_jax.engine.steps.prefill import Prefill

PREFILL, FORK, DECODE, EXACT = Prefill(), Fork(), Decode(), Exact()
ORDINARY: tuple[StepKind, ...] = (PREFILL, FORK, DECODE)
EXACT_MODE: tuple[StepKind, ...] = (EXACT,)


def kinds_of(engine: EngineConfig) -> tuple[StepKind, ...]:
    """The kinds of steps of an engine."""
    return EXACT_MODE if engine.exact else ORDINARY


def all_steps(engine: EngineConfig, *, max_pages: int) -> list[tuple[StepKind, Any]]:
    """Every bucket that a run can meet, with its kind. A warm-up compiles all of them."""
    return [
        (kind, bucket)
        for kind in kinds_of(engine)
        for bucket in kind.buckets(engine, max_pages=max_pages)
    ]


def all_buckets(engine: EngineConfig, *, max_pages: int) -> list[Any]:
    """`all_steps` without the kinds."""
    return [bucket for _, bucket in all_steps(engine, max_pages=max_pages)]

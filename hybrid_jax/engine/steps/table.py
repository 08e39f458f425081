"""The kinds of steps that an engine has, in the order in which the dispatches of a plan run."""

from __future__ import annotations

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.steps.decode import Decode
from hybrid_jax.engine.steps.exact import Exact
from hybrid_jax.engine.steps.fork import Fork
from hybrid_jax.engine.steps.prefill import Prefill
from hybrid_jax.engine.steps.step import StepKind
from hybrid_jax.engine.steps.verify import Verify
from hybrid_jax.state import Model

ORDINARY: tuple[type[StepKind], ...] = (Prefill, Fork, Decode)
SPECULATING: tuple[type[StepKind], ...] = (*ORDINARY, Verify)
EXACT_MODE: tuple[type[StepKind], ...] = (Exact,)


def kinds_of(engine: EngineConfig, model: Model, max_pages: int) -> tuple[StepKind, ...]:
    """The kinds of steps of an engine; the arguments are those of `StepKind`."""
    ordinary = ORDINARY if engine.speculation is None else SPECULATING
    kinds = EXACT_MODE if engine.exact else ordinary
    return tuple(kind(engine, model, max_pages) for kind in kinds)

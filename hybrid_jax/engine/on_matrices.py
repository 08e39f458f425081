"""What turns a step's parameters into matrices, before any layer sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hybrid_jax.models.matrices import with_matrices
from hybrid_jax.state import Model


def on_matrices(step: Callable[..., Any]) -> Callable[..., Any]:
    """A device function whose first argument, the parameters, gets a `Matrix` in place of the arrays of each."""

    @functools.wraps(step)
    def run(params: dict, *rest: Any, model: Model, **static: Any) -> Any:
        return step(
            with_matrices(params, model.config, model.backend), *rest, model=model, **static
        )

    return run

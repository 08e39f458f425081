"""The machine that jax runs models on, and what weights take of it."""

from __future__ import annotations

from typing import Any

import jax

from hybrid_jax.engine.room import Machine, this_host


def this_machine(*, held: int) -> Machine | None:
    """Its memory, as far as it is known; None where it is not.

    Args:
        held: bytes of the model's weights that are in memory already. What else an accelerator holds is not
            for this model.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return this_host()
    known = device.memory_stats() or {}
    if "bytes_limit" not in known:
        return None
    others = max(0, known.get("bytes_in_use", 0) - held)
    return Machine(num_bytes=known["bytes_limit"] - others, accelerator=True)


def held_bytes(params: Any) -> int:
    """Bytes of all arrays, or of their shapes where a step is only to be compiled."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))

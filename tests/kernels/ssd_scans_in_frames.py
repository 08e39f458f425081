"""Scans of the SSD recurrence over states in frames."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.records import RecordSizes
from tests.kernels.cases.ssd_scan import Case, make_inputs
from tests.kernels.framed import in_frames
from tests.kernels.ssd_scans import scan

ODD = Case(
    name="odd",
    rows=3,
    tokens=70,
    heads=6,
    groups=2,
    width=12,
    size=24,
    lengths=(70, 0, 33),
    state_lengths=(64, 0, 33),
    initial_state=True,
)


def arguments(case: Case, dtype: str, per_frame: int) -> dict:
    """`ssd_scan_frames` for a case; row 0 writes in place, the others elsewhere, and row 1 starts from nothing."""
    inputs = make_inputs(case, dtype=dtype)
    arena, read = in_frames(inputs["initial_state"], per_frame)
    exists = jnp.arange(case.rows) != 1
    spare = np.arange(read.size, dtype=np.int32).reshape(read.shape) + arena.shape[0]
    write = jnp.where((jnp.arange(case.rows) == 0)[:, None], read, spare)
    nan = jnp.full((read.size, arena.shape[1]), 0xFFFFFFFF, jnp.uint32)
    flat = [inputs[name].reshape(case.rows, case.tokens, -1) for name in ("x", "B", "C")]
    return {
        "arena": jnp.concatenate([arena, nan]),
        "read": jnp.where(exists[:, None], read, 0),
        "write": write,
        "exists": exists,
        "xBC": jnp.concatenate(flat, axis=-1),
        **{name: inputs[name] for name in ("dt", "A", "lengths", "state_lengths")},
        "D": jnp.linspace(-1, 2, case.heads),
    }


def expected(case: Case, dtype: str) -> tuple:
    """The same in float32 from the reference over dense states."""
    inputs = make_inputs(case, dtype=dtype)
    exists = jnp.arange(case.rows) != 1
    state = jnp.where(exists[:, None, None, None], inputs["initial_state"], 0.0)
    x = inputs["x"].astype(jnp.float32)
    inputs |= {"x": x, "initial_state": state}
    y, state = scan(**inputs, implementation="reference")
    valid = (jnp.arange(case.tokens) < inputs["lengths"][:, None])[..., None, None]
    y = y + jnp.where(valid, jnp.linspace(-1, 2, case.heads)[:, None] * x, 0)
    return y.reshape(case.rows, case.tokens, -1).astype(dtype), state


def records_of(case: Case) -> RecordSizes:
    return RecordSizes(
        num_heads=case.heads,
        head_dim=case.width,
        num_groups=case.groups,
        state_size=case.size,
    )

"""Windows of the SSD recurrence: their cases, run by name."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.ssd_window import RecordSizes
from tests.kernels.by_name import ssd_window_frames, ssd_window_rings
from tests.kernels.cases.ssd_window import Case
from tests.kernels.compare import relative_error
from tests.kernels.framed import framed

FAST = ("pallas", "xla")
TOLERANCE = {"float32": 1e-6}  # of the norm; outputs are float32 whatever the records' dtype
RING = Case(name="ring", tokens=32, heads=6, groups=3, width=12, size=24, starts=(0, 0, 0, 0))


def assert_close(got, want) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert relative_error(got, want) <= TOLERANCE[got.dtype.name]


def ringed(x: jax.Array, B: jax.Array) -> jax.Array:
    """Records as the ring of one layer."""
    lead = x.shape[:2]
    return jnp.concatenate([x.reshape(*lead, -1), B.reshape(*lead, -1)], axis=-1)[None]


def all_scores(C: jax.Array, B: jax.Array) -> jax.Array:
    """C . B of every query and slot, float32[B, T, G, S]."""
    wide = (a.astype(jnp.float32) for a in (C, B))
    return jnp.einsum("btgr,bsgr->btgs", *wide, precision="highest")


@functools.partial(jax.jit, static_argnames="implementation")
def window(state, x, dt, A, B, C, *, starts, num_valid=None, ancestors=None, implementation):
    """The window by the function that has the implementation: over rings for "pallas", which gets no skip here."""
    arena, table, exists = framed(state)
    at = {"starts": starts, "ancestors": ancestors, "implementation": implementation}
    at |= {"arena": arena, "frames": table, "exists": exists}
    if num_valid is None:
        num_valid = jnp.full(len(starts), C.shape[1])
    if implementation != "pallas":
        return ssd_window_frames(**at, x=x, dt=dt, A=A, B=B, C=C, num_valid=num_valid)[0]
    return ssd_window_rings(
        **{"xB": ringed(x, B), "dt": dt[None], "A": A[None]},
        C=C.reshape(*C.shape[:2], -1),
        layer=0,
        records=RecordSizes.of(x, B),
        num_valid=num_valid,
        D=jnp.zeros_like(A),
        scores=all_scores(C, B),
        **at,
    )

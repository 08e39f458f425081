"""Sums over the devices that a model is divided over.

Such a step runs on each of them (`jax.shard_map`), and sees the arrays of one. All devices have the whole residual
stream; a block's result is the sum of what they make.
"""

from __future__ import annotations

import jax

from hybrid_jax.config.mesh import TP

AXIS = TP


def this_shard() -> jax.Array:
    """Which of the devices this is, an int32 from 0."""
    return jax.lax.axis_index(AXIS)


def summed_over(x: jax.Array, shards: int) -> jax.Array:
    """The sum of x over so many devices, which are all of them; x itself for one."""
    return x if shards == 1 else jax.lax.psum(x, AXIS)


def joined_over(x: jax.Array) -> jax.Array:
    """What all devices have, one after the other along the last axis."""
    return jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)


def summed_over_runs(x: jax.Array, run: int) -> jax.Array:
    """The sum of x over the devices of each run of so many, one after the other; x itself for runs of one."""
    if run == 1:
        return x
    every = jax.lax.all_gather(x, AXIS)  # [devices, ...]
    first = this_shard() // run * run
    return jax.lax.dynamic_slice_in_dim(every, first, run).sum(axis=0)

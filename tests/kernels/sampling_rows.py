"""Rows to sample, and what their filters leave: the definition with a sort, in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.engine.sampling import SamplingRows, sample
from pallas_kernels.token_sampling import SamplingArrays
from pallas_kernels.token_sampling.xla import keep_likely

choose = jax.jit(sample)


def arrays_of(logits: jax.Array, rows: SamplingRows, positions: jax.Array) -> SamplingArrays:
    """What the kernels take, of rows that ban nothing."""
    return SamplingArrays(
        logits=logits,
        keys=rows.seed,
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        banned=jnp.full((len(logits), 1), -1, jnp.int32),
        sample_index=rows.sample_index,
        position=positions,
    )


@jax.jit
def keep(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    return keep_likely(scaled, arrays_of(scaled, rows, rows.sample_index))


def rows(count: int, **settings) -> SamplingRows:
    """Parameters of `count` rows; each setting is one value for all or a list."""
    defaults = {
        "seed": [[n, 0] for n in range(count)],
        "sample_index": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "min_end": 0,
        "stop_ids": [[-1] * 4] * count,
    }
    dtypes = {"seed": np.uint32} | dict.fromkeys(("temperature", "top_p", "min_p"), np.float32)
    fields = {}
    for name, value in (defaults | settings).items():
        array = np.asarray(value, dtypes.get(name, np.int32))
        fields[name] = jnp.asarray(np.broadcast_to(array, (count, *array.shape[1:])))
    return SamplingRows(**fields)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def kept_by_sorting(
    scaled: np.ndarray, top_k: int, top_p: float, slack: float, min_p: float = 0.0
) -> set[int]:
    """min_p, top-k, then the smallest set of the most likely that reaches top_p; ties at an edge all stay."""
    scaled = np.asarray(scaled, np.float64)
    if min_p:
        scaled = np.where(scaled >= scaled.max() + np.log(min_p), scaled, -np.inf)
    if top_k:
        edge = np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
        scaled = np.where(scaled >= edge, scaled, -np.inf)
    if top_p < 1:
        values = softmax(scaled)
        order = np.argsort(-values, kind="stable")
        reached = np.cumsum(values[order]) >= top_p + slack
        last = int(reached.argmax()) if reached.any() else len(order) - 1
        scaled = np.where(scaled >= scaled[order[last]], scaled, -np.inf)
    return set(np.flatnonzero(scaled > -np.inf))

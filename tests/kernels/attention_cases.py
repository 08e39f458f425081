"""Paged attention by name and by its definition."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import AttentionArrays, AttentionOptions, xla
from pallas_kernels.paged_attention.api import IMPLEMENTATIONS
from pallas_kernels.paged_attention.layout import FP8, unpack
from pallas_kernels.paged_attention.reference import visible
from tests.kernels.by_name import paged_attention
from tests.kernels.cases.paged_attention import CASES, Case

FAST = sorted(set(IMPLEMENTATIONS) - {"reference"})

# Of the norm, by the pages' dtype. "xla" computes in float32, "pallas" rounds the weights to bfloat16 for packed pages.
TOLERANCE = {
    "reference": {"float32": 1e-6, "bfloat16": 1e-6, FP8: 1e-6},
    "xla": {"float32": 1e-6, "bfloat16": 1e-6, FP8: 1e-6},
    "pallas": {"float32": 1e-6, "bfloat16": 5e-3, FP8: 5e-3},
}

CASE = {case.name: case for case in CASES}
BITS = Case(
    name="bits", tokens=4, base=(0, 30, 97, 150), heads=6, kv_heads=2, head_dim=16, page_tokens=16
)

attend = jax.jit(
    paged_attention,
    static_argnames=("layout", "scale", "sliding_window", "soft_cap", "dtype", "implementation"),
)


def run(case: Case, inputs: dict, implementation: str | None, dtype: str = "float32") -> jax.Array:
    return attend(
        **inputs,
        layout=case.layout(dtype),
        scale=case.head_dim**-0.5,
        sliding_window=case.window,
        soft_cap=case.soft_cap,
        implementation=implementation,
    )


def every_tile(arrays: AttentionArrays, *, options: AttentionOptions) -> jax.Array:
    """`paged_attention_xla` by a walk of all rows over the same tiles, from position 0 to the highest end.

    A window only masks, so what lies before it must be finite.
    """

    def masked(base, tokens, key_position, end, window, ancestors):
        return visible(base, tokens, key_position, end, options.sliding_window, ancestors)

    with mock.patch.object(xla, "visible", masked):
        return xla.paged_attention_xla(arrays, options=options._replace(sliding_window=None))


def expected(case: Case, inputs: dict, dtype: str) -> np.ndarray:
    """Softmax attention in float64, one query and one head at a time, key by key out of the pages."""
    layout, size = case.layout(dtype), case.page_tokens
    arena, table = np.asarray(inputs["arena"]), np.asarray(inputs["table"])
    out = np.zeros(inputs["q"].shape)
    for b, (base, length) in enumerate(zip(case.base, case.lengths, strict=True)):
        places = [(table[b, p // size], p % size) for p in range(length)]
        words = [
            arena[u, case.before + s * layout.token_words :][: layout.token_words]
            for u, s in places
        ]
        if not words:
            continue
        words = np.stack(words).reshape(length, 2, case.kv_heads, layout.head_words)
        kv = np.asarray(unpack(jnp.asarray(words), dtype), np.float64)
        if dtype == FP8:
            first = case.before + size * layout.token_words
            bits = [
                arena[u, first + s * layout.scale_words :][: layout.scale_words] for u, s in places
            ]
            scales = np.stack(bits).view(np.float32).astype(np.float64)
            kv *= scales.reshape(length, 2, case.kv_heads, 1)
        for t in range(case.tokens):
            keys = seen_keys(case, base, t, length)
            if not keys:
                continue
            for n in range(case.heads):
                q = np.asarray(inputs["q"][b, t, n], np.float64)
                k, v = kv[keys, :, n // (case.heads // case.kv_heads)].swapaxes(0, 1)
                scores = k @ q * case.head_dim**-0.5
                if case.soft_cap is not None:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ v / weights.sum()
    return out


def seen_keys(case: Case, base: int, t: int, length: int) -> list[int]:
    """Places in a row's pages that query t sees."""
    path = range(t + 1)
    if case.tree is not None:
        path = [j for j in range(case.tokens) if case.tree[t] >> j & 1]
    keys = [*range(base), *(base + j for j in path)]  # in the order of their positions
    keys = keys if case.window is None else keys[max(len(keys) - case.window, 0) :]
    return [key for key in keys if key < length]

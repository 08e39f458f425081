"""One after another, as XLA fuses them."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.append_kv.heads import split_heads
from pallas_kernels.frame_io.api import pack_records
from pallas_kernels.frame_io.xla import update_tokens_xla
from pallas_kernels.parts import whole


def append_kv_xla(
    arena,
    qkv,
    table,
    base,
    begin,
    end,
    cos,
    sin,
    q_norm,
    k_norm,
    *,
    group,
    layout,
    num_heads,
    eps,
    dtype,
):
    """See `api.append_kv`."""
    qkv = whole(qkv, 3, dtype)
    q, k, v = split_heads(
        *(qkv, cos, sin, q_norm, k_norm, eps),
        num_heads=num_heads,
        head_dim=layout.head_dim,
    )
    records = pack_records(jnp.stack([k, v], axis=2).astype(layout.dtype))
    records = records.reshape(*qkv.shape[:2], layout.token_words)
    places = {"offset": layout.offset, "page_tokens": layout.page_tokens}
    return q.astype(dtype), update_tokens_xla(
        arena, records, table[:, group], base, begin, end, **places
    )

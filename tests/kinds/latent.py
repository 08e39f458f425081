"""A kind that keeps one latent vector of every token in its pages: keys and values are made of it.

k_s, v_s = W_k c_s, W_v c_s with c_s = W_c u_s, for each head; no rotation (multi-head latent attention without its
rope part, arXiv 2405.04434). Whole sequences make keys and values; steps multiply queries by W_k and the mixed latents
by W_v in their place. `register` makes it known to the package; nothing else in the tree knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from hybrid_jax.engine.mixers import table as mixers
from hybrid_jax.engine.mixers.mixer import PagedSteps, Span
from hybrid_jax.geometry import KVPlace
from hybrid_jax.kinds import table as kinds
from hybrid_jax.kinds.kind import Kind, PageEntry, StepSize, Weight, Weights
from hybrid_jax.models import decoder
from hybrid_jax.products.matrix import Matrix, as_matrix, product
from hybrid_jax.state import Model, State
from pallas_kernels.append_kv.entries import append_entries
from pallas_kernels.dispatch import HIGHEST
from pallas_kernels.frame_io import read_frames
from pallas_kernels.paged_attention.layout import kept, pack, unpack
from pallas_kernels.paged_attention.reference import visible

MASKED = -1e30


@dataclass(frozen=True, kw_only=True)
class Latent:
    """N heads of H channels, whose keys and values are made of R numbers a token."""

    num_heads: int
    head_dim: int
    rank: int
    sliding_window: int | None = None
    pages: ClassVar[bool] = True


class LatentKind(Kind):
    name = "latent"

    def entry(self, spec: Latent) -> PageEntry:
        return PageEntry(elements=spec.rank, scaled=spec.rank, window=spec.sliding_window)

    def weights(self, spec: Latent, width: int) -> Weights:
        size = spec.num_heads * spec.head_dim
        up = Weight(shape=(spec.num_heads, spec.rank, spec.head_dim), draw="matrix", plain=True)
        return {
            "q": Weight(shape=(width, size), draw="matrix"),
            "down_proj": Weight(shape=(width, spec.rank), draw="matrix"),
            "k_up": up,
            "v_up": up,
            "out": Weight(shape=(size, width), draw="output"),
        }

    def key_flops(self, spec: Latent) -> int:
        return 4 * spec.num_heads * spec.rank

    def row_bytes(self, spec: Latent, step: StepSize) -> int:
        return spec.num_heads * (spec.head_dim + 2 * spec.rank) * step.item

    chunk_bytes = row_bytes

    def xla_elements(self, spec: Latent, width: int) -> int:
        return 4 * spec.num_heads * (spec.head_dim + spec.rank)


class LatentSteps(PagedSteps[Latent]):
    def attend(
        self,
        params: dict,
        h: jax.Array,
        state: State,
        at: KVPlace,
        span: Span,
        spec: Latent,
        model: Model,
    ) -> tuple[jax.Array, State]:
        """The latents of the new tokens to their pages, then what they read, page by page."""
        table, base, begin, end, ancestors = span
        table, (rows, tokens, _) = table[:, at.frame], h.shape
        dtype, size = model.geometry.kv_dtype, model.geometry.page_tokens
        words, scales = pack(product(h, params["down_proj"]), dtype)
        where = {"base": base, "begin": begin, "end": end, "page_tokens": size}
        arena = append_entries(state.arena, words, table, offset=at.offset, **where)
        if scales is not None:
            after = at.offset + size * at.token_words
            arena = append_entries(arena, scales[..., None], table, offset=after, **where)
        q = _heads(product(h, params["q"]), spec)
        q = jnp.einsum("btnh,nrh->btnr", q, _wide(params["k_up"]), precision=HIGHEST)
        q *= spec.head_dim**-0.5
        part = size * (at.token_words + at.scale_words)

        def visit(page: jax.Array, carry: tuple) -> tuple:
            peak, total, mixed = carry  # [B, T, N], [B, T, N], [B, T, N, R]
            ids = jax.lax.dynamic_slice_in_dim(table, page, 1, axis=1)
            own = read_frames(arena, ids, offset=at.offset, words=part, implementation="xla")[:, 0]
            c = unpack(own[:, : size * at.token_words].reshape(rows, size, -1), dtype)
            if at.scale_words:
                scale = jax.lax.bitcast_convert_type(own[:, size * at.token_words :], jnp.float32)
                c *= scale[..., None]
            position = page * size + jnp.arange(size)
            live = position < end[:, None]  # what lies past a row, or no window sees, may be NaN
            if spec.sliding_window is not None:
                live &= position > base[:, None] - spec.sliding_window
            c = jnp.where(live[..., None], c, 0)
            seen = visible(base, tokens, position, end, spec.sliding_window, ancestors)[:, :, None]
            scores = jnp.einsum("btnr,bsr->btns", q, c, precision=HIGHEST)
            scores = jnp.where(seen, scores, MASKED)
            higher = jnp.maximum(peak, scores.max(-1))
            weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0.0)
            keep = jnp.exp(peak - higher)
            added = jnp.einsum("btns,bsr->btnr", weights, c, precision=HIGHEST)
            return higher, total * keep + weights.sum(-1), mixed * keep[..., None] + added

        shape = (rows, tokens, spec.num_heads)
        start = jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, spec.rank))
        # Two pages at least: a read that does not depend on the loop would come before it, and the arena be copied.
        table = jnp.pad(table, ((0, 0), (0, max(0, 2 - table.shape[1]))))
        _, total, mixed = jax.lax.fori_loop(0, -(-jnp.max(end) // size), visit, start)
        mixed /= jnp.maximum(total, 1e-30)[..., None]
        y = jnp.einsum("btnr,nrh->btnh", mixed, _wide(params["v_up"]), precision=HIGHEST)
        out = product(y.astype(h.dtype).reshape(rows, tokens, -1), params["out"])
        return out, state.replace(arena=arena)


def whole(
    params: dict,
    h: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    spec: Latent,
    kv_dtype: str | None = None,
) -> jax.Array:
    """The definition: sequences [B, T, D] from nothing, with the keys and values of every head."""
    c = product(h, params["down_proj"])
    c = (c if kv_dtype is None else kept(c, kv_dtype)).astype(jnp.float32)
    k, v = (
        jnp.einsum("bsr,nrh->bsnh", c, _wide(params[name]), precision=HIGHEST)
        for name in ("k_up", "v_up")
    )
    q = _heads(product(h, params["q"]), spec)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision=HIGHEST) * spec.head_dim**-0.5
    seen = visible(positions[:, 0], h.shape[1], positions[0], lengths, spec.sliding_window, None)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, MASKED), axis=-1)
    y = jnp.einsum("bnts,bsnh->btnh", weights, v, precision=HIGHEST)
    return product(y.astype(h.dtype).reshape(*h.shape[:2], -1), params["out"])


def _heads(x: jax.Array, spec: Latent) -> jax.Array:
    return x.reshape(*x.shape[:2], spec.num_heads, spec.head_dim).astype(jnp.float32)


def _wide(x: Matrix | jax.Array) -> jax.Array:
    return as_matrix(x).values.astype(jnp.float32)


def register() -> None:
    """Into the three tables that the package finds kinds in."""
    kinds.KINDS[Latent] = LatentKind()
    decoder.MIXERS[Latent] = whole
    mixers.LAYER_STEPS["xla"][Latent] = LatentSteps()

"""Where keys and values lie in a page."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

PER_WORD = {"float32": 1, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """Where one attention layer's K and V lie in a page's frame.

    Attributes:
        offset: word of the frame where the layer's part begins.
        page_tokens: tokens of a page; the layer's part is [page_tokens, 2 (K, V), K, words of a head].
        num_kv_heads: K. head_dim: H.
        dtype: "float32", or "bfloat16", packed two to a word (`pack_heads`).
    """

    offset: int
    page_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in PER_WORD:
            raise ValueError(
                f"PageLayout: dtype must be one of {sorted(PER_WORD)}, got {self.dtype!r}"
            )
        if self.head_dim % self.per_word:
            raise ValueError(
                f"PageLayout: head_dim must be a multiple of {self.per_word} for {self.dtype}, "
                f"got {self.head_dim}"
            )

    @property
    def per_word(self) -> int:
        """Elements of a word; element j of a head is in word j % head_words."""
        return PER_WORD[self.dtype]

    @property
    def head_words(self) -> int:
        """Words of one head of a key or value."""
        return self.head_dim // self.per_word

    @property
    def token_words(self) -> int:
        """Words of one token: keys of all heads, then values."""
        return 2 * self.num_kv_heads * self.head_words

    @property
    def page_words(self) -> int:
        """Words of the layer's part of a page."""
        return self.page_tokens * self.token_words


def pack_heads(x: jax.Array) -> jax.Array:
    """x [..., H] to words: float32 as it is; bfloat16 as element j low and j + H / 2 high, uint32[..., H / 2]."""
    if x.dtype == jnp.float32:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    half = x.shape[-1] // 2
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return bits[..., :half] | (bits[..., half:] << 16)


def unpack_heads(words: jax.Array, dtype: str) -> jax.Array:
    """The inverse of `pack_heads`, widened to float32: float32[..., H]."""
    if dtype == "float32":
        return jax.lax.bitcast_convert_type(words, jnp.float32)
    low = jax.lax.bitcast_convert_type(words << 16, jnp.float32)
    high = jax.lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.concatenate([low, high], axis=-1)

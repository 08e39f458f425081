"""Where keys and values lie in a page."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.e4m3 import LARGEST, from_codes, to_codes

FP8 = "float8_e4m3fn"
PER_WORD = {"float32": 1, "bfloat16": 2, FP8: 4}
LEAST = 1e-30  # heads whose elements are all smaller are stored as zeros


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """Where one attention layer's K and V lie in a page's frame.

    FP8 pages have a scale for each head of each token, after all elements: [page_tokens, 2 (K, V), K] words with the
    bits of float32. So elements stay aligned.

    Attributes:
        offset: word of the frame where the layer's part begins.
        page_tokens: tokens of a page; the layer's elements are [page_tokens, 2 (K, V), K, words of a head].
        num_kv_heads: K. head_dim: H.
        dtype: "float32"; or "bfloat16", two to a word, or "float8_e4m3fn", four (`pack`).
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
        """Words of one token's elements: keys of all heads, then values."""
        return 2 * self.num_kv_heads * self.head_words

    @property
    def scale_words(self) -> int:
        """Words of one token's scales: of the keys of all heads, then of the values."""
        return 2 * self.num_kv_heads if self.dtype == FP8 else 0

    @property
    def scale_offset(self) -> int:
        """Word of the frame where the scales begin."""
        return self.offset + self.page_tokens * self.token_words

    @property
    def page_words(self) -> int:
        """Words of the layer's part of a page."""
        return self.page_tokens * (self.token_words + self.scale_words)

    def split(self, pages: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The layer's parts of pages, uint32[..., page_words], as words of elements and as scales.

        Returns:
            uint32[..., page_tokens, 2, K, head_words], and float32[..., page_tokens, 2, K] for FP8.
        """
        count = self.page_tokens * self.token_words
        shape = (*pages.shape[:-1], self.page_tokens, 2, self.num_kv_heads)
        words = pages[..., :count].reshape(*shape, self.head_words)
        if not self.scale_words:
            return words, None
        bits = pages[..., count:].reshape(shape)
        return words, jax.lax.bitcast_convert_type(bits, jnp.float32)


def pack(x: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array | None]:
    """Keys or values as words of pages.

    Args:
        x: float[..., H]. dtype: of the pages.

    Returns:
        uint32[..., H / n], with elements j, j + H / n, ... of a head in word j, the first one in the lowest bits; and
        for FP8 the scales, uint32[...] bits of float32. An FP8 element is x / s, rounded to the nearest one, with s
        the largest |x| of the head divided by the largest FP8 number, 448.
    """
    if dtype != FP8:
        return _words(_bits(x.astype(dtype)), PER_WORD[dtype]), None
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    codes = to_codes(wide * inverse_scale(largest)[..., None])
    scale = jax.lax.bitcast_convert_type(largest * (1 / LARGEST), jnp.uint32)
    return _words(codes, PER_WORD[dtype]), scale


def inverse_scale(largest: jax.Array) -> jax.Array:
    """1 / s of heads whose largest element is this, float32; 0 for heads of zeros, or of numbers so small."""
    return jnp.where(largest > LEAST, LARGEST / jnp.maximum(largest, LEAST), 0.0)


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.float32:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)


def _words(bits: jax.Array, per_word: int) -> jax.Array:
    """Words of elements whose bits are uint32[..., H]."""
    size = bits.shape[-1] // per_word
    parts = [
        bits[..., part * size : (part + 1) * size] << (32 // per_word * part)
        for part in range(per_word)
    ]
    return functools.reduce(jnp.bitwise_or, parts)


def unpack(words: jax.Array, dtype: str) -> jax.Array:
    """The elements of `pack`'s words, widened to float32[..., H]; those of FP8 without their scale."""
    return jnp.concatenate(
        [element(words, part, dtype) for part in range(PER_WORD[dtype])], axis=-1
    )


def element(words: jax.Array, part: int, dtype: str) -> jax.Array:
    """Of the elements of each word one, widened to float32; those of FP8 without their scale."""
    if dtype == "float32":
        return jax.lax.bitcast_convert_type(words, jnp.float32)
    if dtype == FP8:
        return from_codes((words >> (8 * part)) & jnp.uint32(0xFF))
    bits = words & jnp.uint32(0xFFFF0000) if part else words << 16
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def kept(x: jax.Array, dtype: str) -> jax.Array:
    """Keys or values float[..., H] as pages of a dtype give them back, in the dtype of x."""
    words, scales = pack(x, dtype)
    back = unpack(words, dtype)
    if scales is not None:
        back *= jax.lax.bitcast_convert_type(scales, jnp.float32)[..., None]
    return back.astype(x.dtype)

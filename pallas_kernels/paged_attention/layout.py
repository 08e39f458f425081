"""Where keys and values lie in a page."""

from __future__ import annotations

from dataclasses import dataclass

PER_WORD = {"float32": 1, "bfloat16": 2, "float8_e4m3fn": 4}


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """Where one attention layer's K and V lie in a page's frame.

    Attributes:
        offset: word of the frame where the layer's part begins.
        page_tokens: tokens of a page; the layer's part is [page_tokens, 2 (K, V), K, words of a head].
        num_kv_heads: K. head_dim: H.
        dtype: "float32"; "bfloat16", packed two to a word (`frame_io.pack_records`); or "float8_e4m3fn",
            packed four to a word, with a factor for each head of a token (`frame_io.quantize_records`).
        scale_offset: column of the factors' line of a frame where the layer's begin,
            [page_tokens, 2 (K, V), K]; of float8_e4m3fn alone.
    """

    offset: int
    page_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    scale_offset: int = 0

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
    def quantized(self) -> bool:
        """Whether the pages' numbers have factors."""
        return self.dtype == "float8_e4m3fn"

    @property
    def head_words(self) -> int:
        return self.head_dim // self.per_word

    @property
    def token_words(self) -> int:
        return 2 * self.num_kv_heads * self.head_words

    @property
    def page_words(self) -> int:
        return self.page_tokens * self.token_words

    @property
    def page_scales(self) -> int:
        return self.page_tokens * 2 * self.num_kv_heads

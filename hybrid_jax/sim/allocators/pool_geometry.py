"""What a study of allocators knows of a model: the sizes of a KV page and of a recurrent state, and how many."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_jax.byte_sizes import parse_size

PAGE_TOKENS = 16
ALIGNMENT = 128
ELEMENT_BYTES = 2  # keys, values and states alike
MOST_PAGES = 1 << 22  # each is a number in a list


@dataclass(frozen=True, kw_only=True)
class PoolGeometry:
    """Objects that a request asks for.

    Attributes:
        name: of the model.
        page_bytes: KV of `page_tokens` tokens in one of `num_pages_each` attention layers (or groups of them).
        state_bytes: of one of `num_states` recurrent layers.
    """

    name: str
    page_tokens: int
    page_bytes: int
    num_pages_each: int
    state_bytes: int
    num_states: int

    @property
    def least_bytes(self) -> int:
        """Of a request of one page."""
        return self.num_pages_each * self.page_bytes + self.num_states * self.state_bytes

    def num_pages(self, num_tokens: int) -> int:
        """Pages of one attention layer."""
        return -(-num_tokens // self.page_tokens)


def _published(name: str, *, inner_size: int, state_size: int) -> PoolGeometry:
    """As the published harness has it: every layer on its own, states in two bytes, no convolution."""
    align = lambda size: -(-size // ALIGNMENT) * ALIGNMENT
    return PoolGeometry(
        name=name,
        page_tokens=PAGE_TOKENS,
        page_bytes=align(2 * 8 * 128 * ELEMENT_BYTES * PAGE_TOKENS),  # 8 KV heads of 128
        num_pages_each=4,
        state_bytes=align(inner_size * state_size * ELEMENT_BYTES),
        num_states=28,
    )


# mamba2_1b3 is made up: the sizes of its states are a Mamba-2's, the rest is jamba_1_5_mini.
PUBLISHED = {
    geometry.name: geometry
    for geometry in (
        _published("jamba_1_5_mini", inner_size=8192, state_size=16),
        _published("mamba2_1b3", inner_size=8192, state_size=128),
    )
}


def published_geometry(name: str) -> PoolGeometry:
    """A model of the published harness, by name."""
    if name not in PUBLISHED:
        raise ValueError(
            f"pool-sim: no model {name!r} in paper mode; known are {', '.join(PUBLISHED)}"
        )
    return PUBLISHED[name]


def parse_pool(text: str, geometry: PoolGeometry) -> int:
    """Bytes of a pool, written as 4GiB or as a number of bytes.

    Raises:
        ValueError: it is no such size, holds no request, or is no multiple of a page.
    """
    pool_bytes = parse_size(text, name="--pool")
    check_pool(pool_bytes, geometry)
    return pool_bytes


def check_pool(pool_bytes: int, geometry: PoolGeometry) -> None:
    """Refuses a budget that the model cannot use."""
    if pool_bytes < geometry.least_bytes:
        raise ValueError(
            f"--pool must hold one request of {geometry.name}, {geometry.least_bytes} bytes at least, "
            f"got {pool_bytes}"
        )
    if pool_bytes > MOST_PAGES * geometry.page_bytes:
        raise ValueError(
            f"--pool must be at most {MOST_PAGES} KV pages of {geometry.name}, "
            f"{MOST_PAGES * geometry.page_bytes} bytes, got {pool_bytes}"
        )
    if pool_bytes % geometry.page_bytes:
        raise ValueError(
            f"--pool must be a multiple of {geometry.page_bytes} bytes, a KV page of {geometry.name}, "
            f"got {pool_bytes}"
        )

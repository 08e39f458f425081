"""Layers of other shapes than a norm, a mixer or an MLP, and a sum: one of each that published models have."""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import (
    MLP,
    Attention,
    Block,
    Layer,
    LowRank,
    Mamba2,
    Residual,
    Rope,
    residual_layer,
)

WIDTH = 28
MAMBA = Mamba2(num_heads=6, head_dim=4, state_size=8, num_groups=2, norm_groups=2)
ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(dim=8))
WIDE = Attention(num_heads=2, num_kv_heads=1, head_dim=12, rope=Rope(dim=4), qkv_bias=True)
FEED = MLP(width=40)


def _layer(*blocks: Block) -> Layer:
    return Layer(blocks=blocks)


def _of_two(**form) -> Layer:
    return _layer(Block(parts=(ATTENTION,), **form), Block(parts=(FEED,), **form))


PLAIN = residual_layer(mixers=(MAMBA,), mlp=FEED)
# Attention and an MLP whose results are put aside; they are added to what the recurrent block reads, and to nothing
# else. Each use of them may change some matrices.
ASIDE = (
    Block(parts=(WIDE,), reads="joined", adds=None, change=LowRank(matrices=("qkv",), rank=2)),
    Block(parts=(FEED,), reads="aside", adds=None),
    Block(parts=(MAMBA,), reads="both"),
)
AGAIN = (
    replace(ASIDE[0], weights=(0, 0), change=LowRank(matrices=("qkv",), rank=3)),
    replace(ASIDE[1], weights=(0, 1), change=LowRank(matrices=("up", "down"), rank=3)),
    ASIDE[2],
)

LAYERS: dict[str, tuple[Layer, ...]] = {
    "norms_after": (_of_two(norm="after"), PLAIN),
    "norms_before_and_after": (PLAIN, _of_two(norm="both", adds=Residual(gain=0.7))),
    "residual_of_the_normed_input": (
        _of_two(adds=Residual(keep=1.3, gain=0.6, of="normed")),
        PLAIN,
        _of_two(adds=Residual(keep=0.8, gain=1.2)),
    ),
    "shared_with_changes": (_layer(*ASIDE), PLAIN, _layer(*AGAIN)),
    "looped": (PLAIN, _of_two(), PLAIN.again(0), _of_two().again(1), PLAIN.again(0)),
    "shared_from_another_place": (
        _of_two(),
        _layer(Block(parts=(FEED,), weights=(0, 1)), Block(parts=(ATTENTION,), weights=(0, 0))),
    ),
    "side_by_side_with_an_mlp": (_layer(Block(parts=(FEED, ATTENTION, MAMBA))),),
}


def one_of_each() -> tuple[Layer, ...]:
    """A layer of each shape one after the other, and one whose weights are those of the first again."""
    after, both, of_normed = (
        LAYERS[name][place]
        for name, place in (
            ("norms_after", 0),
            ("norms_before_and_after", 1),
            ("residual_of_the_normed_input", 0),
        )
    )
    aside, _, changed = LAYERS["shared_with_changes"]
    moved = [
        block if block.weights is None else replace(block, weights=(3, block.weights[1]))
        for block in changed.blocks
    ]
    return after, both, of_normed, aside, Layer(blocks=tuple(moved)), after.again(0)

"""Models whose sizes several devices can divide, and whose parts are all different."""

from __future__ import annotations

from hybrid_jax.config import (
    MLP,
    Attention,
    GatedDelta,
    Mamba1,
    Mamba2,
    ModelConfig,
    MoE,
    Rope,
    ShortConv,
    residual_layer,
    with_cut,
)
from tests.blocks import one_of_each

HEADS = 24  # 2, 3, 4 and 8 divide it
VOCAB = 61  # and none of them divides this

MANY_KV = Attention(
    num_heads=HEADS, num_kv_heads=HEADS, head_dim=4, rope=Rope(dim=4), qkv_bias=True, out_bias=True
)
ONE_KV = Attention(num_heads=HEADS, num_kv_heads=1, head_dim=4, gate=True, qk_norm=True)
TWO_KV = Attention(num_heads=8, num_kv_heads=2, head_dim=8, rope=Rope(dim=8), sliding_window=37)
ONE_GROUP = Mamba2(num_heads=HEADS, head_dim=2, state_size=6, proj_bias=True)
MANY_GROUPS = Mamba2(
    num_heads=HEADS, head_dim=2, state_size=4, num_groups=HEADS, norm_groups=HEADS, conv_width=3
)
NO_NORM = Mamba2(num_heads=HEADS, head_dim=2, state_size=4, gated_norm="none")
TWO_GROUPS = Mamba2(
    num_heads=8, head_dim=4, state_size=8, num_groups=2, norm_groups=2, gated_norm="norm_first"
)
MANY_KEYS = GatedDelta(num_key_heads=HEADS, num_value_heads=HEADS, key_dim=6, value_dim=4)
ONE_KEY = GatedDelta(num_key_heads=1, num_value_heads=HEADS, key_dim=6, value_dim=4, conv_width=3)
CHANNELS = Mamba1(inner_size=HEADS, state_size=5, dt_rank=3, conv_width=3, norms="weighted")
SHORT = ShortConv(size=HEADS, bias=True)
WIDE = MLP(width=HEADS, bias=True)
RELU2 = MLP(width=2 * HEADS, kind="relu2")
EXPERTS = MoE(num_experts=HEADS, top_k=3, width=12, shared_width=HEADS, shared_gate=True, bias=True)
GROUPED = MoE(
    num_experts=HEADS,
    top_k=2,
    width=10,
    kind="relu2",
    routing="sigmoid",
    num_groups=3,
    top_groups=2,
    scale=1.7,
    shared_width=HEADS,
    latent_width=14,
    bias=True,
)


# No number of devices divides these.
ODD = MLP(width=37, bias=True)
ODD_RELU2 = MLP(width=23, kind="relu2", bias=True)
ODD_SHARED = MoE(num_experts=HEADS, top_k=3, width=7, shared_width=11, shared_gate=True)


def _config(*layers, **settings) -> ModelConfig:
    shape = {"family": "divided", "width": 28, "vocab_size": VOCAB, "max_position": 512}
    return ModelConfig(layers=layers, **shape | settings)


def _layers(*pairs) -> list:
    return [residual_layer(mixers=tuple(mixers), mlp=mlp, gain=0.8) for *mixers, mlp in pairs]


def _cut() -> ModelConfig:
    near = Attention(num_heads=HEADS, num_kv_heads=1, head_dim=4, qkv_bias=True)
    layers = _layers(
        (ONE_GROUP, WIDE),
        (near, None),
        (NO_NORM, WIDE),
        (near, WIDE),
        (NO_NORM, None),
        (near, WIDE),
    )
    return with_cut(_config(*layers), 2, kv_group=2, state_group=2)


# What it is made of, and how many devices can divide it.
DIVIDED = {
    "attention": (_config(*_layers((MANY_KV, WIDE), (ONE_KV, RELU2))), (2, 3, 4, 8)),
    "two_kv": (_config(*_layers((TWO_KV, RELU2), (ONE_GROUP, None))), (2, 4, 8)),
    "mamba2": (
        _config(
            *_layers((ONE_GROUP, WIDE), (MANY_GROUPS, None), (NO_NORM, None)),
            tie_embeddings=True,
            residual_in_fp32=True,
        ),
        (2, 3, 4, 8),
    ),
    "two_groups": (_config(*_layers((TWO_GROUPS, WIDE), (TWO_GROUPS, None))), (2, 4, 8)),
    "gated_delta": (_config(*_layers((MANY_KEYS, WIDE), (ONE_KEY, None))), (2, 3, 4, 8)),
    "mamba1": (_config(*_layers((CHANNELS, WIDE), (CHANNELS, None))), (2, 3, 4, 8)),
    "short_conv": (_config(*_layers((SHORT, WIDE), (ONE_KV, None), (SHORT, None))), (2, 3, 4, 8)),
    "experts": (_config(*_layers((ONE_GROUP, EXPERTS), (ONE_KV, GROUPED))), (2, 3, 4, 8)),
    "uneven": (
        _config(*_layers((ONE_KV, ODD), (ONE_GROUP, ODD_RELU2), (ONE_KV, ODD_SHARED))),
        (2, 3, 8),
    ),
    "parallel": (
        _config(*_layers((ONE_GROUP, MANY_KV, WIDE), (ONE_KEY, ONE_KV, WIDE))),
        (2, 3, 4, 8),
    ),
    "cut": (_cut(), (2, 3, 4, 8)),
    "mtp": (
        _config(*_layers((ONE_KEY, WIDE)), mtp=tuple(_layers((ONE_KV, WIDE)))),
        (2, 3, 4, 8),
    ),
    "mixed": (
        _config(
            *_layers((ONE_GROUP, WIDE), (TWO_KV, EXPERTS), (ONE_KEY, SHORT, None), (CHANNELS, None))
        ),
        (2,),
    ),
    "blocks": (_config(*one_of_each(), norm_kind="layer"), (2,)),
}

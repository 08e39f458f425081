"""Qwen3-Next: gated delta nets, every few layers gated attention, and experts or a gated MLP in every layer.

Norms multiply by 1 + w, but for the one of the gated delta net, which comes before its gate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from hybrid_jax.config import (
    MLP,
    Attention,
    FeedForward,
    GatedDelta,
    Layer,
    Mixer,
    ModelConfig,
    MoE,
    residual_layer,
)
from hybrid_jax.kinds.kind import Names
from hybrid_jax.kinds.tensors import ATTENTION, GATED_EXPERTS, GATED_MLP, Piece, Rows, under
from hybrid_jax.models.family import MTP_NAMES, Family
from hybrid_jax.models.hf_config import MAX_LAYERS, HFConfig

NORM_EPS = 1e-6  # where the file says nothing, as for the three below
ROTATED = 0.25  # share of each head
ATTENTION_EVERY = 4  # layers
LENGTH = 32_768
# Names of mixers in lists of layers.
DELTA, FULL = "linear_attention", "full_attention"


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "qwen3_next" to `ModelConfig`."""
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    dense = fields.layers("mlp_only_layers", num_layers)
    step = fields.integer("decoder_sparse_step", default=1)
    num_experts = fields.integer("num_experts", minimum=0)
    sparse = [
        num_experts > 0 and index not in dense and (index + 1) % step == 0
        for index in range(num_layers)
    ]
    normalize = fields.flag("norm_topk_prob", default=True)
    made: dict[bool, FeedForward] = {}
    if True in sparse:
        made[True] = experts(fields, normalize=normalize)
    if False in sparse:
        made[False] = MLP(width=fields.integer("intermediate_size"))
    return config_of(fields, [made[kind] for kind in sparse], kv_heads=2)


def config_of(fields: HFConfig, feed_forward: Sequence[FeedForward], kv_heads: int) -> ModelConfig:
    """The model whose layers have these feed-forward blocks; `kv_heads` where config.json names none."""
    fields.silu("hidden_act")
    num_layers = len(feed_forward)
    kinds = fields.names("layer_types")
    if kinds is None:
        every = fields.integer("full_attention_interval", default=ATTENTION_EVERY)
        kinds = [DELTA if (index + 1) % every else FULL for index in range(num_layers)]
    fields.layer_kinds("layer_types", kinds, (DELTA, FULL), num_layers)
    makers: dict[str, Callable[[HFConfig], Mixer]] = {
        DELTA: gated_delta,
        FULL: functools.partial(gated_attention, kv_heads=kv_heads),
    }
    mixers: dict[str, Mixer] = {kind: makers[kind](fields) for kind in dict.fromkeys(kinds)}
    pairs = zip(kinds, feed_forward, strict=True)
    return ModelConfig(
        layers=tuple(residual_layer(mixers=(mixers[kind],), mlp=block) for kind, block in pairs),
        float32_norms=True,
        **fields.common("rms_norm_eps", NORM_EPS, LENGTH),
    )


def gated_attention(fields: HFConfig, kv_heads: int) -> Attention:
    """Attention with a gate, norms of heads, and positions on a part of each head.

    Args:
        fields: of config.json. kv_heads: where they do not say.
    """
    fields.only("attn_output_gate", (True,), True)
    return fields.attention(
        rope=True,
        rope_fraction=ROTATED,
        kv_heads=kv_heads,
        head_size=256,
        gate=True,
        qk_norm=True,
        qk_norm_eps=fields.number("rms_norm_eps", default=NORM_EPS, positive=True),
        float32_norms=True,
    )


def gated_delta(fields: HFConfig) -> GatedDelta:
    """The recurrent mixer."""
    keys, values = "linear_num_key_heads", "linear_num_value_heads"
    num_keys, num_values = fields.integer(keys), fields.integer(values)
    fields.divides(keys, num_keys, values, num_values)
    return GatedDelta(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim", default=4, minimum=2),
        norm_eps=fields.number("rms_norm_eps", default=NORM_EPS, positive=True),
    )


def experts(fields: HFConfig, *, normalize: bool) -> MoE:
    """A mixture of experts with a shared one, which has a gate."""
    num_experts = fields.integer("num_experts")
    return MoE(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", maximum=num_experts),
        width=fields.integer("moe_intermediate_size"),
        routing="softmax_topk",
        normalize=normalize,
        shared_width=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def mtp_layers(config: ModelConfig) -> tuple[Layer, ...]:
    """One layer with attention, and the feed-forward block of the model's last layer."""
    last = config.layers[-1]
    return (last.with_mixers((config.attention,)) if config.attention else last,)


# --- names of tensors -----------------------------------------------------------------------------


def norm(name: str) -> Piece:
    """A norm's weight, which is stored less 1."""
    return Piece(name=name, plus=1.0)


def attention_names(spec: Attention) -> Names:
    """Queries and gates alternate by head in one tensor."""

    def own(kind: str) -> tuple:
        size = 2 * spec.head_dim
        q, gate = (
            Piece(
                name=f"q_proj.{kind}",
                rows=Rows(
                    blocks=spec.num_heads, size=size, start=start, stop=start + spec.head_dim
                ),
            )
            for start in (0, spec.head_dim)
        )
        return (q, f"k_proj.{kind}", f"v_proj.{kind}", gate)

    names = ATTENTION | {"qkv": own("weight"), "qkv_bias": own("bias")}
    return under(
        "self_attn", names | {name: norm(f"{name}.weight") for name in ("q_norm", "k_norm")}
    )


def convolved_names(spec: GatedDelta, name: str) -> tuple[Piece, ...]:
    """Rows of a tensor with those of q, k and v, in our order: v, k, q."""
    keys, size = spec.key_size, spec.conv_size
    spans = ((2 * keys, size), (keys, 2 * keys), (0, keys))
    return tuple(
        Piece(name=name, rows=Rows(blocks=1, size=size, start=start, stop=stop))
        for start, stop in spans
    )


def _delta_names(spec: GatedDelta) -> Names:
    """Rows of q, k, v and z alternate by key head in one tensor, and those of b and a in another."""
    heads = spec.num_value_heads // spec.num_key_heads
    key, value = spec.key_dim, heads * spec.value_dim
    edges = [0, key, 2 * key, 2 * key + value, 2 * key + 2 * value]

    def rows(name: str, start: int, stop: int, size: int) -> Piece:
        own = Rows(blocks=spec.num_key_heads, size=size, start=start, stop=stop)
        return Piece(name=name, rows=own)

    q, k, v, z = (
        rows("in_proj_qkvz.weight", start, stop, edges[-1])
        for start, stop in zip(edges, edges[1:], strict=False)
    )
    b, a = (rows("in_proj_ba.weight", start, start + heads, 2 * heads) for start in (0, heads))
    return delta_names(spec, (z, v, k, q, a, b))


def delta_names(spec: GatedDelta, in_proj: tuple) -> Names:
    """Names of a gated delta net, given those of its projection to z, v, k, q, a, b."""
    names = {
        "in_proj": in_proj,
        "conv": convolved_names(spec, "conv1d.weight"),
        "A_log": "A_log",
        "dt_bias": "dt_bias",
        "norm": "norm.weight",
        "out_proj": "out_proj.weight",
    }
    return under("linear_attn", names)


EXPERTS = under(
    "mlp",
    {
        "router": "gate.weight",
        **GATED_EXPERTS,
        "shared": under("shared_expert", GATED_MLP),
        "shared_gate": "shared_expert_gate.weight",
    },
)
FAMILY = Family(
    read_config=read_config,
    norm=norm("model.norm.weight"),
    mixer_norm=norm("input_layernorm.weight"),
    mlp_norm=norm("post_attention_layernorm.weight"),
    tensors={
        Attention: attention_names,
        GatedDelta: _delta_names,
        MLP: under("mlp", GATED_MLP),
        MoE: EXPERTS,
    },
    ignored=r"^(model\.)?visual\.",
    mtp=mtp_layers,
    mtp_names=MTP_NAMES
    | {name: norm(MTP_NAMES[name]) for name in ("embed_norm", "hidden_norm", "norm")},
)

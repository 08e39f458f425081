"""Falcon-H1: attention and Mamba-2 side by side in every layer, then a gated MLP.

Its multipliers (muP) are factors on projections. Those inside a layer are multiplied into weights when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_jax.config import MLP, Attention, Mamba2, ModelConfig, residual_layer
from hybrid_jax.kinds.kind import Names
from hybrid_jax.kinds.tensors import MAMBA2, Piece, Rows, under
from hybrid_jax.models.family import Family
from hybrid_jax.models.hf_config import MAX_LAYERS, HFConfig

NORM_EPS = 1e-5
# Where the file says nothing: KV heads, and channels of Mamba-2.
KV_HEADS, INNER = 8, 1024
IN_PROJ = ("z", "x", "B", "C", "dt")  # what `ssm_multipliers` multiply


def read_config(fields: HFConfig) -> ModelConfig:
    """config.json with model_type "falcon_h1" to `ModelConfig`."""
    fields.silu("hidden_act")
    layer = residual_layer(
        mixers=(_recurrent_mixer(fields), fields.attention(rope=True, kv_heads=KV_HEADS)),
        mlp=MLP(width=fields.integer("intermediate_size"), bias=fields.flag("mlp_bias")),
    )
    of_config(fields)  # checks the multipliers
    return ModelConfig(
        layers=(layer,) * fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
        embedding_multiplier=fields.number("embedding_multiplier", default=1.0),
        logits_multiplier=fields.number("lm_head_multiplier", default=1.0),
        **fields.common("rms_norm_eps", NORM_EPS),
    )


def _recurrent_mixer(fields: HFConfig) -> Mamba2:
    width, heads = fields.integer("hidden_size"), fields.integer("mamba_n_heads")
    silent = "mamba_d_ssm" not in fields.values
    inner, given = fields.integer("mamba_d_ssm", default=INNER if silent else None), "mamba_d_ssm"
    if inner is None:
        inner = fields.integer("mamba_expand", default=2) * width
        given = "mamba_expand * hidden_size"
    fields.divides("mamba_n_heads", heads, given, inner)
    if fields.get("mamba_d_head", default="auto") != "auto":
        both = heads * fields.integer("mamba_d_head")
        fields.check_inner(both, inner, "mamba_n_heads * mamba_d_head", given)
    first = fields.flag("mamba_norm_before_gate", default=True, null=False)
    norm = "norm_first" if first else "gate_first"
    return fields.ssd_mixer(
        heads="mamba_n_heads",
        head_dim=inner // heads,
        state_size=("mamba_d_state",),
        groups=("mamba_n_groups",),
        conv_width=("mamba_d_conv",),
        conv_bias=("mamba_conv_bias",),
        proj_bias="mamba_proj_bias" if fields.flag("mamba_proj_bias") else "projectors_bias",
        norm_eps=fields.number("rms_norm_eps", default=NORM_EPS, positive=True),
        gated_norm=norm if fields.flag("mamba_rms_norm") else "none",
    )


def of_config(fields: HFConfig) -> Family:
    """The family with the multipliers of one model."""
    gate, down = fields.numbers("mlp_multipliers", 2)
    parts = fields.numbers("ssm_multipliers", len(IN_PROJ))
    ssm_in, ssm_out, attention_in, attention_out, key = (
        fields.number(f"{name}_multiplier", default=1.0)
        for name in ("ssm_in", "ssm_out", "attention_in", "attention_out", "key")
    )

    def scaled(factor: float, *names: str) -> tuple[Piece, ...]:
        return tuple(Piece(name=name, factor=factor) for name in names)

    def attention() -> Names:
        names: Names = {}
        for key_of, kind, into in (
            ("qkv", "weight", attention_in),
            ("qkv_bias", "bias", 1.0),
        ):
            q, k, v = (f"{name}_proj.{kind}" for name in "qkv")
            names[key_of] = (*scaled(into, q), *scaled(into * key, k), *scaled(into, v))
        names["out"], names["out_bias"] = scaled(attention_out, "o_proj.weight", "o_proj.bias")
        return under("self_attn", names)

    def recurrent(spec: Mamba2) -> Names:
        names = dict(MAMBA2)
        names["in_proj"] = _in_proj(spec, "in_proj.weight", [ssm_in * part for part in parts])
        names["in_bias"] = _in_proj(spec, "in_proj.bias", parts)
        names["out_proj"], names["out_bias"] = scaled(ssm_out, "out_proj.weight", "out_proj.bias")
        return under("mamba", names)

    mlp: Names = {}
    for kind, end in (("weight", ""), ("bias", "_bias")):
        mlp[f"up{end}"] = (*scaled(gate, f"gate_proj.{kind}"), f"up_proj.{kind}")
        (mlp[f"down{end}"],) = scaled(down, f"down_proj.{kind}")
    tensors = {
        Attention: attention(),
        Mamba2: recurrent,
        MLP: under("feed_forward", mlp),
    }
    return Family(
        read_config=read_config,
        norm="model.final_layernorm.weight",
        mlp_norm="pre_ff_layernorm.weight",
        tensors=tensors,
        of_config=of_config,
        # One flag says whether in_proj has a bias, and another one whether out_proj has.
        zeros=r"\.mamba\.(in|out)_proj\.bias$",
        # The lists of layers follow from their number.
        harmless=frozenset(("mamba_chunk_size", "layer_types", "layers_block_type")),
    )


def _in_proj(spec: Mamba2, name: str, factors: Sequence[float]) -> tuple[Piece, ...]:
    """The rows of one tensor for z, x, B, C and dt, each with its factor."""
    pieces, start = [], 0
    for size, factor in zip(spec.proj_sizes, factors, strict=True):
        own = Rows(blocks=1, size=spec.proj_size, start=start, stop=start + size)
        pieces.append(Piece(name=name, rows=own, factor=factor))
        start += size
    return tuple(pieces)


FAMILY = of_config(HFConfig({}, "falcon_h1"))

"""Four tiny models for quantised files: what their config.json says, and the tensors they have.

| model | what it has | sizes |
| --- | --- | --- |
| qwen2 | attention with biases, gated MLP | all multiples of 128 |
| llama | attention, gated MLP | none a multiple of 8 |
| nemotron_h | Mamba-2, attention, MLP | multiples of 32, `in_proj` not of 128 |
| qwen3_next | gated delta net, gated attention, experts, a head for multi-token prediction | multiples of 64 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from tests.parity.narrow.drawing import bell, even

LAYER = "{}.layers.{}."


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model before it is quantised.

    Attributes:
        config: fields of config.json, without those of the quantisation.
        linears: [out, in] of each weight that may be quantised, by its name.
        kept: those among them that official files leave in 16 bits.
        others: shapes of all other tensors, by name.
        prompt: token ids, of which logits are stored.
    """

    config: dict[str, Any]
    linears: dict[str, tuple[int, int]] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)
    prompt: tuple[int, ...] = (3, 17, 42, 5, 91, 64, 8, 29, 77)

    def drawn(self, key: str, name: str, dtype: Any) -> np.ndarray:
        """One tensor in 16 bits, as an unquantised file has it."""
        shape = self.linears.get(name) or self.others[name]
        return _drawn(f"{key} {name}", name, shape, self.config["model_type"]).astype(dtype)


def _drawn(key: str, name: str, shape: tuple[int, ...], model_type: str) -> np.ndarray:
    last = name.rsplit(".", 1)[-1]
    if last == "A_log":
        return even(key, shape, -1.5, 2.5)
    if last == "dt_bias":
        return even(key, shape, -5.0, 2.0)
    if last == "D":
        return bell(key, shape)
    if last == "bias":
        return 0.3 * bell(key, shape)
    if len(shape) == 1:
        less = model_type == "qwen3_next" and "linear_attn" not in name  # these are stored less 1
        return 0.25 * bell(key, shape) + (0.0 if less else 1.0)
    if "conv1d" in name:
        return 0.5 * bell(key, shape)
    if "embed" in name:
        return bell(key, shape)
    return bell(key, shape) / math.sqrt(shape[-1])


def _attention(
    width: int, heads: int, kv_heads: int, size: int, gates: int = 1
) -> dict[str, tuple[int, int]]:
    return {
        "q_proj": (gates * heads * size, width),
        "k_proj": (kv_heads * size, width),
        "v_proj": (kv_heads * size, width),
        "o_proj": (width, heads * size),
    }


def _gated(width: int, inner: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}


def _under(prefix: str, shapes: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def _ends(width: int, vocab: int, embed: str, norm: str) -> dict[str, tuple[int, ...]]:
    return {f"{embed}.weight": (vocab, width), f"{norm}.weight": (width,)}


def _attention_model(
    model_type: str, width: int, inner: int, heads: int, kv_heads: int, size: int
) -> Model:
    layers, vocab = 2, 96
    linears: dict[str, tuple[int, int]] = {}
    others = _ends(width, vocab, "model.embed_tokens", "model.norm")
    for layer in range(layers):
        at = f"model.layers.{layer}"
        linears |= _under(f"{at}.self_attn", _attention(width, heads, kv_heads, size))
        linears |= _under(f"{at}.mlp", _gated(width, inner))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            others[f"{at}.{norm}.weight"] = (width,)
        if model_type == "qwen2":
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                others[f"{at}.self_attn.{name}_proj.bias"] = (count * size,)
    linears["lm_head.weight"] = (vocab, width)
    return Model(
        config={
            "architectures": [f"{model_type.capitalize()}ForCausalLM"],
            "model_type": model_type,
            "vocab_size": vocab,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": size,
            "hidden_act": "silu",
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        linears=linears,
        kept=("lm_head.weight",),
        others=others,
    )


def _nemotron_h() -> Model:
    width, inner, vocab = 128, 256, 96
    heads, size, groups, state, taps = 8, 32, 2, 14, 4
    conv = heads * size + 2 * groups * state
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
    linears: dict[str, tuple[int, int]] = {}
    others = _ends(width, vocab, "backbone.embeddings", "backbone.norm_f")
    for layer, kind in enumerate(kinds):
        at = f"backbone.layers.{layer}"
        others[f"{at}.norm.weight"] = (width,)
        if kind == "mlp":
            shapes = {"up_proj": (inner, width), "down_proj": (width, inner)}
        elif kind == "full_attention":
            shapes = _attention(width, 4, 2, 32)
        else:
            shapes = {
                "in_proj": (heads * size + conv + heads, width),
                "out_proj": (width, heads * size),
            }
            others |= {f"{at}.mixer.{name}": (heads,) for name in ("A_log", "D", "dt_bias")}
            others[f"{at}.mixer.conv1d.weight"] = (conv, 1, taps)
            others[f"{at}.mixer.conv1d.bias"] = (conv,)
            others[f"{at}.mixer.norm.weight"] = (heads * size,)
        linears |= _under(f"{at}.mixer", shapes)
    linears["lm_head.weight"] = (vocab, width)
    return Model(
        config={
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "vocab_size": vocab,
            "hidden_size": width,
            "intermediate_size": inner,
            "layers_block_type": kinds,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "mamba_num_heads": heads,
            "mamba_head_dim": size,
            "n_groups": groups,
            "ssm_state_size": state,
            "conv_kernel": taps,
            "chunk_size": 16,
            "mamba_hidden_act": "silu",
            "mlp_hidden_act": "relu2",
            "use_conv_bias": True,
            "use_bias": False,
            "mamba_proj_bias": False,
            "attention_bias": False,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "time_step_min": 0.001,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        linears=linears,
        kept=("lm_head.weight",),
        others=others,
    )


def _qwen3_next() -> Model:
    width, vocab, experts, inner = 128, 96, 4, 64
    linears: dict[str, tuple[int, int]] = {}
    kept: list[str] = ["lm_head.weight"]
    others = _ends(width, vocab, "model.embed_tokens", "model.norm")

    def layer(at: str, kind: str) -> None:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            others[f"{at}.{norm}.weight"] = (width,)
        if kind == "full_attention":
            linears.update(_under(f"{at}.self_attn", _attention(width, 2, 1, 64, gates=2)))
            others[f"{at}.self_attn.q_norm.weight"] = (64,)
            others[f"{at}.self_attn.k_norm.weight"] = (64,)
        else:
            shapes = {
                "in_proj_qkvz": (256, width),
                "in_proj_ba": (8, width),
                "out_proj": (width, 64),
            }
            linears.update(_under(f"{at}.linear_attn", shapes))
            kept.append(f"{at}.linear_attn.in_proj_ba.weight")
            others[f"{at}.linear_attn.conv1d.weight"] = (192, 1, 4)
            others[f"{at}.linear_attn.A_log"] = (4,)
            others[f"{at}.linear_attn.dt_bias"] = (4,)
            others[f"{at}.linear_attn.norm.weight"] = (16,)
        for expert in range(experts):
            linears.update(_under(f"{at}.mlp.experts.{expert}", _gated(width, inner)))
        linears.update(_under(f"{at}.mlp.shared_expert", _gated(width, inner)))
        linears.update(_under(f"{at}.mlp", {"gate": (experts, width)}))
        linears.update(_under(f"{at}.mlp", {"shared_expert_gate": (1, width)}))
        kept.extend((f"{at}.mlp.gate.weight", f"{at}.mlp.shared_expert_gate.weight"))

    layer("model.layers.0", "linear_attention")
    layer("model.layers.1", "full_attention")
    layer("mtp.layers.0", "full_attention")
    linears["mtp.fc.weight"] = (width, 2 * width)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        others[f"mtp.{norm}.weight"] = (width,)
    linears["lm_head.weight"] = (vocab, width)
    kept.extend(name for name in linears if name.startswith("mtp.") and name not in kept)
    return Model(
        config={
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "vocab_size": vocab,
            "hidden_size": width,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": inner,
            "shared_expert_intermediate_size": inner,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        linears=linears,
        kept=tuple(kept),
        others=others,
    )


MODELS = {
    "qwen2": _attention_model("qwen2", 128, 256, 2, 1, 128),
    "llama": _attention_model("llama", 132, 204, 3, 1, 44),
    "nemotron_h": _nemotron_h(),
    "qwen3_next": _qwen3_next(),
}
BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)

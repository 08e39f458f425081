"""Random hybrids of 80 to 175 M parameters, made by transformers and saved as Hugging Face directories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hybrid_jax.config import ModelConfig
from hybrid_jax.models import config_from_hf

NEMOTRON = "M-M-M-M*-M-M-M*-"  # Nemotron-H: M Mamba-2, - MLP, * attention; a layer is one of them
GRANITE = "MMMMM*MMMMM*"  # Granite 4: a layer is a mixer and an MLP
KINDS = {"M": "linear_attention", "*": "full_attention"}


# 173 M parameters in 16 layers of width 1024.
NEMOTRON_FIELDS = {
    "vocab_size": 24576,
    "hidden_size": 1024,
    "hybrid_override_pattern": NEMOTRON,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "intermediate_size": 4096,
    "ssm_state_size": 128,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "chunk_size": 128,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
}


def nemotron_config():
    """The Nemotron-H of `NEMOTRON_FIELDS`."""
    from transformers import NemotronHConfig

    return NemotronHConfig(**NEMOTRON_FIELDS)


def nemotron_model() -> ModelConfig:
    """The same as the engine's own config, in float32: for random weights without transformers."""
    return replace(config_from_hf({"model_type": "nemotron_h", **NEMOTRON_FIELDS}), dtype="float32")


def granite_config():
    """135 M parameters in 12 layers of width 768."""
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        vocab_size=49152,
        hidden_size=768,
        num_hidden_layers=len(GRANITE),
        layer_types=[KINDS[kind] for kind in GRANITE],
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=2048,
        mamba_n_heads=24,
        mamba_n_groups=1,
        mamba_d_state=128,
        mamba_d_head=64,
        mamba_expand=2,
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        rms_norm_eps=1e-5,
    )


def qwen3_5_config():
    """138 M parameters in 12 layers of width 768: nine gated delta nets and three of attention."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=32768,
        hidden_size=768,
        num_hidden_layers=12,
        intermediate_size=2304,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=6,
        linear_num_value_heads=12,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def falcon_h1_config():
    """Mamba-2 and attention side by side in each of 12 layers of width 768."""
    from transformers import FalconH1Config

    return FalconH1Config(
        vocab_size=32768,
        hidden_size=768,
        num_hidden_layers=12,
        intermediate_size=2048,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        mamba_d_ssm=1536,
        mamba_n_heads=24,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=128,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def lfm2_config():
    """Ten short convolutions and six layers of attention of width 768, in the order of LFM2-1.2B."""
    from transformers import Lfm2Config

    attention = (2, 5, 8, 10, 12, 14)
    return Lfm2Config(
        vocab_size=32768,
        hidden_size=768,
        num_hidden_layers=16,
        intermediate_size=2304,
        block_auto_adjust_ff_dim=False,
        num_attention_heads=12,
        num_key_value_heads=4,
        layer_types=["full_attention" if i in attention else "conv" for i in range(16)],
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def mamba_config():
    """129 M parameters, the sizes of mamba-130m: 24 layers of Mamba of width 768."""
    from transformers import MambaConfig

    return MambaConfig(
        vocab_size=50280, hidden_size=768, num_hidden_layers=24, state_size=16, time_step_rank=48
    )


CONFIGS = {
    "nemotron": nemotron_config,
    "granite": granite_config,
    "qwen3_5": qwen3_5_config,
    "falcon_h1": falcon_h1_config,
    "lfm2": lfm2_config,
    "mamba": mamba_config,
}


def write_model(name: str, directory: Path) -> Path:
    """Writes `directory`/`name` unless it is there; returns the model's directory."""
    target = directory / name
    if not (target / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).save_pretrained(
            target
        )
    return target

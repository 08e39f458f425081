"""The bundled model's geometry."""

from __future__ import annotations

from hybrid_jax.config import MLP, Attention, LayerSpec, Mamba2, ModelConfig
from hybrid_jax.train.data import END, VOCAB_SIZE

PATTERN = "MMAMMMAM"  # M: Mamba-2, A: attention; each followed by an MLP


def tiny_config(max_position: int = 4096) -> ModelConfig:
    """4.1 M parameters over bytes: 6 Mamba-2 and 2 attention layers of width 192, no position encoding.

    The recurrent layers come first and see the order of the bytes, so attention goes without positions
    and is not tied to the lengths seen in training.
    """
    mamba = Mamba2(num_heads=6, head_dim=64, state_size=64)
    attention = Attention(num_heads=3, num_kv_heads=1, head_dim=64)
    mlp = MLP(width=512)
    return ModelConfig(
        family="granitemoehybrid",
        vocab_size=VOCAB_SIZE,
        width=192,
        layers=tuple(
            LayerSpec(mixers=(mamba if kind == "M" else attention,), mlp=mlp) for kind in PATTERN
        ),
        tie_embeddings=True,
        max_position=max_position,
        eos_token_ids=(END,),
        bos_token_id=END,
    )

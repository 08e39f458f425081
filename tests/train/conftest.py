"""A corpus and a model small enough to train in a test."""

from __future__ import annotations

import pytest

from hybrid_jax.config import MLP, Attention, LayerSpec, Mamba2, ModelConfig
from hybrid_jax.train.data import END, VOCAB_SIZE, is_held_out


@pytest.fixture(scope="session")
def small_config() -> ModelConfig:
    mamba = Mamba2(num_heads=4, head_dim=8, state_size=8)
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=4, scale=0.5)
    mlp = MLP(width=24)
    return ModelConfig(
        family="granitemoehybrid",
        vocab_size=VOCAB_SIZE,
        width=16,
        layers=tuple(LayerSpec(mixers=(m,), mlp=mlp) for m in (mamba, attention)),
        tie_embeddings=True,
        max_position=256,
        eos_token_ids=(END,),
        bos_token_id=END,
    )


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """A folder of 120 distinct modules; some of them are held out."""
    folder = tmp_path_factory.mktemp("sources")
    for index in range(120):
        lines = [
            f"def function_{index}_{line}(x):\n    return x + {line * index}\n"
            for line in range(20)
        ]
        (folder / f"module_{index}.py").write_text("\n".join(lines))
    assert any(is_held_out(path.name) for path in folder.iterdir())
    return folder

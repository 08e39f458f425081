"""A corpus and a model small enough to train in a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_jax.config import ModelConfig
from hybrid_jax.models import config_from_hf
from hybrid_jax.train.data import is_held_out
from hybrid_jax.train.loop import tiny_fields


@pytest.fixture(scope="session")
def small_fields() -> dict:
    """config.json of a model with a recurrent and an attention layer."""
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_multiplier": 0.5,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "intermediate_size": 24,
        "shared_intermediate_size": 24,
        "max_position_embeddings": 256,
    }
    return tiny_fields() | sizes


@pytest.fixture(scope="session")
def small_config(small_fields) -> ModelConfig:
    return replace(config_from_hf(small_fields), dtype="float32")


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

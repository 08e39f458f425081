"""Model families: what their config.json means and what their checkpoints hold.

No family touches an array; the equations are in `models.decoder`, the same for all of them.

May import: config, kinds, layers, pallas_kernels, products.
Packages: flax, jax, numpy.
"""

from __future__ import annotations

from hybrid_jax.config import ModelConfig
from hybrid_jax.models.families import FAMILIES as FAMILIES
from hybrid_jax.models.families import MODEL_TYPES
from hybrid_jax.models.family import Family as Family
from hybrid_jax.models.hf_config import HFConfig


def config_from_hf(values: dict) -> ModelConfig:
    """The contents of a Hugging Face config.json to a `ModelConfig`.

    Args:
        values: the parsed file, in the dialect of transformers 4 or 5.

    Raises:
        ValueError: `model_type` is missing or unknown, or a field is missing or malformed.
        NotImplementedError: a field asks for something this family does not support here.

    Example:
        >>> config = config_from_hf(
        ...     dict(model_type="mamba2", vocab_size=96, hidden_size=32, num_hidden_layers=2, expand=2)
        ...     | dict(num_heads=8, head_dim=8, state_size=16, n_groups=2, conv_kernel=4)
        ... )
        >>> config.recurrent[0].inner_size, config.recurrent[0].conv_size
        (64, 128)
    """
    name = values.get("model_type")
    if name is None and {"d_model", "n_layer"} <= values.keys():
        raise ValueError(
            "it has d_model, n_layer and no model_type: the layout of the original code of Mamba; fetch the "
            "model in the layout of transformers, whose name usually ends in -hf"
        )
    if name is None:
        raise ValueError(f"model_type is missing; it must be one of {', '.join(FAMILIES)}")
    if isinstance(name, str) and name.startswith("deepseek_v2"):
        raise NotImplementedError(
            f"model_type {name!r} has multi-head latent attention, which is not built; give another model"
        )
    if not isinstance(name, str) or name not in MODEL_TYPES:
        raise ValueError(
            f"model_type {name!r} is not supported; give a model of {', '.join(FAMILIES)}, or add the family "
            "(docs/contribute/add_a_model.md)"
        )
    name = MODEL_TYPES[name]
    family, fields = FAMILIES[name], HFConfig(values, name)
    config = family.read_config(fields)
    fields.log_unread(family.harmless)
    return config

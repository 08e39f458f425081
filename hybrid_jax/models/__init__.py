"""Model families: what their config.json means and what their checkpoints hold.

No family touches an array; the equations are in `models.decoder`, the same for all of them.

May import: config, kinds, layers, pallas_kernels.
Packages: jax, numpy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from hybrid_jax.config import ModelConfig
from hybrid_jax.models import bamba, granitemoehybrid, llama, mamba2, nemotron_h
from hybrid_jax.models.hf_config import HFConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """One checkpoint layout.

    Attributes:
        read_config: fields of config.json to `ModelConfig`.
        stored: `ModelConfig` to the parameter tree with `tensors.Stored` leaves.
        renames: (pattern, replacement) applied to the names of a file, for layouts with two spellings.
        ignored: patterns of tensors that a file may hold and the model does not use.
    """

    read_config: Callable[[HFConfig], ModelConfig]
    stored: Callable[[ModelConfig], dict]
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$", r"^mtp\.", r"^(model\.)?visual\.")

    def canonical(self, name: str) -> str:
        """The name of a file's tensor as `stored` spells it."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name may be there without being used."""
        return any(re.search(pattern, name) for pattern in self.ignored)


def _family(module: ModuleType) -> Family:
    return Family(read_config=module.read_config, stored=module.stored, renames=module.RENAMES)


# By the name of its file, which is its model_type.
FAMILIES = {
    module.__name__.rpartition(".")[2]: _family(module)
    for module in (bamba, granitemoehybrid, llama, mamba2, nemotron_h)
}


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
    if name is None:
        raise ValueError(f"config.json: needs model_type, one of {', '.join(FAMILIES)}")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"config.json: model_type {name!r} is not supported, only {', '.join(FAMILIES)}"
        )
    return FAMILIES[name].read_config(HFConfig(values, name))

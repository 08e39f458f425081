"""What a family of models is: the meaning of its config.json, and the names of the tensors in its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_jax.config import LayerSpec, ModelConfig
from hybrid_jax.kinds.kind import Names
from hybrid_jax.kinds.table import model_weights
from hybrid_jax.kinds.tensors import Piece, stored, under
from hybrid_jax.models.hf_config import HFConfig

ROTATION = r"\.rotary_emb\.inv_freq$"  # of old files: what config.json says too
# Names of the tensors of a head for multi-token prediction, but for its layers. Its norms are stored less 1.
MTP: Names = {
    "embed_norm": Piece(name="mtp.pre_fc_norm_embedding.weight", plus=1.0),
    "hidden_norm": Piece(name="mtp.pre_fc_norm_hidden.weight", plus=1.0),
    "in_proj": "mtp.fc.weight",
    "norm": Piece(name="mtp.norm.weight", plus=1.0),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One checkpoint layout. The head is always `lm_head.weight`.

    Attributes:
        read_config: fields of config.json to `ModelConfig`.
        embed, norm: names of the embedding and of the last norm.
        layers: what stands before the number of a layer. The names below follow that number.
        mixer_norm, mlp_norm: names of the norms of a layer.
        tensors: names of the tensors of mixers and feed-forward blocks, by the class of the block's spec (see
            `tensors.stored`); or a function that makes them from the spec.
        renames: (pattern, replacement) applied to the names of a file, for layouts with two spellings.
        ignored: pattern of further tensors that a file may hold and the model does not use.
        zeros: pattern of tensors that a file may lack; they are zero then.
        also: further `model_type`s that mean this family.
        of_config: makes the family of one model, where its config.json says by what tensors are multiplied as they are
            read.
        mtp: the layers of the head for multi-token prediction of a model, if files of this family have one.
    """

    read_config: Callable[[HFConfig], ModelConfig]
    embed: str = "model.embed_tokens.weight"
    norm: Names = "model.norm.weight"
    layers: str = "model.layers"
    mixer_norm: Names = "input_layernorm.weight"
    mlp_norm: Names = "post_attention_layernorm.weight"
    tensors: Mapping[type, Names | Callable[[Any], Names]]
    renames: tuple[tuple[str, str], ...] = ()
    ignored: str = "^$"
    zeros: str = "^$"
    also: tuple[str, ...] = ()
    of_config: Callable[[HFConfig], Family] | None = None
    mtp: Callable[[ModelConfig], tuple[LayerSpec, ...]] | None = None

    def stored(self, config: ModelConfig, there: Container[str] = ()) -> dict:
        """Our parameter tree in terms of the checkpoint's tensors: a `tensors.Stored` at each leaf.

        Args:
            there: names of the tensors that a checkpoint has, for families with two layouts.
        """
        names = {
            "embed": self.embed,
            "layers": self._layers(self.layers, config.layers),
            "norm": self.norm,
            "head": "lm_head.weight",
            "mtp": MTP | {"layers": self._layers("mtp.layers", config.mtp)},
        }
        return stored(model_weights(config), names, there)

    def _layers(self, prefix: str, specs: Sequence[LayerSpec]) -> list[Names]:
        return [under(f"{prefix}.{index}", self._layer(spec)) for index, spec in enumerate(specs)]

    def _layer(self, spec: LayerSpec) -> Names:
        names: Names = {"norm": self.mixer_norm, "mlp_norm": self.mlp_norm}
        names["mixers"] = [self._block(mixer) for mixer in spec.mixers]
        if spec.mlp is not None:
            names["mlp"] = self._block(spec.mlp)
        return names

    def _block(self, spec: Any) -> Names:
        names = self.tensors[type(spec)]
        return names(spec) if callable(names) else names

    def canonical(self, name: str) -> str:
        """The name of a file's tensor as `stored` spells it."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name may be there without being used."""
        return any(re.search(pattern, name) for pattern in (ROTATION, self.ignored))

    def may_lack(self, name: str) -> bool:
        """Whether a tensor of this name is zero where a file has none."""
        return re.search(self.zeros, name) is not None

"""What a family of models is: the meaning of its config.json, and the names of the tensors in its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_jax.config import Layer, ModelConfig
from hybrid_jax.config.block import is_alone
from hybrid_jax.kinds.kind import Names
from hybrid_jax.kinds.table import KINDS, model_weights
from hybrid_jax.kinds.tensors import stored, under
from hybrid_jax.models.hf_config import HFConfig

ROTATION = r"\.rotary_emb\.inv_freq$"  # of old files: what config.json says too
HEAD = "lm_head.weight"
MTP = "mtp."  # what the names of all tensors of a head for multi-token prediction begin with
MTP_LAYERS = f"{MTP}layers"  # what stands before the number of a layer of the head
# Tensors of a head, but for its layers, in the layout that Qwen began.
MTP_NAMES: Names = {
    "embed_norm": f"{MTP}pre_fc_norm_embedding.weight",
    "hidden_norm": f"{MTP}pre_fc_norm_hidden.weight",
    "in_proj": f"{MTP}fc.weight",
    "norm": f"{MTP}norm.weight",
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
        ignored: pattern of further tensors that a file may hold and the model does not use. Those of a head for
            multi-token prediction need no pattern, if the family has one.
        zeros: pattern of tensors that a file may lack; they are zero then.
        harmless: further fields of config.json that make no difference, beside `hf_config.HARMLESS`.
        also: further `model_type`s that mean this family.
        of_config: makes the family of one model, where its config.json says more about the tensors than `ModelConfig`
            does: by what they are multiplied as they are read, or which layers the head below has.
        mtp: the layers of the head for multi-token prediction of a model, if files of this family have one.
        cut: makes the names of the tensors that the output of a cut is normed and projected with; None if files of this
            family have no cut.
        replaced: pattern of tensors of the model without a cut; after the cut, nothing reads them. Its first group is
            the number of the layer.
        mtp_names: names of the tensors of that head, but for its layers; or a function that makes them from the number
            of its layers.
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
    harmless: frozenset[str] = frozenset()
    also: tuple[str, ...] = ()
    of_config: Callable[[HFConfig], Family] | None = None
    cut: Callable[[ModelConfig], Names] | None = None
    replaced: str = "^()$"
    mtp: Callable[[ModelConfig], tuple[Layer, ...]] | None = None
    mtp_names: Names = field(default_factory=dict)

    @property
    def root(self) -> str:
        """What the names of all tensors of the backbone begin with."""
        return self.embed.partition(".")[0] + "."

    def of(self, fields: HFConfig) -> Family:
        """The family of one model, by its config.json."""
        return self if self.of_config is None else self.of_config(fields)

    def stored(self, config: ModelConfig, there: Container[str] = ()) -> dict:
        """Our parameter tree in terms of the checkpoint's tensors: a `tensors.Stored` at each leaf.

        Args:
            there: names of the tensors that a checkpoint has, for families with two layouts.
        """
        names = {
            "embed": self.embed,
            "layers": self._layers(self.layers, config.layers),
            "norm": self.norm,
            "head": HEAD,
            "mtp": self._head(config.mtp),
        }
        if self.cut is not None:
            names["cut"] = self.cut(config)
        return stored(model_weights(config), names, there)

    def _head(self, specs: Sequence[Layer]) -> Names:
        names = self.mtp_names(len(specs)) if callable(self.mtp_names) else self.mtp_names
        return names | {"layers": self._layers(MTP_LAYERS, specs)}

    def _layers(self, prefix: str, specs: Sequence[Layer]) -> list[Names]:
        return [under(f"{prefix}.{index}", self._layer(spec)) for index, spec in enumerate(specs)]

    def _layer(self, layer: Layer) -> Names:
        names: Names = {"norm": self.mixer_norm, "mlp_norm": self.mlp_norm}
        for own, block in zip(layer.names, layer.blocks, strict=True):
            parts = [self._part(part) for part in block.parts]
            names[own.parts] = parts[0] if is_alone(block) else parts
        return names

    def _part(self, spec: Any) -> Names:
        names = self.tensors[type(spec)]
        return names(spec) if callable(names) else names

    def canonical(self, name: str) -> str:
        """The name of a file's tensor as `stored` spells it."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def ignores(self, name: str, config: ModelConfig) -> bool:
        """Whether a tensor of this name may be there without being used by this model."""
        if any(re.search(pattern, name) for pattern in (ROTATION, self.ignored)):
            return True
        found = re.search(self.replaced, name) if config.cut is not None else None
        if found is not None and int(found[1]) in config.later:
            return True
        return self.mtp is not None and not config.mtp and name.startswith(MTP)

    def may_lack(self, name: str) -> bool:
        """Whether a tensor of this name is zero where a file has none."""
        return re.search(self.zeros, name) is not None


# What to do about a model that is asked for its head, and has none.
NO_HEAD = "choose another speculation than 'mtp', or read the model with mtp=False"


def last_layer_with(config: ModelConfig, block: type) -> Layer:
    """The model's last layer that has a mixer or a feed-forward block of this class, as a head repeats it.

    Raises:
        ValueError: no layer has one.
    """
    for layer in reversed(config.layers):
        if block in map(type, layer.parts):
            return layer
    name = KINDS[block].name
    raise ValueError(
        f"load_model: a head for multi-token prediction of family {config.family} has a layer like the model's last "
        f"one with {name}; this model has no layer with {name}; {NO_HEAD}"
    )

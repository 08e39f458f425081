"""What a family of models is: the meaning of its config.json, and the names of the tensors in its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybrid_jax.config import Attention, LayerSpec, ModelConfig
from hybrid_jax.kinds.kind import Names
from hybrid_jax.kinds.table import kind_of, model_weights
from hybrid_jax.kinds.tensors import stored, under
from hybrid_jax.models.hf_config import HFConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """One checkpoint layout. The head is always `lm_head.weight`.

    Attributes:
        read_config: fields of config.json to `ModelConfig`.
        embed, norm: names of the embedding and of the last norm.
        layers: what stands before the number of a layer. The names below follow that number.
        mixer_norm, mlp_norm: names of the norms of a layer.
        attention, recurrent: what stands before the names of a mixer's tensors.
        feed_forward: names of the tensors of a feed-forward block, by its class. One with {} stands for as many tensors
            as there are experts.
        renames: (pattern, replacement) applied to the names of a file, for layouts with two spellings.
        ignored: pattern of tensors that a file may hold and the model does not use.
        zeros: pattern of tensors that a file may lack; they are zero then.
    """

    read_config: Callable[[HFConfig], ModelConfig]
    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    layers: str = "model.layers"
    mixer_norm: str = "input_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    attention: str = "self_attn"
    recurrent: str = "mamba"
    feed_forward: Mapping[type, Names]
    renames: tuple[tuple[str, str], ...] = ()
    ignored: str = r"\.rotary_emb\.inv_freq$|^mtp\.|^(model\.)?visual\."
    zeros: str = "^$"

    def stored(self, config: ModelConfig) -> dict:
        """Our parameter tree in terms of the checkpoint's tensors: a `tensors.Stored` at each leaf."""
        names = {
            "embed": self.embed,
            "layers": [self._layer(index, spec) for index, spec in enumerate(config.layers)],
            "norm": self.norm,
            "head": "lm_head.weight",
        }
        return stored(model_weights(config), names)

    def _layer(self, index: int, spec: LayerSpec) -> Names:
        names: Names = {"norm": self.mixer_norm, "mixers": [], "mlp_norm": self.mlp_norm}
        for mixer in spec.mixers:
            prefix = self.attention if isinstance(mixer, Attention) else self.recurrent
            names["mixers"].append(under(prefix, kind_of(mixer).tensors))
        if spec.mlp is not None:
            names["mlp"] = self.feed_forward[type(spec.mlp)]
        return under(f"{self.layers}.{index}", names)

    def canonical(self, name: str) -> str:
        """The name of a file's tensor as `stored` spells it."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name may be there without being used."""
        return re.search(self.ignored, name) is not None

    def may_lack(self, name: str) -> bool:
        """Whether a tensor of this name is zero where a file has none."""
        return re.search(self.zeros, name) is not None

"""Llama and Qwen2 with a cut (SwiftKV, arXiv 2410.03960) in torch: transformers has no such models.

`register` makes them known to transformers' own tables, or the classes that were published with such models. All layers
run on all tokens. Windows are left aside: the published classes give them to one kind of attention only.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_outputs import CausalLMOutput


class LlamaSwiftKVConfig(LlamaConfig):
    """Layers up to `num_key_value_layers` are as in Llama; after them, groups share keys and values."""

    model_type = "llama_swiftkv"
    num_key_value_layers: int | None = None
    key_value_group_size: int | None = None
    swiftkv: bool = False  # whether a training uses the cut; a field of the published classes


class Qwen2SwiftKVConfig(Qwen2Config):
    """The same of Qwen2."""

    model_type = "qwen2_swiftkv"
    num_key_value_layers: int | None = None
    key_value_group_size: int | None = None
    swiftkv: bool = False  # whether a training uses the cut; a field of the published classes


class SwiftKV:
    """What both models have in common; the config must name a cut in front of the last layer."""

    def __init__(self, config) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model.norm_swiftkv = type(self.model.norm)(config.hidden_size, config.rms_norm_eps)
        for index in self.later():
            attention = self.model.layers[index].self_attn
            for name in ("q", "k", "v") if self.leads(index) else ("q",):
                setattr(attention, f"{name}_proj_swiftkv", like(getattr(attention, f"{name}_proj")))

    def later(self) -> range:
        """The layers after the cut."""
        return range(self.config.num_key_value_layers, self.config.num_hidden_layers)

    def leads(self, index: int) -> bool:
        """Whether a later layer makes the keys and values of its group."""
        return (index - self.config.num_key_value_layers) % (
            self.config.key_value_group_size or 1
        ) == 0

    def forward(self, tokens: torch.Tensor, use_cache: bool = False) -> CausalLMOutput:
        """Logits of whole sequences int[B, T]."""
        inner, count = self.model, tokens.shape[1]
        h = inner.embed_tokens(tokens)
        positions = torch.arange(count)[None]
        cos, sin = inner.rotary_emb(h, positions)
        masked = torch.full((count, count), float("-inf")).triu(1)
        for layer in inner.layers[: self.config.num_key_value_layers]:
            own = layer.self_attn
            x = layer.input_layernorm(h)
            k, v = rotated(heads(own, own.k_proj(x)), cos, sin), heads(own, own.v_proj(x))
            h = after_cut(layer, h, rotated(heads(own, own.q_proj(x)), cos, sin), k, v, masked)
        u = inner.norm_swiftkv(h)
        for index in self.later():
            layer = inner.layers[index]
            own = layer.self_attn
            if self.leads(index):
                k = rotated(heads(own, own.k_proj_swiftkv(u)), cos, sin)
                v = heads(own, own.v_proj_swiftkv(u))
            q = heads(own, own.q_proj_swiftkv(layer.input_layernorm(h)))
            h = after_cut(layer, h, rotated(q, cos, sin), k, v, masked)
        return CausalLMOutput(logits=self.lm_head(inner.norm(h)))


def like(linear: torch.nn.Linear) -> torch.nn.Linear:
    """Another linear map of the same shape."""
    return torch.nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)


def heads(attention: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """[B, T, N H] to [B, N, T, H]."""
    return x.view(*x.shape[:2], -1, attention.head_dim).transpose(1, 2)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, N, T, H] turned by the angles of cos and sin [B, T, H], in halves."""
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]


def after_cut(layer, h, q, k, v, masked) -> torch.Tensor:
    """The residual stream after a layer with these queries, keys and values."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + masked
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    h = h + layer.self_attn.o_proj(mixed)
    return h + layer.mlp(layer.post_attention_layernorm(h))


class LlamaSwiftKV(SwiftKV, LlamaForCausalLM):
    """Llama with a cut."""

    config_class = LlamaSwiftKVConfig


class Qwen2SwiftKV(SwiftKV, Qwen2ForCausalLM):
    """Qwen2 with a cut."""

    config_class = Qwen2SwiftKVConfig


def register(checkout: Path | None = None) -> None:
    """Makes models with a cut known to transformers.

    Args:
        checkout: of github.com/snowflakedb/ArcticTraining, for its classes; None for those in this file.
    """
    if checkout is None:
        for config_class, model_class in (
            (LlamaSwiftKVConfig, LlamaSwiftKV),
            (Qwen2SwiftKVConfig, Qwen2SwiftKV),
        ):
            transformers.AutoConfig.register(config_class.model_type, config_class)
            transformers.AutoModelForCausalLM.register(config_class, model_class)
        return
    sys.path.insert(0, str(checkout / "projects" / "swiftkv" / "models"))
    for name in ("llama", "qwen2"):
        module = importlib.import_module(f"{name}.modeling_{name}_swiftkv")
        mask = functools.partial(causal_mask, module.create_causal_mask)
        module.create_causal_mask = mask
        getattr(importlib.import_module(name), f"register_{name}_swiftkv")()


def causal_mask(make, *, input_embeds: torch.Tensor, cache_position: torch.Tensor, **others):
    """A mask of transformers 5, from the arguments of transformers 4."""
    return make(inputs_embeds=input_embeds, **others)

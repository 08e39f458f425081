"""The stacks of layers that an engine runs: the model's own, and the one that drafts for it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax

from hybrid_jax.config import Mixer, ModelConfig
from hybrid_jax.models import decoder, mtp
from hybrid_jax.models.decoder import Mix


class Stack(NamedTuple):
    """Layers that run one after the other.

    Attributes:
        params: with the weights of the layers in params["layers"]; of a whole model with all else that it has.
        config: whose `layers` they are.
        first: number of the first one in `ModelConfig.all_layers`.
    """

    params: dict
    config: ModelConfig
    first: int

    def numbered(self, mix: Mix) -> Mix:
        """A `Mix` that numbers these layers from 0, of one that numbers all layers."""

        def mixed(
            weights: dict, normed: jax.Array, spec: Mixer, where: tuple[int, int]
        ) -> jax.Array:
            return mix(weights, normed, spec, (self.first + where[0], where[1]))

        return mixed


class DraftStack(Protocol):
    """Layers that draft what follows a token."""

    layers: Stack
    takes_hidden: bool  # also what the model's own layers have made of the token before

    def through(
        self,
        tokens: jax.Array,
        before: jax.Array | None,
        valid: jax.Array,
        mix: Mix,
        kernels: str = "xla",
    ) -> jax.Array:
        """Takes tokens through the layers.

        Args:
            tokens: int32[B, T]. valid: as for `decoder.walk`; `mix` numbers all layers.
            before: if it takes hidden states, [B, T, D] that before each token, after the last norm.

        Returns:
            [B, T, D'] what the layers make of them. Layers that take hidden states return what the next token takes.
        """

    def logits(self, out: jax.Array, kernels: str = "xla") -> jax.Array:
        """Logits float32[..., V] of drafts, from what `through` returns."""


class HeadStack(NamedTuple):
    """See `DraftStack`; the layers of a head for multi-token prediction.

    Attributes:
        params, config: of the whole model, whose embeddings and head it uses.
    """

    layers: Stack
    params: dict
    config: ModelConfig
    takes_hidden = True

    def through(
        self,
        tokens: jax.Array,
        before: jax.Array | None,
        valid: jax.Array,
        mix: Mix,
        kernels: str = "xla",
    ) -> jax.Array:
        """See `DraftStack.through`."""
        assert before is not None, "a head takes hidden states"
        mix = self.layers.numbered(mix)
        return mtp.head(self.params, tokens, before, valid, self.config, mix, kernels)

    def logits(self, out: jax.Array, kernels: str = "xla") -> jax.Array:
        """See `DraftStack.logits`."""
        return decoder.head_logits(self.params, out, self.config, kernels)


class SecondStack(NamedTuple):
    """See `DraftStack`; a second model."""

    layers: Stack
    takes_hidden = False

    def through(
        self,
        tokens: jax.Array,
        before: jax.Array | None,
        valid: jax.Array,
        mix: Mix,
        kernels: str = "xla",
    ) -> jax.Array:
        """See `DraftStack.through`."""
        params, config, _ = self.layers
        return decoder.walk(params, tokens, valid, config, self.layers.numbered(mix), kernels)

    def logits(self, out: jax.Array, kernels: str = "xla") -> jax.Array:
        """See `DraftStack.logits`."""
        return decoder.logits(self.layers.params, out, self.layers.config, kernels)


def stacks(params: dict, config: ModelConfig) -> list[Stack]:
    """The model's own stack, and the one that drafts, if there is one."""
    drafting = drafting_stack(params, config)
    return [Stack(params, config, 0)] + ([] if drafting is None else [drafting.layers])


def drafting_stack(params: dict, config: ModelConfig) -> DraftStack | None:
    """The stack that drafts, if there is one."""
    if (own := config.drafting) is None:
        return None
    first = len(config.layers)
    if config.mtp:
        return HeadStack(Stack(params["mtp"], own, first), params, config)
    return SecondStack(Stack(params["draft"], own, first))

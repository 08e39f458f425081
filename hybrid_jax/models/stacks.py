"""The stacks of layers that an engine runs: the model's own, and the one that drafts for it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax

from hybrid_jax.config import Backend, Mixer, ModelConfig
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


class Drafting(Protocol):
    """Layers that draft what follows a token."""

    def through(
        self,
        tokens: jax.Array,
        before: jax.Array | None,
        valid: jax.Array,
        mix: Mix,
        backend: Backend,
    ) -> jax.Array:
        """Takes tokens through the layers.

        Args:
            tokens: int32[B, T]. valid: as for `decoder.walk`; `mix` numbers all layers.
            before: [B, T, D], for each token the normed hidden state of the token before it; None unless these layers
                take hidden states.

        Returns:
            [B, T, D'] what the layers make of them. Layers that take hidden states return what the next token takes.
        """

    def logits(self, out: jax.Array) -> jax.Array:
        """Logits float32[..., V] of drafts, from what `through` returns."""


class DraftStack(NamedTuple):
    """Those of a head for multi-token prediction, or of a second model; see `Drafting`.

    Attributes:
        layers: what it runs.
        params, config: of the whole model whose embeddings and head it uses.
        takes_hidden: it is a head, which also takes what the model's own layers have made of the token before.
    """

    layers: Stack
    params: dict
    config: ModelConfig
    takes_hidden: bool

    def through(
        self,
        tokens: jax.Array,
        before: jax.Array | None,
        valid: jax.Array,
        mix: Mix,
        backend: Backend,
    ) -> jax.Array:
        """As in `Drafting`."""
        params, config, mix = self.params, self.config, self.layers.numbered(mix)
        if not self.takes_hidden:
            return decoder.walk(params, tokens, valid, config, mix, backend)
        assert before is not None, "a head takes hidden states"
        return mtp.head(params, tokens, before, valid, config, mix, backend)

    def logits(self, out: jax.Array) -> jax.Array:
        """As in `Drafting`."""
        of = decoder.head_logits if self.takes_hidden else decoder.logits
        return of(self.params, out, self.config)


class ExitStack(NamedTuple):
    """The layers before a cut, with a head of their own on its output (early exit: SwiftKV, arXiv 2410.03960, app. E).

    What `through` returns is their output at the cut, [B, T, D].

    Attributes:
        params, config: of the whole model.
    """

    params: dict
    config: ModelConfig

    def through(
        self,
        tokens: jax.Array,
        before: jax.Array | None,
        valid: jax.Array,
        mix: Mix,
        backend: Backend,
    ) -> jax.Array:
        """As in `Drafting`."""
        params, config = self.params, self.config
        assert config.cut is not None, "the model has a cut"
        stream = decoder.enter(params, tokens, valid, config)
        stream = decoder.through(params, stream, valid, range(config.cut), config, mix, backend)
        return decoder.leave(params, stream, valid, config)

    def logits(self, out: jax.Array) -> jax.Array:
        """As in `Drafting`."""
        return decoder.exit_logits(self.params, out, self.config)


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
        return DraftStack(Stack(params["mtp"], own, first), params, config, takes_hidden=True)
    second = Stack(params["draft"], own, first)
    return DraftStack(second, second.params, own, takes_hidden=False)

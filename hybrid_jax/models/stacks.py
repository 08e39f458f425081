"""The stacks of layers that an engine runs: the model's own, and those of the head or second model that drafts."""

from __future__ import annotations

from typing import NamedTuple

import jax

from hybrid_jax.config import Mixer, ModelConfig
from hybrid_jax.models.decoder import Mix
from hybrid_jax.models.mtp import head_config


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


def stacks(params: dict, config: ModelConfig) -> list[Stack]:
    """The model's own stack, and the one that drafts, if there is one."""
    found = [Stack(params, config, 0)]
    if (drafts := drafting_stack(params, config)) is not None:
        found.append(drafts)
    return found


def drafting_stack(params: dict, config: ModelConfig) -> Stack | None:
    """The stack that drafts; of a head, `params` and `config` are those of its layers alone."""
    first = len(config.layers)
    if config.mtp:
        return Stack(params["mtp"], head_config(config), first)
    if config.draft is not None:
        return Stack(params["draft"], config.draft, first)
    return None

"""The table in which steps find a recurrent layer's kind, by backend and by the class of its spec."""

from __future__ import annotations

from hybrid_jax.config import Mamba2, ModelConfig
from hybrid_jax.engine.kinds.kind import At, LayerSteps
from hybrid_jax.engine.kinds.mamba2_pallas import Mamba2Pallas
from hybrid_jax.engine.kinds.mamba2_xla import Mamba2Recurrence
from hybrid_jax.engine.kinds.replay import Replay
from hybrid_jax.engine.model import Model
from hybrid_jax.geometry import Geometry

KINDS: dict[str, dict[type, LayerSteps]] = {
    "xla": {Mamba2: Replay(Mamba2Recurrence())},
    "pallas": {Mamba2: Mamba2Pallas()},
}


def steps_of(at: At, model: Model) -> LayerSteps:
    """What a layer does in the steps of a model."""
    return KINDS[model.kernels][type(at.spec)]


def recurrent_layers(config: ModelConfig, geometry: Geometry) -> list[At]:
    """All recurrent layers, in layer order."""
    pairs = zip(config.recurrent, geometry.states, strict=True)
    return [At(spec, place.group, place.layer) for spec, place in pairs]


def first_layers(config: ModelConfig, geometry: Geometry) -> list[At]:
    """The first layer of each group."""
    return [at for at in recurrent_layers(config, geometry) if at.layer == 0]

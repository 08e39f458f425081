"""The table in which steps find a recurrent layer's kind, by backend and by the class of its spec."""

from __future__ import annotations

from typing import Any

from hybrid_jax.config import GatedDelta, Mamba1, Mamba2, ShortConv
from hybrid_jax.engine.mixers.carry import Carry
from hybrid_jax.engine.mixers.gated_delta_pallas import GatedDeltaPallas
from hybrid_jax.engine.mixers.gated_delta_xla import GatedDeltaRecurrence
from hybrid_jax.engine.mixers.mamba1_pallas import Mamba1Pallas
from hybrid_jax.engine.mixers.mamba1_xla import Mamba1Recurrence
from hybrid_jax.engine.mixers.mamba2_pallas import Mamba2Pallas
from hybrid_jax.engine.mixers.mamba2_xla import Mamba2Recurrence
from hybrid_jax.engine.mixers.mixer import LayerSteps
from hybrid_jax.engine.mixers.replay import Replay
from hybrid_jax.engine.mixers.short_conv_pallas import ShortConvPallas
from hybrid_jax.engine.mixers.short_conv_xla import ShortConvSteps
from hybrid_jax.state import Model

LAYER_STEPS: dict[str, dict[type, LayerSteps[Any]]] = {
    "xla": {
        Mamba2: Replay(Mamba2Recurrence()),
        GatedDelta: Replay(GatedDeltaRecurrence()),
        ShortConv: ShortConvSteps(),
        Mamba1: Carry(Mamba1Recurrence()),
    },
    "pallas": {
        Mamba2: Mamba2Pallas(),
        GatedDelta: GatedDeltaPallas(),
        ShortConv: ShortConvPallas(),
        Mamba1: Mamba1Pallas(),
    },
}


def steps_of(spec: Any, model: Model) -> LayerSteps[Any]:
    """What layers of a spec do in the steps of a model."""
    return LAYER_STEPS[model.backend.layers][type(spec)]

"""The table in which steps find a mixer's kind, by backend and by the class of its spec."""

from __future__ import annotations

from typing import Any, cast

from hybrid_jax.config import Attention, Backend, GatedDelta, Mamba1, Mamba2, ShortConv
from hybrid_jax.engine.mixers.attention import AttentionSteps
from hybrid_jax.engine.mixers.carry import Carry
from hybrid_jax.engine.mixers.gated_delta_pallas import GatedDeltaPallas
from hybrid_jax.engine.mixers.gated_delta_xla import GatedDeltaRecurrence
from hybrid_jax.engine.mixers.mamba1_pallas import Mamba1Pallas
from hybrid_jax.engine.mixers.mamba1_xla import Mamba1Recurrence
from hybrid_jax.engine.mixers.mamba2_pallas import Mamba2Pallas
from hybrid_jax.engine.mixers.mamba2_xla import Mamba2Recurrence
from hybrid_jax.engine.mixers.mixer import LayerSteps, StateSteps
from hybrid_jax.engine.mixers.replay import Replay
from hybrid_jax.engine.mixers.short_conv_pallas import ShortConvPallas
from hybrid_jax.engine.mixers.short_conv_xla import ShortConvSteps
from hybrid_jax.geometry import StateGroup
from hybrid_jax.state import Model

LAYER_STEPS: dict[str, dict[type, LayerSteps[Any, Any]]] = {
    "xla": {
        Attention: AttentionSteps(),
        Mamba2: Replay(Mamba2Recurrence()),
        GatedDelta: Replay(GatedDeltaRecurrence()),
        ShortConv: ShortConvSteps(),
        Mamba1: Carry(Mamba1Recurrence()),
    },
    "pallas": {
        Attention: AttentionSteps(),
        Mamba2: Mamba2Pallas(),
        GatedDelta: GatedDeltaPallas(),
        ShortConv: ShortConvPallas(),
        Mamba1: Mamba1Pallas(),
    },
}


def steps_of(spec: Any, model: Model) -> LayerSteps[Any, Any]:
    """What layers of a spec do in the steps of a model."""
    return LAYER_STEPS[model.backend.layers][type(spec)]


def group_steps(group: StateGroup, backend: Backend) -> StateSteps[Any]:
    """What the layers of a group with a state do, in steps made of a backend."""
    return cast(StateSteps[Any], LAYER_STEPS[backend.layers][type(group.layout.spec)])

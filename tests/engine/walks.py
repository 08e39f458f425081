"""A tiny model's state and a chunk of a prompt, to walk through its layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.mixers.mixer import ChunkRows
from hybrid_jax.geometry import make_geometry
from hybrid_jax.state import Model, State, make_state, state_specs
from tests.tiny_models import VOCAB, tiny_model

ROWS, TOKENS, PAGE = 2, 40, 64


def setting(name: str, window: int = 1) -> tuple[Model, dict, State]:
    """A model whose rows have a checkpoint in slots 1 and 2 and a page in frames of its own."""
    config, params = tiny_model(name)
    geometry = make_geometry(config, EngineConfig(page_tokens=PAGE))
    per_row = geometry.state_frames + geometry.frames_per_page
    specs = state_specs(
        geometry, num_frames=1 + ROWS * per_row, max_slots=3, max_rows=ROWS, window=window
    )
    state = make_state(specs)
    count = geometry.state_frames
    for row in range(ROWS):
        own = 1 + row * per_row + jnp.arange(count)
        state = state.replace(slots=state.slots.at[1 + row, :count].set(own))
    return Model(config, geometry), params, state


def page_table(model: Model) -> jax.Array:
    """int32[B, frames_per_page, 1]: each row's page after its checkpoint."""
    geometry = model.geometry
    per_row = geometry.state_frames + geometry.frames_per_page
    first = 1 + geometry.state_frames + per_row * np.arange(ROWS)
    return jnp.asarray(first[:, None, None] + np.arange(geometry.frames_per_page)[:, None])


def prompt_chunk(model: Model, state: State) -> ChunkRows:
    slots = state.slots[1:]
    return ChunkRows(
        tokens=jax.random.randint(jax.random.key(0), (ROWS, TOKENS), 0, VOCAB),
        start=jnp.zeros(ROWS, jnp.int32),
        length=jnp.array([TOKENS, TOKENS - 4]),
        state_len=jnp.full(ROWS, model.geometry.grain),
        row=jnp.arange(ROWS),
        read=slots,
        write=slots,
        table=page_table(model),
    )

"""Small programs around the steps: slot table, rows that move, log-probabilities and hidden states of prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hybrid_jax.engine import adjust, kept, rings
from hybrid_jax.engine.frames import in_device_memory
from hybrid_jax.engine.on_matrices import on_matrices
from hybrid_jax.engine.sampling import Sampled, logprobs
from hybrid_jax.engine.steps import narrow
from hybrid_jax.geometry import PROMPT_POSITIONS
from hybrid_jax.models import decoder
from hybrid_jax.state import Model, State


def write_slots(state: State, ids: jax.Array, frames: jax.Array) -> State:
    """Writes the frames int32[n, F] of slots int32[n]; padding repeats a real slot."""
    return state.replace(slots=state.slots.at[ids].set(frames))


def move_row(state: State, source: jax.Array, target: jax.Array) -> State:
    """Moves one ring row to another place; the source is marked as stopped."""
    rows = jnp.arange(state.tokens.shape[0])
    tokens = jnp.where(rows == target, state.tokens[source], state.tokens)
    tokens = jnp.where(rows == source, -1, tokens)
    lengths = jnp.where(rows == target, state.lengths[source], state.lengths)
    moved = jax.tree.map(lambda ring: rings.copy_row(ring, source, target), state.rings)
    drafting = kept.copy_row(state.drafting, source, target)
    return state.replace(rings=moved, tokens=tokens, lengths=lengths, drafting=drafting)


def _beside_rings(state: State) -> dict[str, Any]:
    """What has a row's values on its first axis."""
    return {"tokens": state.tokens, "lengths": state.lengths, "drafting": state.drafting}


def read_row(state: State, row: jax.Array) -> dict[str, Any]:
    """What the state has of one ring row, beside the arena and its slots."""
    of_layers = lambda x: jax.lax.dynamic_index_in_dim(x, row, 1, keepdims=False)  # noqa: E731
    of_row = lambda x: jax.lax.dynamic_index_in_dim(x, row, keepdims=False)  # noqa: E731
    return {
        "rings": jax.tree.map(of_layers, state.rings),
        **jax.tree.map(of_row, _beside_rings(state)),
    }


def write_row(state: State, row: jax.Array, held: dict[str, Any]) -> State:
    """Puts back what `read_row` has read."""
    of_layers = lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, row, 1)  # noqa: E731
    of_row = lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, row, 0)  # noqa: E731
    parts = _beside_rings(state)
    new = {name: jax.tree.map(of_row, x, held[name]) for name, x in parts.items()}
    return state.replace(rings=jax.tree.map(of_layers, state.rings, held["rings"]), **new)


def save_frames(state: State, frames: jax.Array) -> tuple[jax.Array, ...]:
    """Frames int32[COPIED_FRAMES] of the arena, each as an array uint32[W] of its own."""
    return tuple(
        jax.lax.dynamic_index_in_dim(state.arena, frame, keepdims=False) for frame in frames
    )


def load_frames(state: State, frames: jax.Array, *words: jax.Array) -> State:
    """Writes what `save_frames` has made to frames int32[COPIED_FRAMES]; padding writes to the sink."""
    arena = state.arena
    for frame, row in zip(frames, words, strict=True):
        arena = jax.lax.dynamic_update_index_in_dim(arena, in_device_memory(row), frame, 0)
    return state.replace(arena=arena)


@on_matrices
def prompt_logprobs(
    params: dict, h: jax.Array, tokens: jax.Array, *, model: Model, num_logprobs: int
) -> Sampled:
    """Log-probabilities of given tokens, a few positions at a time.

    Args:
        h: [R, T, D] hidden states before the last norm.
        tokens: int32[R, T] the token that follows each position.

    Returns:
        The tokens int32[R, T], and logprobs with the same leading axes.
    """

    def blocks_of(x):
        x = x.reshape(-1, *x.shape[2:])
        x = jnp.pad(x, ((0, -x.shape[0] % PROMPT_POSITIONS), *((0, 0) for _ in x.shape[1:])))
        return x.reshape(-1, PROMPT_POSITIONS, *x.shape[1:])

    def some(block):
        return logprobs(decoder.logits(params, block[0], model.config), block[1], num_logprobs)

    found = jax.lax.map(some, (blocks_of(h), blocks_of(tokens)))

    def whole(x):
        return x.reshape(-1, *x.shape[2:])[: tokens.size].reshape(*tokens.shape, *x.shape[2:])

    found = jax.tree.map(whole, found)
    return Sampled(tokens, found)


@on_matrices
def pooled_hidden(
    params: dict, h: jax.Array, begin: jax.Array, end: jax.Array, *, model: Model
) -> jax.Array:
    """Sums of hidden states after the last norm, float32[R, D].

    Args:
        h: [R, T, D] hidden states before the last norm.
        begin, end: int32[R] the positions of each row that count, [begin, end).
    """
    normed = decoder.normed_hidden(params, h, model.config)
    position = jnp.arange(h.shape[1])
    counts = (position >= begin[:, None]) & (position < end[:, None])
    return jnp.where(counts[:, :, None], normed.astype(jnp.float32), 0).sum(axis=1)


@on_matrices
def all_hidden(params: dict, h: jax.Array, *, model: Model) -> jax.Array:
    """Hidden states h [R, T, D] before the last norm to float32[R, T, D] after it."""
    return decoder.normed_hidden(params, h, model.config).astype(jnp.float32)


@on_matrices
def all_logprobs(params: dict, h: jax.Array, *, model: Model) -> jax.Array:
    """Hidden states after the last norm, float32[N, D], to the log-probabilities of all tokens, float32[N, V]."""
    logits = decoder.head_logits(params, h.astype(decoder.activation_dtype(params)), model.config)
    return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


# Programs that read what a prefill has made of prompts, and change nothing.
READERS: dict[str, Callable] = {
    "prompt_logprobs": prompt_logprobs,
    "pooled_hidden": pooled_hidden,
    "all_hidden": all_hidden,
    "all_logprobs": all_logprobs,
}
# Programs that read a part of the state, and change nothing.
READ_STATE: dict[str, Callable] = {
    "read_row": read_row,
    "read_adjust": adjust.read_row,
    "save_frames": save_frames,
    "narrow_checkpoint": narrow.narrow_checkpoint,
    "widen_checkpoint": narrow.widen_checkpoint,
}
OF_MODEL = ("narrow_checkpoint", "widen_checkpoint")  # these take the model, too
TO_HOST = ("save_frames",)  # their results go into the host's memory
# By the name of their programs. The first argument is donated.
CHANGES: dict[str, Callable] = {
    "write_slots": write_slots,
    "move_row": move_row,
    "write_row": write_row,
    "write_adjust": adjust.write_row,
    "load_frames": load_frames,
    "write_checkpoint": narrow.write_checkpoint,
    "load_history": kept.load_tokens,
    "load_adjust": adjust.load_row,
    "move_adjust": adjust.move_row,
}

"""Copies of frames between the arena and the host's memory, compiled for an H200 over an arena of 26 GB."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from hybrid_jax.engine.steps.small import load_frames, save_frames
from hybrid_jax.schedule.bucket import COPIED_FRAMES
from hybrid_jax.state import State
from tests.aot.chip import compile_for_gpu
from tests.aot.models import decode_step, smallest

FRAMES = jax.ShapeDtypeStruct((COPIED_FRAMES,), jnp.int32)
SMALL = 4096  # bytes of all that is no frame


def state_of(num_frames: int) -> State:
    _, specs = decode_step(smallest(), rows=4, num_frames=num_frames, tokens=512)
    return specs[1]


def frame_of(state: State) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(state.arena.shape[1:], state.arena.dtype)


def bytes_of(array) -> int:
    return array.size * array.dtype.itemsize


def saved(state: State, frames: jax.Array) -> tuple[jax.Array, ...]:
    """As an engine saves on a GPU: results go to the host's memory."""
    return tuple(jax.device_put(x, jax.memory.Space.Host) for x in save_frames(state, frames))


@pytest.mark.parametrize("num_frames", [4_000, 400_000])
def test_frames_are_saved_into_the_hosts_memory_and_nothing_else_is_copied(num_frames):
    state = state_of(num_frames)
    copied = COPIED_FRAMES * bytes_of(frame_of(state))
    compiled = compile_for_gpu(saved, state, FRAMES)
    assert compiled.host_bytes == (0, copied)
    assert compiled.kinds["kCopy"] == compiled.kinds["kAsyncStart"] == COPIED_FRAMES
    assert compiled.kinds["kCustomKernel"] == 1
    assert copied <= compiled.temp_bytes < copied + SMALL


@pytest.mark.parametrize("num_frames", [4_000, 400_000])
def test_frames_are_loaded_from_the_hosts_memory_into_the_arena_where_it_is(num_frames):
    state = state_of(num_frames)
    words = [frame_of(state)] * COPIED_FRAMES
    copied = COPIED_FRAMES * bytes_of(words[0])
    compiled = compile_for_gpu(
        load_frames, state, FRAMES, *words, donate=(0,), from_host=COPIED_FRAMES
    )
    assert compiled.host_bytes == (copied, 0)
    assert compiled.kinds["kCopy"] == compiled.kinds["kAsyncStart"] == COPIED_FRAMES
    assert compiled.kinds["kCustomKernel"] == COPIED_FRAMES
    assert copied <= compiled.temp_bytes < copied + SMALL
    assert compiled.alias_bytes >= sum(map(bytes_of, jax.tree.leaves(state)))

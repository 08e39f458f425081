"""Copies of frames between the arena and the host's memory, and checkpoints that become int8, compiled for an H200."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from hybrid_jax.config import PALLAS, CacheConfig, EngineConfig
from hybrid_jax.engine.steps.narrow import narrow_checkpoint, widen_checkpoint, write_checkpoint
from hybrid_jax.engine.steps.small import load_frames, save_frames
from hybrid_jax.schedule.bucket import COPIED_FRAMES
from hybrid_jax.sizing.temporaries import narrowing_bytes
from hybrid_jax.state import State
from tests.aot.chip import compile_for_gpu
from tests.aot.models import decode_step, hybrid_7b, model_and_state, smallest

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


def test_a_checkpoint_becomes_int8_and_comes_back_beside_the_arena():
    config = hybrid_7b(2)
    model, state = model_and_state(config, 4, 4_000, "bfloat16", checkpoints="int8")
    wide, narrow = model.geometry.checkpoint_frames
    numbers = lambda count: jax.ShapeDtypeStruct((count,), jnp.int32)
    size = model.geometry.frame_bytes
    made = compile_for_gpu(functools.partial(narrow_checkpoint, model=model), state, numbers(wide))
    back = compile_for_gpu(functools.partial(widen_checkpoint, model=model), state, numbers(narrow))
    assert narrow < wide / 3.5 and back.temp_bytes < made.temp_bytes
    engine = EngineConfig(cache=CacheConfig(checkpoints="int8"), dtype="bfloat16", max_rows=4)
    counted = narrowing_bytes(config, engine, backend=PALLAS)
    assert made.temp_bytes + narrow * size <= counted <= 1.1 * (made.temp_bytes + narrow * size)
    for count in (wide, narrow):
        words = jax.ShapeDtypeStruct((count, model.geometry.frame_words), jnp.uint32)
        written = compile_for_gpu(write_checkpoint, state, numbers(count), words, donate=(0,))
        assert written.temp_bytes < SMALL
        assert written.alias_bytes >= sum(map(bytes_of, jax.tree.leaves(state)))

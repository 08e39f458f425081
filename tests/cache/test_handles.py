"""Handles: what they name while it lives, and errors once it does not."""

import pytest

from hybrid_jax.cache import handles
from hybrid_jax.cache.frames import FrameAllocator
from hybrid_jax.cache.slots import SlotTable


def test_handles_pack_and_unpack():
    for kind, generation, index in [(1, 0, 1), (2, 63, handles.MAX_ID), (1, 17, 12345)]:
        assert handles.unpack(handles.pack(kind, generation, index)) == (kind, generation, index)
    assert handles.pack(2, 17, 5) == 0b10_010001_000000000000000000000101


def test_a_stale_handle_raises_even_when_the_frame_lives_again():
    frames = FrameAllocator(3)
    (frame,) = frames.allocate(1)
    [handle] = frames.handles([frame])
    assert frames.resolve(handle) == frame
    frames.release([frame])
    with pytest.raises(handles.StaleHandle, match="frame 1 of generation 0"):
        frames.resolve(handle)
    assert frames.allocate(1).tolist() == [frame]
    with pytest.raises(handles.StaleHandle, match="present generation is 1"):
        frames.resolve(handle)


def test_a_handle_of_one_pool_does_not_resolve_in_another():
    frames = FrameAllocator(8)
    slots = SlotTable(frames, state_frames=2, max_slots=4)
    slot = slots.allocate()
    with pytest.raises(handles.StaleHandle, match="names a slot, resolved as a frame"):
        frames.resolve(slot)
    with pytest.raises(handles.StaleHandle, match="names a frame, resolved as a slot"):
        slots.resolve(int(frames.handles(1)))


def test_generations_wrap_after_64_lives():
    frames = FrameAllocator(2)
    (frame,) = frames.allocate(1)
    first = frames.handles(frame)
    for _ in range(handles.NUM_GENERATIONS):
        frames.release([frame])
        frames.allocate(1)
    assert frames.resolve(first) == frame  # the documented limit of a 6-bit generation

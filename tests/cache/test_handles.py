"""Handles: what they name while it lives, and errors once it does not."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_jax.cache.pools import handles
from hybrid_jax.cache.pools.frames import FrameAllocator
from hybrid_jax.cache.pools.slots import SlotTable
from tests.cache.worn import WornPools, contents


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
    slots = SlotTable(frames, lengths=(2,), max_slots=4)
    slot = slots.allocate()
    with pytest.raises(handles.StaleHandle, match="names a slot, resolved as a frame"):
        frames.resolve(slot)
    with pytest.raises(handles.StaleHandle, match="names a frame, resolved as a slot"):
        slots.resolve(int(frames.handles(1)))


def test_a_slot_behind_the_table_s_end_is_stale():
    slots = SlotTable(FrameAllocator(8), lengths=(2,), max_slots=4)
    with pytest.raises(handles.StaleHandle):
        slots.resolve(handles.pack(handles.SLOT, 0, 4))


def test_generations_wrap_after_64_lives():
    frames = FrameAllocator(2)
    (frame,) = frames.allocate(1)
    first = frames.handles(frame)
    for _ in range(handles.NUM_GENERATIONS):
        frames.release([frame])
        frames.allocate(1)
    assert frames.resolve(first) == frame  # the documented limit of a 6-bit generation


NO_HANDLES = [
    1.5,
    2.0,
    np.float64(3),
    None,
    "7",
    b"7",
    [1],
    (),
    {},
    np.array([1, 2]),
    np.bool_(True),
]
ALL_BITS = st.integers(0, 2**32 - 1)
BEYOND = st.one_of(
    st.integers(-(2**70), -1),
    st.integers(2**32, 2**70),
    st.sampled_from([-1, -(2**31), -(2**63), 2**32, 2**63, 2**64 - 1, 2**64]),
)
worn_pools = st.builds(WornPools, st.integers(0, 11))


def any_names(pools: WornPools) -> st.SearchStrategy[int]:
    """Live and stale names of both kinds, of free frames, past the end, of other kinds, with bits too many."""
    known = sorted(pools.live_frames | pools.live_slots) + sorted(pools.dead)
    near = st.builds(
        handles.pack, st.integers(0, 3), st.integers(0, 63), st.integers(0, 20) | st.just(handles.MAX_ID)
    )  # fmt: skip
    marked = st.builds(
        lambda name, bit: name + (1 << bit), st.sampled_from(known), st.integers(32, 70)
    )
    return st.one_of(st.sampled_from(known), near, marked, ALL_BITS, BEYOND)


def assert_told(error: pytest.ExceptionInfo, name: int) -> None:
    """The message has the name, or what it is made of."""
    _, generation, index = handles.unpack(name)
    message = str(error.value)
    assert f"{name:#010x}" in message or f" {index} of generation {generation}" in message, message


@given(pools=worn_pools, data=st.data())
def test_a_name_resolves_to_what_was_given_under_it_or_raises(pools, data):
    name = data.draw(any_names(pools))
    before = contents(pools.frames, pools.slots)
    for resolve, live in (
        (pools.frames.resolve, pools.live_frames),
        (pools.slots.resolve, pools.live_slots | {0: 0}),
    ):
        if name in live:
            assert resolve(name) == live[name]
            continue
        with pytest.raises(handles.StaleHandle) as error:
            resolve(name)
        assert_told(error, name)
    assert contents(pools.frames, pools.slots) == before


@given(pools=worn_pools, data=st.data())
def test_one_bad_name_anywhere_in_an_array_raises(pools, data):
    good = data.draw(st.lists(st.sampled_from(sorted(pools.live_frames)), max_size=7), "good")
    bad = data.draw(any_names(pools).filter(lambda name: name not in pools.live_frames), "bad")
    before = contents(pools.frames, pools.slots)
    ids = [pools.live_frames[name] for name in good]
    assert pools.frames.resolve(good).tolist() == ids
    good.insert(data.draw(st.integers(0, len(good)), "place"), bad)
    dtypes = [object, *(t for t in (np.uint32, np.int64, np.uint64) if fits(bad, t))]
    names = np.array(good, data.draw(st.sampled_from(dtypes), "dtype"))
    for given_as in (names, names.tolist(), names[:, None], names.reshape(1, 1, -1)):
        with pytest.raises(handles.StaleHandle) as error:
            pools.frames.resolve(given_as)
        assert_told(error, bad)
    assert contents(pools.frames, pools.slots) == before


def fits(name: int, dtype: type) -> bool:
    return np.iinfo(dtype).min <= name <= np.iinfo(dtype).max


@given(pools=worn_pools, data=st.data())
def test_only_a_live_name_changes_or_shows_a_slot(pools, data):
    slots, name = pools.slots, data.draw(any_names(pools))
    if name in pools.live_slots:
        holders, frames = slots.holders(name), slots.frames(name)
        slots.retain(name)
        assert slots.holders(name) == holders + 1
        slots.release(name)
        assert slots.holders(name) == holders and slots.frames(name) == frames
        return
    before = contents(pools.frames, slots)
    for call in (slots.frames, slots.holders, slots.retain, slots.release):
        if name == 0 and call in (slots.frames, slots.holders):
            assert not call(0)  # no checkpoint
            continue
        with pytest.raises(ValueError if name == 0 else handles.StaleHandle) as error:
            call(name)
        if name == 0:
            assert "got handle 0" in str(error.value)
        else:
            assert_told(error, name)
    assert contents(pools.frames, slots) == before


@pytest.mark.parametrize("thing", NO_HANDLES, ids=repr)
def test_what_is_no_integer_is_no_handle(thing):
    pools = WornPools(0)
    before = contents(pools.frames, pools.slots)
    slots = pools.slots
    for call in (slots.resolve, slots.frames, slots.holders, slots.retain, slots.release):
        with pytest.raises(ValueError, match=f"must be an integer, got {re.escape(repr(thing))}"):
            call(thing)
    good = min(pools.live_frames)
    for names in ([good, thing], [thing, good, good]):
        with pytest.raises(ValueError, match="handles: a handle must be an integer, got "):
            pools.frames.resolve(names)
    assert contents(pools.frames, slots) == before


def test_no_names_resolve_to_no_frames():
    frames = FrameAllocator(4)
    for names in ([], (), np.zeros((0, 3), np.uint32), np.zeros(0)):
        assert frames.resolve(names).shape == np.shape(names)


def test_the_name_a_free_frame_will_have_resolves_to_nothing():
    frames = FrameAllocator(3)
    a, b = frames.allocate(2)
    frames.release([a])
    for name in (handles.pack(handles.FRAME, 1, a), handles.pack(handles.FRAME, 0, 0), 0):
        with pytest.raises(handles.StaleHandle):
            frames.resolve(name)
    assert frames.resolve(handles.pack(handles.FRAME, 0, b)) == b
    with pytest.raises(handles.StaleHandle, match="nobody holds frame 1 of generation 1"):
        frames.resolve(handles.pack(handles.FRAME, 1, a))


def test_bits_beyond_the_32_of_a_handle_are_not_cut_off():
    frames = FrameAllocator(3)
    [name] = frames.handles(frames.allocate(1)).tolist()
    for wrong in (name + (1 << 32), name - (1 << 32)):
        for given_as in (wrong, np.int64(wrong), [name, wrong], np.array([[wrong]])):
            with pytest.raises(handles.StaleHandle, match=f"{wrong:#010x} names nothing"):
                frames.resolve(given_as)

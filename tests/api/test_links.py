"""What every link to a worker does, whatever it goes over."""

from __future__ import annotations

import socket
import struct
import threading
import time
from multiprocessing.connection import Connection
from queue import SimpleQueue

import pytest

from hybrid_jax.api.workers import link as link_module
from hybrid_jax.api.workers import process
from hybrid_jax.api.workers.link import receive_from_worker
from hybrid_jax.api.workers.process import PipeLink
from tests.api.thread_workers import MemoryLink


def pipes():
    """Both ends of a pipe."""
    return [PipeLink(Connection(end.detach()), None, "the other") for end in socket.socketpair()]


def memory():
    """Both ends of two queues."""
    there, back = SimpleQueue(), SimpleQueue()
    return MemoryLink("the other", there, back), MemoryLink("the other", back, there)


@pytest.fixture(params=[pipes, memory])
def ends(request):
    return request.param()


def test_frames_come_whole_and_in_order(ends):
    """Also those that are larger than what lies between both."""
    one, other = ends
    frames = [b"", b"short", bytes(3 << 20), b"last"]
    sender = threading.Thread(target=lambda: [one.send(frame) for frame in frames])
    sender.start()
    assert [other.receive() for _ in frames] == frames
    sender.join()
    other.send(b"back")
    assert one.receive(5.0) == b"back"


def test_nothing_within_some_seconds_is_said_and_costs_nothing(ends):
    one, other = ends
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        other.receive(0.05)
    assert 0.04 < time.monotonic() - begun < 5
    one.send(b"late")
    assert other.receive(5.0) == b"late"


def test_a_part_is_itself_where_there_is_no_store(ends):
    one, other = ends
    assert other.read(other.disclose(one.enclose(one.store(b"part")))) == b"part"


def test_so_many_beats_are_waited_for(ends, monkeypatch):
    monkeypatch.setattr(link_module, "BEAT", 0.02)
    one, other = ends
    with pytest.raises(TimeoutError, match="it has said nothing for 0.1 seconds: it was stopped"):
        receive_from_worker(other, 5)
    one.send(b"alive")
    assert receive_from_worker(other, 5) == b"alive"


def test_an_end_that_stops_in_the_middle_of_a_frame_is_silent(monkeypatch):
    monkeypatch.setattr(process, "SILENT", 1)
    one, other = socket.socketpair()
    process.limit_waits(other)
    link = PipeLink(Connection(other.detach()), None, "the other")
    one.send(struct.pack("!i", 100) + b"the beginning")
    with pytest.raises(TimeoutError, match="it has said nothing for"):
        receive_from_worker(link, 60)
    one.close()


def test_an_end_that_is_gone_is_no_silence():
    one, other = pipes()
    one._connection.close()
    with pytest.raises((EOFError, ConnectionError)):
        receive_from_worker(other, 5)

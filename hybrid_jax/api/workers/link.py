"""What connects a caller with an engine in another process: messages in frames that are numbered and checked."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, cast

from hybrid_jax import __version__

_MAGIC = b"hybridjx"
_HEAD = struct.Struct(
    "<8s16sQQI"
)  # magic, version of the package, number, bytes of the body, CRC-32 of it

BEAT = 1.0  # seconds after which a worker that has nothing to tell says that it is there
# So many of them without a word, and a worker is taken for lost: in general, and while it starts, because the packages
# that it imports may come from a slow disk, and nothing else runs meanwhile.
SILENT, STARTING = 60, 600


class WorkerLost(RuntimeError):
    """An engine in another process has ended, cannot be reached, or said what cannot be read."""


class Link(ABC):
    """A way to another process, and back. What arrives is whole and in order, or `Frames` finds out.

    Attributes:
        about: what is at the other end, in words.
        where: what such ends are, in words.
        sharing: how many of them share the memory of that machine.
        side: which side of a hand-over the worker is; "" for none.
    """

    about: str
    where = "other processes"
    sharing = 1
    side: Literal["prefill", "decode", ""] = ""

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Sends a frame. One thread at a time may call it.

        Raises:
            OSError: nobody is there.
        """

    @abstractmethod
    def receive(self, within: float | None = None) -> bytes:
        """Waits for the next frame. One thread at a time may call it.

        Args:
            within: seconds; None for as long as it takes.

        Raises:
            TimeoutError: none has come within them.
            EOFError, OSError: no more will come.
        """

    @abstractmethod
    def close(self) -> None:
        """Has the other process end, and waits for that. Nothing can be sent any more."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the other process at once."""

    # Parts of prefixes are large. Where all ends see a store, a part stays there, and messages only name it.

    def store(self, part: bytes) -> Any:
        """Keeps a part where other ends can read it, and returns what leads to it: the part itself without a store.

        Raises:
            OSError: there is no room.
        """
        return part

    def read(self, found: Any) -> bytes:
        """A part, by what leads to it.

        Raises:
            OSError: it is there no longer.
        """
        return cast(bytes, found)

    def enclose(self, found: Any) -> Any:
        """What stands for a part in the messages of the next frames that are sent."""
        return found

    def disclose(self, enclosed: Any) -> Any:
        """What leads to a part, by what stands for it in a message that has come."""
        return enclosed

    def why_lost(self) -> str:
        """What is known of how the other process ended."""
        return "its process has ended"


def receive_from_worker(link: Link, beats: int) -> bytes:
    """The next frame of a worker, which sends one each `BEAT` at least.

    Short waits are counted, and not the time: a caller that was stopped (Ctrl-Z) must not think that its workers were.

    Raises:
        TimeoutError: nothing has come for so many beats; says so.
        EOFError, OSError: as `Link.receive`.
    """
    for _ in range(beats):
        try:
            return link.receive(BEAT)
        except TimeoutError:
            continue
        except BlockingIOError:  # half a frame has come, and then nothing for as long
            break
    raise TimeoutError(
        f"it has said nothing for {beats * BEAT:g} seconds: it was stopped, or hangs"
    )


class Frames:
    """Makes frames of messages, and messages of frames. There is one object for each end of a link.

    Args:
        about: the other end, for errors.
    """

    def __init__(self, about: str) -> None:
        self._about = about
        self._sent = self._received = 0

    def pack(self, messages: Sequence[bytes]) -> bytes:
        """A frame with messages in it, in order, each as `as_bytes` makes it."""
        body = b"".join(messages)
        head = (_MAGIC, __version__.encode()[:16], self._sent, len(body), zlib.crc32(body))
        self._sent += 1
        return _HEAD.pack(*head) + body

    def pack_one(self, message: Any) -> bytes:
        """A frame with one message. Raises as `as_bytes`."""
        return self.pack([as_bytes(message)])

    def unpack(self, frame: bytes) -> list[Any]:
        """The messages of a frame.

        Raises:
            WorkerLost: it was cut or changed on the way, is of another version, came twice, or one before it is
                missing. Nothing after it can be trusted.
        """
        if len(frame) < _HEAD.size:
            raise WorkerLost(
                f"{self._about}: a message of {len(frame)} bytes is cut: its head alone has {_HEAD.size}"
            )
        magic, version, number, length, crc = _HEAD.unpack_from(frame)
        if magic != _MAGIC:
            raise WorkerLost(f"{self._about}: what came is no message of hybrid_jax: {magic!r}")
        theirs = version.rstrip(b"\0").decode(errors="replace")
        if theirs != __version__:
            raise WorkerLost(
                f"{self._about} runs hybrid_jax {theirs}, and this process {__version__}; install the same everywhere"
            )
        body = memoryview(frame)[_HEAD.size :]
        if len(body) != length or zlib.crc32(body) != crc:
            raise WorkerLost(
                f"{self._about}: message {number} was cut or changed on the way: {len(body)} of {length} bytes came, "
                "or its checksum is wrong"
            )
        if number != self._received:
            raise WorkerLost(
                f"{self._about}: message {number} came where {self._received} was due: one was lost, or came twice"
            )
        self._received += 1
        found, stream = [], io.BytesIO(body)
        while stream.tell() < length:
            found.append(pickle.load(stream))
        return found


def as_bytes(message: Any) -> bytes:
    """A message as it travels. Raises what `pickle` does for what cannot."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def portable(error: BaseException) -> BaseException:
    """An error that another process can read: itself, or one that says the same."""
    try:
        found = pickle.loads(as_bytes(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error if isinstance(found, BaseException) else RuntimeError(str(error))

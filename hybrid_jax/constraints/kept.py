"""What is kept of forms: the compiled grammars that were used last, and what is known of others by their digests."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from hybrid_jax.config.structured_outputs import StructuredOutputsParams
from hybrid_jax.constraints.bounds import TRIED, TooLarge, check_bounds

T = TypeVar("T")
GRAMMARS_KEPT = 64
# Of all kept grammars together, by estimate; the one used last may have more alone.
KEPT_BYTES = 256 << 20
# The most that was measured with llguidance 1.9.1, rounded up: for each character of its notation, and for each token,
# since all texts of a grammar add to what its lexer keeps.
BYTES_PER_CHARACTER = {"json": 192, "grammar": 192, "regex": 32, "choice": 32, "json_object": 192}
BYTES_PER_TOKEN = 2500
# Of forms whose expressions count what is counted already, such as (.{0,303}a){0,30}b: each state is larger, and almost
# every token leads to new ones.
BYTES_PER_TOKEN_COUNTED = 16_000
COUNTED = 1000  # counts within counts, multiplied, from which this holds


def digest_of(wanted: StructuredOutputsParams) -> bytes:
    """32 bytes that stand for a form."""
    return hashlib.sha256(repr((wanted.kind, wanted.value)).encode()).digest()


def token_bytes_of(wanted: StructuredOutputsParams) -> int:
    """What a token adds to a form, by estimate."""
    try:
        check_bounds(wanted, replace(TRIED, repeats=COUNTED))
    except TooLarge:
        return BYTES_PER_TOKEN_COUNTED
    return BYTES_PER_TOKEN


class Recent(Generic[T]):
    """What is known of so many forms, by their digests; those noted last are kept. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._known: OrderedDict[bytes, T] = OrderedDict()

    def get(self, digest: bytes) -> T | None:
        """What was noted, or None."""
        with self._lock:
            return self._known.get(digest)

    def note(self, digest: bytes, value: T) -> bool:
        """Notes something, and says whether nothing was known before."""
        with self._lock:
            is_new = digest not in self._known
            self._known[digest] = value
            self._known.move_to_end(digest)
            if len(self._known) > self._limit:
                self._known.popitem(last=False)
            return is_new


@dataclass
class Kept:
    """A compiled grammar.

    Attributes:
        start: an LLMatcher at its start. Its copies share the lexer with it.
        end: the id of the token that ends a text.
        source_bytes: what it takes by itself, by estimate.
        num_tokens: those that its copies have followed so far.
        token_bytes: what each of them adds, by estimate.
    """

    start: Any
    end: int
    source_bytes: int
    num_tokens: int = 0
    token_bytes: int = BYTES_PER_TOKEN

    @property
    def lexer_bytes(self) -> int:
        """What the texts so far have added, by estimate."""
        return self.num_tokens * self.token_bytes


class Shelf:
    """The compiled grammars that were used last: up to GRAMMARS_KEPT, and KEPT_BYTES. Threads may share it.

    A grammar whose texts have added more than half of the bytes is not given again, but compiled anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grammars: OrderedDict[StructuredOutputsParams, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grammars)

    def get(self, wanted: StructuredOutputsParams) -> Kept | None:
        """A grammar, or None."""
        with self._lock:
            found = self._grammars.get(wanted)
            if found is not None and found.lexer_bytes > KEPT_BYTES // 2:
                del self._grammars[wanted]
                return None
            if found is not None:
                self._grammars.move_to_end(wanted)
                self._trim()
            return found

    def put(self, wanted: StructuredOutputsParams, kept: Kept) -> None:
        """Keeps a grammar in place of the one before it, if there is one."""
        with self._lock:
            self._grammars[wanted] = kept
            self._grammars.move_to_end(wanted)
            self._trim()

    def drop(self, wanted: StructuredOutputsParams, kept: Kept) -> None:
        """Keeps a grammar no longer. One that has taken its place stays."""
        with self._lock:
            if self._grammars.get(wanted) is kept:
                del self._grammars[wanted]

    def _trim(self) -> None:
        sizes = [kept.source_bytes + kept.lexer_bytes for kept in self._grammars.values()]
        total = sum(sizes)
        for size in sizes[:-1]:
            if len(self._grammars) <= GRAMMARS_KEPT and total <= KEPT_BYTES:
                return
            self._grammars.popitem(last=False)
            total -= size

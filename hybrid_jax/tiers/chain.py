"""Names of prefixes: digests of their tokens, each run of tokens chained to the one before."""

from __future__ import annotations

import hashlib

import numpy as np

RUN_TOKENS = 256  # tokens of pages in one part; every grain divides it
_BYTES = 16


def root_of(*marks: object) -> str:
    """A digest, in hex digits, of what a prefix's values depend on beside its tokens."""
    digest = hashlib.blake2b(digest_size=_BYTES)
    for mark in marks:
        text = repr(mark).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def pages_are_in_runs(page_tokens: int) -> bool:
    """Whether no page is in two runs. 0 for a model without pages."""
    return not page_tokens or RUN_TOKENS % page_tokens == 0


def run_begin(position: int) -> int:
    """Where the run begins that holds the last of `position` tokens."""
    return (position - 1) // RUN_TOKENS * RUN_TOKENS


def runs_to(position: int) -> list[int]:
    """Where the runs of `position` tokens end; the last one may be shorter than the others."""
    ends = list(range(RUN_TOKENS, position, RUN_TOKENS))
    return [*ends, position] if position else []


class Chain:
    """Names of the prefixes of one sequence of tokens. A name is made when it is first asked for.

    Args:
        root: digest of what else the values depend on, in hex digits.
        tokens: int32[n].
    """

    def __init__(self, root: str, tokens: np.ndarray) -> None:
        self._bytes = np.ascontiguousarray(tokens, "<i4").tobytes()
        self.num_tokens = len(tokens)
        self._runs = [bytes.fromhex(root)]  # of the first 0, 1, 2, ... whole runs

    def name(self, position: int) -> str:
        """The name of the first `position` > 0 tokens, 32 hex digits."""
        number = run_begin(position) // RUN_TOKENS
        while len(self._runs) <= number:
            self._runs.append(self._digest(len(self._runs) - 1, len(self._runs) * RUN_TOKENS))
        return self._digest(number, position).hex()

    def _digest(self, run: int, end: int) -> bytes:
        begin = 4 * run * RUN_TOKENS
        return hashlib.blake2b(
            self._runs[run] + self._bytes[begin : 4 * end], digest_size=_BYTES
        ).digest()

"""What was asked, small enough to keep: hashes of blocks of tokens, for replays under other settings."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedRequest:
    """One finished request.

    Attributes:
        prompt: int32[ceil(n / grain)] hashes of the prompt's blocks, the last of which may be shorter than a grain.
        whole: int32[m // grain] hashes of the whole blocks of prompt and output.
        num_tokens: of the prompt. hit_len: tokens of it that were skipped.
    """

    prompt: np.ndarray
    whole: np.ndarray
    num_tokens: int
    hit_len: int


class RequestLog:
    """The latest requests of one engine; the oldest are forgotten.

    A block is `grain` tokens, and its hash one number. Two blocks that differ share a hash once in 2**31. A replay
    would then hit where the cache could not, and nothing else comes of it.

    Args:
        grain: tokens of a block.
        max_requests, max_blocks: what is kept.
    """

    def __init__(self, grain: int, *, max_requests: int = 8192, max_blocks: int = 1 << 21):
        self.grain = grain
        self._max_requests, self._max_blocks = max_requests, max_blocks
        self._requests: deque[LoggedRequest] = deque()
        self._num_blocks = 0

    def note(self, tokens: np.ndarray, num_prompt_tokens: int, hit_len: int) -> LoggedRequest:
        """Adds a finished request: its prompt and output, how many of them are prompt, how many were skipped."""
        whole, full = block_hashes(tokens, self.grain), num_prompt_tokens // self.grain
        tail = tokens[full * self.grain : num_prompt_tokens]
        prompt = np.concatenate((whole[:full], block_hashes(tail, max(1, len(tail)))))
        request = LoggedRequest(
            prompt=prompt, whole=whole, num_tokens=num_prompt_tokens, hit_len=hit_len
        )
        self._requests.append(request)
        self._num_blocks += len(prompt) + len(whole)
        while len(self._requests) > self._max_requests or self._num_blocks > self._max_blocks:
            oldest = self._requests.popleft()
            self._num_blocks -= len(oldest.prompt) + len(oldest.whole)
        return request

    @property
    def hit_rate(self) -> float:
        """Tokens skipped per token of the prompts that are kept; 0.0 for none."""
        total = sum(request.num_tokens for request in self._requests)
        return sum(request.hit_len for request in self._requests) / max(1, total)

    def __copy__(self) -> RequestLog:
        """What is logged so far; the requests themselves never change."""
        new = RequestLog(self.grain, max_requests=self._max_requests, max_blocks=self._max_blocks)
        new._requests, new._num_blocks = self._requests.copy(), self._num_blocks
        return new

    def __iter__(self) -> Iterator[LoggedRequest]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


def block_hashes(tokens: np.ndarray, grain: int) -> np.ndarray:
    """One number for every `grain` tokens, none for what is left over: int32[n // grain], at least 0."""
    count = len(tokens) // grain
    blocks = np.asarray(tokens[: count * grain], np.int32).reshape(count, grain)
    return np.array([zlib.crc32(block) >> 1 for block in blocks], np.int32)

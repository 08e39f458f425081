"""The program that tries grammars, in a process of its own (`trial.py`). If a grammar ends it, nothing else is lost.

It is run by its path and imports nothing of the package, so it starts in a tenth of a second. Input and output are
frames: four bytes of length, then UTF-8. Input comes in pairs, and each pair is answered with one frame of JSON:

- settings as JSON, and a tokenizer.json: null, once it was read. It replaces the one before it.
- "{}", and a grammar in llguidance's own notation: null if it may be used, or why it is refused.
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]  # a module elsewhere

WALKS, STEPS = 4, 100
WALK_SECONDS = 0.02  # of processor time for all walks of a grammar
STEP_SECONDS = 1.0  # of processor time; a slower step would hold up all other rows
STACK_BYTES = 2 << 20  # a quarter of what the thread has that compiles the grammar later
PARENT_SECONDS = 2.0  # between two looks at whether the parent is alive
COMMON_TOKENS = 256  # often single bytes, which end strings and numbers


def serve(library: Any, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers until the requests end."""
    judging: Any = None
    while (head := read_frame(requests)) is not None and (body := read_frame(requests)) is not None:
        settings, text = json.loads(head), body.decode()
        if settings:
            limit_memory(None)
            judging = None  # frees the tokenizer before
            tokens = library.LLTokenizer(
                text, n_vocab=settings["vocab_size"], eos_token=settings["end"]
            )
            limits = library.LLParserLimits(**settings["limits"])
            judging = partial(judge, library, tokens, limits, settings["end"])
            limit_memory(settings["memory_bytes"])
            seconds, verdict = settings["seconds"], None
        else:
            limit_seconds(seconds)
            verdict = in_small_thread(judging, text)
        write_frame(answers, json.dumps(verdict).encode())


def in_small_thread(function: Callable[[str], str | None], text: str) -> str | None:
    """What a function returns when it is called with a small stack."""
    answers: list[str | None] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: answers.append(function(text)))
    thread.start()
    thread.join()
    return answers[0]


def judge(library: Any, tokens: Any, limits: Any, end: int, source: str) -> str | None:
    """Compiles a grammar and walks random texts of it; None, or why it is refused."""
    try:
        return _judge(library, tokens, limits, end, source)
    except BaseException as error:  # a panic of the library is none of Python's own exceptions
        return f"{type(error).__name__}: {error}"


def _judge(library: Any, tokens: Any, limits: Any, end: int, source: str) -> str | None:
    start = library.LLMatcher(tokens, source, log_level=0, limits=limits)
    if start.is_error():
        return start.get_error() or "unknown error"
    draw, failures, stop = random.Random(0), [], time.process_time() + WALK_SECONDS
    for _ in range(WALKS):
        failures.append(walk(start.deep_copy(), end, draw, stop))
        if time.process_time() > stop:
            break
    # A grammar that fails on one way may be followed on another. If it fails on all, it is of no use.
    return failures[0] if all(failures) else None


def walk(matcher: Any, end: int, draw: random.Random, stop: float) -> str | None:
    """Adds random tokens to a text until it is complete; None, or why it could not go on."""
    for _ in range(STEPS):
        begin = time.process_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & ~(1 << end)
        if not mask or matcher.is_error():
            break
        matcher.consume_token(drawn(mask, draw))
        now = time.process_time()
        if now - begin > STEP_SECONDS:
            what = f"one of its tokens takes {now - begin:.1f} seconds, the limit is {STEP_SECONDS}"
            return f"{what}; lower its counts, or leave out alternatives"
        if now > stop or matcher.is_error():
            break
    error = matcher.get_error() if matcher.is_error() else ""
    # A form without any text is refused elsewhere, in words that say so.
    return None if error.startswith("NoExtension") else error or None


def drawn(mask: int, draw: random.Random) -> int:
    """One of the tokens whose bits are set, at random; half of the time one of the common ones, if there is any."""
    common = mask & ((1 << COMMON_TOKENS) - 1)
    if common and draw.random() < 0.5:
        mask = common
    begin = draw.randrange(mask.bit_length())
    above = mask >> begin
    return begin + (above & -above).bit_length() - 1


def limit_memory(num_bytes: int | None) -> None:
    """Allows so many bytes more than are in use, where the system reports and enforces that; None for no limit."""
    with suppress(OSError, ValueError, AttributeError):
        with open("/proc/self/statm", "rb") as file:
            held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = most if num_bytes is None else held + num_bytes
        if most != resource.RLIM_INFINITY:
            limit = min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def limit_seconds(seconds: int) -> None:
    """Allows so many seconds of processor time more than were used so far."""
    with suppress(OSError, ValueError, AttributeError):
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
        if most == resource.RLIM_INFINITY or limit < most:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


def read_frame(stream: BinaryIO) -> bytes | None:
    """One frame that the other side wrote; None if that side has ended."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    body = stream.read(struct.unpack("<I", head)[0])
    return body if len(body) == struct.unpack("<I", head)[0] else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Writes one frame."""
    stream.write(struct.pack("<I", len(body)) + body)
    stream.flush()


def end_with(parent: int) -> None:
    """Ends this process with the one that started it, even if a fork of that one holds the other end of the pipe."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(0)


def main() -> None:
    """Serves on stdin and stdout; the argument is the folder that holds llguidance."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between the answers
    with suppress(OSError, ValueError, AttributeError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    sys.path.append(sys.argv[1])
    import llguidance

    serve(llguidance, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()

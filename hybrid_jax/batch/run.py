"""A batch file from its first line to its last: many lines under way, written in order, a bounded number held."""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hybrid_jax.batch.errors import BatchStopped, LineError
from hybrid_jax.batch.lines import InputFile, Line, read_lines
from hybrid_jax.batch.partial import PartialOutput
from hybrid_jax.batch.progress import Meter
from hybrid_jax.batch.requests import (
    BatchRequest,
    CustomIds,
    custom_id_of,
    read_envelope,
    read_request,
)
from hybrid_jax.batch.responses import Names, answer, as_line, failure, success
from hybrid_jax.batch.summary import LineCounts, Tally
from hybrid_jax.batch.token_text import TokenTexts
from hybrid_jax.feed import Feed, Ticket
from hybrid_jax.llm import LLM
from hybrid_jax.request_limits import TooLong

LIVE_PER_ROW = (
    4  # completions under way for each row of the engine: it looks ahead for shared prefixes
)
FINISHED = ("stop", "length")  # the API knows no other way a text may end
MAX_HELD_LINES = 4096  # answered lines that wait for an earlier one
MAX_HELD_BYTES = 64 << 20


@dataclass(eq=False)
class Entry:
    """One line between reading and writing: `data` is None until it is answered."""

    number: int
    names: Names
    custom_id: str | None = None
    request: BatchRequest | None = None
    data: bytes | None = None
    counts: LineCounts | None = None


class Run:
    """Answers the lines of one file that an earlier run did not.

    Args:
        llm: answers them.
        source: the input.
        partial_output: the output so far.
        chat_template: for chat lines, instead of the model's own.
        model: what to call the model when a line does not.
    """

    def __init__(
        self,
        llm: LLM,
        source: InputFile,
        partial_output: PartialOutput,
        *,
        chat_template: str | None,
        model: str,
    ) -> None:
        self.tally = Tally()
        self._llm, self._source, self._output = llm, source, partial_output
        self._model, self._chat_template = model, chat_template
        self._ids, self._texts = CustomIds(), TokenTexts(llm.get_tokenizer())
        self._held: deque[Entry] = deque()  # read and not written, in the order of the file
        self._running: dict[Ticket, Entry] = {}  # those of them that are not answered
        self._num_held_bytes = 0

    def identity(self) -> dict[str, Any]:
        """What the output's lines depend on, as JSON."""
        engine = self._llm.engine_config
        settings = {
            "model": self._llm.fingerprint(),
            "dtype": engine.dtype,
            "seed": engine.seed,
            "exact": engine.exact,
            "max_model_len": self._llm.max_model_len,
            "chat_template": self._chat_template,
            "sampling_defaults": asdict(self._llm.get_default_sampling_params()),
        }
        source = {"digest": self._source.digest, "num_lines": self._source.num_lines}
        return json.loads(json.dumps({"input": source, "settings": settings}, default=str))

    def recover(self) -> int:
        """Takes over what an earlier run wrote; returns how many lines that is."""
        for line in self._output.recover(self.identity()):
            self._check_recovered(line)
            self.tally.add(LineCounts.of(line))
            if line["custom_id"] is not None:
                self._ids.add(line["custom_id"])
        return self.tally.num_lines

    def _check_recovered(self, line: dict[str, Any]) -> None:
        place = self.tally.num_lines
        names = Names(self._source.digest, place)
        if place >= self._source.num_lines or line.get("id") != names.line_id:
            raise ValueError(
                f"run-batch: line {place + 1} of {self._output.path} is not this run's answer to "
                f"request {place + 1} of {self._source.path}; delete the partial file to start over"
            )

    def run(self, meter: Meter) -> None:
        """Answers the rest and makes the output what it is to be.

        Raises:
            BatchStopped: the output cannot be written, or the input is no longer what it was.
        """
        digest = hashlib.blake2b(digest_size=16)
        lines = self._rest(digest)
        more = True
        with self._llm.feed() as feed:
            while more or self._held:
                more = more and self._fill(feed, lines)
                for ticket in feed.step():
                    self._answer(ticket)
                self._write()
                meter.show(self.tally, lambda: feed.num_tokens)
        if digest.hexdigest() != self._source.digest:
            raise BatchStopped(
                f"run-batch: {self._source.path} was changed while it was read; delete the partial "
                "output and run again"
            )
        self._output.finish()

    def _fill(self, feed: Feed, lines: Iterator[Line]) -> bool:
        """Starts lines while there is room; returns whether there are more.

        No more of them at a time than may be under way: the engine must not wait for a file of mistakes.
        """
        max_live = LIVE_PER_ROW * self._llm.engine_config.max_rows
        num_live = feed.num_unfinished  # counted once: it looks at each of them
        for _ in range(max_live):
            if num_live >= max_live or self._full:
                return True
            line = next(lines, None)
            if line is None:
                return False
            num_live += self._start(feed, line)
        return True

    def _rest(self, digest: hashlib.blake2b) -> Iterator[Line]:
        """The lines that are not answered; no more than were counted."""
        first = self.tally.num_lines
        for line in read_lines(self._source.path, digest):
            if first <= line.place < self._source.num_lines:
                yield line

    @property
    def _full(self) -> bool:
        return len(self._held) >= MAX_HELD_LINES or self._num_held_bytes >= MAX_HELD_BYTES

    def _start(self, feed: Feed, line: Line) -> int:
        """Starts what a line asks for, or answers it with an error; returns how many completions that began."""
        entry = Entry(line.number, Names(self._source.digest, line.place))
        self._held.append(entry)
        try:
            envelope = read_envelope(line)
            entry.custom_id = custom_id_of(envelope)
            entry.request = read_request(
                envelope,
                is_new=entry.custom_id is None or self._ids.add(entry.custom_id),
                seed=self._llm.engine_config.seed,
                defaults=self._llm.get_default_sampling_params(),
                render=partial(self._llm.render_chat, chat_template=self._chat_template),
            )
            ticket = feed.add(entry.request.prompts, entry.request.params)
            self._running[ticket] = entry
            return ticket.num_unfinished
        except LineError as error:
            self._fail(entry, error)
        except TooLong as error:
            self._fail(entry, LineError(str(error), code="context_length_exceeded"))
        except ValueError as error:
            self._fail(entry, LineError(str(error)))
        except Exception as error:  # a mistake of ours, which must not cost the other lines
            what = LineError(f"{type(error).__name__}: {error}", code="internal_error")
            self._fail(entry, what, status_code=500)
        return 0

    def _fail(self, entry: Entry, error: LineError, *, status_code: int = 400) -> None:
        line = failure(
            entry.names,
            entry.custom_id,
            error,
            number=entry.number,
            status_code=status_code,
        )
        self._settle(entry, line)

    def _answer(self, ticket: Ticket) -> None:
        entry, outputs = self._running.pop(ticket), ticket.outputs()
        for choice in (choice for output in outputs for choice in output.outputs):
            if choice.finish_reason not in FINISHED:
                what = (
                    f"a completion ended early: {choice.stop_reason or choice.finish_reason}; change "
                    "the form, bad_words or allowed_token_ids"
                )
                error = LineError(what, code="ended_early", param="structured_outputs")
                self._fail(entry, error)
                return
        body = answer(
            entry.names,
            entry.request,
            outputs,
            model=self._model,
            created=int(time.time()),
            texts=self._texts,
        )
        self._settle(entry, success(entry.names, entry.custom_id, body))

    def _settle(self, entry: Entry, line: dict[str, Any]) -> None:
        entry.data, entry.counts, entry.request = as_line(line), LineCounts.of(line), None
        self._num_held_bytes += len(entry.data)

    def _write(self) -> None:
        """Writes the answers that no earlier line holds up."""
        ready = []
        while self._held and self._held[0].data is not None:
            ready.append(self._held.popleft())
        if ready:
            self._output.append([entry.data for entry in ready])
        for entry in ready:
            self._num_held_bytes -= len(entry.data)
            self.tally.add(entry.counts)

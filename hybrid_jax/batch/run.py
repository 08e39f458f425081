"""A run through a batch file: lines are read ahead, computed along their prefixes, and written as they finish."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from hybrid_jax.api.feed import Feed, Ticket
from hybrid_jax.api.llm import LLM
from hybrid_jax.api.threads.dispatcher import NoReplicas
from hybrid_jax.batch.input_file import InputFile, Line, read_lines
from hybrid_jax.batch.meter import Meter
from hybrid_jax.batch.partial import BatchStopped, PartialOutput
from hybrid_jax.batch.requests import (
    BatchRequest,
    custom_id_of,
    note_id,
    read_envelope,
    read_request,
)
from hybrid_jax.batch.responses import AnswerIds, as_line, failure, success
from hybrid_jax.batch.summary import line_counts
from hybrid_jax.cache.tree.prefix_order import prefix_order
from hybrid_jax.openai.answers import ID_PREFIXES, TokenTexts, answer
from hybrid_jax.openai.errors import RequestError, as_request_error
from hybrid_jax.text.prompts import Prompt

LOG = logging.getLogger("hybrid_jax.batch")
# Completions under way for each row of the engine, which looks ahead for shared prefixes.
LIVE_PER_ROW = 4
READ_LINES, READ_BYTES = 512, 256 << 10  # between two turns of the engine: less than 0.1 s of work


MAX_LINES = 16_384  # read and not started
MAX_BYTES = 64 << 20  # of those lines, as text or as token ids, whichever is more


@dataclass(eq=False, kw_only=True)
class Entry:
    """One line between reading and writing.

    Attributes:
        number: of the line in the file, from 1, with blank lines counted.
        num_bytes: bytes of the line.
        ids: the ids in its answer.
        custom_id: None while it is not known.
        request: what the line asks for; set once that has been read.
    """

    number: int
    num_bytes: int
    ids: AnswerIds
    custom_id: str | None = None
    request: BatchRequest = field(init=False)


class Ahead:
    """Lines that were read and not started, handed out a block at a time.

    A block holds what was read while the block before it was handed out, in the order of the tree of prefixes. So the
    first blocks are small, and nobody waits for them. Later ones are as large as the limits allow.

    Args:
        grain: tokens between resume points; None to keep the order of the file.
    """

    def __init__(self, grain: int | None) -> None:
        self._grain = grain
        self._block: deque[Entry] = deque()
        self._read: list[Entry] = []
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._block) + len(self._read)

    @property
    def full(self) -> bool:
        """Whether no more lines should be read for now."""
        return len(self) >= MAX_LINES or self._num_bytes >= MAX_BYTES

    def add(self, entry: Entry) -> None:
        """Takes a line whose request is known."""
        self._read.append(entry)
        self._num_bytes += _held_bytes(entry)

    def pop(self) -> Entry:
        """Hands out the next line. There must be one."""
        if not self._block:
            self._block.extend(self._ordered())
            self._read = []
        entry = self._block.popleft()
        self._num_bytes -= _held_bytes(entry)
        return entry

    def _ordered(self) -> list[Entry]:
        """What was read, in the order of the tree. A line of several prompts goes where its first prompt belongs."""
        if self._grain is None:
            return self._read
        prompts = [entry.request.prompts[0] for entry in self._read]
        return [self._read[index] for index in prefix_order(prompts, self._grain)]


def _held_bytes(entry: Entry) -> int:
    return max(entry.num_bytes, sum(int(prompt.nbytes) for prompt in entry.request.prompts))


class Run:
    """Answers those lines of a file that an earlier run has not answered.

    Args:
        llm: answers them.
        source: the input.
        partial_output: the output so far.
        chat_template: for chat lines, instead of the model's own.
        model: the name of the model in answers to lines that give none.
        max_errors: of lines that get an error, before the run stops; None for no limit.

    Attributes:
        counts: of all lines written so far, by the names that `BatchSummary` has for them.
    """

    def __init__(
        self,
        llm: LLM,
        source: InputFile,
        partial_output: PartialOutput,
        *,
        chat_template: str | None,
        model: str,
        max_errors: int | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._llm, self._source, self._output = llm, source, partial_output
        self._model, self._chat_template, self._max_errors = model, chat_template, max_errors
        self._ids: set[bytes] = set()  # digests of those read so far
        self._texts = TokenTexts(llm.get_tokenizer())
        engine = llm.engine_config
        self._ahead = Ahead(None if engine.cache.policy == "off" else engine.grain)
        self._running: dict[Ticket, Entry] = {}
        self._unwritten: list[tuple[Entry, dict[str, Any]]] = []  # lines that are answered

    def identity(self) -> dict[str, Any]:
        """What the output's lines depend on, as JSON."""
        engine = self._llm.engine_config
        settings = {
            "model": self._llm.fingerprint(),
            "dtype": engine.dtype,
            "kv_dtype": engine.kv_dtype,
            "seed": engine.seed,
            "exact": engine.exact,
            "max_model_len": self._llm.max_model_len,
            "chat_template": self._chat_template,
            "sampling_defaults": asdict(self._llm.get_default_sampling_params()),
        }
        identity = {"input": self._source.identity, "settings": settings}
        return json.loads(json.dumps(identity, default=str))

    def recover(self) -> int:
        """Takes over the lines that an earlier run wrote, and returns how many there are."""
        for line in self._output.recover(self.identity()):
            self.counts.update(line_counts(line))
        return self.counts["num_lines"]

    def run(self, report: Callable[[int, int], None], meter: Meter) -> None:
        """Answers the other lines and finishes the output.

        Args:
            report: called with (lines done, lines in all) whenever that has changed.
            meter: gets to know the tokens of lines under way.

        Raises:
            BatchStopped: the output cannot be written, the input has changed, or too many lines got an error.
        """
        digest = hashlib.blake2b(digest_size=16)
        lines = self._rest(digest)
        more, told = True, self.counts["num_lines"]
        report(told, self._source.num_lines)
        with self._llm.feed() as feed:
            meter.num_live_tokens = lambda: feed.num_tokens
            while more or self._ahead or self._running:
                self._check_errors()
                more = more and self._read_some(lines, feed)
                self._start_some(feed)
                for ticket in self._finished(feed):
                    self._answer(ticket)
                self._write()
                if self.counts["num_lines"] != told:
                    told = self.counts["num_lines"]
                    report(told, self._source.num_lines)
        if digest.hexdigest() != self._source.digest:
            raise BatchStopped(
                f"run-batch: {self._source.path} was changed while it was read; delete the partial "
                "output and run again"
            )
        self._output.finish()

    def _finished(self, feed: Feed) -> list[Ticket]:
        """Waits for lines that are finished; there may be none yet."""
        try:
            return feed.step()
        except NoReplicas as error:
            raise BatchStopped(
                f"run-batch: {error}; the lines so far are in {self._output.path}, the same command goes on from there"
            ) from error

    def _check_errors(self) -> None:
        """Stops the run if too many lines got an error. Called while there is more to do."""
        found, most = self.counts["num_errors"], self._max_errors
        if most is not None and found > most:
            raise BatchStopped(
                f"run-batch: {found} lines got an error, and max_errors={most}; they and the other lines so far are in "
                f"{self._output.path}, where each says what is wrong; to go on, raise max_errors"
            )

    def _read_some(self, lines: Iterator[Line], feed: Feed) -> bool:
        """Reads some lines ahead, and returns whether there are more. The engine must not wait for a whole file."""
        num_bytes = 0
        for _ in range(READ_LINES):
            if self._ahead.full or num_bytes >= READ_BYTES:
                return True
            line = next(lines, None)
            if line is None:
                return False
            num_bytes += len(line.data or b"")
            self._read(line, feed)
        return True

    def _rest(self, digest: hashlib.blake2b) -> Iterator[Line]:
        """The lines, of those counted at the start, that are not answered yet. Notes the ids of the others."""
        for line in read_lines(self._source.path, digest):
            if line.index >= self._source.num_lines:
                continue
            if line.index not in self._output:
                yield line
                continue
            with suppress(RequestError):
                custom_id = custom_id_of(read_envelope(line))
                if custom_id is not None:
                    note_id(self._ids, custom_id)

    def _read(self, line: Line, feed: Feed) -> None:
        """Reads what a line asks for, or answers it with an error."""
        ids = AnswerIds(self._source.digest, line.index)
        entry = Entry(number=line.number, num_bytes=len(line.data or b""), ids=ids)
        with self._mistakes_of(entry):
            envelope = read_envelope(line)
            entry.custom_id = custom_id_of(envelope)
            entry.request = read_request(
                envelope,
                self._llm,
                is_new=entry.custom_id is None or note_id(self._ids, entry.custom_id),
                chat_template=self._chat_template,
            )
            self._ahead.add(entry)
            feed.foresee(entry.request.params[0])  # those of a line differ in their seeds only

    def _start_some(self, feed: Feed) -> None:
        """Starts lines that were read ahead, as long as there is room for them."""
        num_live = feed.num_unfinished  # counted once, because that looks at each completion
        most = LIVE_PER_ROW * feed.max_rows
        for _ in range(most):
            if num_live >= most or not self._ahead:
                return
            num_live += self._start(feed, self._ahead.pop())

    def _start(self, feed: Feed, entry: Entry) -> int:
        """Starts a line, or answers it with an error; returns how many completions have begun."""
        with self._mistakes_of(entry):
            request = entry.request
            parts = zip(request.prompts, request.breakpoints, request.thoughts, strict=True)
            prompts = [
                Prompt(None, tuple(tokens.tolist()), points, thoughts)
                for tokens, points, thoughts in parts
            ]
            ticket = feed.add(prompts, request.params)
            self._running[ticket] = entry
            return ticket.num_unfinished
        return 0

    @contextmanager
    def _mistakes_of(self, entry: Entry) -> Iterator[None]:
        """Turns an error inside the block into the answer to the line."""
        try:
            yield
        except Exception as error:  # even a bug here must not affect the other lines
            self._fail(entry, as_request_error(error))

    def _fail(self, entry: Entry, error: RequestError) -> None:
        LOG.info("line %d got an error: %s", entry.number, error)
        line = failure(entry.ids, entry.custom_id, error, number=entry.number)
        self._unwritten.append((entry, line))

    def _answer(self, ticket: Ticket) -> None:
        entry = self._running.pop(ticket)
        with self._mistakes_of(entry):
            request = entry.request
            body = answer(
                ticket.outputs(),
                request.params[0],  # the others differ in the seed only
                request.url,
                answer_id=entry.ids.id(ID_PREFIXES[request.url]),
                model=self._model if request.model is None else request.model,
                created=int(time.time()),
                texts=self._texts,
            )
            self._unwritten.append((entry, success(entry.ids, entry.custom_id, body)))

    def _write(self) -> None:
        """Writes the lines that were answered since it was called last."""
        answered, self._unwritten = self._unwritten, []
        if answered:
            self._output.append((entry.ids.index, as_line(line)) for entry, line in answered)
        for _, line in answered:
            self.counts.update(line_counts(line))

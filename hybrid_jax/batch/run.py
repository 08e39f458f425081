"""A batch file from its first line to its last: read ahead, computed along its prefixes, written as it comes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from hybrid_jax.api.feed import Feed, Ticket
from hybrid_jax.api.llm import LLM
from hybrid_jax.api.request_limits import TooLong
from hybrid_jax.batch.ahead import Ahead, Entry
from hybrid_jax.batch.errors import BatchStopped, LineError
from hybrid_jax.batch.input_file import InputFile, Line, read_lines
from hybrid_jax.batch.meter import Meter
from hybrid_jax.batch.partial import PartialOutput
from hybrid_jax.batch.requests import CustomIds, custom_id_of, read_envelope, read_request
from hybrid_jax.batch.responses import Names, TokenTexts, answer, as_line, failure, success
from hybrid_jax.batch.summary import LineCounts, Tally
from hybrid_jax.text.prompts import Prompt, read_prompts

LIVE_PER_ROW = (
    4  # completions under way for each row of the engine: it looks ahead for shared prefixes
)
READ_LINES, READ_BYTES = 512, 256 << 10  # between two turns of the engine: less than 0.1 s of work
FINISHED = ("stop", "length")  # the API knows no other way a text may end


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
        engine = llm.engine_config
        self._max_live = LIVE_PER_ROW * engine.max_rows
        self._ahead = Ahead(None if engine.cache.policy == "off" else engine.grain)
        self._running: dict[Ticket, Entry] = {}
        self._settled: list[tuple[Entry, bytes, LineCounts]] = []  # answered and not written

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
        identity = {"input": self._source.identity, "settings": settings}
        return json.loads(json.dumps(identity, default=str))

    def recover(self) -> int:
        """Takes over what an earlier run wrote; returns how many lines that is."""
        for line in self._output.recover(self.identity()):
            self.tally.add(LineCounts.of(line))
        return self.tally.num_lines

    def run(self, meter: Meter) -> None:
        """Answers the rest and makes the output what it is to be.

        Raises:
            BatchStopped: the output cannot be written, or the input is no longer what it was.
        """
        digest = hashlib.blake2b(digest_size=16)
        lines = self._rest(digest)
        more = True
        with self._llm.feed() as feed:
            while more or self._ahead or self._running:
                more = more and self._read_some(lines)
                self._start_some(feed)
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

    def _read_some(self, lines: Iterator[Line]) -> bool:
        """Reads lines ahead; returns whether there are more.

        Only some at a time: the engine must not wait, neither for a long file nor for one of mistakes.
        """
        num_bytes = 0
        for _ in range(READ_LINES):
            if self._ahead.full or num_bytes >= READ_BYTES:
                return True
            line = next(lines, None)
            if line is None:
                return False
            num_bytes += len(line.data or b"")
            self._read(line)
        return True

    def _rest(self, digest: hashlib.blake2b) -> Iterator[Line]:
        """The lines that are not answered, no more than were counted; takes note of the others' ids on the way."""
        for line in read_lines(self._source.path, digest):
            if line.place >= self._source.num_lines:
                continue
            if line.place not in self._output:
                yield line
                continue
            with suppress(LineError):
                custom_id = custom_id_of(read_envelope(line))
                if custom_id is not None:
                    self._ids.add(custom_id)

    def _read(self, line: Line) -> None:
        """Finds out what a line asks for, or answers it with an error."""
        entry = Entry(
            place=line.place,
            number=line.number,
            num_bytes=len(line.data or b""),
            names=Names(self._source.digest, line.place),
        )
        with self._mistakes_of(entry):
            envelope = read_envelope(line)
            entry.custom_id = custom_id_of(envelope)
            entry.request = read_request(
                envelope,
                is_new=entry.custom_id is None or self._ids.add(entry.custom_id),
                seed=self._llm.engine_config.seed,
                defaults=self._llm.get_default_sampling_params(),
                render=partial(self._llm.render_chat, chat_template=self._chat_template),
                tokenize=partial(
                    read_prompts,
                    tokenizer=self._llm.get_tokenizer(),
                    vocab_size=self._llm.model_config.vocab_size,
                ),
            )
            self._ahead.add(entry)

    def _start_some(self, feed: Feed) -> None:
        """Starts lines that were read ahead while there is room for them."""
        num_live = feed.num_unfinished  # counted once: it looks at each of them
        for _ in range(self._max_live):
            if num_live >= self._max_live or not self._ahead:
                return
            num_live += self._start(feed, self._ahead.pop())

    def _start(self, feed: Feed, entry: Entry) -> int:
        """Starts what a line asks for, or answers it with an error; returns how many completions that began."""
        with self._mistakes_of(entry):
            request = entry.request
            pairs = zip(request.prompts, request.breakpoints, strict=True)
            prompts = [Prompt(None, tuple(tokens.tolist()), points) for tokens, points in pairs]
            ticket = feed.add(prompts, request.params)
            self._running[ticket] = entry
            return ticket.num_unfinished
        return 0

    @contextmanager
    def _mistakes_of(self, entry: Entry) -> Iterator[None]:
        """What goes wrong inside becomes the answer to the line."""
        try:
            yield
        except LineError as error:
            self._fail(entry, error)
        except TooLong as error:
            self._fail(entry, LineError(str(error), code="context_length_exceeded"))
        except ValueError as error:
            self._fail(entry, LineError(str(error)))
        except Exception as error:  # a mistake of ours, which must not cost the other lines
            what = LineError(f"{type(error).__name__}: {error}", code="internal_error")
            self._fail(entry, what, status_code=500)

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
        entry = self._running.pop(ticket)
        with self._mistakes_of(entry):
            outputs = ticket.outputs()
            for choice in (choice for output in outputs for choice in output.outputs):
                if choice.finish_reason not in FINISHED:
                    raise LineError(
                        f"a completion ended early: {choice.stop_reason or choice.finish_reason}; change "
                        "the form, bad_words or allowed_token_ids",
                        code="ended_early",
                        param="structured_outputs",
                    )
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
        self._settled.append((entry, as_line(line), LineCounts.of(line)))

    def _write(self) -> None:
        """Writes what was answered since it was called last."""
        settled, self._settled = self._settled, []
        if settled:
            self._output.append((entry.place, data) for entry, data, _ in settled)
        for _, _, counts in settled:
            self.tally.add(counts)

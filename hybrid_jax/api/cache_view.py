"""What an `LLM` keeps of its finished requests, and what the prefix cache did for each of them, in words."""

from __future__ import annotations

import json
import reprlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybrid_jax.api.arguments import checks_arguments
from hybrid_jax.api.completions import Job
from hybrid_jax.api.outputs import Delta, RequestOutput
from hybrid_jax.api.threads import questions
from hybrid_jax.api.threads.front import Front
from hybrid_jax.api.threads.questions import Answer, Question
from hybrid_jax.byte_sizes import format_size, parse_size
from hybrid_jax.cache.tree.node import MAX_NODES, LookUp, NodeLine, Why
from hybrid_jax.cluster.router import Decision
from hybrid_jax.config import CacheConfig, EngineConfig, ModelConfig
from hybrid_jax.display import MARK, PALE, bar
from hybrid_jax.text.prompts import PromptLike, read_prompts

if TYPE_CHECKING:
    from hybrid_jax.text.tokenizer import Tokenizer

SHOWN_TOKENS, SHOWN_CHARACTERS = 32, 40  # of a span in the picture of the tree
LOADED = "background:repeating-linear-gradient(45deg,rgba(66,133,244,.25) 0 4px,rgba(66,133,244,.6) 4px 8px)"
LOWER = "border-bottom:1px dotted"  # what only tiers below the arena have
NO_FOLDER = {
    FileNotFoundError: "; make its folder first",
    IsADirectoryError: "; give the name of a file",
}
NO_FILE = {
    FileNotFoundError: "; cache.save writes one",
    IsADirectoryError: "; give the name of a file",
}
REMEMBERED = 4096  # requests that can still be explained


class SeenRequest(NamedTuple):
    """What the cache did for a prompt.

    Attributes:
        num_tokens, num_cached: tokens of the prompt, and those that were skipped.
        look_up: what the cache knew of it; None without a cache.
        decision: which replica computed it, and why; None where there is one engine.
    """

    num_tokens: int
    num_cached: int
    look_up: LookUp | None
    decision: Decision | None = None


class Totals(NamedTuple):
    """Tokens of all finished requests: of prompts, those of them that came from the cache, and new ones."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class Ledger:
    """Sums over all finished requests, and what the cache did for the latest ones.

    It holds no reference to the `LLM`, which may be dropped.

    Attributes:
        totals: replaced as a whole, so that any thread may read them.
        seen: for `CacheView`, by request id.
    """

    def __init__(self) -> None:
        self.totals, self._lock = Totals(), threading.Lock()
        self.seen: OrderedDict[str, SeenRequest] = OrderedDict()

    def record(self, job: Job) -> None:
        """Notes a prompt that has ended, and forgets the oldest one if there are too many. For threads of engines."""
        request = job.completions[0].request
        num_tokens, num_cached = len(request.prompt), request.hit.num_tokens
        added = num_tokens, num_cached, job.num_tokens
        seen = SeenRequest(num_tokens, num_cached, request.hit.look_up, job.decision)
        with self._lock:
            self.totals = Totals(*map(sum, zip(self.totals, added, strict=True)))
            self.seen[job.request_id] = seen
            if len(self.seen) > REMEMBERED:
                self.seen.popitem(last=False)


@dataclass(frozen=True, kw_only=True)
class CacheExplanation:
    """How much of a prompt came from the cache, and why not more.

    Attributes:
        request_id: of the prompt.
        prompt_tokens: tokens of the prompt.
        matched_tokens: leading tokens that earlier requests had as well, cached or not.
        hit_tokens: tokens skipped.
        loaded_tokens: how many of these the arena did not have. loaded_from: the tier that they were copied from, in
            words; "" for none.
        possible_tokens: the most that could have been skipped. The last token is always computed, because it gives the
            logits.
        reason: why the rest was computed.
        replica: the number of the replica that answered, or finished if it took over; None where there is one engine.
        why_there: why that one, in words.
    """

    request_id: str
    prompt_tokens: int
    matched_tokens: int
    hit_tokens: int
    possible_tokens: int
    reason: str
    loaded_tokens: int = 0
    loaded_from: str = ""
    replica: int | None = None
    why_there: str = ""

    def _repr_html_(self) -> str:
        hit, known = self.hit_tokens, max(self.matched_tokens, self.hit_tokens)
        loaded = self.loaded_tokens
        parts = [
            (hit - loaded, MARK, f"{hit - loaded} tokens came from the prefix cache"),
            (loaded, LOADED, f"{loaded} tokens came from {self.loaded_from}"),
            (
                known - hit,
                "background:rgba(128,128,128,.35)",
                f"{known - hit} were known and computed again",
            ),
            (self.prompt_tokens - known, "", f"{self.prompt_tokens - known} were new"),
        ]
        return f"{bar(parts, self.prompt_tokens)}<div>{escape(str(self))}</div>"

    def __str__(self) -> str:
        return (
            f"request {self.request_id}: {self.hit_tokens} of {self.prompt_tokens} prompt tokens came "
            f"from the prefix cache; {self.reason}{self._where()}"
        )

    def _where(self) -> str:
        """Which replica answered, and why."""
        return (
            "" if self.replica is None else f". Replica {self.replica} answered: {self.why_there}"
        )


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """How many tokens a replay of the latest requests skipped.

    Attributes:
        policy, memory: the settings of the replay; memory in bytes.
        requests: how many were replayed.
        hit_rate: tokens skipped per token of the prompts, with these settings.
        present_hit_rate: the same for a replay with the settings of the engine.
        measured_hit_rate: the same for what the engine really did.
    """

    policy: str
    memory: int
    requests: int
    hit_rate: float
    present_hit_rate: float
    measured_hit_rate: float

    def __str__(self) -> str:
        return (
            f"{self.policy} with {format_size(self.memory)}: {100 * self.hit_rate:.1f} % of "
            f"{self.requests} requests' prompt tokens would come from the cache, "
            f"{100 * self.present_hit_rate:.1f} % with the present settings"
        )


class Picture(str):
    """Text that a shell shows without quotes, and that a notebook shows as HTML.

    Args:
        text: the text. html: the same as HTML.
    """

    _html: str

    def __new__(cls, text: str, html: str) -> Picture:
        self = super().__new__(cls, text)
        self._html = html
        return self

    __repr__ = str.__str__

    def _repr_html_(self) -> str:
        return self._html


class CacheView:
    """The prefix cache as a caller sees it; made by `LLM`, reached as `llm.cache`.

    Args:
        thread: of the engine.
        seen: what the cache did for the latest requests, by request id. The engine's thread writes it.
        model, config: of the engine.
        tokenizer: shows the text of spans; None to show token ids.
    """

    def __init__(
        self,
        thread: Front,
        seen: Mapping[str, SeenRequest],
        model: ModelConfig,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._thread, self._seen, self._config, self._tokenizer = thread, seen, config, tokenizer
        self._recurrent, self._vocab_size = bool(model.recurrent), model.vocab_size

    def _ask(self, question: Question[Answer], *args: Any) -> Answer:
        """Asks after what nobody waits for has ended, so that its pages are in the cache."""
        self._thread.settle()
        return self._thread.ask(question, *args)

    def explain(self, request: RequestOutput | Delta | str) -> CacheExplanation:
        """Why a request's prompt hit as much of the cache as it did.

        Args:
            request: a `RequestOutput` or `Delta` of this `LLM`, or its `request_id`.

        Raises:
            KeyError: there is no such request, or it is too long ago. TypeError: the argument is something else.
            RuntimeError: the `LLM` was closed.

        Example:
            >>> from hybrid_jax import LLM, SamplingParams
            >>> llm = LLM()
            >>> [out] = llm.generate("x = 1", SamplingParams(temperature=0.0, max_tokens=2))
            >>> explanation = llm.cache.explain(out)
            >>> explanation.prompt_tokens, explanation.hit_tokens
            (5, 0)
            >>> explanation.reason
            'a prompt of at most 32 tokens holds no resume point (they lie 32 apart)'
        """
        request_id = request.request_id if isinstance(request, RequestOutput | Delta) else request
        if not isinstance(request_id, str):
            raise TypeError(
                "cache.explain: takes a RequestOutput, a Delta or the request_id of one, got "
                f"{type(request).__name__} {reprlib.repr(request)}"
            )
        self._thread.settle()
        found = self._seen.get(request_id)
        if found is None:
            raise KeyError(
                f"cache.explain: no finished request {request_id!r} among the latest {REMEMBERED}; pass an "
                "output of this LLM, or its request_id"
            )
        tokens, hit, look_up, decision = found
        possible = (tokens - 1) // self._config.grain * self._config.grain
        return CacheExplanation(
            request_id=request_id,
            prompt_tokens=tokens,
            matched_tokens=hit if look_up is None else max(hit, look_up.match_len),
            hit_tokens=hit,
            possible_tokens=possible,
            reason=self._reason(hit, possible, look_up),
            replica=None if decision is None else decision.replica,
            why_there="" if decision is None else decision.why,
            loaded_tokens=0 if look_up is None else look_up.loaded,
            loaded_from="" if look_up is None else look_up.loaded_from,
        )

    def _reason(self, hit: int, possible: int, look_up: LookUp | None) -> str:
        grain = self._config.grain
        if self._config.cache.policy == "off":
            return "the cache is off"
        if possible == 0:
            return (
                f"a prompt of at most {grain} tokens holds no resume point (they lie {grain} apart)"
            )
        below = ""
        if look_up is not None and look_up.loaded:
            below = f". {look_up.loaded} of the skipped ones came from {look_up.loaded_from}"
        if hit >= possible:
            return (
                f"that is all there can be: resume points lie {grain} tokens apart, and the last "
                f"token must be computed{below}"
            )
        why = "" if look_up is None else f". {self._missing(look_up)}"
        return f"{possible} were possible{why}{below}"

    @property
    def _or_below(self) -> str:
        others = [
            self._config.host_memory and "host_memory",
            self._config.cache_dir and "disk_memory",
        ]
        return "".join(f" or {name}" for name in others if name)

    def _missing(self, look_up: LookUp) -> str:
        """What kept a prompt from resuming at its last resume point."""
        what = "state" if self._recurrent else "pages"
        known, hit, position = look_up.match_len, look_up.hit_len, look_up.position
        match look_up.why:
            case Why.EVICTED:
                gone = "Pages"
                if self._recurrent:
                    gone = "Pages and state" if look_up.pages else "The state"
                others = f"{look_up.ago} other prompt{'s were' if look_up.ago != 1 else ' was'}"
                return (
                    f"{gone} at {position} had been evicted by policy {look_up.policy}; {others} looked up since. "
                    f"More memory{self._or_below} would have kept {'it' if gone == 'The state' else 'them'}"
                )
            case Why.TAKEN_BACK:
                return (
                    f"The state at {position} had been given up, because the request that wrote it needed its memory "
                    "to go on. More memory would have kept it"
                )
            case Why.NOT_ADMITTED:
                span = f"between {hit} and {position}" if hit else f"up to {position}"
                return (
                    f"The cache knew the first {known} tokens of this prompt, but had no saved {what} "
                    f"{span}"
                )
            case Why.ENDED:
                saved = f"its last saved {what}, at {position}" if position else "its beginning"
                return (
                    f"An earlier request had the first {known} tokens of this prompt, but it ended "
                    f"{look_up.tail} tokens after {saved}, and what comes after that is not kept"
                )
            case Why.GIVEN_BACK:
                return (
                    f"The cache had pages up to {position}, but not all that layers with a sliding window read there, "
                    "because a text gives these back as it goes on. The pages of this prompt are kept"
                )
            case Why.NO_ROOM:
                return f"The cache had {what} at {position}, but there was no room for both that and this request"
            case Why.SLOWER:
                return (
                    f"{look_up.slower_from.capitalize()} had {what} at {position}, but by the speeds measured here "
                    f"it takes longer to load that than to compute the tokens after {hit}"
                )
            case Why.ASKED_FOR:
                return (
                    "The request asked for numbers of its prompt's tokens (log-probabilities, or the mean of hidden "
                    f"states), so those after {hit} had to be computed"
                )
        if not known:
            return "The cache knew no earlier request that began like this one"
        knew = f"The cache knew only the first {known} tokens of this prompt"
        if hit:
            return f"{knew}, so it could resume at {hit}"
        return f"{knew}, and the first place to resume is {self._config.grain}"

    def describe(self) -> str:
        """The engine's memory, and the prefix tree: span and first tokens of each node, and what of it is cached."""
        memory = self._ask(questions.describe)
        return f"{memory}\n{self.tree() or 'the cache is off'}"

    def tree(self) -> Picture:
        """The prefix tree alone: one line a node, indented below its parent. Empty if the cache is off.

        A line has the node's span in tokens, how its text begins (or its token ids, without a tokenizer), and what of
        it is cached: in the arena, unless a place is named. What is "on disk" can be resumed from there at the span's
        end, or at the position that is named. A span that is "known" was seen, but its pages are not cached.
        """
        found = self.nodes()
        if found is None:
            return Picture("", "the prefix cache is off")
        more = ["..."] * (len(found) == MAX_NODES)
        text = "\n".join([*map(str, found), *more]) or "(empty)"
        rows = [_html_line(line) for line in found] or ["the prefix cache is empty"]
        return Picture(text, f"<div style='font-family:monospace'>{''.join(rows + more)}</div>")

    def nodes(self) -> list[NodeLine] | None:
        """The nodes of the prefix tree as `tree` shows them, at most 200; None if the cache is off."""

        found = self._ask(questions.cache_nodes, SHOWN_TOKENS)
        return None if found is None else [self._with_text(line, first) for line, first in found]

    def _with_text(self, line: NodeLine, first: list[int]) -> NodeLine:
        """A node with its beginning as text, if there is a tokenizer."""
        if self._tokenizer is None:
            return line
        start, end = line.span
        text = self._tokenizer.decode(first, skip_special_tokens=False)
        short = end - start <= SHOWN_TOKENS and len(text) <= SHOWN_CHARACTERS
        shown = json.dumps(text[:SHOWN_CHARACTERS], ensure_ascii=False) + " ..." * (not short)
        return line._replace(text=shown)

    def what_if(self, *, policy: str | None = None, memory: int | str | None = None) -> WhatIf:
        """How many tokens the requests so far would have skipped under another policy, or with more or less memory.

        Replays the latest requests (8192 at most), one after the other. The replay counts whole blocks between resume
        points. It leaves out the memory of running requests and the breakpoints that callers declared. So the present
        settings are replayed as well: compare `hit_rate` with `present_hit_rate`.

        Args:
            policy: as in `CacheConfig`, but not "off"; None for the present one.
            memory: size of the arena, in bytes or like 5GB or 5GiB; None for the present one.

        Raises:
            ValueError: the policy or size is unknown, or no request has finished yet.
        """
        present = self._config.cache.policy
        policy = present if policy is None else CacheConfig(policy=policy).policy
        asked = None if memory is None else parse_size(memory, name="memory")
        past = self._ask(questions.past_requests)
        if past is None:
            raise ValueError("cache.what_if: the cache is off, so nothing was logged; turn it on")
        if not past.num_requests:
            raise ValueError("cache.what_if: no request has finished yet; ask after one has")
        if policy == "off":
            raise ValueError("cache.what_if: policy must keep something, got 'off'")
        arena = past.capacity
        size = arena if asked is None else asked
        return WhatIf(
            policy=policy,
            memory=size,
            requests=past.num_requests,
            hit_rate=past.replay(policy, size),
            present_hit_rate=past.replay(present, arena),
            measured_hit_rate=past.hit_rate,
        )

    @checks_arguments
    def save(self, prompt: PromptLike, file: str | Path) -> int:
        """Writes what the cache has of a prompt to a file, from which `load` gives it to any engine of the same model.

        Page size, memory, rows and grain of that engine may be others.

        Args:
            prompt: as for `LLM.generate`, which has computed it. file: where to; it is replaced.

        Returns:
            How many tokens of the prompt the file has: up to the last resume point that is cached.

        Raises:
            ValueError: the cache is off, or nothing of the prompt is cached. OSError: of the system.

        Example:
            >>> import pathlib, tempfile
            >>> from hybrid_jax import LLM, SamplingParams
            >>> llm, prompt = LLM(quiet=True), "x = 1; " * 20
            >>> _ = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1))
            >>> file = pathlib.Path(tempfile.mkdtemp()) / "prefix.safetensors"
            >>> llm.cache.save(prompt, file)
            128
            >>> other = LLM(page_tokens=16, quiet=True)
            >>> other.cache.load(file)
            128
        """
        [read] = read_prompts([prompt], self._tokenizer, vocab_size=self._vocab_size)
        with _told_with("cache.save", file, NO_FOLDER):
            saved = None
            while saved is None:  # each answer comes after another turn of the engine
                saved = self._ask(questions.save_prefix, Path(file), read.token_ids)
        if not saved:
            raise ValueError(
                f"cache.save: no resume point of this prompt of {len(read.token_ids)} tokens is in memory; they lie "
                f"{self._config.grain} tokens apart. Generate from it first"
            )
        return saved

    @checks_arguments
    def load(self, file: str | Path) -> int:
        """Puts a prefix that `save` has written into the cache; returns its tokens.

        Raises:
            ValueError: the file is damaged, or of another model, or of other weights or settings; or memory has no room
                for it. FileNotFoundError, OSError: there is no such file, or it cannot be read.
        """
        with _told_with("cache.load", file, NO_FILE):
            return self._ask(questions.load_prefix, Path(file))

    def __repr__(self) -> str:
        return f"CacheView({self._config.cache.policy!r}, {len(self._seen)} requests remembered)"


@contextmanager
def _told_with(
    what: str, file: str | Path, remedies: Mapping[type[OSError], str]
) -> Iterator[None]:
    """Has an error say what was done, and one of the system name the file and what helps."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    except OSError as error:
        remedy = next((x for kind, x in remedies.items() if isinstance(error, kind)), "")
        raise type(error)(error.errno, f"{what}: {error.strerror}{remedy}", str(file)) from error


def _html_line(line: NodeLine) -> str:
    """A node of the tree as HTML: what resumes is marked, what only lower tiers have is underlined, what is only known
    is pale."""
    start, end = line.span
    elsewhere = LOWER if any(not tier.coming for tier in line.below) else PALE
    style = MARK if line.resumes else "" if line.cached else elsewhere
    return (
        f"<div style='margin-left:{2 * line.depth}em'><span style='{PALE}'>{start}-{end}</span> "
        f"<span style='{style}'>{escape(line.text)}</span> <small>{escape(', '.join(line.marks))}</small></div>"
    )

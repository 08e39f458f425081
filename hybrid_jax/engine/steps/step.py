"""What the runner asks of a kind of step."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from hybrid_jax.config import EngineConfig
from hybrid_jax.config.sampling_params import MAX_LOGPROBS
from hybrid_jax.engine import pack
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import NOT_FINITE, Sampled
from hybrid_jax.schedule.bucket import shapes_of
from hybrid_jax.schedule.plan import Plan, PrefillRow, Row
from hybrid_jax.schedule.request import Request, TokenLogprobs
from hybrid_jax.state import Model


@dataclass(frozen=True)
class Variant:
    """What a dispatch computes beside tokens. Each variant is an executable of its own.

    Attributes:
        num_logprobs: how many of the most likely tokens to report; 0 for no log-probabilities.
        adjusts: logits of some rows are changed before sampling.
    """

    num_logprobs: int = 0
    adjusts: bool = False

    def covers(self, other: Variant) -> bool:
        """Whether it computes all that another one does."""
        return self.num_logprobs >= other.num_logprobs and self.adjusts >= other.adjusts

    @property
    def suffix(self) -> str:
        """The end of such a program's name."""
        return " logprobs" * (self.num_logprobs > 0) + " adjusted" * self.adjusts


PLAIN = Variant()
WHOLE = Variant(num_logprobs=MAX_LOGPROBS, adjusts=True)


class Made(NamedTuple):
    """What a step returns beside the state.

    Attributes:
        sampled: tokens, and log-probabilities if asked for.
        logits: float32[R, V] from which forks draw; None in other steps.
        hidden: [R, T, D] before the last norm, of which prompts' log-probabilities and sums are computed; None in other
            steps. T is 1, for the last token of each row, if not all tokens went through all layers.
        drafted: int32[steps, B] how many draft tokens each row had in each step; None in steps without drafts.
        ends: int32[B] what the next step of the dispatch takes from this one (`verify`); else None.
    """

    sampled: Sampled
    logits: jax.Array | None = None
    hidden: jax.Array | None = None
    drafted: jax.Array | None = None
    ends: jax.Array | None = None


class Results(NamedTuple):
    """What a dispatch brings to its rows, on the device or on the host.

    Attributes:
        sampled, drafted: as in `Made`.
        prompt: log-probabilities of prompts, or None.
        pooled: float32[R, D] sums of hidden states, or None.
        hidden: float32[R, T, D] hidden states after the last norm, or None.
    """

    sampled: Sampled
    prompt: Sampled | None = None
    pooled: Any = None
    hidden: Any = None
    drafted: Any = None


class Work(NamedTuple):
    """What a dispatch computes.

    Attributes:
        tokens: that go through the layers.
        logits: lines of logits.
        whole: the tokens go through the layers after a cut, too.
    """

    tokens: int
    logits: int
    whole: bool = True


class StepKind(abc.ABC):
    """One kind of step of one engine. The runner, its warm-up and its results know steps only through this class.

    A bucket is a frozen dataclass with the sizes that a program is compiled for; `rows` is one of them.

    Args:
        engine: the engine's settings. model: what its steps are specialised on.
        max_pages: pages of the longest sequence possible.

    Attributes:
        name: name of its programs.
        shapes: the engine's padded shapes.
        takes_weights: the weights are the first argument of the device function.
        steps: a dispatch is several steps of the same rows. The device function loops over them, or it is one of them.
        numbers: the first columns, which hold one number each, in order; the others are in `layout`.
        run: the device function: (weights,) state, adjust, int32 rows, `rest` and keywords -> state, adjust, `Made`.
    """

    name: ClassVar[str]
    takes_weights: ClassVar[bool] = True
    steps: ClassVar[bool] = False
    numbers: ClassVar[tuple[str, ...]]
    run: ClassVar[Callable]

    def __init__(self, engine: EngineConfig, model: Model, max_pages: int) -> None:
        self.engine, self.model, self.max_pages = engine, model, max_pages
        self.shapes = shapes_of(engine)

    # --- shapes -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def buckets(self) -> list[Any]:
        """Every bucket that a run can meet, small ones first. A warm-up compiles all of them."""

    @abc.abstractmethod
    def bucket(self, rows: Sequence[Any], before: Any) -> Any:
        """The smallest bucket that fits the rows of a dispatch.

        Args:
            rows: rows of the dispatch.
            before: the bucket of the previous dispatch of the plan, or None.
        """

    def expected(self, requests: Iterable[Request]) -> set[Any]:
        """Buckets that requests which have not begun will need, as far as their prompts say."""
        return set()

    def larger(self, bucket: Any) -> list[Any]:
        """Buckets that can do the work of another, the cheapest first."""
        fits = [
            other
            for other in self.buckets()
            if other != bucket
            and all(a >= b for a, b in zip(astuple(other), astuple(bucket), strict=True))
        ]
        return sorted(fits, key=lambda other: (np.prod(astuple(other), dtype=object), other))

    def smaller(self, bucket: Any) -> list[Any]:
        """Buckets whose work another can do."""
        return [other for other in self.buckets() if bucket in self.larger(other)]

    def cost(self, bucket: Any) -> tuple[int, int]:
        """Orders buckets: the larger the cost, the more other buckets it can replace."""
        return 1, bucket.rows

    @abc.abstractmethod
    def work(self, bucket: Any, rows: Sequence[Any]) -> Work:
        """What a dispatch of these rows computes, padding included."""

    def static(self, bucket: Any) -> Mapping[str, int]:
        """Further keywords of the device function, beside model, layout and num_logprobs."""
        return {}

    # --- variants ---------------------------------------------------------------------------------

    @property
    def all_variants(self) -> list[Variant]:
        """The variants that there are, those that compute less first.

        On a CPU there are two, because there a step branches past what no row asks for.
        """
        if self.model.backend.branches:
            return [PLAIN, WHOLE]
        return [Variant(count, adjusts) for adjusts in (False, True) for count in (0, MAX_LOGPROBS)]

    def variant(self, rows: Sequence[Row]) -> Variant:
        """The first variant that computes all that these rows ask for."""
        drawn = [row.request for row in rows if row.samples]
        logprobs = any(request.params.logprobs is not None for request in drawn)
        asked = Variant(
            num_logprobs=MAX_LOGPROBS if logprobs else 0,
            adjusts=any(request.adjusts_logits for request in drawn),
        )
        return next(variant for variant in self.all_variants if variant.covers(asked))

    def variants(self, *, logprobs: bool, adjusts: bool) -> list[Variant]:
        """The variants to warm up, with log-probabilities and with adjusted logits if these are asked for.

        On a CPU one variant serves all rows.
        """
        most = Variant(MAX_LOGPROBS if logprobs else 0, adjusts)
        if self.model.backend.branches:
            return [next(variant for variant in self.all_variants if variant.covers(most))]
        return [variant for variant in self.all_variants if most.covers(variant)]

    # --- rows -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def dispatches(self, plan: Plan) -> Iterable[list[Any]]:
        """The rows of each dispatch that a plan needs. A dispatch without rows is left out."""

    def foreseen(self, plan: Plan) -> Iterable[list[Any]]:
        """The same, together with rows that will certainly follow in the next plan."""
        return self.dispatches(plan)

    @abc.abstractmethod
    def layout(self, bucket: Any) -> Layout:
        """The columns of its rows."""

    def values(self, row: Any) -> list[int]:
        """What the columns `numbers` of a row hold."""
        return [getattr(row, name) for name in self.numbers]

    def num_lines(self, bucket: Any) -> int:
        """Lines of the packed rows."""
        return bucket.rows

    def pack(self, rows: Sequence[Row], layout: Layout, bucket: Any) -> np.ndarray:
        """The packed rows int32[lines, layout.size]; lines without a row are zero, but name the sink's ring row."""
        batch: np.ndarray = np.zeros((self.num_lines(bucket), layout.size), np.int32)
        if layout.has("row"):
            batch[:, layout.spans["row"]] = self.engine.max_rows
        for index, row in enumerate(rows):
            line = self.line(row, index)
            batch[line, : len(self.numbers)] = self.values(row)
            if isinstance(row, PrefillRow):
                layout.set(batch, line, "tokens", row.tokens)
            pack.set_pages(layout, batch, line, row.pages)
            pack.set_copies(layout, batch, line, row.copies)
            if row.samples:
                pack.set_sampling(layout, batch, line, row.request)
        return batch

    def rest(self, rows: Sequence[Any], before: Made | None) -> tuple:
        """Arguments of the device function after the rows; `before` is what the previous dispatch made."""
        return ()

    def inert(self, bucket: Any) -> tuple:
        """`rest` for a call without rows."""
        return ()

    @property
    def tokens(self) -> int:
        """The most that a row takes in each of several steps."""
        return 1

    def num_steps(self, rows: Sequence[Any]) -> int:
        """Of a dispatch of these rows."""
        return 1

    def rest_of_step(self, bucket: Any, number: int, before: Made | None) -> tuple:
        """`rest` of a program that is one step of a dispatch.

        Args:
            number: how many steps came before it. before: what the last of them made; None for the first step.
        """
        raise NotImplementedError(f"{self.name}: a dispatch is one step")

    # --- results ----------------------------------------------------------------------------------

    def line(self, row: Any, index: int) -> int:
        """The line of a row in the results of a dispatch; `index` says which row of the dispatch it is."""
        return index

    def drawn_at(self, row: Any, line: int) -> list[tuple[int, ...]]:
        """Where a row's tokens are among those that were sampled, in order. A negative number there is no token."""
        return [(line,)] if row.samples else []

    def unpack(self, rows: Sequence[Any], results: Results) -> None:
        """Gives each row its results, which are on the host."""
        sampled, prompt = results.sampled, results.prompt
        for index, row in enumerate(rows):
            line = self.line(row, index)
            places = self.drawn_at(row, line)
            drawn = [place for place in places if sampled.tokens[place] >= 0]
            row.new_tokens = [int(sampled.tokens[place]) for place in drawn]
            row.not_finite = any(sampled.tokens[place] == NOT_FINITE for place in places)
            count = row.request.params.logprobs
            if count is not None:
                row.new_logprobs = [logprobs_at(sampled, place, count) for place in drawn]
            if not isinstance(row, PrefillRow):
                continue
            if row.pooled:
                summed = row.request.pooling != "none"
                found = results.pooled[line] if summed else results.hidden[line, : row.length]
                row.hidden = np.asarray(found)
                row.not_finite |= not np.isfinite(row.hidden).all()
            count = row.request.params.prompt_logprobs
            if prompt is not None and count is not None and row.reads:
                known = min(len(row.tokens), len(row.request.prompt) - 1 - row.start)
                places = [(line, offset) for offset in range(known)]
                row.prompt_logprobs = [logprobs_at(prompt, place, count) for place in places]
                read = row.prompt_logprobs[max(0, row.request.logprobs_from - 1 - row.start) :]
                row.not_finite |= not all(math.isfinite(entry.logprob) for entry in read)


def logprobs_at(sampled: Sampled, place: tuple[int, ...], count: int) -> TokenLogprobs:
    """The log-probabilities at one place, with the `count` most likely tokens."""
    found = sampled.logprobs
    assert found is not None, "the program that ran reports no log-probabilities"
    best = zip(found.ids[place][:count], found.values[place][:count], strict=True)
    return TokenLogprobs(
        token_id=int(sampled.tokens[place]),
        logprob=float(found.chosen[place]),
        rank=int(found.rank[place]),
        top=tuple((int(token), float(value)) for token, value in best),
    )

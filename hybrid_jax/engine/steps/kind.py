"""What the runner asks of a kind of step."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from hybrid_jax.config import EngineConfig
from hybrid_jax.config.sampling_params import MAX_LOGPROBS
from hybrid_jax.engine.model import Model
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.schedule.plan import DecodeRow, ForkRow, Plan, PrefillRow, Tokens

Row = PrefillRow | ForkRow | DecodeRow


@dataclass(frozen=True)
class Variant:
    """What a dispatch computes beside tokens. Each variant is an executable of its own.

    Attributes:
        num_logprobs: how many of the most likely tokens to report; 0 for no log-probabilities.
        adjusts: logits of some rows are changed before sampling.
    """

    num_logprobs: int = 0
    adjusts: bool = False

    @property
    def suffix(self) -> str:
        """The end of such a program's name."""
        return " logprobs" * (self.num_logprobs > 0) + " adjusted" * self.adjusts


PLAIN = Variant()


class Made(NamedTuple):
    """What a step returns beside the state.

    Attributes:
        sampled: tokens, and log-probabilities if asked for.
        logits: float32[R, V] from which forks draw; None in other steps.
        hidden: [R, T, D] before the last norm, from which log-probabilities of prompts are computed; None in other
            steps.
    """

    sampled: Sampled
    logits: jax.Array | None = None
    hidden: jax.Array | None = None


class StepKind(abc.ABC):
    """One kind of step. The runner, its warm-up and its results know steps only through this class.

    A bucket is a frozen dataclass with the sizes that a program is compiled for; `rows` is one of them.

    Attributes:
        name: name of its programs.
        takes_weights: the weights are the first argument of the device function.
        run: the device function: (weights,) state, adjust, int32 rows, `rest` and keywords -> state, adjust, `Made`.
    """

    name: ClassVar[str]
    takes_weights: ClassVar[bool] = True
    run: ClassVar[Callable]

    # --- shapes -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def buckets(self, engine: EngineConfig, *, max_pages: int) -> list[Any]:
        """Every bucket that a run can meet, small ones first. A warm-up compiles all of them."""

    @abc.abstractmethod
    def bucket(
        self, engine: EngineConfig, rows: Sequence[Row], plan: Plan, *, max_pages: int, before: Any
    ) -> Any:
        """The smallest bucket that fits.

        Args:
            rows: rows of the dispatch. plan: the plan that the dispatch is part of.
            max_pages: pages of the longest sequence possible.
            before: the bucket of the previous dispatch of this plan, or None.
        """

    def larger(self, engine: EngineConfig, bucket: Any, *, max_pages: int) -> list[Any]:
        """Buckets that can do the work of another, the cheapest first."""
        fits = [
            other
            for other in self.buckets(engine, max_pages=max_pages)
            if other != bucket
            and all(a >= b for a, b in zip(astuple(other), astuple(bucket), strict=True))
        ]
        return sorted(fits, key=lambda other: (np.prod(astuple(other), dtype=object), other))

    def cost(self, bucket: Any) -> tuple[int, int]:
        """Orders buckets: the larger the cost, the more other buckets it can replace."""
        return 1, bucket.rows

    def static(self, engine: EngineConfig, bucket: Any) -> Mapping[str, int]:
        """Further keywords of the device function, beside model, layout and num_logprobs."""
        return {}

    # --- variants ---------------------------------------------------------------------------------

    def variant(self, rows: Sequence[Row]) -> Variant:
        """What these rows ask for."""
        drawn = [row for row in rows if not isinstance(row, PrefillRow) or row.samples]
        logprobs = any(row.request.params.logprobs is not None for row in drawn)
        return Variant(
            num_logprobs=MAX_LOGPROBS if logprobs else 0,
            adjusts=any(row.request.adjusts_logits for row in drawn),
        )

    def variants(self, *, logprobs: bool, adjusts: bool) -> list[Variant]:
        """The variants to warm up, with log-probabilities and with adjusted logits if these are asked for."""
        return [
            Variant(count, adjusting)
            for adjusting in (False, True)[: 1 + adjusts]
            for count in (0, MAX_LOGPROBS)[: 1 + logprobs]
        ]

    # --- rows -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def dispatches(self, plan: Plan) -> Iterable[list[Any]]:
        """The rows of each dispatch that a plan needs."""

    def foreseen(self, plan: Plan) -> Iterable[list[Any]]:
        """The same, together with rows that will certainly follow in the next plan."""
        return self.dispatches(plan)

    def drawing(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows that are about to draw their first token."""
        return [row for row in rows if isinstance(row, PrefillRow) and row.samples]

    @abc.abstractmethod
    def layout(self, model: Model, bucket: Any) -> Layout:
        """The columns of its rows."""

    @abc.abstractmethod
    def pack(
        self, rows: Sequence[Any], layout: Layout, bucket: Any, engine: EngineConfig
    ) -> np.ndarray:
        """The packed rows int32[lines, layout.size]; lines without a row are inert."""

    def rest(self, plan: Plan, rows: Sequence[Row], before: Made | None) -> tuple:
        """Arguments of the device function after the rows; `before` is what the previous dispatch made."""
        return ()

    def inert(self, model: Model, bucket: Any) -> tuple:
        """`rest` for a call without rows."""
        return ()

    # --- results ----------------------------------------------------------------------------------

    def line(self, row: Row, place: int) -> int:
        """The line of a row's results; `place` is the row's index in its dispatch."""
        return place

    @abc.abstractmethod
    def unpack(
        self,
        rows: Sequence[Any],
        sampled: Sampled,
        prompt: Sampled | None,
        places: Mapping[int, int],
        into: Tokens,
    ) -> None:
        """Puts what was sampled into a plan's tokens.

        Args:
            sampled: what was sampled, on the host. prompt: log-probabilities of prompts, or None.
            places: indices of the rows in the plan's lists, by `id`.
        """

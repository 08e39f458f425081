"""What a kind of step is to the runner."""

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
    """What a dispatch computes beside tokens; each is an executable of its own.

    Attributes:
        num_logprobs: most likely tokens to report; 0 for no log-probabilities.
        adjusts: logits of some rows change before they are sampled from.
    """

    num_logprobs: int = 0
    adjusts: bool = False

    @property
    def suffix(self) -> str:
        """What the name of such a program ends in."""
        return " logprobs" * (self.num_logprobs > 0) + " adjusted" * self.adjusts


PLAIN = Variant()


class Made(NamedTuple):
    """What a step returns beside the state.

    Attributes:
        sampled: tokens, and log-probabilities if asked for.
        logits: float32[R, V] that forks draw from; None of other steps.
        hidden: [R, T, D] before the last norm, where prompts' log-probabilities come from; None of other steps.
    """

    sampled: Sampled
    logits: jax.Array | None = None
    hidden: jax.Array | None = None


class StepKind(abc.ABC):
    """One kind of step. The runner, its warm-up and its results know steps only through this.

    A bucket is a frozen dataclass of the sizes that a program is compiled for, `rows` among them.

    Attributes:
        name: of its programs.
        takes_weights: the device function's first argument is the weights.
        run: the device function: (weights,) state, adjust, int32 rows, `rest` and keywords -> state, adjust, `Made`.
    """

    name: ClassVar[str]
    takes_weights: ClassVar[bool] = True
    run: ClassVar[Callable]

    # --- shapes -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def buckets(self, engine: EngineConfig, *, max_pages: int) -> list[Any]:
        """Every bucket that a run can meet, the small ones first: what a warm-up compiles."""

    @abc.abstractmethod
    def bucket(
        self, engine: EngineConfig, rows: Sequence[Row], plan: Plan, *, max_pages: int, before: Any
    ) -> Any:
        """The smallest bucket that fits.

        Args:
            rows: of the dispatch. plan: that it is part of.
            max_pages: of the longest sequence possible.
            before: the bucket of the dispatch before it in this plan, or None.
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
        """Orders buckets by what they can serve in place of others."""
        return 1, bucket.rows

    def static(self, engine: EngineConfig, bucket: Any) -> Mapping[str, int]:
        """Keywords of the device function beside model, layout and num_logprobs."""
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
        """Those to warm up, with log-probabilities and with adjusted logits if these are asked for."""
        return [
            Variant(count, adjusting)
            for adjusting in (False, True)[: 1 + adjusts]
            for count in (0, MAX_LOGPROBS)[: 1 + logprobs]
        ]

    # --- rows -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def dispatches(self, plan: Plan) -> Iterable[list[Any]]:
        """Rows of each dispatch that a plan asks for."""

    def foreseen(self, plan: Plan) -> Iterable[list[Any]]:
        """The same, with what follows in the next plan for certain."""
        return self.dispatches(plan)

    def drawing(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Those that are about to draw their first token."""
        return [row for row in rows if isinstance(row, PrefillRow) and row.samples]

    @abc.abstractmethod
    def layout(self, model: Model, bucket: Any) -> Layout:
        """Columns of its rows."""

    @abc.abstractmethod
    def pack(
        self, rows: Sequence[Any], layout: Layout, bucket: Any, engine: EngineConfig
    ) -> np.ndarray:
        """int32[lines, layout.size]; lines that no row takes are inert."""

    def rest(self, plan: Plan, rows: Sequence[Row], before: Made | None) -> tuple:
        """Arguments of the device function after the rows; `before` is what the dispatch before it made."""
        return ()

    def inert(self, model: Model, bucket: Any) -> tuple:
        """`rest` for a call without rows."""
        return ()

    # --- results ----------------------------------------------------------------------------------

    def line(self, row: Row, place: int) -> int:
        """The line of the results that is a row's, the so-manieth of its dispatch."""
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
            sampled: on the host. prompt: log-probabilities of prompts, or None.
            places: of the rows in the plan's lists, by `id`.
        """

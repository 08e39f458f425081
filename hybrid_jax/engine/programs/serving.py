"""Which compiled program runs a dispatch: the one that fits, or one that can do more and is there already."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from hybrid_jax.config import EngineConfig
from hybrid_jax.costs import token_costs
from hybrid_jax.engine.programs.compiling import Program
from hybrid_jax.engine.steps.step import StepKind, Variant
from hybrid_jax.schedule.plan import Row
from hybrid_jax.schedule.request import Request
from hybrid_jax.state import Model

# What compiling one more program is worth, as FLOPs of padding: about as many as two cores do in that time. No clock
# decides, so runs repeat.
PROGRAM_FLOPS = 2e11
# A larger program is compiled in place of one that fits only if it can serve so often before that one is worth it too.
LEAST_USES = 16


class StepKey(NamedTuple):
    """Names the program of a step: the name of its kind, its bucket, its variant."""

    kind: str
    bucket: Any
    variant: Variant


class Serving:
    """Chooses programs for dispatches.

    With coarse shapes, a larger program serves until the one that fits has been compiled in the background. With fine
    shapes it serves the requests that are there, while the one that fits is compiled for those that come. The first
    time that more requests are there than can run at once, few programs are compiled: one that fits comes only when its
    absence has cost as much as compiling it. A program that costs next to nothing more, because it only can report or
    adjust what no row asks for, serves for good.

    Args:
        engine: settings. model: what steps are specialised on.
        programs: all of them by key, also those that are being compiled.

    Attributes:
        thrifty: few programs should be compiled now, with fine shapes.
        requests: those that are there.
        asks_more: a request asked for more than tokens, or will. A program that has to be compiled then can report and
            adjust.
        since: the generation of requests that first may run a program. With fine shapes, that is any where it is not
            said.
    """

    def __init__(
        self, engine: EngineConfig, model: Model, programs: Mapping[tuple, Program]
    ) -> None:
        self.thrifty = self.asks_more = False
        self.requests: Collection[Request] = ()
        self.since: dict[tuple, int] = {}
        self._was_thrifty = False
        self._generation = 0
        self._fine, self._max_rows = engine.shapes == "fine", engine.max_rows
        self._programs = programs
        self._other_keys: dict[StepKey, tuple[StepKey, ...]] = {}
        self._padding: dict[StepKey, float] = {}  # FLOPs of padding so far, in place of a program
        config = model.config
        self._flops_of_layers = {
            whole: token_costs(config, whole=whole).flops_per_token for whole in (False, True)
        }
        self._flops_of_logits = 2 * config.width * config.vocab_size

    # --- requests ---------------------------------------------------------------------------------

    def begin(self, request: Request) -> int:
        """The generation of a request that begins now. It may run the programs that are compiled by now.

        Programs that are compiled in the background while it runs are for later requests. So a request's programs, and
        with them its last bits, do not change on its way.
        """
        self.asks_more |= request.params.logprobs is not None or request.adjusts_logits
        if self._fine:
            return self._generation
        known = self._programs.items()
        new = [key for key, program in known if program.compiled and key not in self.since]
        if new:
            self._generation += 1
            self.since |= dict.fromkeys(new, self._generation)
        return self._generation

    def note_requests(self, requests: Collection[Request]) -> None:
        """Notes which requests are there."""
        self.requests = requests
        if len(requests) > self._max_rows and not self._was_thrifty:
            self.thrifty = self._was_thrifty = True
        self.thrifty &= len(requests) > 0

    # --- dispatches -------------------------------------------------------------------------------

    def choose(self, kind: StepKind, fits: Any, variant: Variant, rows: Sequence[Row]) -> StepKey:
        """The program to run for rows that fit into a bucket and ask for a variant. It may have to be compiled.

        Args:
            kind: of the step. fits: the bucket. variant: of the step.
            rows: of the dispatch; none for one that is expected.
        """
        own = StepKey(kind.name, fits, variant)
        oldest = min((row.request.notes.generation for row in rows), default=self._generation)
        if self._fine:
            return self._choose_fine(kind, own, rows, oldest)
        candidates = (own, *self._others(kind, own))
        return next((key for key in candidates if self._usable(key, oldest)), own)

    def _choose_fine(
        self, kind: StepKind, own: StepKey, rows: Sequence[Row], oldest: int
    ) -> StepKey:
        if self._usable(own, oldest):
            return own
        left = PROGRAM_FLOPS - self._padding.get(own, 0.0)
        for key in self._others(kind, own):
            if self._usable(key, oldest) and self._padded(kind, own, key, rows) <= left:
                return key
        own = self._worth_compiling(kind, own)
        if not self.thrifty:
            return own
        # Those in whose place no other can serve, and of these the one that can serve for the most others.
        widest = [
            key
            for key in (own, *self._others(kind, own))
            if key.variant == own.variant
            and not kind.larger(key.bucket)
            and self._padded(kind, own, key, rows) * LEAST_USES <= PROGRAM_FLOPS
        ]
        return max(widest, key=lambda key: len(kind.smaller(key.bucket)), default=own)

    def _worth_compiling(self, kind: StepKind, own: StepKey) -> StepKey:
        """The program of a bucket that does all that has been asked for so far."""
        return own._replace(variant=kind.all_variants[-1]) if self.asks_more else own

    def _usable(self, key: StepKey, oldest: int) -> bool:
        """Whether a dispatch may run a program, if its oldest request is of this generation."""
        if self._fine:
            return key in self._programs and self.since.get(key, 0) <= oldest
        return self.since.get(key, oldest + 1) <= oldest

    def stood_in(
        self, kind: StepKind, own: StepKey, serves: StepKey, rows: Sequence[Row]
    ) -> StepKey | None:
        """Notes that one program is dispatched in place of another.

        Returns:
            A program that should be compiled in the background, for requests that begin later; None for none.
        """
        if not self._fine:
            return own
        padded = self._padded(kind, own, serves, rows)
        self._padding[own] = self._padding.get(own, 0.0) + padded
        better = self._worth_compiling(kind, own)
        if self.thrifty or not padded or better in self._programs:
            return None
        self._generation += 1
        self.since[better] = self._generation
        return better

    def ran(self, key: StepKey) -> None:
        """Notes that a program ran: where no other could take its place, all requests may run it."""
        self.since.setdefault(key, 0)

    def _others(self, kind: StepKind, own: StepKey) -> tuple[StepKey, ...]:
        """What could run in place of a program, the cheapest first."""
        found = self._other_keys.get(own)
        if found is None:
            keys = [
                StepKey(kind.name, bucket, variant)
                for bucket in (own.bucket, *kind.larger(own.bucket))
                for variant in kind.all_variants
                if variant.covers(own.variant)
            ]
            if self._fine:
                keys.sort(key=lambda key: self._padded(kind, own, key, []))
            found = self._other_keys[own] = tuple(key for key in keys if key != own)
        return found

    def _padded(self, kind: StepKind, own: StepKey, other: StepKey, rows: Sequence[Row]) -> float:
        """FLOPs that another program does more than the one that fits."""
        return self._flops(kind, other.bucket, rows) - self._flops(kind, own.bucket, rows)

    def _flops(self, kind: StepKind, bucket: Any, rows: Sequence[Row]) -> float:
        work = kind.work(bucket, rows)
        layers = self._flops_of_layers[work.whole]
        return work.tokens * layers + work.logits * self._flops_of_logits

"""Where host and device meet. The runner owns weights and state, and turns plans into dispatches."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.config.sampling_params import MAX_LOGPROBS
from hybrid_jax.engine import pack
from hybrid_jax.engine.adjust import Adjust, make_adjust, row_of
from hybrid_jax.engine.kernel_choice import Kernels
from hybrid_jax.engine.programs import compile_cache
from hybrid_jax.engine.programs.compiling import (
    Background,
    Compiling,
    Needed,
    Program,
    WarmUp,
    shapes_of,
)
from hybrid_jax.engine.programs.store import ProgramStore
from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.engine.serving import Serving, StepKey
from hybrid_jax.engine.steps.small import CHANGES, READERS
from hybrid_jax.engine.steps.step import PLAIN, Made, Results, StepKind, Variant
from hybrid_jax.engine.steps.table import kinds_of
from hybrid_jax.engine.this_device import device_of
from hybrid_jax.geometry import PROMPT_POSITIONS, Geometry, drafting_specs
from hybrid_jax.schedule.bucket import SLOT_WRITES
from hybrid_jax.schedule.plan import Plan, PrefillRow, Row
from hybrid_jax.state import Model, State, make_state, state_specs
from pallas_kernels import jax_triton

MOST_COMPILERS = 4  # at the same time beside the engine, because each takes memory


@dataclass
class Pending:
    """A plan whose results may still be computing; `read` waits for them.

    Attributes:
        plan: the plan.
        dispatches: for each dispatch its kind, its rows, and what it brings to them.
    """

    plan: Plan
    dispatches: list[tuple[StepKind, Sequence[Row], Results]] = field(default_factory=list)

    def read(self) -> Plan:
        """Blocks until the device is done, and returns the plan, whose rows have their results then."""
        results = jax.device_get([results for *_, results in self.dispatches])
        for (kind, rows, _), of_one in zip(self.dispatches, results, strict=True):
            kind.unpack(rows, of_one)
        return self.plan


class Runner:
    """Executes plans on one device.

    Args:
        config: the model. params: its weights, in the engine's dtype.
        engine: engine settings.
        geometry: shapes. num_frames, max_slots, max_model_len: sizes of the state.
        kernels: the kernels that steps are made of.
        store: where compiled programs are kept between processes, or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        engine: EngineConfig,
        geometry: Geometry,
        *,
        num_frames: int,
        max_slots: int,
        max_model_len: int,
        kernels: Kernels,
        store: ProgramStore | None = None,
    ) -> None:
        self.params, self._store = params, store
        self._device = device_of(params)
        self._platform = self._device.platform
        self.kernels = kernels
        if kernels.backend.has_triton:
            jax_triton.load()  # a stored program with Triton kernels makes a call that it registers
        self.model = Model(
            config,
            geometry,
            backend=kernels.backend,
            speculation=engine.speculation,
        )
        self.engine = engine
        self.kinds = kinds_of(engine, self.model, geometry.num_pages(max_model_len))
        self._by_name = {kind.name: kind for kind in self.kinds}
        self.specs = state_specs(
            geometry,
            num_frames=num_frames,
            max_slots=max_slots,
            max_rows=engine.max_rows,
            window=engine.decode_tokens,
            aligned=engine.exact,
            drafting=drafting_specs(config, engine, max_model_len),
        )
        self.state: State = make_state(self.specs)
        self.adjust: Adjust | None = None  # made for the first request that needs it
        self.num_traces = 0
        self.compiling = Compiling()
        self._executables: dict[tuple, Program] = {}
        self.serving = Serving(engine, self.model, self._executables)
        one_by_one = self._platform != "cpu" or engine.shapes == "coarse"
        self._background = Background(1 if one_by_one else min(MOST_COMPILERS, os.cpu_count() or 1))

    # --- executables ------------------------------------------------------------------------------

    def executable(self, name: str, *key: Any) -> Program:
        """A program by its name and shape, or for a step by its bucket and variant; compiled at its first call."""
        known = self._executables.get((name, *key))
        if known is None:
            build = self._build_step if name in self._by_name else self._build
            known = self._executables[name, *key] = build(name, *key)
        return known

    def layout(self, name: str, shape: Any, *, adjusts: bool = False) -> pack.Layout:
        """The columns of the packed rows of a kind of step."""
        layout = self._by_name[name].layout(shape)
        extra = pack.adjust_fields(self.model.config.vocab_size) if adjusts else ()
        return pack.Layout(layout.fields + extra)

    def _build(self, name: str, shape: Any = None) -> Program:
        """Makes one of the small programs around the steps."""
        if name in CHANGES:
            return self._program(name, name, shape, CHANGES[name], 0, {})
        static: dict[str, Any] = {"model": self.model}
        if name == "prompt_logprobs":
            static["num_logprobs"] = MAX_LOGPROBS
        return self._program(name, name, shape, READERS[name], (), static)

    def _build_step(self, name: str, shape: Any, variant: Variant = PLAIN) -> Program:
        kind = self._by_name[name]
        static = {
            "model": self.model,
            "layout": self.layout(name, shape, adjusts=variant.adjusts),
            "num_logprobs": variant.num_logprobs,
            **kind.static(shape),
        }
        donated = (1, 2) if kind.takes_weights else (0, 1)
        return self._program(name, f"{shape}{variant.suffix}", shape, kind.run, donated, static)

    def _program(
        self,
        name: str,
        title: str,
        shape: Any,
        function: Callable,
        donated: int | tuple[int, ...],
        static: dict[str, Any],
    ) -> Program:
        def traced(*args):
            self.num_traces += 1
            return function(*args, **static)

        traced.__name__ = name
        return Program(
            traced,
            donated,
            self.compiling,
            self._platform,
            name=title,
            store=self._store,
            identity=f"{name} {shape} {static}",
            device=self._device,
        )

    def _step_program(
        self, kind: StepKind, bucket: Any, variant: Variant, rows: Sequence[Row]
    ) -> StepKey:
        """The program to use for rows that fit into a bucket; one that fits better is compiled in the background."""
        own = StepKey(kind.name, bucket, variant)
        key = self.serving.choose(kind, *own[1:], rows)
        if key != own and (better := self.serving.stood_in(kind, own, key, rows)):
            self._compile_ahead(better)
        return key

    # --- dispatch ---------------------------------------------------------------------------------

    def execute(self, plan: Plan, missing: Sequence[tuple]) -> Pending:
        """Dispatches a plan and returns at once. Each call rebinds the state in the same statement.

        Args:
            plan: the plan. missing: what `missing` says of it.
        """
        needed = Needed(lambda: self._missing_with_loads(plan), self._executables)
        with self.compiling.counting(needed.count_with):
            if missing:
                self._compile_beside(missing)
            return self._dispatch(plan)

    def _dispatch(self, plan: Plan) -> Pending:
        pending = Pending(plan)
        assert not (plan.saves or plan.loads), "runner: the arena is the only tier it can copy in"
        if plan.new_slots:
            self._write_slots(plan.new_slots)
        for source, target in plan.moves:
            self._move_row(source, target)
        shape, made = None, None
        for kind in self.kinds:
            for rows in filter(None, kind.dispatches(plan)):
                for row in rows:
                    if row.begins and row.request.adjusts_logits:
                        self._load_adjust(
                            row.row, *row_of(row.request, self.model.config.vocab_size)
                        )
                    if row.begins and "history" in self.specs.drafting:
                        self._load_history(row.row, row.sequence.prompt)
                asked = kind.variant(rows)
                _, shape, variant = self._step_program(kind, kind.bucket(rows, shape), asked, rows)
                made = self._run(kind, shape, variant, rows, *kind.rest(rows, made))
                prompt = self._prompt_logprobs(kind, rows, made.hidden)
                pooled = self._pooled_hidden(kind, rows, made.hidden)
                every = self._all_hidden(rows, made.hidden)
                results = Results(made.sampled, prompt, pooled, every, made.drafted)
                pending.dispatches.append((kind, rows, results))
        return pending

    def missing(self, plan: Plan) -> list[tuple]:
        """Keys of the programs that a plan, and the steps that follow it for certain, need and that are not compiled.

        Steps come in the order in which they run.
        """
        needed: list[tuple] = [("write_slots",)] * bool(plan.new_slots)
        if plan.moves:
            needed += [("move_row",)] + [("move_adjust",)] * (self.adjust is not None)
        shape = None
        for kind in self.kinds:
            for rows in filter(None, kind.foreseen(plan)):
                key = self.serving.choose(kind, kind.bucket(rows, shape), kind.variant(rows), rows)
                shape = key.bucket
                needed.append(key)
        return self._not_compiled(needed)

    def _not_compiled(self, keys: Sequence[tuple]) -> list[tuple]:
        known = self._executables
        return [k for k in dict.fromkeys(keys) if k not in known or not known[k].compiled]

    def _missing_with_loads(self, plan: Plan) -> list[tuple]:
        """As `missing`, and the small programs that load what rows need before their first token."""
        rows = [
            row
            for kind in self.kinds
            for rows in kind.dispatches(plan)
            for row in rows
            if row.begins
        ]
        loads: list[tuple] = []
        if any(row.request.adjusts_logits for row in rows):
            loads.append(("load_adjust",))
        if rows and "history" in self.specs.drafting:
            loads.append(("load_history",))
        return [*self._not_compiled(loads), *self.missing(plan)]

    def _compile_beside(self, missing: Sequence[tuple]) -> None:
        """Has all but the first of the steps that a plan lacks compiled beside that one, which its dispatch compiles.

        So are the steps that other requests will need, if there are many. Not on an accelerator, where two compilers
        would disturb each other, nor with coarse shapes, where a larger program serves.
        """
        if self._platform != "cpu" or self.engine.shapes == "coarse":
            return
        steps = [key for key in missing if key[0] in self._by_name]
        for key in steps[1:]:
            self._compile_ahead(StepKey(*key))
        if not (steps and self.serving.thrifty):
            return
        self.executable(*steps[0])  # now it is known, and can be chosen for others
        for kind in self.kinds:
            for bucket in sorted(kind.expected(self.serving.requests), reverse=True):
                self._compile_ahead(self.serving.choose(kind, bucket, PLAIN, []))

    def _compile_ahead(self, key: StepKey) -> None:
        kind = self._by_name[key.kind]
        self._background.compile(key, functools.partial(self._ahead, kind, *key[1:]))

    def _write_slots(self, new_slots: list) -> None:
        write = self.executable("write_slots")
        for begin in range(0, len(new_slots), SLOT_WRITES):
            part = new_slots[begin : begin + SLOT_WRITES]
            part = part + [part[-1]] * (SLOT_WRITES - len(part))
            ids = np.array([slot for slot, _ in part], np.int32)
            frames = np.stack([frames for _, frames in part])
            self.state = write(self.state, ids, frames)

    def _move_row(self, source: int, target: int) -> None:
        places = np.int32(source), np.int32(target)
        self.state = self.executable("move_row")(self.state, *places)
        if self.adjust is not None:
            self.adjust = self.executable("move_adjust")(self.adjust, *places)

    def _load_adjust(self, row: int, counts: np.ndarray, bias: np.ndarray) -> None:
        """Loads what adjusts the logits of a row that is about to draw its first token."""
        load = self.executable("load_adjust")
        self.adjust = load(self._some_adjust(), np.int32(row), counts, bias)

    def _load_history(self, row: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Loads the tokens of a row that is about to draw its first token, those that a hit skipped too."""
        line = np.zeros(self.specs.drafting["history"].shape[1], np.int32)
        line[: len(tokens)] = tokens
        self.state = self.executable("load_history")(self.state, np.int32(row), line)

    def _prompt_logprobs(
        self, kind: StepKind, rows: Sequence[Row], hidden: jax.Array | None
    ) -> Sampled | None:
        """Log-probabilities of the prompts of rows that ask for them, from hidden states [R, T, D]."""
        wanted = [
            (index, row)
            for index, row in enumerate(rows)
            if isinstance(row, PrefillRow) and row.reads and row.request.lacks_prompt_logprobs
        ]
        if hidden is None or not wanted:
            return None
        tokens = np.zeros(hidden.shape[:2], np.int32)
        for index, row in wanted:
            following = row.request.prompt[row.start + 1 : row.start + len(row.tokens) + 1]
            tokens[kind.line(row, index), : len(following)] = following
        return self.executable("prompt_logprobs", tokens.shape)(self.params, hidden, tokens)

    def _pooled_hidden(
        self, kind: StepKind, rows: Sequence[Row], hidden: jax.Array | None
    ) -> jax.Array | None:
        """Sums of the hidden states [R, T, D] that rows ask for, float32[R, D]; None if no row asks."""
        if hidden is None:
            return None
        num_rows, width, _ = hidden.shape
        begin, end = np.zeros((2, num_rows), np.int32)
        for index, row in enumerate(rows):
            if not isinstance(row, PrefillRow) or row.request.pooling == "none":
                continue
            if pooled := row.pooled:
                line = kind.line(row, index)
                # Of some prefills only the last token's hidden state comes back; places count from there.
                skipped = row.length - 1 if width == 1 else 0
                begin[line], end[line] = pooled.start - skipped, pooled.stop - skipped
        if not end.any():
            return None
        return self.executable("pooled_hidden", hidden.shape)(self.params, hidden, begin, end)

    def _all_hidden(self, rows: Sequence[Row], hidden: jax.Array | None) -> jax.Array | None:
        """Hidden states [R, T, D] after the last norm, float32, if a row asks for all of its own."""
        asked = any(isinstance(r, PrefillRow) and r.request.pooling == "none" for r in rows)
        if hidden is None or not asked:
            return None
        return self.executable("all_hidden", hidden.shape)(self.params, hidden)

    def all_logprobs(self, hidden: np.ndarray) -> np.ndarray:
        """Log-probabilities of all tokens after hidden states.

        Args:
            hidden: float32[N, D] after the last norm, N at most `PROMPT_POSITIONS`.

        Returns:
            float32[N, V].
        """
        num = len(hidden)
        padded = np.zeros((1 if num == 1 else PROMPT_POSITIONS, hidden.shape[1]), np.float32)
        padded[:num] = hidden
        found = self.executable("all_logprobs", padded.shape)(self.params, padded)
        return np.asarray(found)[:num]

    def _run(
        self,
        kind: StepKind,
        shape: Any,
        variant: Variant,
        rows: Sequence[Row],
        *rest: Any,
    ) -> Made:
        """Packs rows and dispatches one step; returns what the step makes beside the state."""
        run, args = self._call(kind, shape, rows, rest, variant)
        self.state, adjust, made = run(*args)
        self.serving.ran(StepKey(kind.name, shape, variant))
        if variant.adjusts:
            self.adjust = adjust
        return made

    def _call(
        self, kind: StepKind, shape: Any, rows: Sequence[Row], rest: tuple, variant: Variant
    ) -> tuple[Program, tuple]:
        """The program of a step, and its arguments."""
        layout = self.layout(kind.name, shape, adjusts=variant.adjusts)
        batch = kind.pack(rows, layout, shape)
        weights = (self.params,) if kind.takes_weights else ()
        adjust = self._some_adjust() if variant.adjusts else None
        return self.executable(kind.name, shape, variant), (
            *weights,
            self.state,
            adjust,
            batch,
            *rest,
        )

    def _some_adjust(self) -> Adjust:
        if self.adjust is None:
            self.adjust = make_adjust(self.model.config, self.engine.max_rows)
        return self.adjust

    # --- around it --------------------------------------------------------------------------------

    def warm_ups(self, *, logprobs: bool = False, adjusts: bool = False) -> list[WarmUp]:
        """All programs that a warm-up compiles. Each is run once with inert rows.

        Args:
            logprobs, adjusts: also the programs that report log-probabilities, and those that adjust logits.
        """
        sink, vocab = self.engine.max_rows, self.model.config.vocab_size
        move = functools.partial(self._move_row, sink, sink)
        jobs: list[tuple[str, Callable[[], object]]] = [("move_row", move)]
        if "history" in self.specs.drafting:
            jobs += [("load_history", functools.partial(self._load_history, sink, []))]
        if self.model.geometry.has_state:
            empty_slot = (0, (0,) * self.model.geometry.state_frames)
            jobs += [("write_slots", functools.partial(self._write_slots, [empty_slot]))]
        steps = self._warm_steps(logprobs, adjusts)
        if any(variant.adjusts for *_, variant in steps):
            counts: np.ndarray = np.zeros(vocab, np.int32)
            bias: np.ndarray = np.zeros(vocab, np.float32)
            load = functools.partial(self._load_adjust, sink, counts, bias)
            jobs += [("load_adjust", load), ("move_adjust", move)]
        found = [WarmUp(name, job) for name, job in jobs]
        for number, kind, shape, variant in steps:
            job = functools.partial(self._warm_step, kind, shape, variant)
            ahead = self._ahead(kind, shape, variant)
            # Plain steps come first, and of these the ones that can serve in place of others.
            rank = (number, *(-part for part in kind.cost(shape)))
            found.append(WarmUp(f"{shape}{variant.suffix}", job, ahead, rank))
        # They may run in another order, and turns between them.
        numbers = itertools.count(1)

        def counted(run: Callable[[], object]) -> Callable[[], None]:
            return lambda: self._warm(run, next(numbers), len(found))

        return [program._replace(run=counted(program.run)) for program in found]

    def _warm_steps(
        self, logprobs: bool, adjusts: bool
    ) -> list[tuple[int, StepKind, Any, Variant]]:
        """All steps that a warm-up compiles, plain ones before others: each variant's number, kind, bucket, variant."""
        steps = [
            (number, kind, shape, variant)
            for kind in self.kinds
            for shape in kind.buckets()
            for number, variant in enumerate(kind.variants(logprobs=logprobs, adjusts=adjusts))
        ]
        return sorted(steps, key=lambda step: step[0])

    def _warm(self, job: Callable[[], object], number: int, total: int) -> None:
        with self.compiling.counting(lambda program: lambda: (number, total)):
            job()
            jax.block_until_ready(self.state)

    def _warm_step(self, kind: StepKind, shape: Any, variant: Variant) -> None:
        self._run(kind, shape, variant, [], *kind.inert(shape))

    def _ahead(self, kind: StepKind, shape: Any, variant: Variant) -> Callable[[], object]:
        """A call that compiles a step in any thread."""
        program, args = self._call(kind, shape, [], kind.inert(shape), variant)
        return functools.partial(program.compile_ahead, *shapes_of(args))

    @property
    def keeps_programs(self) -> bool:
        """Whether the next process will have what is compiled now."""
        return self._store is not None or compile_cache.keeps_programs()

    def close(self) -> None:
        """Frees the state and drops the weights."""
        self._background.close()
        # Nothing runs a step any more.
        self.state = self.adjust = self.params = None  # type: ignore[assignment]
        self._executables.clear()

    def rebuild(self) -> None:
        """Throws the state away, consumed or not, and starts from an empty one."""
        # What is there is freed before its like is made.
        self.state = self.adjust = None  # type: ignore[assignment]
        self.state = make_state(self.specs)

"""Where host and device meet. The runner owns weights and state, and turns plans into dispatches."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.engine.adjust import Adjust, make_adjust, row_of
from hybrid_jax.engine.kernel_choice import Kernels
from hybrid_jax.engine.loop_trial import LoopTrial, row_for_trial
from hybrid_jax.engine.programs.compiling import WarmUp
from hybrid_jax.engine.programs.loops import choose_loops
from hybrid_jax.engine.programs.programs import Programs
from hybrid_jax.engine.programs.serving import StepKey
from hybrid_jax.engine.programs.store import ProgramStore
from hybrid_jax.engine.readings import results_of
from hybrid_jax.engine.steps.step import Made, Results, StepKind, Variant
from hybrid_jax.engine.steps.table import kinds_of
from hybrid_jax.engine.this_device import device_of, host_memory
from hybrid_jax.engine.tiers.host_frames import HostFrames, copy_in, copy_out
from hybrid_jax.geometry import PROMPT_POSITIONS, Geometry, drafting_specs
from hybrid_jax.mesh.shards import Shards
from hybrid_jax.schedule.bucket import SLOT_WRITES
from hybrid_jax.schedule.plan import DecodeRow, Incoming, Plan, Recast, Row, Transfer
from hybrid_jax.state import Model, State, make_state, state_specs
from pallas_kernels import jax_triton

T = TypeVar("T")
TOLD = 4  # requests of a dispatch that are named


@dataclass
class Pending:
    """A plan whose results may still be computing; `read` waits for them.

    Attributes:
        plan: the plan.
        dispatches: for each dispatch its kind, its rows, and what each of its programs brings to them.
    """

    plan: Plan
    dispatches: list[tuple[StepKind, Sequence[Row], list[Results]]] = field(default_factory=list)

    def read(self) -> Plan:
        """Blocks until the device is done, and returns the plan, whose rows have their results then."""
        results = jax.device_get([results for *_, results in self.dispatches])
        for (kind, rows, _), parts in zip(self.dispatches, results, strict=True):
            kind.unpack(rows, one_after_another(parts))
        return self.plan


def one_after_another(parts: Sequence[Results]) -> Results:
    """The results of the steps of a dispatch, as one program would bring them."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


class Runner:
    """Executes plans on one device.

    Args:
        config: the model. params: its weights, in the engine's dtype.
        engine: engine settings.
        geometry: shapes. num_frames, max_slots, max_model_len: sizes of the state.
        kernels: the kernels that steps are made of.
        store: where compiled programs are kept between processes, or None.
        shards: the devices that the model is divided over, of which `config` and `geometry` are those of each; None for
            one device.
        moves_frames: there is a tier below the arena, or another engine that frames go to.

    Attributes:
        loops: where loops over steps run.
        host_frames: of the tier below the arena.
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
        shards: Shards | None = None,
        moves_frames: bool = False,
    ) -> None:
        self._shards, self._moves_frames = shards, moves_frames
        self.params, self.kernels, self.engine = params, kernels, engine
        if kernels.backend.has_triton:
            jax_triton.load()  # a stored program with Triton kernels makes a call that it registers
        self.model = Model(
            config,
            geometry,
            backend=kernels.backend,
            speculation=engine.speculation,
        )
        self.kinds = kinds_of(engine, self.model, geometry.num_pages(max_model_len))
        self.specs = state_specs(
            geometry,
            num_frames=num_frames,
            max_slots=max_slots,
            max_rows=engine.max_rows,
            window=engine.decode_tokens,
            aligned=engine.exact,
            drafting=drafting_specs(config, engine, max_model_len),
        )
        self.state: State = self._empty_state()
        self.adjust: Adjust | None = None  # made for the first request that needs it
        device = device_of(params)
        name = f"loop over steps {self.model}"
        self.loops = choose_loops(device, store, name)
        self._trial = LoopTrial(self.loops, device, store, name)
        self._host = host_memory(device) if shards is None else shards.host_memory
        here = device if shards is None else shards.words
        self._words_at = self._host or here
        self.programs = Programs(
            engine,
            self.model,
            self.kinds,
            device=device,
            arguments=self._inert,
            store=store,
            loops=self.loops,
            to_host=self._host,
            shards=shards,
        )
        self.host_frames = HostFrames(self.programs)

    # --- dispatch ---------------------------------------------------------------------------------

    def told_of(self, plan: Plan) -> str:
        """All that a plan would have the device do, as words and a checksum of its numbers."""
        words, numbers, shape = [], [], None
        for kind in self.kinds:
            for rows in filter(None, kind.dispatches(plan)):
                key = self.programs.serving.choose(
                    kind, kind.bucket(rows, shape), kind.variant(rows), rows
                )
                shape = key.bucket
                numbers.append(self._packed(kind, shape, key.variant, rows))
                asked = ", ".join(row.request.request_id for row in rows[:TOLD])
                more = f" and {len(rows) - TOLD} more" * (len(rows) > TOLD)
                words.append(f"{key.kind} {shape}{key.variant.suffix} of {asked}{more}")
        # What has come of the requests so far, which only the device knows while they run.
        numbers += [np.array(sequence.tokens[-1:], np.int32) for sequence in plan.sequences]
        for transfer in (*plan.saves, *plan.loads):
            numbers += [transfer.arena, transfer.other]
        for recast in (*plan.narrowed, *plan.widened):
            numbers += [recast.source, recast.target]
        for place, frames in plan.new_slots:
            numbers += [np.array([place], np.int32), np.asarray(frames, np.int32)]
        numbers.append(np.array(plan.moves, np.int32))
        crc = 0
        for array in numbers:
            crc = zlib.crc32(array.tobytes(), zlib.crc32(str(array.shape).encode(), crc))
        return f"{'; '.join(words) or 'nothing to compute'} [{crc:08x}]"

    def execute(self, plan: Plan, missing: Sequence[tuple]) -> Pending:
        """Dispatches a plan and returns at once. Each call rebinds the state in the same statement.

        Args:
            plan: the plan. missing: what `missing` says of it.
        """
        with self.programs.counting(functools.partial(self.missing, plan, loads=True)):
            if missing:
                self.programs.compile_beside(missing)
            return self._dispatch(plan)

    def _dispatch(self, plan: Plan) -> Pending:
        pending = Pending(plan)
        for recast in plan.narrowed:
            self._recast("narrow_checkpoint", recast)
        for transfer in plan.saves:
            self._save_frames(transfer)
        for out in plan.to_disk:
            out.give(self.copy_out(out.arena))
        for transfer in plan.loads:
            self._load_frames(transfer)
        for come in plan.from_disk:
            self.write_frames(come)
        for recast in plan.widened:
            self._recast("widen_checkpoint", recast)
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
                bucket = kind.bucket(rows, shape)
                _, shape, variant = self.programs.choose(kind, bucket, asked, rows)
                if kind.steps and self.loops.untried:
                    self._try_loop(kind, shape, variant, rows)
                parts = self._run_all(kind, shape, variant, rows, made)
                results = [results_of(kind, rows, made, self._read) for made in parts]
                made = parts[-1]
                pending.dispatches.append((kind, rows, results))
        return pending

    def _run_all(
        self, kind: StepKind, shape: Any, variant: Variant, rows: Sequence[Row], before: Made | None
    ) -> list[Made]:
        """Runs a dispatch: one program, or one for each of its steps, in order."""
        if not kind.steps or self.loops.inside:
            rest = kind.rest(rows, before)
            return [
                self._watched(kind, lambda: self._run(kind, shape, variant, rows, *rest)),
            ]
        batch = self._everywhere(self._packed(kind, shape, variant, rows))
        parts: list[Made] = []
        for number in range(kind.num_steps(rows)):
            rest = kind.rest_of_step(shape, number, parts[-1] if parts else None)
            parts.append(self._run_packed(kind, shape, variant, batch, rest))
        return parts

    def _watched(self, kind: StepKind, call: Callable[[], T]) -> T:
        """Runs a program; one with a loop that was not tried is watched.

        Raises:
            LoopFailed: that loop could not be compiled, or raised. What the state holds is not known.
        """
        if not (kind.steps and self.loops.untried):
            return call()
        try:
            return self._trial.guarded(call)
        finally:
            self._forget_loops()

    def _try_loop(self, kind: StepKind, shape: Any, variant: Variant, rows: Sequence[Row]) -> None:
        """Tries the loop over steps with a dispatch that is about to run, if its rows allow it.

        Raises:
            LoopFailed: as `_watched`.
        """
        geometry = self.model.geometry
        row = row_for_trial(
            [row for row in rows if isinstance(row, DecodeRow)],
            lambda: jax.device_get((self.state.tokens, self.state.lengths)),
            tokens=kind.tokens,
            grain=geometry.grain if geometry.has_state else None,
        )
        if row is None:
            return
        ring_row, alive = np.int32(row.row), []

        def call(part: DecodeRow, num_steps: int) -> jax.Array:
            batch = self._everywhere(self._packed(kind, shape, variant, [part]))
            made = self._run_packed(kind, shape, variant, batch, (np.int32(num_steps),))
            alive.append((batch, made))  # so that each call has arrays at other addresses
            return made.sampled.tokens[:, part.row]

        def read() -> dict[str, Any]:
            held = self.programs.get("read_row")(self.state, ring_row)
            if variant.adjusts:
                held["adjust"] = self.programs.get("read_adjust")(self._some_adjust(), ring_row)
            return held

        def write(held: dict[str, Any]) -> None:
            of_state = {name: part for name, part in held.items() if name != "adjust"}
            self.state = self.programs.get("write_row")(self.state, ring_row, of_state)
            if variant.adjusts:
                part = self._some_adjust(), ring_row, held["adjust"]
                self.adjust = self.programs.get("write_adjust")(*part)

        write(read())
        self._warm_step(kind, shape, variant)  # compiles what the trial runs
        try:
            self._trial.run(row, call, read, write, tokens=kind.tokens)
        finally:
            self._forget_loops()

    def _forget_loops(self) -> None:
        if not self.loops.inside:
            self.programs.forget_loops()

    def missing(self, plan: Plan, *, loads: bool = False) -> list[tuple]:
        """Keys of the programs that a plan, and the steps that follow it for certain, need and that are not compiled.

        Args:
            plan: the plan.
            loads: also the small programs that load what rows need before their first token.
        """
        small: list[tuple] = []
        if loads:
            dispatches = (rows for kind in self.kinds for rows in kind.dispatches(plan))
            begin = [row for rows in dispatches for row in rows if row.begins]
            if any(row.request.adjusts_logits for row in begin):
                small.append(("load_adjust",))
            if begin and "history" in self.specs.drafting:
                small.append(("load_history",))
        for name, recasts in (
            ("narrow_checkpoint", plan.narrowed),
            ("widen_checkpoint", plan.widened),
        ):
            if recasts:
                small += [(name,), ("write_checkpoint", len(recasts[0].target))]
        small += [("save_frames",)] * bool(plan.saves or plan.to_disk)
        small += [("load_frames",)] * bool(plan.loads or plan.from_disk)
        if plan.new_slots:
            small.append(("write_slots",))
        if plan.moves:
            small += [("move_row",)] + [("move_adjust",)] * (self.adjust is not None)
        return self.programs.missing(plan, small)

    def _save_frames(self, transfer: Transfer) -> None:
        self.host_frames.save(self.state, transfer)

    def _load_frames(self, transfer: Transfer) -> None:
        self.state = self.host_frames.load(self.state, transfer)

    def copy_out(self, frames: np.ndarray) -> list[jax.Array]:
        """As `host_frames.copy_out`, of the arena as it is now."""
        return copy_out(self.programs, self.state, frames)

    def bring(self, words: Sequence[jax.Array | np.ndarray]) -> list[jax.Array]:
        """Arrays uint32[frame_words] from anywhere, where the program reads them that writes them into the arena."""
        return jax.device_put([*words], self._words_at)

    def write_frames(self, come: Incoming) -> None:
        """Writes what comes from elsewhere into the arena."""
        self.state = copy_in(self.programs, self.state, come.arena, self.bring(come.words))

    def _recast(self, name: str, recast: Recast) -> None:
        """Writes a checkpoint in another form; the program of that name reads it."""
        words = self.programs.get(name)(self.state, recast.source)
        write = self.programs.get("write_checkpoint", len(recast.target))
        self.state = write(self.state, recast.target, words)

    def _write_slots(self, new_slots: list) -> None:
        write = self.programs.get("write_slots")
        for begin in range(0, len(new_slots), SLOT_WRITES):
            part = new_slots[begin : begin + SLOT_WRITES]
            part = part + [part[-1]] * (SLOT_WRITES - len(part))
            ids = np.array([slot for slot, _ in part], np.int32)
            frames = np.stack([frames for _, frames in part])
            self.state = write(self.state, ids, frames)

    def _move_row(self, source: int, target: int) -> None:
        places = np.int32(source), np.int32(target)
        self.state = self.programs.get("move_row")(self.state, *places)
        if self.adjust is not None:
            self.adjust = self.programs.get("move_adjust")(self.adjust, *places)

    def _load_adjust(self, row: int, counts: np.ndarray, bias: np.ndarray) -> None:
        """Loads what adjusts the logits of a row that is about to draw its first token."""
        load = self.programs.get("load_adjust")
        self.adjust = load(self._some_adjust(), np.int32(row), counts, bias)

    def _load_history(self, row: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Loads the tokens of a row that is about to draw its first token, those that a hit skipped too."""
        line = np.zeros(self.specs.drafting["history"].shape[1], np.int32)
        line[: len(tokens)] = tokens
        self.state = self.programs.get("load_history")(self.state, np.int32(row), line)

    def _read(self, name: str, shape: Any, *arrays: Any) -> Any:
        """Runs a program that reads something from arrays."""
        return self.programs.get(name, shape)(self.params, *arrays)

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
        return np.asarray(self._read("all_logprobs", padded.shape, padded))[:num]

    def _run(
        self,
        kind: StepKind,
        shape: Any,
        variant: Variant,
        rows: Sequence[Row],
        *rest: Any,
    ) -> Made:
        """Packs rows and dispatches one step; returns what the step makes beside the state."""
        batch = self._packed(kind, shape, variant, rows)
        return self._run_packed(kind, shape, variant, batch, rest)

    def _run_packed(
        self, kind: StepKind, shape: Any, variant: Variant, batch: Any, rest: tuple
    ) -> Made:
        args = self._arguments(kind, variant, batch, rest)
        run = self.programs.get(kind.name, shape, variant)
        self.state, adjust, made = run(*args)
        self.programs.serving.ran(StepKey(kind.name, shape, variant))
        if variant.adjusts:
            self.adjust = adjust
        return made

    def _packed(
        self, kind: StepKind, shape: Any, variant: Variant, rows: Sequence[Row]
    ) -> np.ndarray:
        layout = self.programs.layout(kind.name, shape, adjusts=variant.adjusts)
        return kind.pack(rows, layout, shape)

    def _arguments(self, kind: StepKind, variant: Variant, batch: Any, rest: tuple) -> tuple:
        """The arguments of the program of a step."""
        weights = (self.params,) if kind.takes_weights else ()
        adjust = self._some_adjust() if variant.adjusts else None
        return *weights, self.state, adjust, batch, *rest

    def _inert(self, kind: StepKind, shape: Any, variant: Variant) -> tuple:
        """The same without rows."""
        batch = self._packed(kind, shape, variant, [])
        return self._arguments(kind, variant, batch, self._inert_rest(kind, shape))

    def _inert_rest(self, kind: StepKind, shape: Any) -> tuple:
        if kind.steps and not self.loops.inside:
            return kind.rest_of_step(shape, 0, None)
        return kind.inert(shape)

    def _some_adjust(self) -> Adjust:
        if self.adjust is None:
            self.adjust = make_adjust(self.model.config, self.engine.max_rows)
            if self._shards is not None:
                self.adjust = self._everywhere(self.adjust)
        return self.adjust

    # --- around it --------------------------------------------------------------------------------

    def warm_ups(self, *, logprobs: bool = False, adjusts: bool = False) -> list[WarmUp]:
        """All programs that a warm-up compiles. Each is run once with inert rows.

        Args:
            logprobs, adjusts: also the programs that report log-probabilities, and those that adjust logits.
        """

        def run(job: Callable[..., object], *args: Any) -> None:
            job(*args)
            jax.block_until_ready(self.state)

        steps = self.programs.steps_to_warm(logprobs=logprobs, adjusts=adjusts)
        small = [
            (name, functools.partial(run, *job))
            for name, *job in self._inert_changes(any(variant.adjusts for *_, variant in steps))
        ]
        return self.programs.warm_ups(small, steps, functools.partial(run, self._warm_step))

    def _inert_changes(self, adjusts: bool) -> list[tuple]:
        """Names of small programs, and for each the method and arguments that run it without an effect."""
        sink, vocab = self.engine.max_rows, self.model.config.vocab_size
        jobs: list[tuple] = [("move_row", self._move_row, sink, sink)]
        if "history" in self.specs.drafting:
            jobs += [("load_history", self._load_history, sink, [])]
        if self._moves_frames:
            frame: np.ndarray = np.zeros(1, np.int32)
            count = 1 if self._shards is None else self._shards.count
            words: np.ndarray = np.zeros(count * self.model.geometry.frame_words, np.uint32)
            jobs += [("save_frames", self.copy_out, frame)]
            jobs += [("load_frames", self.write_frames, Incoming(arena=frame, words=[words]))]
        if self.model.geometry.narrow is not None:
            sizes = self.model.geometry.checkpoint_frames
            forms: list[np.ndarray] = [np.zeros(count, np.int32) for count in sizes]
            for name, (source, target) in (
                ("narrow_checkpoint", forms),
                ("widen_checkpoint", forms[::-1]),
            ):
                jobs += [(name, self._recast, name, Recast(source=source, target=target))]
        if self.model.geometry.has_state:
            empty_slot = (0, (0,) * self.model.geometry.state_frames)
            jobs += [("write_slots", self._write_slots, [empty_slot])]
        if adjusts:
            counts: np.ndarray = np.zeros(vocab, np.int32)
            bias: np.ndarray = np.zeros(vocab, np.float32)
            jobs += [("load_adjust", self._load_adjust, sink, counts, bias)]
            jobs += [("move_adjust", self._move_row, sink, sink)]
        return jobs

    def _warm_step(self, kind: StepKind, shape: Any, variant: Variant) -> None:
        rest = self._inert_rest(kind, shape)
        self._watched(kind, lambda: self._run(kind, shape, variant, [], *rest))

    def close(self) -> None:
        """Frees the state and drops the weights."""
        self.programs.close()
        # Nothing runs a step any more.
        self.state = self.adjust = self.params = None  # type: ignore[assignment]
        self.host_frames.clear()

    def rebuild(self) -> None:
        """Throws the state away, consumed or not, and starts from an empty one. Frames of the host stay."""
        # What is there is freed before its like is made.
        self.state = self.adjust = None  # type: ignore[assignment]
        self.state = self._empty_state()

    def _empty_state(self) -> State:
        return make_state(self.specs) if self._shards is None else self._shards.state(self.specs)

    def _everywhere(self, tree: T) -> T:
        """Arrays of the host, on all devices."""
        return jax.device_put(tree) if self._shards is None else self._shards.put_everywhere(tree)

"""Where host and device meet: owns weights and state, turns plans into dispatches and results into tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.config.sampling_params import MAX_LOGPROBS
from hybrid_jax.engine import adjust as adjusting
from hybrid_jax.engine import batches, pack, steps
from hybrid_jax.engine.adjust import Adjust, make_adjust, row_of
from hybrid_jax.engine.blocks import Model
from hybrid_jax.engine.exact import exact_step
from hybrid_jax.engine.kernel_choice import Kernels
from hybrid_jax.engine.pending import Pending
from hybrid_jax.engine.programs.behind import Behind
from hybrid_jax.engine.programs.compiling import Compiling, Program, shapes_of
from hybrid_jax.engine.programs.store import ProgramStore
from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.engine.this_device import device_of
from hybrid_jax.geometry import Geometry
from hybrid_jax.schedule import bucket
from hybrid_jax.schedule.plan import DecodeRow, ForkRow, Plan, PrefillRow
from hybrid_jax.state import State, make_state, state_specs
from pallas_kernels import jax_triton

KINDS = {
    bucket.PrefillBucket: "prefill",
    bucket.ForkBucket: "fork",
    bucket.DecodeBucket: "decode",
    bucket.ExactBucket: "exact",
}
Shape = bucket.PrefillBucket | bucket.ForkBucket | bucket.DecodeBucket | bucket.ExactBucket
STEPS = {
    "prefill": steps.prefill,
    "fork": steps.fork,
    "decode": steps.decode,
    "exact": exact_step,
}
MOVES = {
    "write_slots": steps.write_slots,
    "move_row": steps.move_row,
    "load_adjust": adjusting.load_row,
    "move_adjust": adjusting.move_row,
}


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
        return " logprobs" * (self.num_logprobs > 0) + " adjusted" * self.adjusts


PLAIN = Variant()


def _cost(shape) -> tuple[int, int]:
    """Orders shapes by what they can serve: the largest chunk and the most decoding rows first, forks last."""
    rank = {bucket.ForkBucket: 0}.get(type(shape), 1)
    return rank, shape.rows * getattr(shape, "tokens", 64)


class Runner:
    """Executes plans on one device.

    Args:
        config: the model. params: its weights, in the engine's dtype.
        engine: engine settings.
        geometry: shapes. num_frames, max_slots, max_model_len: sizes of the state.
        kernels: what steps are made of.
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
        self._platform = device_of(params).platform
        self.kernels = kernels
        if "triton" in (kernels.scan, kernels.sampling):
            jax_triton.load()  # a stored program with Triton kernels makes a call that it registers
        self.model = Model(
            config,
            geometry,
            kernels=kernels.steps,
            scan=kernels.scan,
            sampling=kernels.sampling,
        )
        self.engine = engine
        self.max_pages = geometry.num_pages(max_model_len)
        self.specs = state_specs(
            config,
            geometry,
            num_frames=num_frames,
            max_slots=max_slots,
            max_rows=engine.max_rows,
            window=engine.grain if engine.exact else 1,
            aligned=engine.exact,
        )
        self.state: State = make_state(self.specs)
        self.adjust: Adjust | None = None  # made for the first request that needs it
        self.num_traces = 0
        self.compiling = Compiling()
        self._executables: dict[tuple, Program] = {}
        self._since: dict[
            tuple, int
        ] = {}  # the generation of requests that first may run a program
        self._generation = 0
        self._behind = Behind()

    # --- executables ------------------------------------------------------------------------------

    def executable(self, kind: str, *key) -> Program:
        """The step for one kind and bucket; compiled at its first call."""
        known = self._executables.get((kind, *key))
        if known is None:
            known = self._executables[kind, *key] = self._build(kind, *key)
        return known

    def layout(self, kind: str, shape, *, adjusts: bool = False) -> pack.Layout:
        """Columns of the packed rows of a prefill, fork, decode or exact dispatch."""
        pages = self.model.geometry.frames_per_page
        if kind == "prefill":
            layout = pack.prefill_layout(
                tokens=shape.tokens, width=shape.width, frames_per_page=pages
            )
        elif kind == "fork":
            layout = pack.fork_layout(frames_per_page=pages)
        elif kind == "decode":
            layout = pack.decode_layout(width=shape.width, frames_per_page=pages)
        else:
            tokens = self.engine.grain
            layout = pack.exact_layout(tokens=tokens, width=shape.width, frames_per_page=pages)
        extra = pack.adjust_fields(self.model.config.vocab_size) if adjusts else ()
        return pack.Layout(layout.fields + extra)

    def _build(self, kind: str, shape=None, variant: Variant = PLAIN) -> Program:
        static = {}
        if kind in MOVES:
            function, donated = MOVES[kind], 0
        elif kind == "prompt_logprobs":
            static = {"model": self.model, "num_logprobs": MAX_LOGPROBS}
            function, donated = functools.partial(steps.prompt_logprobs, **static), ()
        else:
            static = {
                "model": self.model,
                "layout": self.layout(kind, shape, adjusts=variant.adjusts),
                "num_logprobs": variant.num_logprobs,
            }
            if kind == "decode":
                static["max_steps"] = shape.steps
            if kind == "prefill":
                static["logits_rows"] = bucket.logits_rows(self.engine, shape.rows)
            function = functools.partial(STEPS[kind], **static)
            donated = (0, 1) if kind == "fork" else (1, 2)

        def traced(*args):
            self.num_traces += 1
            return function(*args)

        traced.__name__ = kind
        step = kind in STEPS
        return Program(
            traced,
            donated,
            self.compiling,
            self._platform,
            name=f"{shape}{variant.suffix}" if step else kind,
            store=self._store,
            identity=f"{kind} {shape} {static}",
        )

    def begin(self) -> int:
        """The generation of a request that begins now: it may run what is compiled by now.

        What is compiled behind while it runs is for requests to come. So which programs a request runs, and with them
        its last bits, do not change on its way.
        """
        known = self._executables.items()
        new = [key for key, program in known if program.compiled and key not in self._since]
        if new:
            self._generation += 1
            self._since |= dict.fromkeys(new, self._generation)
        return self._generation

    def _serving(self, kind: str, wanted: Shape, variant: Variant, rows: Sequence) -> Shape:
        """The shape that serves: `wanted`, or the cheapest larger one while that is newer than a request of these rows.

        Where shapes are fine, programs are compiled in seconds, and padding costs more.
        """
        oldest = min(row.request.generation for row in rows)

        def usable(shape: Shape) -> bool:
            return self._since.get((kind, shape, variant), oldest + 1) <= oldest

        if self.engine.shapes == "fine" or usable(wanted):
            return wanted
        larger = bucket.larger(self.engine, wanted, max_pages=self.max_pages)
        return next((shape for shape in larger if usable(shape)), wanted)

    def _step_shape(self, kind: str, wanted: Shape, rows: list) -> Shape:
        """The shape that serves; what would fit better is compiled behind, for calls to come."""
        variant = self._variant(rows)
        shape = self._serving(kind, wanted, variant, rows)
        if shape != wanted:
            self._behind.compile((kind, wanted, variant), lambda: self._ahead(wanted, variant))
        return shape

    # --- dispatch ---------------------------------------------------------------------------------

    def execute(self, plan: Plan) -> Pending:
        """Dispatches a plan and returns at once; the state is rebound in the same statement as each call."""
        self.compiling.begin("turns", functools.partial(self._num_missing, plan))
        pending = self._dispatch(plan)
        self.compiling.end_turn()
        return pending

    def _dispatch(self, plan: Plan) -> Pending:
        pending = Pending(plan, exact=self.engine.exact)
        if plan.new_slots:
            self._write_slots(plan.new_slots)
        for source, target in plan.moves:
            self._move_row(source, target)
            if self.adjust is not None:
                self._move_adjust(source, target)
        if self.engine.exact:
            # A row whose prompt ends here decodes in a second dispatch, all others in the first.
            begun = {row.row for row in plan.prefill}
            joined = [row for row in plan.decode if row.row not in begun]
            later = [row for row in plan.decode if row.row in begun]
            if plan.prefill or joined:
                pending.prefill, h = self._exact(plan.prefill, joined)
                pending.prompt = self._prompt_logprobs(plan.prefill, h)
                pending.joined = frozenset(row.row for row in joined)
            if later:
                pending.decode, _ = self._exact([], later)
            return pending
        if plan.prefill:
            pending.prefill, logits, h = self._prefill(plan.prefill)
            pending.prompt = self._prompt_logprobs(plan.prefill, h)
            if plan.forks:
                pending.forks = self._fork(plan.forks, logits)
        if plan.decode:
            pending.decode = self._decode(plan.decode, plan.num_steps)
        return pending

    def _num_missing(self, plan: Plan) -> int:
        """Programs that a plan, and the decode steps that follow on it, need and that are not compiled."""
        needed: set[tuple] = {("write_slots", n) for n in self._slot_sizes(len(plan.new_slots))}
        if plan.moves:
            needed |= {("move_row",)} | ({("move_adjust",)} if self.adjust is not None else set())
        if self.engine.exact:
            needed.add(("exact", self._exact_shape(), self._variant([])))
        else:
            if plan.prefill:
                variant = self._variant(plan.prefill)
                wanted = self._prefill_shape(plan.prefill)
                shape = self._serving("prefill", wanted, variant, plan.prefill)
                needed.add(("prefill", shape, variant))
            if plan.forks:
                fork = bucket.fork_bucket(self.engine, shape.rows)
                needed.add(("fork", fork, self._variant(plan.forks)))
            begun = [row for row in plan.prefill if row.samples and row.request.max_tokens > 1]
            if rows := [*plan.decode, *begun]:
                variant = self._variant(rows)
                shape = self._decode_shape(rows, max(plan.num_steps, 1))
                needed.add(("decode", self._serving("decode", shape, variant, rows), variant))
        known = self._executables
        return sum(key not in known or not known[key].compiled for key in needed)

    def _slot_sizes(self, count: int) -> list[int]:
        """Sizes of the dispatches that write `count` lines of the slot table."""
        sizes = bucket.slot_sizes(self.engine)
        parts = [min(sizes[-1], count - begin) for begin in range(0, count, sizes[-1])]
        return [next(size for size in sizes if size >= part) for part in parts]

    def _write_slots(self, new_slots: list) -> None:
        for size in self._slot_sizes(len(new_slots)):
            part, new_slots = new_slots[:size], new_slots[size:]
            part = part + [part[-1]] * (size - len(part))
            ids = np.array([slot for slot, _ in part], np.int32)
            frames = np.stack([frames for _, frames in part])
            write = self.executable("write_slots", size)
            self.state = write(self.state, ids, frames)

    def _move_row(self, source: int, target: int) -> None:
        move = self.executable("move_row")
        self.state = move(self.state, np.int32(source), np.int32(target))

    def _move_adjust(self, source: int, target: int) -> None:
        move = self.executable("move_adjust")
        self.adjust = move(self._some_adjust(), np.int32(source), np.int32(target))

    def _prefill(self, rows: list[PrefillRow]) -> tuple[Sampled, jax.Array, jax.Array]:
        self._load_adjust([row for row in rows if row.samples])
        shape = self._step_shape("prefill", self._prefill_shape(rows), rows)
        return self._run("prefill", shape, rows)

    def _prefill_shape(self, rows: list[PrefillRow]) -> bucket.PrefillBucket:
        return bucket.prefill_bucket(
            self.engine,
            num_rows=len(rows),
            num_tokens=max(len(row.tokens) for row in rows),
            num_pages=max(len(row.pages) for row in rows),
            max_pages=self.max_pages,
        )

    def _fork(self, rows: list[ForkRow], logits: jax.Array) -> Sampled:
        self._load_adjust(rows)
        shape = bucket.ForkBucket(logits.shape[0])
        return self._run("fork", shape, rows, logits, np.int32(len(rows)))[0]

    def _decode(self, rows: list[DecodeRow], num_steps: int) -> Sampled:
        shape = self._step_shape("decode", self._decode_shape(rows, num_steps), rows)
        return self._run("decode", shape, rows, np.int32(num_steps))[0]

    def _decode_shape(
        self, rows: Sequence[DecodeRow | PrefillRow], num_steps: int
    ) -> bucket.DecodeBucket:
        return bucket.decode_bucket(
            self.engine,
            num_rows=max(row.row for row in rows) + 1,
            num_steps=num_steps,
            num_pages=max(len(row.pages) for row in rows),
            max_pages=self.max_pages,
        )

    def _exact(
        self, prefill: list[PrefillRow], decode: list[DecodeRow]
    ) -> tuple[Sampled, jax.Array]:
        """Prompt chunks and decode steps alike, each row at its ring row of one [max_rows, grain] window."""
        self._load_adjust([row for row in prefill if row.samples])
        return self._run("exact", self._exact_shape(), [*prefill, *decode])

    def _exact_shape(self) -> bucket.ExactBucket:
        return bucket.exact_bucket(self.engine, max_pages=self.max_pages)

    def _prompt_logprobs(self, rows: list[PrefillRow], h: jax.Array) -> Sampled | None:
        """What the hidden states [R, T, D] of a prefill say about the prompts of rows that ask."""
        wanted = [line for line, row in enumerate(rows) if row.request.lacks_prompt_logprobs]
        if not wanted:
            return None
        tokens = np.zeros(h.shape[:2], np.int32)
        for line in wanted:
            row = rows[line]
            following = row.request.prompt[row.start + 1 : row.start + len(row.tokens) + 1]
            place = row.row if self.engine.exact else line
            tokens[place, : len(following)] = following
        return self.executable("prompt_logprobs", tokens.shape)(self.params, h, tokens)

    def _run(self, kind: str, shape, rows: list, *rest, variant: Variant | None = None) -> list:
        """Packs rows and dispatches one step; what it returns beside the state."""
        variant = self._variant(rows) if variant is None else variant
        run, args = self._call(kind, shape, rows, rest, variant)
        self.state, adjust, *results = run(*args)
        # Nothing could serve in its place, so all may run it.
        self._since.setdefault((kind, shape, variant), 0)
        if variant.adjusts:
            self.adjust = adjust
        return results

    def _call(
        self, kind: str, shape, rows: list, rest: Sequence, variant: Variant
    ) -> tuple[Program, tuple]:
        """The program of a step, and what it is called with."""
        layout = self.layout(kind, shape, adjusts=variant.adjusts)
        batch = self._batch(kind, shape, rows, layout)
        weights = () if kind == "fork" else (self.params,)
        adjust = self._some_adjust() if variant.adjusts else None
        return self.executable(kind, shape, variant), (*weights, self.state, adjust, batch, *rest)

    def _batch(self, kind: str, shape, rows: list, layout: pack.Layout) -> np.ndarray:
        most, size = self.engine.max_rows, shape.rows
        if kind == "prefill":
            return batches.prefill_batch(rows, layout, size=size, sink=most)
        if kind == "fork":
            return batches.fork_batch(rows, layout, size=most, sink=most)
        if kind == "decode":
            return batches.decode_batch(rows, layout, size=size)
        return batches.exact_batch(rows, layout, size=size, grain=self.engine.grain)

    def _variant(self, rows: list) -> Variant:
        """Exact mode always takes the whole: two executables would round differently."""
        rows = [row for row in rows if not isinstance(row, PrefillRow) or row.samples]
        logprobs = any(row.request.params.logprobs is not None for row in rows)
        return Variant(
            num_logprobs=MAX_LOGPROBS if logprobs or self.engine.exact else 0,
            adjusts=self.engine.exact or any(row.request.adjusts_logits for row in rows),
        )

    def _some_adjust(self) -> Adjust:
        if self.adjust is None:
            self.adjust = make_adjust(self.model.config, self.engine.max_rows)
        return self.adjust

    def _load_adjust(self, rows: list) -> None:
        """What adjusts the logits of rows that are about to draw their first token."""
        for row in rows:
            if row.request.adjusts_logits:
                counts, bias = row_of(row.request, self.model.config.vocab_size)
                load = self.executable("load_adjust")
                self.adjust = load(self._some_adjust(), np.int32(row.row), counts, bias)

    # --- around it --------------------------------------------------------------------------------

    def warmup_jobs(
        self, *, logprobs: bool = False, adjusts: bool = False
    ) -> list[tuple[str, Callable[[], None]]]:
        """Names and calls that together compile every program; each runs one with inert rows.

        Args:
            logprobs, adjusts: those that report log-probabilities, and that adjust logits, too.
        """
        sink = self.engine.max_rows
        jobs: list[tuple[str, Callable]] = [("move_row", lambda: self._move_row(sink, sink))]
        if self.model.geometry.has_state:
            line = (0, (0,) * self.model.geometry.state_frames)
            jobs += [
                (f"write_slots {n}", functools.partial(self._write_slots, [line] * n))
                for n in bucket.slot_sizes(self.engine)
            ]
        if adjusts or self.engine.exact:
            jobs += [
                ("load_adjust", self._warm_adjust),
                ("move_adjust", lambda: self._move_adjust(sink, sink)),
            ]
        for variant in self._warm_variants(logprobs, adjusts):
            for shape in bucket.all_buckets(self.engine, max_pages=self.max_pages):
                name = f"{shape}{variant.suffix}"
                jobs.append((name, functools.partial(self._warm_step, shape, variant)))
        return [
            (name, functools.partial(self._warm, job, len(jobs) - done))
            for done, (name, job) in enumerate(jobs)
        ]

    def _warm_variants(self, logprobs: bool, adjusts: bool) -> list[Variant]:
        if self.engine.exact:
            return [self._variant([])]
        return [
            Variant(count, adjusting)
            for adjusting in (False, True)[: 1 + adjusts]
            for count in (0, MAX_LOGPROBS)[: 1 + logprobs]
        ]

    def _warm(self, job: Callable[[], None], num_left: int) -> None:
        self.compiling.begin("warm-up", lambda: num_left)
        job()
        jax.block_until_ready(self.state)

    def _warm_adjust(self) -> None:
        vocab = self.model.config.vocab_size
        empty = np.zeros(vocab, np.int32), np.zeros(vocab, np.float32)
        load = self.executable("load_adjust")
        self.adjust = load(self._some_adjust(), np.int32(self.engine.max_rows), *empty)

    def _warm_step(self, shape, variant: Variant) -> None:
        kind, rest = self._warm_arguments(shape)
        self._run(kind, shape, [], *rest, variant=variant)

    def _warm_arguments(self, shape) -> tuple[str, tuple]:
        """The kind of a step, and what it takes beside weights, state and rows."""
        kind, none = KINDS[type(shape)], np.int32(0)
        rest = {
            "fork": (np.zeros((shape.rows, self.model.config.vocab_size), np.float32), none),
            "decode": (none,),
        }
        return kind, rest.get(kind, ())

    def ahead_jobs(
        self, *, logprobs: bool = False, adjusts: bool = False
    ) -> dict[str, Callable[[], None]]:
        """The steps of `warmup_jobs` by their names, as calls that compile one and run nothing. Any thread may call
        them, several at a time. Those that serve in place of others come first."""
        jobs = {}
        for variant in self._warm_variants(logprobs, adjusts):
            shapes = bucket.all_buckets(self.engine, max_pages=self.max_pages)
            for shape in sorted(shapes, key=_cost, reverse=True):
                jobs[f"{shape}{variant.suffix}"] = self._ahead(shape, variant)
        return jobs

    def _ahead(self, shape: Shape, variant: Variant) -> Callable[[], None]:
        """A call for any thread that compiles a step."""
        kind, rest = self._warm_arguments(shape)
        program, args = self._call(kind, shape, [], rest, variant)
        return functools.partial(program.compile_ahead, *shapes_of(args))

    def close(self) -> None:
        """Frees the state and drops the weights."""
        self._behind.close()
        self.state = self.adjust = self.params = None
        self._executables.clear()

    def rebuild(self) -> None:
        """Throws the state away, consumed or not, and starts from an empty one."""
        self.state = self.adjust = None
        self.state = make_state(self.specs)

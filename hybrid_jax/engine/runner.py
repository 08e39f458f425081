"""Where host and device meet: owns weights and state, turns plans into dispatches and results into tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.engine import batches, bucket, pack, steps
from hybrid_jax.engine.blocks import Model
from hybrid_jax.engine.exact import exact_step
from hybrid_jax.engine.pending import Pending
from hybrid_jax.engine.plan import DecodeRow, ForkRow, Plan, PrefillRow
from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.geometry import Geometry
from hybrid_jax.sampling_params import MAX_LOGPROBS
from hybrid_jax.state import State, make_state, state_specs

SLOT_BUCKETS = (1, 8, 64)
KINDS = {
    bucket.PrefillBucket: "prefill",
    bucket.ForkBucket: "fork",
    bucket.DecodeBucket: "decode",
    bucket.ExactBucket: "exact",
}


class Runner:
    """Executes plans on one device.

    Args:
        config: the model. params: its weights, in the engine's dtype.
        engine: engine settings.
        geometry: shapes. num_frames, max_slots, max_model_len: sizes of the state.
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
    ) -> None:
        self.model = Model(config, geometry)
        self.engine = engine
        self.params = params
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
        self.num_traces = 0
        self._executables: dict[tuple, Callable] = {}

    # --- executables ------------------------------------------------------------------------------

    def executable(self, kind: str, *key) -> Callable:
        """The jitted step for one kind and bucket; compiled at its first call."""
        known = self._executables.get((kind, *key))
        if known is None:
            known = self._executables[kind, *key] = self._build(kind, *key)
        return known

    def layout(self, kind: str, shape) -> pack.Layout:
        """Columns of the packed rows of a prefill, fork, decode or exact dispatch."""
        pages = self.model.geometry.frames_per_page
        if kind == "prefill":
            return pack.prefill_layout(
                tokens=shape.tokens, width=shape.width, frames_per_page=pages
            )
        if kind == "fork":
            return pack.fork_layout(frames_per_page=pages)
        if kind == "decode":
            return pack.decode_layout(width=shape.width, frames_per_page=pages)
        return pack.exact_layout(tokens=self.engine.grain, width=shape.width, frames_per_page=pages)

    def _build(self, kind: str, shape=None, num_logprobs: int = 0) -> Callable:
        if kind == "write_slots":
            function, donated = steps.write_slots, 0
        elif kind == "move_row":
            function, donated = steps.move_row, 0
        else:
            static = {
                "model": self.model,
                "layout": self.layout(kind, shape),
                "num_logprobs": num_logprobs,
            }
            if kind == "decode":
                static["max_steps"] = shape.steps
            step = {"prefill": steps.prefill, "decode": steps.decode, "exact": exact_step}
            step["fork"] = steps.fork
            function, donated = functools.partial(step[kind], **static), int(kind != "fork")

        def traced(*args):
            self.num_traces += 1
            return function(*args)

        traced.__name__ = kind
        return jax.jit(traced, donate_argnums=donated)

    # --- dispatch ---------------------------------------------------------------------------------

    def execute(self, plan: Plan) -> Pending:
        """Dispatches a plan and returns at once; the state is rebound in the same statement as each call."""
        pending = Pending(plan, exact=self.engine.exact)
        if plan.new_slots:
            self._write_slots(plan.new_slots)
        for source, target in plan.moves:
            move = self.executable("move_row")
            self.state = move(self.state, np.int32(source), np.int32(target))
        if self.engine.exact:
            # A row whose prompt ends here decodes in a second dispatch, all others in the first.
            begun = {row.row for row in plan.prefill}
            joined = [row for row in plan.decode if row.row not in begun]
            later = [row for row in plan.decode if row.row in begun]
            if plan.prefill or joined:
                pending.prefill = self._exact(plan.prefill, joined)
                pending.joined = frozenset(row.row for row in joined)
            if later:
                pending.decode = self._exact([], later)
            return pending
        if plan.prefill:
            pending.prefill, logits = self._prefill(plan.prefill)
            if plan.forks:
                pending.forks = self._fork(plan.forks, logits)
        if plan.decode:
            pending.decode = self._decode(plan.decode, plan.num_steps)
        return pending

    def _write_slots(self, new_slots: list) -> None:
        for begin in range(0, len(new_slots), SLOT_BUCKETS[-1]):
            part = new_slots[begin : begin + SLOT_BUCKETS[-1]]
            size = next(n for n in SLOT_BUCKETS if n >= len(part))
            part = part + [part[-1]] * (size - len(part))
            ids = np.array([slot for slot, _ in part], np.int32)
            frames = np.array([frames for _, frames in part], np.int32)
            write = self.executable("write_slots", size)
            self.state = write(self.state, ids, frames)

    def _prefill(self, rows: list[PrefillRow]) -> tuple[Sampled, jax.Array]:
        shape = bucket.prefill_bucket(
            self.engine,
            num_rows=len(rows),
            num_tokens=max(len(row.tokens) for row in rows),
            num_pages=max(len(row.pages) for row in rows),
            max_pages=self.max_pages,
        )
        layout, sink = self.layout("prefill", shape), self.engine.max_rows
        batch = batches.prefill_batch(rows, layout, size=shape.rows, sink=sink)
        run = self.executable("prefill", shape, _num_logprobs(rows))
        self.state, sampled, logits = run(self.params, self.state, batch)
        return sampled, logits

    def _fork(self, rows: list[ForkRow], logits: jax.Array) -> Sampled:
        shape, most = bucket.ForkBucket(logits.shape[0]), self.engine.max_rows
        batch = batches.fork_batch(rows, self.layout("fork", shape), size=most, sink=most)
        run = self.executable("fork", shape, _num_logprobs(rows))
        self.state, sampled = run(self.state, logits, batch, np.int32(len(rows)))
        return sampled

    def _decode(self, rows: list[DecodeRow], num_steps: int) -> Sampled:
        shape = bucket.decode_bucket(
            self.engine,
            num_rows=max(row.row for row in rows) + 1,
            num_steps=num_steps,
            num_pages=max(len(row.pages) for row in rows),
            max_pages=self.max_pages,
        )
        batch = batches.decode_batch(rows, self.layout("decode", shape), size=shape.rows)
        run = self.executable("decode", shape, _num_logprobs(rows))
        self.state, sampled = run(self.params, self.state, batch, np.int32(num_steps))
        return sampled

    def _exact(self, prefill: list[PrefillRow], decode: list[DecodeRow]) -> Sampled:
        """Prompt chunks and decode steps alike, each row at its ring row of one [max_rows, grain] window."""
        shape = bucket.exact_bucket(self.engine, max_pages=self.max_pages)
        layout, grain = self.layout("exact", shape), self.engine.grain
        batch = batches.exact_batch(prefill, decode, layout, size=shape.rows, grain=grain)
        # Always with log-probabilities: with and without would be two executables.
        run = self.executable("exact", shape, MAX_LOGPROBS)
        self.state, sampled = run(self.params, self.state, batch)
        return sampled

    def warmup(
        self, progress: Callable[[int, int, str], None] | None = None, *, logprobs: bool = False
    ) -> int:
        """Runs every shape once with inert rows, which compiles it; returns how many there are."""
        jobs: list[tuple[str, Callable]] = [("move_row", self._warm_move)]
        if self.model.geometry.has_state:
            line = (0, (0,) * self.model.geometry.state_frames)
            jobs += [
                (f"write_slots {n}", functools.partial(self._write_slots, [line] * n))
                for n in SLOT_BUCKETS
            ]
        for shape in bucket.all_buckets(self.engine, max_pages=self.max_pages):
            jobs.append((str(shape), functools.partial(self._warm_step, shape, logprobs)))
        for done, (name, job) in enumerate(jobs):
            if progress is not None:
                progress(done, len(jobs), name)
            job()
        jax.block_until_ready(self.state)
        if progress is not None:
            progress(len(jobs), len(jobs), "done")
        return len(jobs)

    def _warm_move(self) -> None:
        sink = np.int32(self.engine.max_rows)
        self.state = self.executable("move_row")(self.state, sink, sink)

    def _warm_step(self, shape, logprobs: bool) -> None:
        kind, most, none = KINDS[type(shape)], self.engine.max_rows, np.int32(0)
        layout, size = self.layout(kind, shape), shape.rows
        if kind == "prefill":
            args = (batches.prefill_batch([], layout, size=size, sink=most),)
        elif kind == "fork":
            logits = np.zeros((size, self.model.config.vocab_size), np.float32)
            args = (logits, batches.fork_batch([], layout, size=most, sink=most), none)
        elif kind == "decode":
            args = (batches.decode_batch([], layout, size=size), none)
        else:
            grain = self.engine.grain
            args = (batches.exact_batch([], [], layout, size=size, grain=grain),)
        weights = () if kind == "fork" else (self.params,)
        for num_logprobs in (
            (MAX_LOGPROBS,) if kind == "exact" else (0, MAX_LOGPROBS)[: 1 + logprobs]
        ):
            run = self.executable(kind, shape, num_logprobs)
            self.state, *_ = run(*weights, self.state, *args)

    def close(self) -> None:
        """Frees the state and drops the weights."""
        self.state = self.params = None
        self._executables.clear()

    def rebuild(self) -> None:
        """Throws the state away, consumed or not, and starts from an empty one."""
        self.state = None
        self.state = make_state(self.specs)


def _num_logprobs(rows: list) -> int:
    wanted = any(row.request.params.logprobs is not None for row in rows)
    return MAX_LOGPROBS if wanted else 0

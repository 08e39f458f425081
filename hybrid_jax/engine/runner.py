"""Where host and device meet: owns weights and state, turns plans into dispatches and results into tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.engine import bucket, pack, steps
from hybrid_jax.engine.blocks import Model
from hybrid_jax.engine.exact import exact_step
from hybrid_jax.engine.plan import Plan, Tokens
from hybrid_jax.engine.request import Request, TokenLogprobs
from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.geometry import Geometry
from hybrid_jax.sampling_params import MAX_LOGPROBS
from hybrid_jax.state import State, make_state, state_specs

SLOT_BUCKETS = (1, 8, 64)


@dataclass
class Pending:
    """Results of one plan that may still be computing; `read` waits for them.

    Attributes:
        plan: what was asked.
        prefill, decode: device results of the two dispatches, or None.
        rows: exact mode only: {"prefill": where each ring row's prefill result lies}.
    """

    plan: Plan
    prefill: Sampled | None = None
    decode: Sampled | None = None
    rows: dict = field(default_factory=dict)

    def read(self) -> Tokens:
        """Blocks until the device is done and copies the tokens to the host."""
        out = Tokens(prefill=[], decode=[])
        if self.prefill is not None:
            sampled = jax.device_get(self.prefill)
            for line, row in enumerate(self.plan.prefill):
                place = self.rows.get("prefill", {}).get(row.row, line)
                out.prefill.append(int(sampled.tokens[place]))
                if row.request.params.logprobs is not None:
                    out.prefill_logprobs.append(_entry(sampled, (place,), row.request))
                else:
                    out.prefill_logprobs.append(None)
        if self.decode is not None:
            sampled = jax.device_get(self.decode)
            tokens = sampled.tokens if sampled.tokens.ndim == 2 else sampled.tokens[None]
            for row in self.plan.decode:
                column = tokens[: row.num_steps, row.row]
                count = int((column >= 0).sum())
                out.decode.append([int(t) for t in column[:count]])
                entries = []
                if row.request.params.logprobs is not None:
                    two = sampled.tokens.ndim == 2
                    for step in range(count):
                        place = (step, row.row) if two else (row.row,)
                        entries.append(_entry(sampled, place, row.request))
                out.decode_logprobs.append(entries)
        return out


def _entry(sampled: Sampled, place: tuple[int, ...], request: Request) -> TokenLogprobs:
    found, count = sampled.logprobs, request.params.logprobs
    return TokenLogprobs(
        token_id=int(sampled.tokens[place]),
        logprob=float(found.chosen[place]),
        rank=int(found.rank[place]),
        top=tuple(
            (int(token), float(value))
            for token, value in zip(
                found.ids[place][:count], found.values[place][:count], strict=True
            )
        ),
    )


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
        """Columns of the packed rows of a prefill, decode or exact dispatch."""
        pages = self.model.geometry.frames_per_page
        if kind == "prefill":
            return pack.prefill_layout(
                tokens=shape.tokens, width=shape.width, frames_per_page=pages
            )
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
            function, donated = functools.partial(step[kind], **static), 1

        def traced(*args):
            self.num_traces += 1
            return function(*args)

        traced.__name__ = kind
        return jax.jit(traced, donate_argnums=donated)

    # --- dispatch ---------------------------------------------------------------------------------

    def execute(self, plan: Plan) -> Pending:
        """Dispatches a plan and returns at once; the state is rebound in the same statement as each call."""
        pending = Pending(plan)
        if plan.new_slots:
            self._write_slots(plan.new_slots)
        for source, target in plan.moves:
            move = self.executable("move_row")
            self.state = move(self.state, np.int32(source), np.int32(target))
        if self.engine.exact:
            if plan.prefill:
                pending.prefill = self._exact(plan.prefill, ())
                pending.rows["prefill"] = {row.row: row.row for row in plan.prefill}
            if plan.decode:
                pending.decode = self._exact((), plan.decode)
            return pending
        if plan.prefill:
            pending.prefill = self._prefill(plan.prefill)
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

    def _prefill(self, rows: list) -> Sampled:
        shape = bucket.prefill_bucket(
            self.engine,
            num_rows=len(rows),
            num_tokens=max(len(row.tokens) for row in rows),
            num_pages=max(len(row.pages) for row in rows),
            max_pages=self.max_pages,
        )
        layout = self.layout("prefill", shape)
        batch = np.zeros((shape.rows, layout.size), np.int32)
        batch[:, layout.span("row")] = self.engine.max_rows
        for line, row in enumerate(rows):
            put = functools.partial(layout.set, batch, line)
            put("row", row.row)
            put("start", row.start)
            put("length", len(row.tokens))
            put("state_len", row.state_len)
            put("read_slot", row.read_slot)
            put("write_slot", row.write_slot)
            put("samples", row.samples)
            put("tokens", row.tokens)
            self._put_pages(layout, batch, line, row, shape.width)
            pack.set_sampling(layout, batch, line, row.request)
        run = self.executable("prefill", shape, _num_logprobs(rows))
        self.state, sampled = run(self.params, self.state, batch)
        return sampled

    def _decode(self, rows: list, num_steps: int) -> Sampled:
        shape = bucket.decode_bucket(
            self.engine,
            num_rows=max(row.row for row in rows) + 1,
            num_steps=num_steps,
            num_pages=max(len(row.pages) for row in rows),
            max_pages=self.max_pages,
        )
        layout = self.layout("decode", shape)
        batch = np.zeros((shape.rows, layout.size), np.int32)
        for row in rows:
            put = functools.partial(layout.set, batch, row.row)
            put("position", row.position)
            put("checkpoint", row.checkpoint_position)
            put("read_slot", row.read_slot)
            put("fold_slot", row.fold_slot)
            put("num_steps", row.num_steps)
            pack.set_pages(layout, batch, row.row, row.pages, shape.width)
            pack.set_sampling(layout, batch, row.row, row.request)
        run = self.executable("decode", shape, _num_logprobs(rows))
        self.state, sampled = run(self.params, self.state, batch, np.int32(num_steps))
        return sampled

    def _exact(self, prefill: list, decode: list) -> Sampled:
        """Prompt chunks and decode steps alike, each row at its ring row of one [max_rows, grain] window."""
        shape = bucket.exact_bucket(self.engine, max_pages=self.max_pages)
        layout = self.layout("exact", shape)
        batch = np.zeros((shape.rows, layout.size), np.int32)
        batch[:, layout.span("fold_before")] = batch[:, layout.span("fold_after")] = -1
        grain = self.engine.grain
        for row in prefill:
            put = functools.partial(layout.set, batch, row.row)
            put("base", row.start)
            put("begin", row.start)
            put("end", row.start + len(row.tokens))
            put("checkpoint", row.start)
            put("read_slot", row.read_slot)
            put("fold_after", row.write_slot if row.state_len else -1)
            put("load_conv", 1)
            put("samples", row.samples)
            put("tokens", row.tokens)
            self._put_pages(layout, batch, row.row, row, shape.width)
            pack.set_sampling(layout, batch, row.row, row.request)
        for row in decode:
            put = functools.partial(layout.set, batch, row.row)
            full = row.position - row.checkpoint_position == grain
            put("base", row.position if full else row.checkpoint_position)
            put("begin", row.position)
            put("end", row.position + 1)
            put("checkpoint", row.checkpoint_position)
            put("read_slot", row.read_slot)
            put("fold_before", row.fold_slot if full else -1)
            put("feeds", 1)
            put("samples", 1)
            pack.set_pages(layout, batch, row.row, row.pages, shape.width)
            pack.set_sampling(layout, batch, row.row, row.request)
        # Always with log-probabilities: with and without would be two executables.
        run = self.executable("exact", shape, MAX_LOGPROBS)
        self.state, sampled = run(self.params, self.state, batch)
        return sampled

    def _put_pages(self, layout, batch, line: int, row, width: int) -> None:
        pack.set_pages(layout, batch, line, row.pages, width)
        for source, target in row.copies:
            layout.set(batch, line, "sources", source)
            layout.set(batch, line, "targets", target)

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
        kinds = {
            bucket.PrefillBucket: "prefill",
            bucket.DecodeBucket: "decode",
            bucket.ExactBucket: "exact",
        }
        kind = kinds[type(shape)]
        layout = self.layout(kind, shape)
        batch = np.zeros((shape.rows, layout.size), np.int32)
        if kind == "prefill":
            batch[:, layout.span("row")] = self.engine.max_rows
        if kind == "exact":
            batch[:, layout.span("fold_before")] = batch[:, layout.span("fold_after")] = -1
        count = (np.int32(0),) if kind == "decode" else ()
        for num_logprobs in (
            (MAX_LOGPROBS,) if kind == "exact" else (0, MAX_LOGPROBS)[: 1 + logprobs]
        ):
            run = self.executable(kind, shape, num_logprobs)
            self.state, _ = run(self.params, self.state, batch, *count)

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

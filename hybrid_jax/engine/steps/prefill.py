"""Prefill: a chunk of a prompt for each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from hybrid_jax.engine import frames, kept, pack, rings
from hybrid_jax.engine.adjust import Adjust, choose
from hybrid_jax.engine.mixers.mixer import ChunkRows
from hybrid_jax.engine.on_matrices import on_matrices
from hybrid_jax.engine.pack import Layout
from hybrid_jax.engine.sampling import Sampled
from hybrid_jax.engine.steps.step import Made, StepKind, Work
from hybrid_jax.engine.walk import Ends, chunk, short_chunk
from hybrid_jax.models import decoder
from hybrid_jax.schedule.bucket import AfterCut, PrefillBucket
from hybrid_jax.schedule.plan import Plan, PrefillRow
from hybrid_jax.schedule.request import Request
from hybrid_jax.state import Model, State


@on_matrices
def prefill(
    params: dict,
    state: State,
    adjust: Adjust | None,
    batch: jax.Array,
    *,
    model: Model,
    layout: Layout,
    num_logprobs: int,
    logits_rows: int = 0,
    after_cut: AfterCut = AfterCut.ALL,
) -> tuple[State, Adjust | None, Made]:
    """Runs one prompt chunk per row, from a checkpoint at its start to a checkpoint and a ring tail at its end.

    Args:
        batch: int32[R, layout.size]; a padding row names the sink's ring row and has length 0.
        logits_rows: how many lines the logits are padded to, for forks.
        after_cut: what the layers after a cut do.

    Returns:
        State, adjust, and tokens int32[R] (meaningless if a row does not sample), their logits
        float32[max(R, logits_rows), V], and the hidden states [R, T, D], or [R, 1, D] of the last tokens if only these
        go through all layers.
    """
    geometry = model.geometry
    get = lambda name: layout.get(batch, name)  # noqa: E731
    tokens, start, length, state_len = get("tokens"), get("start"), get("length"), get("state_len")
    end = start + length
    state = frames.copy_pages(state, get("sources"), get("targets"), model)
    rows = ChunkRows(
        tokens=tokens,
        start=start,
        length=length,
        state_len=state_len,
        row=get("row"),
        read=frames.slot_frames(state, get("read_slot")),
        write=frames.slot_frames(state, get("write_slot")),
        table=pack.get_pages(layout, batch, geometry.frames_per_page),
    )
    if after_cut == AfterCut.ALL:
        h, state = chunk(params, state, rows, model=model)
        last = rings.slice_tokens(h, jnp.maximum(length - 1, 0), 1)[:, 0]
    else:
        slot = jnp.where(state_len > 0, get("write_slot"), get("read_slot"))
        ends = Ends(get("samples"), start + state_len, slot) if after_cut == AfterCut.ENDS else None
        last, state = short_chunk(params, state, rows, ends, model=model)
        h = last[:, None]
    with jax.named_scope("sample"):
        state = kept.note_hidden(params, state, rows.row, last, length > 0, model)
        logits = decoder.logits(params, last, model.config)
        state, adjust, sampled = first_tokens(
            state, adjust, logits, batch, end, get("samples") > 0, layout, num_logprobs, model
        )
        logits = jnp.pad(logits, ((0, max(0, logits_rows - len(batch))), (0, 0)))
    return state, adjust, Made(sampled, logits, h)


def first_tokens(
    state: State,
    adjust: Adjust | None,
    logits: jax.Array,
    batch: jax.Array,
    positions: jax.Array,
    samples: jax.Array,
    layout: Layout,
    num_logprobs: int,
    model: Model,
) -> tuple[State, Adjust | None, Sampled]:
    """Samples the first token of each row, and stores it, or the mark of a stop, where decode will find it.

    Args:
        logits: float32[R, V]. batch: packed rows. samples: bool[R], true for rows whose prompt ends here.
        positions: int32[R] positions of these tokens, which are also the lengths of the rows from now on.
    """
    row = layout.get(batch, "row")
    sampled, fed, adjust = choose(
        logits, batch, layout, positions, samples, num_logprobs, adjust, row, model.backend.sampling
    )
    tokens, lengths, rows = state.tokens, state.lengths, jnp.arange(state.tokens.shape[0])
    for r in range(row.shape[0]):
        tokens = jnp.where(rows == row[r], fed[r], tokens)
        lengths = jnp.where(rows == row[r], positions[r], lengths)
    state = state.replace(tokens=tokens, lengths=lengths)
    state = kept.note_tokens(state, row, positions, fed[:, None], samples.astype(jnp.int32))
    return state, adjust, sampled


class Prefill(StepKind):
    """See `prefill`. The rows are in the plan's order."""

    name = "prefill"
    numbers = ("row", "start", "length", "state_len", "read_slot", "write_slot", "samples")
    run = staticmethod(prefill)

    def buckets(self) -> list[PrefillBucket]:
        return sorted(
            PrefillBucket(rows, tokens, width, after_cut)
            for rows, tokens in self.shapes.prefill
            for width in self.shapes.widths(self.max_pages)
            for after_cut in (AfterCut if self.model.config.later else (AfterCut.ALL,))
        )

    def bucket(self, rows: Sequence[PrefillRow], before: object) -> PrefillBucket:
        return self.shapes.prefill_bucket(
            num_rows=len(rows),
            num_tokens=max(len(row.tokens) for row in rows),
            num_pages=max(len(row.pages) for row in rows),
            max_pages=self.max_pages,
            after_cut=self._after_cut(rows),
        )

    def expected(self, requests: Iterable[Request]) -> set[PrefillBucket]:
        found = set()
        prompts = {(len(r.prompt), r.first_read is not None) for r in requests}
        for num_tokens, reads in prompts:
            first = self.shapes.first_chunk(num_tokens)
            found.add(
                self.shapes.prefill_bucket(
                    num_rows=self.shapes.prefill_of(first)[1][-1],
                    num_tokens=first,
                    num_pages=self.model.geometry.num_pages(num_tokens),
                    max_pages=self.max_pages,
                    after_cut=self._through(reads=reads, samples=first >= num_tokens),
                )
            )
        return found

    def _after_cut(self, rows: Sequence[PrefillRow]) -> AfterCut:
        reads, samples = any(row.reads for row in rows), any(row.samples for row in rows)
        return self._through(reads=reads, samples=samples)

    def _through(self, *, reads: bool, samples: bool) -> AfterCut:
        """What the layers after a cut compute. Hidden states of a prompt's tokens need all of it."""
        if reads or not self.model.config.later:
            return AfterCut.ALL
        return AfterCut.ENDS if samples else AfterCut.NOTHING

    def cost(self, bucket: PrefillBucket) -> tuple[int, int]:
        return 1, bucket.rows * bucket.tokens

    def work(self, bucket: PrefillBucket, rows: Sequence[PrefillRow]) -> Work:
        whole = bucket.after_cut == AfterCut.ALL
        return Work(bucket.rows * bucket.tokens, bucket.rows, whole)

    def static(self, bucket: PrefillBucket) -> Mapping[str, int]:
        return {"logits_rows": self.shapes.logits_rows, "after_cut": bucket.after_cut}

    def dispatches(self, plan: Plan) -> list[list[PrefillRow]]:
        return [plan.prefill]

    def layout(self, bucket: PrefillBucket) -> Layout:
        per_page = self.model.geometry.frames_per_page
        return pack.row_layout(
            self.numbers,
            *pack.copy_fields(per_page),
            *pack.page_fields(bucket.width, per_page),
            ("tokens", bucket.tokens),
        )

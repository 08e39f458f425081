"""The matrix can fail: each mistake planted here, in the host's plans or in the compiled steps, turns it red."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.config.engine import FP8
from hybrid_jax.engine import frames, rings, walk
from hybrid_jax.engine.mixers import (
    attention,
    carry,
    columns,
    gated_delta_xla,
    mamba2_xla,
    short_conv_xla,
)
from hybrid_jax.engine.mixers.attention import AttentionSteps
from hybrid_jax.engine.mixers.columns import WithColumns
from hybrid_jax.engine.mixers.mamba1_xla import Mamba1Recurrence
from hybrid_jax.engine.steps import decode, prefill, verify
from hybrid_jax.engine.steps.decode import Decode
from hybrid_jax.engine.steps.fork import Fork
from hybrid_jax.engine.steps.prefill import Prefill
from hybrid_jax.engine.steps.step import StepKind
from hybrid_jax.layers import gated_delta
from hybrid_jax.layers.cut import CutInput
from hybrid_jax.layers.gated_delta import GatedDeltaState
from hybrid_jax.layers.mamba2 import Mamba2State
from hybrid_jax.schedule.memory import Memory
from pallas_kernels.rmsnorm import gated_rmsnorm
from tests.drawing import left_to_all, spine
from tests.exactness.conftest import ROOM, SETTINGS, load
from tests.exactness.engines import make_engine, one_shape
from tests.exactness.jobs import Job, drive, random_prompt
from tests.exactness.planted import Planted, planting, with_mistakes
from tests.exactness.poison import Poison

MODEL = "bamba"


def traffic(prompt) -> list[list[Job]]:
    """Batches that meet everything a plant may break: chunks, hits inside pages, folds, seeds, stops."""
    shared = prompt(100, seed=6)
    first = [Job(prompt=shared + prompt(n, seed=n), max_tokens=45) for n in (5, 20)]
    sampled = [
        Job(prompt=shared, max_tokens=30, temperature=0.9, seed=7, sample_index=i, arrive=3 * i)
        for i in range(2)
    ]
    strangers = [Job(prompt=prompt(40, seed=n), max_tokens=20) for n in (2, 3)]
    last = Job(prompt=prompt(33, seed=1), max_tokens=70)
    forks = [
        replace(sampled[0], prompt=prompt(50, seed=9), sample_index=i, group="g") for i in (0, 1)
    ]
    return [first, [*first[::-1], *sampled], strangers, [*strangers, last], forks]


def mismatches(engine, plain, poison, prompt):
    found = []
    for jobs in traffic(prompt):
        with one_shape():
            found += plain.mismatches(drive(engine, jobs, poison).requests)
    return found


# --- in the plans ---------------------------------------------------------------------------------


def change_rows(kind: type[StepKind], change):
    """Rows of a kind of step go to the device other than they were planned."""
    original = kind.pack
    return mock.patch.object(
        kind, "pack", lambda self, rows, *rest: original(self, change(list(rows)), *rest)
    )


def rotated(field: str):
    """Each row gets the field's value of the next one."""

    def change(rows):
        values = [getattr(row, field) for row in rows]
        return [
            replace(row, **{field: value})
            for row, value in zip(rows, values[1:] + values[:1], strict=True)
        ]

    return change


def stale_page(rows):
    """The second page of a row is its first."""
    return [replace(row, pages=row.pages[[0, 0, *range(2, len(row.pages))]]) for row in rows]


IN_PLANS = {
    "another row's checkpoint in decode": lambda: change_rows(Decode, rotated("read_slot")),
    "another row's checkpoint in prefill": lambda: change_rows(Prefill, rotated("read_slot")),
    "another row's pages": lambda: change_rows(Decode, rotated("pages")),
    "a wrong page": lambda: change_rows(Decode, stale_page),
    "a checkpoint older than it is": lambda: change_rows(
        Decode,
        lambda rows: [replace(r, checkpoint=max(r.checkpoint - 1, 0)) for r in rows],
    ),
    "a checkpoint of fewer tokens": lambda: change_rows(
        Prefill, lambda rows: [replace(r, state_len=r.state_len // 2) for r in rows]
    ),
    "a page not copied": lambda: change_rows(
        Prefill, lambda rows: [replace(r, copies=[]) for r in rows]
    ),
    "a page not copied for a fork": lambda: change_rows(
        Fork, lambda rows: [replace(r, copies=[]) for r in rows]
    ),
    "a fork at another position": lambda: change_rows(
        Fork, lambda rows: [replace(r, position=r.position + 1) for r in rows]
    ),
}


def test_without_a_bug_nothing_is_reported(bench_of):
    bench = bench_of(MODEL, "padded")
    before = bench.engine.stats()
    assert mismatches(bench.engine, bench.plain, bench.poison, bench.prompt) == []
    moved = {name: value - before[name] for name, value in bench.engine.stats().items()}
    assert min(moved[n] for n in ("copies", "folds_to_new", "cache_hits", "prefill_rows")) >= 2
    assert moved["forks"] == 1


@spine
@pytest.mark.parametrize("bug", IN_PLANS)
def test_a_bug_in_the_plans_is_reported(bench_of, bug):
    bench = bench_of(MODEL, "padded")
    with IN_PLANS[bug]():
        found = mismatches(bench.engine, bench.plain, bench.poison, bench.prompt)
    assert found


@spine
def test_a_shared_checkpoint_overwritten_is_noticed_by_the_books(bench_of):
    bench = bench_of(MODEL, "padded")
    choose = Memory.slot_to_write
    in_place = lambda self, sequence: sequence.held.slot or choose(self, sequence)
    with (
        mock.patch.object(Memory, "slot_to_write", in_place),
        pytest.raises(
            AssertionError, match=r"memory: counts \{\d+: \d.*\} slot holders, found \{\d+: \d"
        ),
    ):
        mismatches(bench.engine, bench.plain, bench.poison, bench.prompt)


# --- in the compiled steps ------------------------------------------------------------------------


def ring_off_by_one():
    put = rings.put_row
    return mock.patch.object(
        rings,
        "put_row",
        lambda array, value, row, start=0, layer=0: put(
            array, value, row, start if isinstance(start, int) else start + 1, layer
        ),
    )


def length_off_by_one():
    """Every fold, page and position follows from it."""
    where = decode.cursor

    def behind(lengths, *rest):
        return where(jnp.maximum(lengths - 1, 0), *rest)

    return mock.patch.object(decode, "cursor", behind)


def padding_in_the_state():
    scan = Mamba2State.scan

    def leak(self, params, tokens, state, lengths, state_lengths, *rest):
        everything = jnp.full_like(state_lengths, tokens.z.shape[1])
        return scan(self, params, tokens, state, lengths, everything, *rest)

    return mock.patch.object(Mamba2State, "scan", leak)


def one_record_too_many():
    """Its weight is zero; only NaN can show that it was read."""
    window = mamba2_xla.ssd_window_frames

    def more(arrays, **options):
        return window(arrays._replace(num_valid=arrays.num_valid + 1), **options)

    return mock.patch.object(mamba2_xla, "ssd_window_frames", more)


def noise_by_step():
    choose = decode.choose
    return mock.patch.object(
        decode,
        "choose",
        lambda logits, batch, layout, position, *rest: choose(
            logits, batch, layout, position % 3, *rest
        ),
    )


def fork_without_the_ring():
    return mock.patch.object(rings, "copy_row", lambda ring, source, target: ring)


def fold_forgets_the_convolution():
    return mock.patch.object(frames, "write_columns", lambda arena, own, bits, group: arena)


def u_is_v_in_windows():
    """The ring gets what a token would write if nothing were known under its key."""
    window = gated_delta_xla.gated_delta_window_frames

    def changed(arrays, **options):
        y, _, arena = window(arrays, **options)
        return y, arrays.v, arena

    return mock.patch.object(gated_delta_xla, "gated_delta_window_frames", changed)


def u_is_v_in_chunks():
    scan = gated_delta.gated_delta_scan

    def changed(q, k, v, *rest, **options):
        y, _, state = scan(q, k, v, *rest, **options)
        return y, v, state

    return mock.patch.object(gated_delta, "gated_delta_scan", changed)


def gate_before_norm():
    """In steps alone, not in the definition."""

    class GateFirst(GatedDeltaState):
        def gate(self, params, y, z, spec, implementation):
            return gated_rmsnorm(
                y,
                z,
                params["norm"],
                eps=spec.norm_eps,
                groups=spec.num_value_heads,
                implementation=implementation,
            )

    return mock.patch.object(gated_delta_xla.GatedDeltaRecurrence, "equations", GateFirst())


def state_of_another_row():
    advance = Mamba1Recurrence.advance

    def changed(self, params, convolved, z, state, *rest, **options):
        return advance(self, params, convolved, z, jnp.roll(state, 1, axis=0), *rest, **options)

    return mock.patch.object(Mamba1Recurrence, "advance", changed)


def columns_off_by_one_in_windows():
    """The next window finds the columns as they were one token earlier."""
    following = columns.next_columns

    def behind(arrays, history, plan):
        return following(jnp.roll(arrays, 1, axis=1), history, plan)

    return mock.patch.object(columns, "next_columns", behind)


def columns_off_by_one_in_chunks():
    cut = short_conv_xla.slice_tokens
    return mock.patch.object(
        short_conv_xla,
        "slice_tokens",
        lambda array, start, count: cut(array, jnp.maximum(start - 1, 0), count),
    )


def keys_after_a_cut_are_not_rotated():
    """Those of prompts; released code did so once."""
    append = attention.append_kv

    def changed(arrays, *, options, **rest):
        if options.num_heads == 0:
            arrays = arrays._replace(cos=None, sin=None)
        return append(arrays, options=options, **rest)

    return mock.patch.object(attention, "append_kv", changed)


def own_input_is_written():
    """A layer after a cut makes its keys and its state of its own input."""
    mix = walk.WindowWalk.mix

    def changed(self, weights, given, *rest):
        if isinstance(given, CutInput):
            given = CutInput(given.own, jnp.resize(given.own, given.written.shape))
        return mix(self, weights, given, *rest)

    return mock.patch.object(walk.WindowWalk, "mix", changed)


def page_of_another_group():
    reread = AttentionSteps.reread

    def changed(self, weights, given, state, place, plan, *rest):
        return reread(self, weights, given, state, plan.model.geometry.kv[0], plan, *rest)

    return mock.patch.object(AttentionSteps, "reread", changed)


def record_of_the_last_token_one_too_far():
    """Where the last token of a prompt goes through the layers after the cut."""
    short = prefill.short_chunk

    def changed(params, state, rows, ends, **rest):
        if ends is not None:
            ends = ends._replace(checkpoint=ends.checkpoint - 1)
        return short(params, state, rows, ends, **rest)

    return mock.patch.object(prefill, "short_chunk", changed)


IN_STEPS = {
    "ring_off_by_one": ring_off_by_one,
    "length_off_by_one": length_off_by_one,
    "padding_in_the_state": padding_in_the_state,
    "one_record_too_many": one_record_too_many,
    "noise_by_step": noise_by_step,
    "fork_without_the_ring": fork_without_the_ring,
    "fold_forgets_the_convolution": fold_forgets_the_convolution,
}


IN_KINDS = [
    ("qwen3_next", u_is_v_in_windows),
    ("qwen3_next", u_is_v_in_chunks),
    ("qwen3_next", gate_before_norm),
    ("jamba", state_of_another_row),
    ("lfm2", columns_off_by_one_in_windows),
    ("lfm2", columns_off_by_one_in_chunks),
    ("with_cut", keys_after_a_cut_are_not_rotated),
    ("with_cut", own_input_is_written),
    ("with_cut", page_of_another_group),
    ("with_cut", record_of_the_last_token_one_too_far),
]


def found_with(bug, model: str, plain_of, kv_dtype: str | None = None) -> list[str]:
    """What the matrix reports of an engine that was compiled with a bug; `kv_dtype` is that of the definition."""
    config, params = load(model)
    prompt = lambda length, seed: random_prompt(length, seed, config.vocab_size)
    with contextlib.ExitStack() as stack:
        stack.enter_context(bug())
        stack.enter_context(one_shape())
        engine = make_engine(config, params, SETTINGS["padded"], room=ROOM)
        return mismatches(engine, plain_of(model, kv_dtype), Poison(engine), prompt)


@spine("fold_forgets_the_convolution", "fork_without_the_ring")
@pytest.mark.parametrize("bug", IN_STEPS)
def test_a_bug_in_a_step_is_reported(plain_of, bug):
    assert found_with(IN_STEPS[bug], MODEL, plain_of)


@pytest.mark.parametrize("model, bug", IN_KINDS)
def test_a_bug_in_a_kind_is_reported(plain_of, model, bug):
    assert found_with(bug, model, plain_of)


def test_pages_that_are_not_fp8_are_reported_where_they_should_be(plain_of):
    """What FP8 rounds off is more than what two executables may differ by."""
    assert found_with(contextlib.nullcontext, "with_cut", plain_of, FP8)


# --- in speculation -------------------------------------------------------------------------------


def columns_move_one_too_far():
    """What is committed has one token more for the convolutions than for all else."""
    commit = WithColumns.commit

    def changed(self, state, group, rows, model):
        most = state.rings[group]["conv"].shape[2] - model.geometry.groups[group].layout.columns
        rows = rows._replace(count=jnp.minimum(rows.count + 1, most))
        return commit(self, state, group, rows, model)

    return mock.patch.object(WithColumns, "commit", changed)


def rejected_token_stays():
    """One draft more than was accepted counts as committed."""
    judge = verify.judge

    def changed(logits, window, *rest):
        judged = judge(logits, window, *rest)
        return judged._replace(count=jnp.minimum(judged.count + 1, window.fed))

    return mock.patch.object(verify, "judge", changed)


def rejected_token_is_fed():
    """The row goes on with the draft that was rejected, not with what was drawn in its place."""
    judge = verify.judge

    def changed(logits, window, *rest):
        judged = judge(logits, window, *rest)
        place = jnp.clip(judged.count, 0, window.tokens.shape[1] - 1)[:, None]
        rejected = jnp.take_along_axis(window.tokens, place, axis=1)[:, 0]
        wrong = (judged.count < window.fed) & (judged.last >= 0)
        return judged._replace(last=jnp.where(wrong, rejected, judged.last))

    return mock.patch.object(verify, "judge", changed)


def window_crosses_the_boundary():
    """Drafts are fed past the end of the grain, so the next fold has a wrong number of records."""
    grain = verify.fold_full

    def changed(state, at, *rest):
        state, at = grain(state, at, *rest)
        return state, at._replace(checkpoint=at.checkpoint + 2)

    return mock.patch.object(verify, "fold_full", changed)


def noise_of_the_position_before():
    """Drafts are judged with the noise of another position than plain decoding has there."""
    choose = verify.choose

    def changed(logits, batch, layout, positions, *rest):
        return choose(logits, batch, layout, positions - 1, *rest)

    return mock.patch.object(verify, "choose", changed)


def states_of_the_wrong_token():
    """A carried state is the one after another number of tokens than was committed."""
    put = carry.put_copies
    return mock.patch.object(
        carry,
        "put_copies",
        lambda ring, new, layer, live, start, zero: put(ring, new, layer, live, start + 1, zero),
    )


IN_SPECULATION = [
    ("bamba", columns_move_one_too_far),
    ("bamba", rejected_token_stays),
    ("bamba", rejected_token_is_fed),
    ("bamba", window_crosses_the_boundary),
    ("bamba", noise_of_the_position_before),
    ("jamba", states_of_the_wrong_token),
]


def found_with_drafts(model: str, bug, plain_of, *, fp8: bool = False) -> list:
    """What the matrix reports of an engine that judges planted drafts, compiled with a bug; in trees with FP8 pages."""
    config, params = load(model)
    prompt = lambda length, seed: random_prompt(length, seed, config.vocab_size)
    planted, rng = Planted(), np.random.default_rng(0)
    drafts = SpeculationConfig(num_tokens=3, adaptive=False)
    if fp8:
        drafts = SpeculationConfig(tree=(0, 0, 1, 2, 3), adaptive=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(bug())
        stack.enter_context(planting(planted))
        stack.enter_context(one_shape())
        settings = replace(SETTINGS["fp8" if fp8 else "padded"], speculation=drafts)
        settings = replace(settings, steps_per_dispatch=4)
        engine = make_engine(config, params, settings, room=ROOM)
        plain, poison = plain_of(model, FP8 if fp8 else None), Poison(engine)
        jobs = [
            Job(prompt=prompt(n, seed=n), max_tokens=70, temperature=0.8 * (n % 2), seed=n)
            for n in (20, 33, 47)
        ]
        for job in jobs:
            outputs = plain.greedy_loop(job.prompt, 70) if not job.temperature else [0] * 70
            planted.outputs[job.prompt] = with_mistakes(outputs, rng, 0.3)
        found = plain.mismatches(drive(engine, jobs, poison).requests)
        return found + plain.mismatches(drive(engine, jobs, poison).requests)


@pytest.mark.parametrize("model", ["bamba", "jamba"])
def test_without_a_bug_nothing_is_reported_of_drafts(plain_of, model):
    assert found_with_drafts(model, contextlib.nullcontext, plain_of) == []


@spine("bamba-rejected_token_stays")
@pytest.mark.parametrize("model, bug", IN_SPECULATION)
def test_a_bug_in_speculation_is_reported(plain_of, model, bug):
    assert found_with_drafts(model, bug, plain_of)


def scales_stay_behind():
    """Of the tokens of a tree that stay, keys and values move together, but not their scales."""
    move = walk.move_words

    def changed(arena, sources, targets, *, words, **rest):
        small = words < 8  # of a token's keys and values there are more
        return arena if small else move(arena, sources, targets, words=words, **rest)

    return mock.patch.object(walk, "move_words", changed)


@left_to_all
def test_scales_of_fp8_move_with_what_they_scale(plain_of):
    assert found_with_drafts("with_cut", contextlib.nullcontext, plain_of, fp8=True) == []
    assert found_with_drafts("with_cut", scales_stay_behind, plain_of, fp8=True)

"""What the compiler made of each step: state updated in place, and no work that grows with the arena.

Every executable a runner can build is compiled, for the shapes of a real bucket and for an arena of terabytes; nothing
runs. Donation is a promise XLA may break silently, by keeping a copy of what it cannot prove dead.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import (
    SpeculationConfig,
)
from hybrid_jax.config.sampling_params import MAX_LOGPROBS
from hybrid_jax.engine.runner import Runner
from hybrid_jax.engine.steps.step import WHOLE, Variant
from hybrid_jax.schedule import bucket
from hybrid_jax.schedule.bucket import AfterCut
from pallas_kernels.paged_attention.xla import TILE_TOKENS
from tests.drawing import left_to_all, spine
from tests.engine.compiled_steps import (
    EXIT,
    FRAMES,
    HEAD,
    SECOND,
    SPECULATION,
    Program,
    compile_step,
    make_runner,
    mistakable,
    shape_of,
    struct,
)

WRITES_IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "dynamic-update-slice", "fusion"}

pytestmark = [pytest.mark.usefixtures("no_compile_cache"), pytest.mark.as_users]


def widths_of(runner: Runner) -> tuple[int, ...]:
    """Widths of the page tables."""
    kind = runner.kinds[0]
    return kind.shapes.widths(kind.max_pages)


def num_bytes(*trees) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(trees))


def check(runner: Runner, kind: str, *key) -> None:
    """The gate for one executable."""
    program = compile_step(runner, kind, *key)
    assert program.aliased_bytes >= num_bytes(program.state, program.adjust)
    arena = program.results(program.state.arena)
    assert "parameter" in arena
    assert set(arena) <= WRITES_IN_PLACE, f"{kind} {key}: {set(arena) - WRITES_IN_PLACE}"
    # A row's hidden state is no larger than what a layer makes of one token.
    kept = {k: leaf for k, leaf in program.state.drafting.items() if k != "hidden"}
    large = (program.state.rings, kept)
    for name, leaf in jax.tree_util.tree_leaves_with_path(large):
        assert "copy" not in program.results(leaf), f"{kind} {key}: a copy of {name}"
    if program.adjust is not None:
        assert "copy" not in program.results(program.adjust.counts), f"{kind} {key}: of adjust"
    assert not mistakable(program.text), f"{kind} {key}: {mistakable(program.text)}"
    assert program.temp_bytes < FRAMES, f"{kind} {key}: temporaries grow with the arena"


CASES = {
    "decode": ("MAM", "float32", "decode", 1, None),
    "decode_logprobs": ("MAM", "float32", "decode", 8, None),
    "decode_adjusted": ("MAM", "float32", "decode", 8, None),
    "decode_bfloat16": ("MAM", "bfloat16", "decode", 8, None),
    "decode_one_frame_a_layer": ("M", "float32", "decode", 1, None),
    "prefill": ("MAM", "float32", "prefill", 1, 32),
    "prefill_rows": ("MAM", "float32", "prefill", 4, 128),
    "prefill_bfloat16": ("MAM", "bfloat16", "prefill", 1, 32),
    "prefill_one_frame_a_layer": ("M", "float32", "prefill", 1, 32),
    "prefill_attention_last": ("MA", "float32", "prefill", 1, 32),
    "prefill_rows_attention_last": ("MA", "float32", "prefill", 4, 32),
    "prefill_attention": ("AA", "float32", "prefill", 1, 32),
    "prefill_adjusted": ("MA", "float32", "prefill", 4, 32),
    "fork_adjusted": ("MAM", "float32", "fork", 8, None),
    "fork": ("MAM", "float32", "fork", 8, None),
    "fork_logprobs": ("MAM", "bfloat16", "fork", 8, None),
    "fork_attention": ("AA", "float32", "fork", 8, None),
    "fork_recurrent": ("M", "float32", "fork", 8, None),
    "exact": ("MAM", "float32", "exact", 8, 32),
    "decode_side_by_side": ("PP", "float32", "decode", 8, None),
    "decode_side_by_side_attention_first": ("QQ", "float32", "decode", 8, None),
    "decode_pages_side_by_side": ("VW", "float32", "decode", 8, None),
    "prefill_side_by_side": ("PQ", "float32", "prefill", 4, 32),
    "exact_side_by_side": ("PP", "float32", "exact", 8, 32),
    "exact_attention_first": ("AMMA", "float32", "exact", 8, 32),
    "decode_two_shapes": ("MNBAN", "float32", "decode", 8, None),
    "prefill_two_shapes": ("MNBAN", "float32", "prefill", 4, 32),
    "exact_attention_behind_carried": ("JA", "float32", "exact", 8, 32),
    "decode_cut": ("MA|MA", "float32", "decode", 8, None),
    "decode_cut_shared": ("MA!MAMA", "float32", "decode", 8, None),
    "decode_cut_one_row": ("MD|DG", "bfloat16", "decode", 1, None),
    "exact_cut_shared": ("MA!MAMA", "float32", "exact", 8, 32),
    "fork_cut": ("MA|MA", "float32", "fork", 8, None),
    "decode_fp8": ("MA|MA", "fp8", "decode", 8, None),
    "decode_fp8_one_row": ("A", "fp8", "decode", 1, None),
    "prefill_fp8": ("MAM", "fp8", "prefill", 4, 128),
    "prefill_fp8_one_row": ("MA", "fp8", "prefill", 1, 32),
    "exact_fp8": ("MAM", "fp8", "exact", 8, 32),
    "exact_one_of_a_kind": ("DA", "float32", "exact", 8, 32),
    "exact_two_shapes": ("MNBMAN", "float32", "exact", 8, 32),
    "fork_two_shapes": ("MNBAN", "float32", "fork", 8, None),
    "decode_other_kinds": ("DJCGSJD", "float32", "decode", 8, None),
    "decode_other_kinds_bfloat16": ("MJCAD", "bfloat16", "decode", 8, None),
    "prefill_other_kinds": ("DJCGSJD", "float32", "prefill", 4, 32),
    "prefill_other_side_by_side": ("RCRTR", "float32", "prefill", 1, 32),
    "prefill_rows_other_side_by_side": ("RTR", "float32", "prefill", 4, 32),
    "decode_other_side_by_side": ("RTR", "float32", "decode", 8, None),
    "exact_other_kinds": ("DJCGSJD", "float32", "exact", 8, 32),
    "fork_other_kinds": ("DJCGSJD", "float32", "fork", 8, None),
    # Windows of these do not read the arena, so nothing else orders them after a fold.
    "decode_latent": ("MLA", "bfloat16", "decode", 8, None),
    "decode_latent_one_row": ("L", "fp8", "decode", 1, None),
    "prefill_latent": ("LM", "fp8", "prefill", 4, 32),
    "exact_latent": ("LML", "float32", "exact", 8, 32),
    "prefill_window": ("VV", "fp8", "prefill", 4, 32),
    "exact_window": ("VM", "bfloat16", "exact", 8, 32),
    "decode_fixed_decay": ("MFA", "bfloat16", "decode", 8, None),
    "prefill_fixed_decay": ("FA", "float32", "prefill", 4, 32),
    "exact_fixed_decay": ("FAF", "float32", "exact", 8, 32),
    "decode_carried": ("JJ", "float32", "decode", 8, None),
    "decode_columns": ("SS", "float32", "decode", 8, None),
    # The compiler knows the row of a batch of one, so it may read a ring twice, or before a loop.
    "decode_carried_one_row": ("J", "float32", "decode", 1, None),
    "decode_columns_one_row": ("S", "float32", "decode", 1, None),
}
LEFT_TO_ALL = {
    *("decode_logprobs", "decode_bfloat16", "decode_one_frame_a_layer", "decode_side_by_side"),
    *("decode_fp8_one_row", "prefill_fp8_one_row", "exact_fp8"),
    *("decode_other_kinds", "prefill_rows", "prefill_bfloat16", "prefill_attention"),
    *("prefill_attention_last", "exact", "exact_side_by_side", "fork", "fork_recurrent"),
    *(
        "exact_one_of_a_kind",
        "fork_two_shapes",
        "prefill_rows_other_side_by_side",
        "decode_other_side_by_side",
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[left_to_all] * (name in LEFT_TO_ALL)) for name in CASES],
)
@left_to_all(
    "exact_attention_first",
    "exact_two_shapes",
    "decode_two_shapes",
    "decode_side_by_side_attention_first",
    "fork_logprobs",
    "fork_adjusted",
    "prefill_one_frame",
    "decode_adjusted",
    "prefill_adjusted",
    "prefill_other_side_by_side",
    "exact_attention_behind_carried",
    "decode_cut_shared",
    "prefill_fp8",
    "decode_cut]",
    "fork_cut",
    "prefill_window",
    "exact_window",
)
@spine(
    "decode_other_kinds_bfloat16", "prefill_other_kinds", "exact_other_kinds", "fork_other_kinds"
)
def test_a_step_updates_its_state_in_place(name):
    """All of the state is aliased, nothing arena-sized or ring-sized is copied, no temporary grows with U."""
    pattern, dtype, kind, rows, tokens = CASES[name]
    runner = make_runner(pattern, dtype, exact=kind == "exact")
    shape = shape_of(runner, kind, rows, tokens)
    variant = Variant(MAX_LOGPROBS if name.endswith("logprobs") else 0, name.endswith("adjusted"))
    check(runner, kind, shape, variant if kind != "exact" else WHOLE)


@pytest.mark.parametrize("after_cut", AfterCut)
@pytest.mark.parametrize(
    "pattern, dtype, rows, tokens",
    [
        ("MA|MA", "float32", 1, 32),
        ("MA!MAMA", "float32", 4, 128),
        ("M|DG", "bfloat16", 4, 32),
        ("A|P", "float32", 1, 32),
    ],
)
@left_to_all("MA|MA", "M|DG", "A|P-float32-1-32-1", "A|P-float32-1-32-3", "MA!MAMA-float32-4-128-2")
@spine("MA!MAMA-float32-4-128-1")
def test_a_prefill_that_stops_at_a_cut_updates_its_state_in_place(
    pattern, dtype, rows, tokens, after_cut
):
    runner = make_runner(pattern, dtype)
    shape = replace(shape_of(runner, "prefill", rows, tokens), after_cut=after_cut)
    check(runner, "prefill", shape, Variant())


TREE = SpeculationConfig(tree=(0, 0, 1))
# pattern, dtype, rows, variant, the settings if these are not `SPECULATION`, and layers that draft if not `DRAFTING`.
VERIFY: dict[str, tuple] = {
    "verify": ("MAM", "float32", 8, Variant()),
    "verify_other_kinds": ("DJCGSJD", "float32", 8, Variant()),
    "verify_one_row": ("MAM", "float32", 1, Variant()),
    "verify_carried": ("JJ", "float32", 8, Variant()),
    "verify_reported_and_adjusted": ("MA", "bfloat16", 8, Variant(MAX_LOGPROBS, True)),
    "verify_side_by_side": ("PQ", "float32", 8, Variant()),
    "tree": ("MAM", "float32", 8, Variant(), TREE),
    "tree_other_kinds": ("DJCGSJD", "float32", 8, Variant(), TREE),
    "tree_window": ("V", "float32", 8, Variant(), TREE),
    "tree_attention": ("AA", "bfloat16", 8, Variant(), TREE),
    "tree_fixed_decay": ("FM", "float32", 8, Variant(), TREE),
    "tree_latent": ("LM", "float32", 8, Variant(), TREE),
    "verify_attention": ("AA", "float32", 8, Variant()),
    "verify_two_shapes": ("MNBAN", "float32", 8, Variant()),
    "verify_other_side_by_side": ("RTR", "float32", 8, Variant()),
    "head": ("MAM", "float32", 8, Variant(), HEAD),
    "head_tree": ("DA", "bfloat16", 8, Variant(), replace(TREE, method="mtp")),
    "second": ("MAM", "float32", 8, Variant(), SECOND),
    "second_one_row": ("AM", "float32", 1, Variant(), SECOND),
    "second_other_kinds": ("DS", "bfloat16", 8, Variant(), SECOND),
    "tree_fp8": ("MA|MA", "fp8", 8, Variant(), TREE),
    "exit": ("MD|MA", "float32", 8, Variant(), EXIT),
    "exit_carried": ("JA|M", "float32", 8, Variant(), EXIT),
    "exit_tree": ("MA|MA", "float32", 8, Variant(), replace(TREE, method="exit")),
    "verify_cut_shared": ("MA!MAMA", "float32", 8, Variant()),
    "second_tree": ("JA", "float32", 8, Variant(), replace(TREE, method="draft")),
    "second_tree_delta": ("C", "float32", 8, Variant(), replace(TREE, method="draft"), "AD"),
}


VERIFY_LEFT_TO_ALL = {
    *("verify_two_shapes", "verify_side_by_side", "verify_other_side_by_side", "verify_attention"),
    *("verify_one_row", "tree", "tree_attention", "head_tree", "second_tree"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[left_to_all] * (name in VERIFY_LEFT_TO_ALL)) for name in VERIFY],
)
@left_to_all(
    "exit_carried", "tree_fp8", "tree_window", "verify_reported_and_adjusted", "second]", "verify]"
)
@spine("verify_carried", "exit]", "second_other_kinds")
def test_a_step_that_judges_drafts_updates_its_state_in_place(name):
    pattern, dtype, rows, variant, *given = VERIFY[name]
    speculation, drafting = (*given, *(SPECULATION, None)[len(given) :])
    runner = make_runner(pattern, dtype, speculation=speculation, drafting=drafting)
    check(runner, "verify", shape_of(runner, "decode", rows, speculation.window), variant)


@pytest.mark.parametrize("kind, tokens", [("decode", 1), ("prefill", 32), ("fork", None)])
@pytest.mark.parametrize(
    "pattern, speculation",
    [
        *[(pattern, SPECULATION) for pattern in ("MAM", "JAC", "JJ")],
        *[pytest.param("MM", HEAD, id="head"), pytest.param("DA", SECOND, id="second")],
    ],
)
@left_to_all("JAC", "MAM", "second-prefill")
def test_steps_beside_it_update_its_state_in_place_too(pattern, speculation, kind, tokens):
    """They write down the tokens that they draw, and run the layers that draft."""
    runner = make_runner(pattern, speculation=speculation)
    check(runner, kind, shape_of(runner, kind, 4 if kind == "prefill" else 8, tokens), Variant())


@pytest.mark.parametrize("speculation", [pytest.param(HEAD, marks=left_to_all), SECOND])
def test_an_exact_step_with_layers_that_draft_updates_its_state_in_place(speculation):
    runner = make_runner("MAM", exact=True, speculation=speculation)
    check(runner, "exact", shape_of(runner, "exact", 8, 32), WHOLE)


@pytest.mark.parametrize("tiles", [1, 2])
def test_a_page_table_of_few_tiles_is_read_in_place(tiles):
    """With one, nothing in the walk over pages depends on the walk."""
    runner = make_runner(page_tokens=16, max_model_len=tiles * TILE_TOKENS)
    shape = bucket.DecodeBucket(8, 8, widths_of(runner)[0])
    assert shape.width * 16 == tiles * TILE_TOKENS
    check(runner, "decode", shape, Variant())


def test_a_prefill_holds_the_activations_of_few_layers():
    """More layers add their share of the ring to its temporaries, not the columns of a whole chunk."""
    held = []
    for pattern in ("MM", "MMMMMM"):
        runner = make_runner(pattern)
        shape = bucket.PrefillBucket(1, 512, widths_of(runner)[0])
        held.append(compile_step(runner, "prefill", shape, Variant()).temp_bytes)
    columns = 512 * runner.model.config.layers[0].mixers[0].conv_size * 4
    assert held[1] - held[0] < 4 * columns


@spine
def test_slots_and_moves_update_the_state_in_place():
    runner = make_runner(speculation=SPECULATION)
    check(runner, "move_row")
    check(runner, "load_history")
    check(runner, "write_slots")


@spine
@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_frames_go_to_the_host_and_back_without_a_copy_of_the_arena(dtype):
    runner = make_runner(dtype=dtype)
    check(runner, "load_frames")
    saved = compile_step(runner, "save_frames")
    assert set(saved.results(saved.state.arena)) == {"parameter"} and saved.aliased_bytes == 0
    assert saved.temp_bytes < 1024


@spine
@pytest.mark.parametrize("pattern", ["MA", "SJCM", "MNBDN"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_are_narrowed_and_widened_without_a_copy_of_the_arena(pattern, dtype):
    runner = make_runner(pattern, dtype, checkpoints="int8")
    for frames in runner.model.geometry.checkpoint_frames:
        check(runner, "write_checkpoint", frames)
    for name in ("narrow_checkpoint", "widen_checkpoint"):
        made = compile_step(runner, name)
        assert set(made.results(made.state.arena)) == {"parameter"} and made.aliased_bytes == 0
        assert made.temp_bytes < FRAMES


@spine
def test_the_gate_sees_a_copy_a_whole_pass_and_a_lost_donation():
    state = struct(FRAMES, 64, dtype=np.uint32)

    def compiled(function, **options) -> Program:
        program = jax.jit(function, **options).lower(state).compile()
        memory = program.memory_analysis()
        return Program(
            state=state,
            adjust=None,
            aliased_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            text=program.as_text(),
        )

    good = compiled(lambda arena: arena.at[3].set(7), donate_argnums=0)
    assert set(good.results(state)) <= WRITES_IN_PLACE
    assert good.aliased_bytes == 4 * FRAMES * 64 and good.temp_bytes < FRAMES
    late_read = compiled(lambda a: (a.at[3].set(a[2] + a[5, ::-1]), a[3, 0]), donate_argnums=0)
    assert "copy" in late_read.results(state)
    assert not compiled(lambda arena: arena.at[3].set(7)).aliased_bytes
    reshaped = compiled(
        lambda a: jax.lax.bitcast_convert_type(a, np.float32)[::-1], donate_argnums=0
    )
    assert set(reshaped.results(state)) - WRITES_IN_PLACE
    # What is in each frame, and whether it is more than is in the next.
    compared = compiled(lambda a: a.at[3].set(jnp.sort(a[:, 0] > a[::-1, 1])[:64].astype(a.dtype)))
    assert compared.temp_bytes >= FRAMES

"""Names in compiled steps: XLA on a CPU takes two instructions of a fusion for one if only - and _ tell them apart.

It compiles instructions of a fusion to functions and replaces - in their names by _. What jax asked for is
dynamic_slice.5, what XLA made of a gather of one line is dynamic-slice.5. Whoever calls one of them then gets the
other: a wrong value, or a function that calls itself. Which numbers meet is chance, so no fusion of ours may hold
both spellings.
"""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from hybrid_jax.config.sampling_params import MAX_LOGPROBS
from hybrid_jax.engine.steps.step import WHOLE, Variant
from pallas_kernels.frame_io import read_frames
from tests.drawing import left_to_all
from tests.engine.compiled_steps import (
    HEAD,
    SECOND,
    SPECULATION,
    compile_step,
    make_runner,
    mistakable,
    shape_of,
    struct,
)

pytestmark = [pytest.mark.usefixtures("no_compile_cache"), pytest.mark.as_users]

READ_A_CHECKPOINT = """
import jax
import jax.numpy as jnp
from hybrid_jax.engine.frames import slot_frames
from hybrid_jax.state import State
from pallas_kernels.frame_io import read_frames

@jax.jit
def read(arena, slots, slot):
    none = dict.fromkeys(("rings", "tokens", "lengths", "drafting"))
    ids = slot_frames(State(arena=arena, slots=slots, **none), slot)
    return read_frames(arena, ids, implementation="xla")

for count in range(2, 10):
    ids = jnp.arange(4 * count, dtype=jnp.int32).reshape(4, count)
    arena = jnp.repeat(jnp.arange(4 * count, dtype=jnp.uint32)[:, None], 8, axis=1)
    assert (read(arena, ids, jnp.array([3]))[0, :, 0] == ids[3]).all(), count
"""

STEPS = {
    "decode": ("MAM", "float32", "decode"),
    "decode_bfloat16_logprobs_adjusted": ("MAM", "bfloat16", "decode"),
    "decode_one_frame_a_layer": ("M", "float32", "decode"),
    "decode_side_by_side": ("PQ", "float32", "decode"),
    "prefill": ("MAM", "float32", "prefill"),
    "prefill_bfloat16": ("MMMA", "bfloat16", "prefill"),
    "prefill_logprobs_adjusted": ("PQ", "float32", "prefill"),
    "exact": ("MAM", "float32", "exact"),
    "decode_delta": ("DGD", "float32", "decode"),
    "prefill_delta": ("DGD", "float32", "prefill"),
    "exact_delta": ("DGD", "float32", "exact"),
}


@pytest.mark.parametrize("name", STEPS)
@left_to_all(
    "decode_one_frame",
    "prefill_bfloat16",
    "prefill_delta",
    "exact_delta",
    "decode_bfloat16_logprobs",
    "prefill_logprobs",
)
def test_a_step_of_one_row_has_no_fusion_with_both_spellings(name):
    pattern, dtype, kind = STEPS[name]
    runner = make_runner(pattern, dtype, exact=kind == "exact", max_rows=1)
    shape = shape_of(runner, kind, 1)
    variant = Variant(MAX_LOGPROBS, True) if name.endswith("adjusted") else Variant()
    variant = WHOLE if kind == "exact" else variant
    assert not mistakable(compile_step(runner, kind, shape, variant).text)


@pytest.mark.parametrize(
    "pattern, speculation",
    [
        ("MAM", SPECULATION),
        pytest.param("DJGD", SPECULATION, marks=left_to_all),
        pytest.param("MAM", HEAD, marks=left_to_all),
        ("DA", SECOND),
    ],
)
def test_a_window_of_one_row_has_no_fusion_with_both_spellings(pattern, speculation):
    runner = make_runner(pattern, speculation=speculation, max_rows=1)
    shape = shape_of(runner, "decode", 1, SPECULATION.window)
    assert not mistakable(compile_step(runner, "verify", shape, Variant()).text)


def test_both_spellings_are_seen_where_a_line_is_gathered():
    def read(arena, slots, slot):
        return read_frames(arena, slots[slot], implementation="xla")

    arena = struct(100, 8, dtype=jnp.uint32)
    text = jax.jit(read).lower(arena, struct(4, 2), struct(1)).compile().as_text()
    assert mistakable(text) == [{"dynamic-slice", "dynamic_slice"}]


def test_frames_of_a_lone_slot_are_read_whatever_their_number(root):
    """In a process of its own, which would end: with six frames both were number 5 when the line was gathered."""
    command = [sys.executable, "-c", READ_A_CHECKPOINT]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])

"""What the engine takes for each chip, and its steps compiled for each."""

from __future__ import annotations

import re

import pytest

from hybrid_jax.engine.programs.loops import GPU_OPTIONS, LOOP_OPTIONS
from pallas_kernels.plan import Chip
from tests.aot.chip import CHIPS, chip_of, compile_for_gpu
from tests.aot.models import decode_step, hybrid_7b, mixture, prefill_step
from tests.drawing import left_to_all

FRAMES = 4096
# Steps that each chip compiles. Some of their smaller kernels spill a few bytes of a thread on some chips.
STEPS = {
    "experts, decode": (decode_step, mixture("M*"), {"rows": 64}),
    "experts, prefill": (prefill_step, mixture("M"), {"rows": 1, "chunk": 8192}),
    "decode": (decode_step, hybrid_7b(1), {"rows": 64}),
    "prefill": (prefill_step, hybrid_7b(1), {"rows": 1, "chunk": 2048}),
}


@pytest.mark.parametrize("name", CHIPS)
def test_the_engine_knows_what_a_chip_has(name):
    text = CHIPS[name].read_text()

    def number(key: str) -> int:
        return int(re.search(rf"{key}: (\d+)", text)[1])

    assert chip_of(name) == Chip(
        num_sms=number("core_count"),
        shared_bytes=number("shared_memory_per_block_optin"),
        capability=(number("major"), number("minor")),
    )


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("step", STEPS)
@left_to_all("decode", "prefill", "experts, decode")
@left_to_all(*(f"experts, prefill-{chip}" for chip in CHIPS if chip != "l40s"))
def test_steps_compile_for_every_chip_with_all_of_their_kernels(step, chip):
    """No operation is left to XLA on any of them."""
    make, config, sizes = STEPS[step]
    function, specs = make(config, num_frames=FRAMES, chip=chip, **sizes)
    options = LOOP_OPTIONS if make is decode_step else GPU_OPTIONS
    compiled = compile_for_gpu(
        function, *specs, donate=(1,), chip=chip, spills=True, options=options
    )
    assert compiled.outer == ("kCommandBuffer",)
    assert max(launch.shared_bytes for launch in compiled.launches) <= chip_of(chip).shared_bytes
    layers = {"experts, decode": 2, "experts, prefill": 1}.get(step, 0)
    for name in ("expert_up", "expert_down"):
        assert len(compiled.named(name)) == layers
    assert compiled.named("ssd_window" if "decode" in step else "ssd_scan")
    assert step == "experts, prefill" or compiled.named("paged_attention")

"""What the engine takes for each chip, and its steps compiled for each."""

from __future__ import annotations

import re

import pytest

from pallas_kernels.plan import Chip
from tests.aot.chip import CHIPS, chip_of
from tests.aot.kernels import needs_disassembler
from tests.aot.resources import CASES, compiled, recorded, used
from tests.drawing import left_to_all

EXPERTS = ("expert_visits", "expert_up", "expert_down")
KERNELS = {
    "decode": ("ssd_window", "paged_attention", "ssd_fold"),
    "prefill": ("ssd_scan", "paged_attention"),
    "experts, decode": (*EXPERTS, "ssd_window", "paged_attention"),
    "experts, prefill": (*EXPERTS, "ssd_scan"),
    "gated delta, decode": ("gated_delta_window", "paged_attention", "ssd_fold"),
    "gated delta, prefill": ("gated_delta_solve", "gated_delta_scan", "paged_attention"),
}
for step in ("decode", "prefill"):
    KERNELS[f"FP8 pages, {step}"] = KERNELS[step]
# Bytes of a thread that spill; elsewhere nothing does.
SPILLS = {("b200", "paged_attention"): 4}
# Of the steps on chips these two, of which the experts of long prompts want most of a program.
DRAWN = ("experts, prefill-l40s", "decode-a100")


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


cases = pytest.mark.parametrize(("step", "chip"), CASES)
others_left_to_all = left_to_all(*sorted({*map("-".join, CASES)} - {*DRAWN}))


@cases
@others_left_to_all
def test_steps_compile_for_every_chip_with_all_of_their_kernels(step, chip):
    """No operation is left to XLA on any of them."""
    found = compiled(step, chip)
    assert found.outer == ("kCommandBuffer",)
    assert max(launch.shared_bytes for launch in found.launches) <= chip_of(chip).shared_bytes
    for name in KERNELS[step]:
        assert found.named(name), name


@needs_disassembler
@cases
@others_left_to_all
def test_kernels_take_what_the_table_says_of_a_chip(step, chip):
    """Registers and spilled bytes of a thread, and shared memory of a program."""
    assert used(step, chip) == recorded()[step, chip]


def test_the_table_has_every_step_and_chip_and_what_spills_is_little():
    table = recorded()
    assert list(table) == CASES
    for (step, chip), kernels in table.items():
        for name, (_, spilled, shared) in kernels.items():
            assert spilled <= SPILLS.get((chip, name), 0), (step, chip, name)
            assert shared <= chip_of(chip).shared_bytes

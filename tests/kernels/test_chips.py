"""Launch parameters by the chip at hand: an H200's as they were, smaller tiles elsewhere, and what fits nowhere."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta.scan_kernel import config_of as delta_config_of
from pallas_kernels.grouped_linear import ExpertArrays, mix_experts
from pallas_kernels.grouped_linear.plan import (
    LEAST_STAGES,
    Config,
    choose_config,
    shared_bytes,
    why_unsupported,
)
from pallas_kernels.paged_attention import plan as attention
from pallas_kernels.plan import H200, Chip
from pallas_kernels.records import RecordSizes
from pallas_kernels.ssd_scan.kernel import config_of
from tests.kernels.cases.grouped_linear import SMALL_CASES, make_inputs
from tests.kernels.lowered import kernels_in

B200 = Chip(num_sms=148, shared_bytes=232_448, capability=(10, 0))
A100 = Chip(num_sms=108, shared_bytes=166_912, capability=(8, 0))
L40S = Chip(num_sms=142, shared_bytes=101_376, capability=(8, 9))
RTX_5090 = Chip(num_sms=170, shared_bytes=101_376, capability=(12, 0))
OTHERS = [A100, L40S, RTX_5090]
BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
# Of tokens, experts and hidden units.
VISITS = [(6, 64, 512), (384, 64, 512), (640, 512, 512), (1024, 64, 512), (3072, 64, 512)]
LONG = (49_152, 64, 512)


@pytest.mark.parametrize(
    ("chip", "columns", "num_bytes"),
    [(chip, 256, 196_608) for chip in (H200, B200)] + [(chip, 128, 98_304) for chip in OTHERS],
)
def test_long_prompts_take_the_widest_tile_only_where_products_read_shared_memory(
    chip, columns, num_bytes
):
    choose = functools.partial(choose_config, *LONG, "bfloat16", chip=chip)
    config = Config(rows=128, columns=columns, inner=64, num_warps=8, num_stages=4)
    assert choose(matrices=1) == config
    assert choose(matrices=2) == replace(config, columns=columns // 2)
    counted_for = H200 if chip == B200 else chip  # a B200 has barriers beside its tiles
    assert shared_bytes(config, "bfloat16", matrices=1, chip=counted_for) == num_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("chip", [H200, *OTHERS])
def test_every_tile_of_experts_fits_every_chip(chip, dtype):
    assert why_unsupported(64, dtype, chip) is None
    for visits, experts, columns in (*VISITS, LONG):
        for matrices in (1, 2):
            config = choose_config(visits, experts, columns, dtype, matrices=matrices, chip=chip)
            assert shared_bytes(config, dtype, matrices=matrices, chip=chip) <= chip.shared_bytes


def test_fewer_loads_run_ahead_where_more_do_not_fit():
    config = choose_config(*LONG, "bfloat16", matrices=1, chip=replace(L40S, shared_bytes=70_000))
    assert config == Config(rows=128, columns=128, inner=64, num_warps=8, num_stages=3)
    # One byte more, and one more stage.
    for room, stages in ((98_303, 3), (98_304, 4)):
        chip = replace(L40S, shared_bytes=room)
        assert choose_config(*LONG, "bfloat16", matrices=1, chip=chip).num_stages == stages
    least = choose_config(*LONG, "bfloat16", matrices=1, chip=replace(L40S, shared_bytes=1))
    assert least.num_stages == LEAST_STAGES


def test_experts_that_fit_nowhere_are_left_to_xla_and_say_what_they_want():
    # Two stages of 128 visits and 128 columns, of which one is in registers.
    assert why_unsupported(64, "bfloat16", replace(L40S, shared_bytes=32_768)) is None
    tiny = replace(L40S, shared_bytes=32_767)
    reason = (
        "a tile of experts wants at least 32,768 bytes of shared memory for 'pallas', and this GPU has 32,767; "
        "use 'xla'"
    )
    assert why_unsupported(64, "bfloat16", tiny) == reason
    assert why_unsupported(64, "float32", tiny) is None  # tiles of 32 rows
    case = SMALL_CASES[0]
    arrays = ExpertArrays(**make_inputs(case, "bfloat16"))
    ask = functools.partial(mix_experts, arrays, kind=case.kind)
    with pytest.raises(NotImplementedError, match=f"mix_experts: {reason}"):
        ask(chip=tiny, implementation="pallas")
    assert not kernels_in(lambda: ask(chip=tiny))
    assert "expert_up" in kernels_in(lambda: ask(chip=L40S))


def test_other_kernels_of_prompts_take_fewer_tokens_where_operands_go_through_registers():
    small = RecordSizes(num_heads=4, head_dim=64, num_groups=1, state_size=128)
    large = replace(small, state_size=256)
    keys = functools.partial(attention.choose_config, "bfloat16", 128, 2048)
    assert [keys(chip).block_k for chip in (H200, B200, *OTHERS)] == [64, 64, 32, 32, 32]
    for chip in (H200, B200):
        assert [config_of(x, BFLOAT16, chip).chunk for x in (small, large)] == [64, 64]
        assert delta_config_of(BFLOAT16, chip).num_stages == 2
    for chip in OTHERS:
        assert [config_of(x, BFLOAT16, chip).chunk for x in (small, large)] == [32, 16]
        assert delta_config_of(BFLOAT16, chip).num_stages == 1
        for sizes in (small, large):  # without tensor cores
            assert config_of(sizes, FLOAT32, chip) == config_of(sizes, FLOAT32, H200)

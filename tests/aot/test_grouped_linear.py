"""Experts compiled for an H200 at the shapes of models: no spills, few launches, and tensor cores where they pay."""

from __future__ import annotations

import functools

import jax
import pytest

from pallas_kernels.grouped_linear import ExpertArrays, mix_experts
from pallas_kernels.grouped_linear.api import MATRICES
from pallas_kernels.grouped_linear.plan import MAX_EXPERTS, choose_config, shared_bytes
from tests.aot import sass
from tests.aot.chip import CHIPS, H200, SHARED_MEMORY, Compiled, chip_of, compile_for_gpu
from tests.kernels.cases.grouped_linear import CASES, Case, shapes_of

needs_disassembler = pytest.mark.skipif(sass.NO_TOOLS is not None, reason=str(sass.NO_TOOLS))
MODELS = {case.name: case for case in CASES if case.large}
# Not those of a model: a few tokens, most experts, biases, and columns and rows that fill no tile.
OTHERS = [
    Case(name="few", tokens=2, top_k=6, num_experts=64, width=1536, hidden=512),
    Case(name="experts", tokens=64, top_k=8, num_experts=MAX_EXPERTS, width=1024, hidden=256),
    Case(name="chunk", tokens=512, top_k=6, num_experts=64, width=1536, hidden=512, biased=True),
    Case(name="ragged", tokens=256, top_k=3, num_experts=48, width=1000, hidden=500, kind="relu2"),
]

# Tiles of 16, 32, 64 and 128 visits, for a gated product and for another one.
TILES = [
    *(MODELS[f"granite_4_h_tiny_{tokens}"] for tokens in (1, 64, 8192)),
    MODELS["nemotron_3_nano_8192"],
    Case(name="visits_32", tokens=200, top_k=6, num_experts=64, width=1536, hidden=512),
    Case(name="visits_64", tokens=300, top_k=6, num_experts=64, width=1536, hidden=512),
]


def program_of(case: Case, dtype: str, chip: str = H200) -> tuple:
    """A call of `mix_experts` and the shapes of its arguments."""
    visits = (case.tokens, case.top_k)
    shapes = shapes_of(case, dtype) | {
        name: jax.ShapeDtypeStruct(visits, of)
        for name, of in (("ids", "int32"), ("weights", "float32"))
    }

    def call(shapes: dict) -> jax.Array:
        return mix_experts(ExpertArrays(**shapes), kind=case.kind, chip=chip_of(chip))

    return call, shapes


def assert_few_launches(compiled: Compiled, case: Case) -> None:
    """Two products, and what sorts, activates and sums; all of them kernels."""
    assert set(compiled.kinds) == {"kCustomKernel"}
    assert max(launch.shared_bytes for launch in compiled.launches) <= SHARED_MEMORY
    for name in ("expert_up", "expert_down"):
        assert len(compiled.named(name)) == 1
    assert len(compiled.named("expert_visits")) == (case.tokens > 1)
    assert len(compiled.launches) <= 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tokens", [1, 64, 8192])
@pytest.mark.parametrize(
    "model", ["granite_4_h_tiny", "nemotron_3_nano", "qwen3_next", "jamba_mini"]
)
def test_experts_of_models(model, tokens, dtype):
    case = MODELS[f"{model}_{tokens}"]
    compiled = compile_for_gpu(*program_of(case, dtype))
    assert_few_launches(compiled, case)
    # What experts make of each visit, and its hidden units; ids and counters, and parts of a lone token's.
    item = 2 if dtype == "bfloat16" else 4
    held = case.tokens * case.top_k * (case.width + case.hidden) * item
    assert compiled.temp_bytes <= 1.02 * held + 200_000


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", TILES, ids=lambda case: case.name)
@pytest.mark.parametrize("chip", CHIPS)
def test_shared_memory_is_counted_as_the_compiler_lays_it_out(chip, case, dtype):
    """And it fits the chip; registers that spill are an error."""
    launches = compile_for_gpu(*program_of(case, dtype, chip), chip=chip)
    matrices, of = MATRICES[case.kind], chip_of(chip)
    choose = functools.partial(
        choose_config, case.tokens * case.top_k, case.num_experts, dtype=dtype, chip=of
    )
    products = {"expert_up": (case.hidden, matrices), "expert_down": (case.width, 1)}
    for name, (columns, count) in products.items():
        (launch,) = launches.named(name)
        config = choose(columns, matrices=count)
        counted = shared_bytes(config, dtype, matrices=count, chip=of)
        assert launch.shared_bytes == counted <= of.shared_bytes


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_experts_of_other_shapes(case):
    assert_few_launches(compile_for_gpu(*program_of(case, "bfloat16")), case)


@needs_disassembler
@pytest.mark.parametrize(
    ("model", "up", "down"),
    [("granite_4_h_tiny", "m64n128k16", "m64n256k16"), ("nemotron_3_nano", *["m64n256k16"] * 2)],
)
def test_long_prompts_take_the_widest_products(model, up, down):
    codes = sass.of_program(*program_of(MODELS[f"{model}_8192"], "bfloat16"))
    found = {code.name: code for code in codes}
    for name, product in (("expert_up", up), ("expert_down", down)):
        assert found[name].products == {product} and found[name].registers <= 192


@needs_disassembler
@pytest.mark.parametrize("model", ["granite_4_h_tiny", "nemotron_3_nano"])
def test_few_rows_leave_room_for_four_programs_of_each_product(model):
    """By registers; by shared memory, four take 220 KB of 228."""
    program = program_of(MODELS[f"{model}_64"], "bfloat16")
    launches = compile_for_gpu(*program).launches
    for code in sass.of_program(*program):
        if code.name in ("expert_up", "expert_down"):
            assert code.registers <= 128
            assert "mma.sync.aligned.m16n8k16" in code.ptx  # rows of a tile: 16, not 64
            (launch,) = (launch for launch in launches if launch.name == code.name)
            assert 4 * (launch.shared_bytes + 1024) <= 228 * 1024

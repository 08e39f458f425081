"""Experts against their definition: few tokens and many, tiles that are full and that are not, and what may hold
anything."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_linear import kernel, plan
from pallas_kernels.grouped_linear.api import IMPLEMENTATIONS
from pallas_kernels.plan import H200
from tests.kernels.by_name import mix_experts
from tests.kernels.cases.grouped_linear import SMALL_CASES, Case, make_inputs
from tests.kernels.compare import assert_same_bits, relative_error
from tests.kernels.lowered import kernels_in

FAST = sorted(set(IMPLEMENTATIONS) - {"reference"})
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}  # of the norm
run = functools.partial(jax.jit, static_argnames=("kind", "implementation"))(mix_experts)
named = {case.name: case for case in SMALL_CASES}


def mixed(case: Case, inputs: dict, implementation: str) -> jax.Array:
    return run(**inputs, kind=case.kind, implementation=implementation)


def one_by_one(case: Case, inputs: dict) -> np.ndarray:
    """Every visit by itself, in float64."""
    arrays = {name: np.asarray(array, np.float64) for name, array in inputs.items()}
    out = np.zeros((case.tokens, case.width))
    for token, ids in enumerate(np.asarray(inputs["ids"])):
        for expert, weight in zip(ids, arrays["weights"][token], strict=True):
            if expert == case.num_experts:
                continue
            bias = lambda name, e=expert: arrays[name][e] if name in arrays else 0
            hidden = arrays["x"][token] @ arrays["up"][expert] + bias("up_bias")
            if case.kind == "gated_silu":
                gate, up = np.split(hidden, 2)
                hidden = gate / (1 + np.exp(-gate)) * up
            else:
                hidden = np.maximum(hidden, 0) ** 2
            out[token] += weight * (hidden @ arrays["down"][expert] + bias("down_bias"))
    return out


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_the_reference_is_the_definition(case):
    inputs = make_inputs(case)
    got = mixed(case, inputs, "reference")
    np.testing.assert_allclose(got, one_by_one(case, inputs), atol=1e-5)


@pytest.mark.parametrize("implementation", FAST)
class TestImplementation:
    @pytest.mark.parametrize("dtype", sorted(TOLERANCE))
    @pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
    def test_equals_the_reference(self, implementation, case, dtype):
        inputs = make_inputs(case, dtype)
        got = mixed(case, inputs, implementation)
        want = mixed(case, inputs, "reference")
        assert got.dtype == dtype and got.shape == want.shape
        assert not np.asarray(got)[case.tokens - case.invalid :].any()
        if case.invalid < case.tokens:
            assert relative_error(got, want) <= TOLERANCE[dtype]

    def test_invalid_tokens_and_idle_experts_may_hold_anything(self, implementation):
        case = named["invalid_tokens"]
        inputs = make_inputs(case)
        poisoned = inputs | {"x": inputs["x"].at[-case.invalid :].set(jnp.nan)}
        poisoned["weights"] = inputs["weights"].at[-case.invalid :].set(jnp.nan)
        for name in ("up", "down"):
            poisoned[name] = inputs[name].at[-case.idle :].set(jnp.nan)
        got, want = (mixed(case, given, implementation) for given in (poisoned, inputs))
        assert_same_bits(got, want)

    @pytest.mark.parametrize("dtype", sorted(TOLERANCE))
    def test_a_token_has_the_same_bits_whatever_the_others_are(self, implementation, dtype):
        """The same expert in another tile, and in another row of it."""
        case = Case(name="others", tokens=40, num_experts=3)
        inputs = make_inputs(case, dtype)
        want = mixed(case, inputs, implementation)[17]
        for seed, place in ((1, 0), (2, 17), (3, 39)):
            others = make_inputs(case, dtype, seed=seed)
            for name in ("x", "ids", "weights"):
                others[name] = others[name].at[place].set(inputs[name][17])
            others |= {name: inputs[name] for name in ("up", "down")}
            assert_same_bits(mixed(case, others, implementation)[place], want)

    @pytest.mark.parametrize("dtype", sorted(TOLERANCE))
    def test_the_tolerance_is_tight_enough_to_see_gate_and_up_swapped(self, implementation, dtype):
        case = named["few_tokens"]
        inputs = make_inputs(case, dtype)
        gate, up = jnp.split(inputs["up"], 2, axis=-1)
        swapped = mixed(case, inputs | {"up": jnp.concatenate([up, gate], -1)}, implementation)
        assert relative_error(swapped, mixed(case, inputs, "reference")) > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize(("count", "block"), [(1, 4096), (50, 4096), (50, 16)])
def test_pallas_sorts_visits_by_expert_and_keeps_their_order(count, block, monkeypatch):
    monkeypatch.setattr(kernel, "SORTED_AT_ONCE", block)
    ids = np.random.default_rng(count).integers(0, 8, count).astype(np.int32)  # 7: no visit
    order, begins = jax.jit(lambda ids: kernel.sort_visits(ids, 7))(ids)
    want = np.argsort(ids, kind="stable")[: (ids < 7).sum()]
    np.testing.assert_array_equal(order[: len(want)], want)
    np.testing.assert_array_equal(begins, np.searchsorted(np.sort(ids), np.arange(8)))


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(2, 6, 64), (64, 10, 512), (900, 2, 16)])
def test_the_grid_of_pallas_has_room_for_all_tiles_that_visits_can_make(tokens, top_k, experts):
    config = plan.Config(rows=16, columns=64, inner=64)
    made = plan.make_plan(
        config, (tokens, top_k), experts, inner=512, columns=512, num_sms=H200.num_sms
    )
    visits = tokens * top_k
    spread = np.bincount(np.arange(visits) % min(experts, visits))
    # One visit to each expert, and all others to one of them: then most tiles are hardly filled.
    skewed = np.ones(min(experts, visits), int)
    skewed[0] += visits - len(skewed)
    for counts in (spread, skewed, np.array([visits])):
        assert (-(-counts // 16)).sum() <= made.tiles
    assert made.tiles <= min(experts, visits) + visits // 16


@pytest.mark.parametrize(
    ("visits", "experts", "rows"),
    [(6, 64, 16), (384, 64, 16), (640, 512, 16), (1024, 64, 32), (49152, 64, 128)],
)
def test_a_tile_of_pallas_has_room_for_most_experts_visits(visits, experts, rows):
    config = plan.choose_config(visits, experts, 512, "bfloat16", matrices=2, chip=H200)
    assert config.rows == rows


@pytest.mark.parametrize(("name", "count"), [("few_tokens", 3), ("lone_token", 2)])
def test_a_gpu_gets_two_products_and_a_sort_if_there_is_something_to_sort(name, count):
    case = named[name]
    inputs = make_inputs(case, "bfloat16")
    call = functools.partial(mix_experts, kind=case.kind)
    found = kernels_in(lambda inputs: call(**inputs), inputs)
    assert found == ["expert_visits", "expert_up", "expert_down"][-count:]


def test_too_many_experts_are_left_to_xla():
    case = Case(name="many", tokens=2, num_experts=plan.MAX_EXPERTS + 1, width=4, hidden=4)
    inputs = make_inputs(case)
    message = "there must be at most 1024 experts for 'pallas', got 1025; use 'xla'"
    with pytest.raises(NotImplementedError, match=f"mix_experts: {message}"):
        mix_experts(**inputs, kind=case.kind, implementation="pallas")
    assert not kernels_in(lambda inputs: mix_experts(**inputs, kind=case.kind), inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "gelu"}, r"kind must be one of \['gated_silu', 'relu2'\], got 'gelu'"),
        ({"kind": "relu2"}, "up must have 20 columns for 'relu2' and 20 rows of down, got 40"),
        ({"ids": jnp.zeros((9, 2))}, "ids must be int32, got float32"),
        ({"weights": jnp.zeros((9, 3))}, r"weights must have shape \(9, 2\), got \(9, 3\)"),
        ({"down": jnp.ones((5, 20, 24), "bfloat16")}, "down must be float32, got bfloat16"),
        ({"up_bias": jnp.ones((5, 40))}, "up_bias and down_bias must be given together"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    case = named["few_tokens"]
    arguments = make_inputs(case) | {"kind": case.kind} | changes
    with pytest.raises(ValueError, match=f"mix_experts: {message}"):
        mix_experts(**arguments)

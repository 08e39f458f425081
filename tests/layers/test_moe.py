"""Routing against sorted lists, experts one by one, and what other tokens may not change."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import BACKENDS, PALLAS, Backend, MoE
from hybrid_jax.kinds.table import kind_of
from hybrid_jax.layers.mlp import moe, route
from hybrid_jax.models.matrices import bound
from tests.kernels.lowered import kernels_in
from tests.tiny_models import GRANITE_MOE, NEMOTRON_MOE

WIDTH = 10
SPECS = {
    "granite": GRANITE_MOE,
    "one_expert_each": replace(GRANITE_MOE, top_k=1, shared_width=0),
    "all_experts": replace(GRANITE_MOE, top_k=5, bias=True),
    "nemotron": NEMOTRON_MOE,
    "latent_and_biases": replace(NEMOTRON_MOE, latent_width=4, bias=True),
    "raw_weights_no_groups": replace(NEMOTRON_MOE, normalize=False, num_groups=1, top_groups=1),
}


@functools.partial(jax.jit, static_argnums=(3, 4))
def jitted(params: dict, h, valid, spec: MoE, backend: Backend) -> jax.Array:
    weights = kind_of(spec).weights(spec, WIDTH)
    return moe(bound(params, weights, backend), h, valid, spec)


KERNELS = pytest.mark.parametrize("kernels", ["xla", "pallas"])
choose = functools.partial(jax.jit, static_argnums=2)(route)


@functools.partial(jax.jit, static_argnames="spec")
def on_kernels(params: dict, h, spec: MoE) -> tuple[jax.Array, jax.Array]:
    """`route`, with products as steps of Pallas kernels make them."""
    weights = kind_of(spec).weights(spec, WIDTH)
    return route(bound(params, weights, PALLAS), h, spec)


def run(params: dict, h, valid, spec: MoE, kernels: str = "xla") -> jax.Array:
    return jitted(params, h, valid, spec, BACKENDS[kernels])


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_params(spec: MoE, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)

    def block(outer: int, width: int, *lead: int) -> dict:
        hidden = 2 * width if spec.kind == "gated_silu" else width
        params = {
            "up": rng.standard_normal((*lead, outer, hidden)) / 3,
            "down": rng.standard_normal((*lead, width, outer)) / 3,
        }
        if spec.bias:
            params["up_bias"] = rng.standard_normal((*lead, hidden))
            params["down_bias"] = rng.standard_normal((*lead, outer))
        return params

    inner = spec.latent_width or WIDTH
    params = block(inner, spec.width, spec.num_experts)
    params["router"] = rng.standard_normal((WIDTH, spec.num_experts))
    if spec.routing == "sigmoid":  # corrections below -1 make every choice negative
        params["router_bias"] = rng.standard_normal(spec.num_experts) - 2
    if spec.shared_width:
        params["shared"] = block(WIDTH, spec.shared_width)
    if spec.latent_width:
        params["latent_down"] = rng.standard_normal((WIDTH, inner))
        params["latent_up"] = rng.standard_normal((inner, WIDTH))
        if spec.bias:
            params["latent_down_bias"] = rng.standard_normal(inner)
            params["latent_up_bias"] = rng.standard_normal(WIDTH)
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)


def slow_route(params: dict, h: np.ndarray, spec: MoE) -> tuple[list[int], list[float]]:
    """One token: expert ids, best first and the lower id on ties, and their weights."""
    logits = np.asarray(h, np.float64) @ np.asarray(params["router"], np.float64)
    if spec.routing == "topk_softmax":
        ids = sorted(range(spec.num_experts), key=lambda e: -logits[e])[: spec.top_k]
        weights = np.exp(logits[ids] - logits[ids].max())
        return ids, list(weights / weights.sum())
    scores = 1 / (1 + np.exp(-logits))
    choice = scores + np.asarray(params["router_bias"], np.float64)
    per_group = spec.num_experts // spec.num_groups
    groups = [range(g * per_group, (g + 1) * per_group) for g in range(spec.num_groups)]
    strength = [sum(sorted((choice[e] for e in group), reverse=True)[:2]) for group in groups]
    kept = sorted(range(spec.num_groups), key=lambda g: -strength[g])[: spec.top_groups]
    candidates = [e for g in sorted(kept) for e in groups[g]]
    ids = sorted(candidates, key=lambda e: -choice[e])[: spec.top_k]
    weights = scores[ids]
    if spec.normalize:
        weights = weights / weights.sum()
    return ids, list(weights * spec.scale)


def slow_block(params: dict, h: np.ndarray, kind: str) -> np.ndarray:
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    hidden = h @ p["up"] + p.get("up_bias", 0)
    if kind == "gated_silu":
        gate, up = np.split(hidden, 2)
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        hidden = np.maximum(hidden, 0) ** 2
    return hidden @ p["down"] + p.get("down_bias", 0)


def slow_moe(params: dict, h: np.ndarray, spec: MoE) -> np.ndarray:
    """One token through the experts it chose, one after the other."""
    h = np.asarray(h, np.float64)
    wide = {name: np.asarray(v, np.float64) for name, v in params.items() if name != "shared"}
    inner = h
    if spec.latent_width:
        inner = h @ wide["latent_down"] + wide.get("latent_down_bias", 0)
    mixed = 0
    for expert, weight in zip(*slow_route(params, h, spec), strict=True):
        own = {name: wide[name][expert] for name in wide if name.startswith(("up", "down"))}
        mixed = mixed + weight * slow_block(own, inner, spec.kind)
    if spec.latent_width:
        mixed = mixed @ wide["latent_up"] + wide.get("latent_up_bias", 0)
    if spec.shared_width:
        mixed = mixed + slow_block(params["shared"], h, spec.kind)
    return mixed


@pytest.mark.parametrize("name", SPECS)
def test_routing_equals_sorted_lists(name):
    spec, params, h = SPECS[name], make_params(SPECS[name]), draw(40, WIDTH)
    ids, weights = choose(params, h, spec)
    assert weights.dtype == jnp.float32
    for t in range(len(h)):
        want_ids, want_weights = slow_route(params, h[t], spec)
        assert list(np.asarray(ids[t])) == want_ids
        np.testing.assert_allclose(weights[t], want_weights, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_routing_of_a_lone_row_on_kernels_equals_sorted_lists(name, dtype):
    spec, params = SPECS[name], make_params(SPECS[name])
    params["router"] = params["router"].astype(dtype)
    h = jnp.asarray(draw(40, WIDTH), dtype)
    for t in range(len(h)):
        ids, weights = on_kernels(params, h[t : t + 1], spec)
        assert weights.dtype == jnp.float32
        want_ids, want_weights = slow_route(params, h[t], spec)
        assert list(np.asarray(ids[0])) == want_ids
        np.testing.assert_allclose(weights[0], want_weights, rtol=1e-5)


def test_on_a_gpu_the_router_of_a_lone_row_is_a_product_of_its_own():
    params, h = make_params(GRANITE_MOE), draw(2, WIDTH)
    routed = functools.partial(on_kernels, spec=GRANITE_MOE)
    assert kernels_in(routed, params, h[:1]) == ["row_product"]
    assert kernels_in(routed, params, h) == []


@pytest.mark.parametrize("name", ["granite", "nemotron"])
def test_ties_go_to_the_lower_expert(name):
    spec, params = SPECS[name], make_params(SPECS[name])
    params["router"] = jnp.ones_like(params["router"])
    if name == "nemotron":
        params["router_bias"] = jnp.full(spec.num_experts, -2.0)
    ids, weights = choose(params, jnp.ones((2, WIDTH)), spec)
    assert np.asarray(ids).tolist() == [[0, 1]] * 2
    np.testing.assert_allclose(weights, np.full((2, 2), spec.scale / 2), rtol=1e-6)


def test_normalised_weights_sum_to_the_scale():
    weights = choose(make_params(NEMOTRON_MOE), draw(40, WIDTH), NEMOTRON_MOE)[1]
    np.testing.assert_allclose(np.asarray(weights).sum(-1), NEMOTRON_MOE.scale, rtol=1e-5)


def test_routing_of_bfloat16_is_done_in_float32():
    params, h = make_params(NEMOTRON_MOE), jnp.asarray(draw(40, WIDTH), jnp.bfloat16)
    params["router"] = params["router"].astype(jnp.bfloat16)
    ids, weights = choose(params, h, NEMOTRON_MOE)
    wide = params | {"router": params["router"].astype(jnp.float32)}
    want_ids, want_weights = choose(wide, h.astype(jnp.float32), NEMOTRON_MOE)
    assert weights.dtype == jnp.float32
    assert np.array_equal(ids, want_ids) and np.array_equal(weights, want_weights)


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [((1, 1), "xla"), ((2, 9), "xla"), ((5, 40), "xla"), ((2, 9), "pallas")],
    ids=str,
)
@pytest.mark.parametrize("name", SPECS)
def test_moe_equals_the_chosen_experts_one_by_one(name, shape, kernels):
    """Blocks of one visit, blocks of a few, and experts with more visits than the largest block has."""
    spec, params, h = SPECS[name], make_params(SPECS[name]), draw(*shape, WIDTH)
    got = run(params, h, jnp.ones(shape, bool), spec, kernels)
    want = np.array([[slow_moe(params, token, spec) for token in row] for row in h])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["granite", "latent_and_biases"])
def test_a_bfloat16_block_keeps_its_dtype(name):
    spec, params, h = SPECS[name], make_params(SPECS[name]), draw(2, 9, WIDTH)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    h = jnp.asarray(h, jnp.bfloat16)
    got = run(half, h, jnp.ones((2, 9), bool), spec)
    assert got.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), half)
    want = run(wide, h.astype(jnp.float32), jnp.ones((2, 9), bool), spec)
    error = np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want)
    assert error < 3e-2


@pytest.mark.parametrize("name", ["granite", "nemotron", "latent_and_biases"])
def test_a_token_has_the_same_bits_whatever_the_others_are_and_wherever_it_stands(name):
    spec, params = SPECS[name], make_params(SPECS[name])
    h, everyone = draw(4, 8, WIDTH), jnp.ones((4, 8), bool)
    want = np.asarray(run(params, h, everyone, spec))
    for place in (0, 5, 31):
        others = draw(32, WIDTH, seed=place + 1)
        others[place] = h[1, 3]
        got = run(params, others.reshape(h.shape), everyone, spec)
        assert np.array_equal(np.asarray(got).reshape(32, WIDTH)[place], want[1, 3])


@KERNELS
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 9.0])
@pytest.mark.parametrize("name", ["granite", "nemotron"])
def test_invalid_tokens_change_no_bit_of_valid_ones(name, garbage, kernels):
    spec, params, h = SPECS[name], make_params(SPECS[name]), draw(2, 9, WIDTH)
    valid = np.arange(9) < np.array([[4], [0]])
    want = np.asarray(run(params, h, jnp.asarray(valid), spec, kernels))
    dirty = np.where(valid[..., None], h, np.float32(garbage))
    got = np.asarray(run(params, dirty, jnp.asarray(valid), spec, kernels))
    assert np.array_equal(got[valid], want[valid])


@KERNELS
def test_invalid_tokens_visit_no_expert(kernels):
    spec = replace(GRANITE_MOE, shared_width=0)
    params, h = make_params(spec), draw(2, 9, WIDTH)
    valid = jnp.asarray(np.arange(9) < np.array([[4], [0]]))
    got = np.asarray(run(params, h, valid, spec, kernels))
    assert not got[~np.asarray(valid)].any() and got[np.asarray(valid)].any()
    # An expert nobody chose is not even computed: its weights may be anything.
    ids = np.asarray(choose(params, h.reshape(-1, WIDTH), spec)[0]).reshape(2, 9, -1)
    unused = set(range(spec.num_experts)) - set(ids[0, :1].ravel())
    poisoned = params | {"up": params["up"].at[jnp.array(sorted(unused))].set(jnp.nan)}
    one = jnp.zeros((2, 9), bool).at[0, 0].set(True)
    assert np.array_equal(run(poisoned, h, one, spec, kernels)[0, 0], got[0, 0])


@pytest.mark.usefixtures("no_compile_cache")
@pytest.mark.parametrize("num_tokens", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loop_of_steps_makes_no_copy_of_all_experts(dtype, num_tokens):
    """As in decode, where a converted copy of the weights would be made for each dispatch, or each layer."""
    spec = replace(GRANITE_MOE, num_experts=256, shared_width=0)
    params = jax.tree.map(lambda a: a.astype(dtype), make_params(spec))
    valid = jnp.ones((1, num_tokens), bool)

    def steps(params, h, count):
        return jax.lax.fori_loop(0, count, lambda _, h: moe(params, h, valid, spec), h)

    h = jnp.zeros((1, num_tokens, WIDTH), dtype)
    memory = jax.jit(steps).lower(params, h, jnp.int32(3)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < params["down"].nbytes


@pytest.mark.parametrize("eps", [1e-20, 1e-6])
def test_small_scores_are_divided_by_their_sum_and_what_is_added_to_it(eps):
    spec = replace(SPECS["nemotron"], num_groups=1, top_groups=1, sum_eps=eps, scale=1.0)
    params = {
        "router": np.full((1, spec.num_experts), -1, np.float32),
        "router_bias": np.zeros(spec.num_experts, np.float32),
    }
    _, weights = choose(params, np.full((1, 1), 16, np.float32), spec)
    score = 1 / (1 + np.exp(16.0))
    assert np.allclose(weights, score / (spec.top_k * score + eps), rtol=1e-4)

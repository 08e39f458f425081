"""Tokens of the Triton kernel are those of the definition, by sorting."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.token_sampling.reference import SamplingArrays
from tests.drawing import left_to_all
from tests.kernels.sampled import ROWS, arguments, tokens

try:
    from pallas_kernels.token_sampling.triton_kernel import Config, sample_tokens_triton
except ModuleNotFoundError:
    pytest.skip("needs triton", allow_module_level=True)

PART, ROOM = Config().part, Config().room
LARGE = 151_936


def rows(given: dict, *which: int) -> dict:
    return {name: array[np.array(which)] for name, array in given.items()}


def asking(vocab: int, *wishes: dict, seed: int = 0, **changes) -> dict:
    """One row per wish: a temperature, and top_k, top_p, min_p where it asks for them; no token is banned."""
    given = rows(arguments(vocab, seed), *range(len(wishes)))
    none = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for name, value in none.items():
        values = [wish.get(name, value) for wish in wishes]
        given[name] = jnp.asarray(values, given[name].dtype)
    return given | {"banned": jnp.full((len(wishes), 1), -1)} | changes


def assert_as_defined(given: dict) -> np.ndarray:
    got = tokens(given, "triton")
    np.testing.assert_array_equal(got, tokens(given, "reference"))
    return got


@pytest.mark.parametrize("vocab", [1, 7, PART, 2 * PART + 5])
@left_to_all("4096")
def test_the_kernel_draws_what_the_definition_draws(vocab):
    assert_as_defined(arguments(vocab))


@left_to_all
def test_a_large_vocabulary():
    few = {"top_k": 50, "top_p": 0.9}
    flat = {
        "temperature": 2.0,
        "top_p": 0.95,
    }  # 70,000 tokens: levels are refined, candidates near the edge alone
    greedy = {"temperature": 0.0}
    wishes = greedy, {"min_p": 0.01}, few, {"top_p": 0.9}, flat
    given = asking(LARGE, *wishes)
    assert_as_defined(given | {"banned": jnp.asarray([[-1, 3], *[[7, LARGE - 1]] * 4])})


def test_every_mixture_of_filters():
    mixtures = itertools.product((0, 3, 40), (1.0, 0.9), (0.0, 0.02), (0.5, 1.5))
    wishes = [{"top_k": k, "top_p": p, "min_p": m, "temperature": t} for k, p, m, t in mixtures]
    for start in range(0, len(wishes), ROWS):
        assert_as_defined(asking(PART + 3, *wishes[start : start + ROWS], seed=start))


FILTERS = (
    {"temperature": 0.0},
    {},
    {"top_k": 2},
    {"top_k": 700},
    {"top_p": 0.5},
    {"top_k": 5, "top_p": 0.9},
    {"min_p": 0.5, "top_p": 0.99},
)


@pytest.mark.parametrize("vocab", [300, 2 * PART])
def test_equal_logits_everywhere_all_stay(vocab):
    given = asking(vocab, *FILTERS)
    got = assert_as_defined(given | {"logits": jnp.full((len(FILTERS), vocab), 2.5)})
    assert got[0] == 0 and len(set(got)) > 4  # every filter keeps all of them
    two = jnp.where(jnp.arange(vocab) % 3 == 0, 1.0, 0.5)
    assert_as_defined(given | {"logits": jnp.broadcast_to(two, (len(FILTERS), vocab))})


def test_one_dominant_token():
    given = asking(PART + 9, *FILTERS)
    got = assert_as_defined(given | {"logits": given["logits"].at[:, PART + 1].set(99.0)})
    assert (got == PART + 1).all()


def test_tied_logits_take_the_first_and_stay_together():
    vocab = PART + 3
    logits = jnp.zeros((ROWS, vocab)).at[:, PART - 2 :].set(1.0)
    given = arguments(vocab, logits=logits, banned=jnp.full((ROWS, 1), -1))
    got = assert_as_defined(given)
    greedy = np.asarray(given["temperature"]) == 0
    assert (got[greedy] == PART - 2).all()
    coarse = jnp.round(given["logits"] + arguments(vocab)["logits"])  # thousands of tokens a level
    assert_as_defined(rows(given | {"logits": coarse}, *range(12)))


@pytest.mark.parametrize("top_p", [0.0, 1e-7, 1 - 2**-24])
def test_extreme_masses(top_p):
    assert_as_defined(asking(3000, *FILTERS) | {"top_p": jnp.full(len(FILTERS), top_p)})


@pytest.mark.parametrize("temperature", [1e-38, 1e-2, 1e30])
def test_extreme_temperatures(temperature):
    given = asking(3000, *FILTERS)
    assert_as_defined(given | {"temperature": jnp.full(len(FILTERS), temperature, jnp.float32)})


def test_nan_banned_and_infinite_logits():
    given = asking(300, *FILTERS)
    broken = given["logits"].at[:, 7].set(jnp.nan).at[:, 9:200].set(-jnp.inf)
    banned = jnp.asarray([[-1, 8, -1, 250, 299]] * len(FILTERS))
    got = assert_as_defined(given | {"logits": broken, "banned": banned})
    assert not np.isin(got, [7, 8, *range(9, 200), 250, 299]).any()
    for value in (-jnp.inf, jnp.nan):
        got = assert_as_defined(given | {"logits": jnp.full_like(broken, value)})
        assert (got == 0).all()
    top = given["logits"].at[:, 5].set(jnp.inf)
    np.testing.assert_array_equal(
        tokens(given | {"logits": top}, "triton"), tokens(given | {"logits": top}, "pallas")
    )


@pytest.mark.parametrize("room", [16, 256])
@left_to_all("16")
def test_more_candidates_than_there_is_room_for(room):
    given = arguments(PART + 77, 3)
    run = jax.jit(functools.partial(sample_tokens_triton, config=Config(room=room)))
    np.testing.assert_array_equal(run(SamplingArrays(**given)), tokens(given, "reference"))


def test_tokens_do_not_depend_on_sizes():  # nor on the order of candidates
    given = rows(arguments(1100, 4), *range(12))
    config = Config(part=256, line=128, group=2, piece=128, room=512, block=64)
    run = jax.jit(functools.partial(sample_tokens_triton, config=config))
    np.testing.assert_array_equal(run(SamplingArrays(**given)), tokens(given, "triton"))


def test_a_row_draws_the_same_in_any_batch():
    given = rows(arguments(PART + 1, 2), *range(8))
    together = tokens(given, "triton")
    for row in (5, 7):
        assert tokens(rows(given, row), "triton") == together[row : row + 1]
    other = tokens(given | {"keys": given["keys"] + jnp.uint32(1)}, "triton")
    assert (other != together).any()

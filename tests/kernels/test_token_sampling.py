"""Sampled tokens: the kernel, XLA's form, and the definition by sorting agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.engine import sampling
from pallas_kernels import jax_triton
from pallas_kernels.token_sampling.kernel import BLOCK
from pallas_kernels.token_sampling.numbers import noise_keys
from tests.kernels.by_name import sample_tokens
from tests.kernels.lowered import kernels_in
from tests.kernels.sampled import ROWS, arguments, tokens


@pytest.mark.parametrize("vocab", [7, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_kernel_and_xla_draw_what_the_definition_draws(vocab, seed):
    given = arguments(vocab, seed)
    want = tokens(given, "reference")
    for implementation in ("pallas", "xla"):
        np.testing.assert_array_equal(tokens(given, implementation), want)


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
def test_numbers_are_folded_into_keys_where_noise_is_made(implementation):
    given = arguments(300)
    sample, position = jnp.arange(ROWS) % 3, 7 * jnp.arange(ROWS)
    made = noise_keys(given["keys"], sample, position)
    want = tokens(given | {"keys": made}, implementation)
    got = tokens(given | {"sample_index": sample, "position": position}, implementation)
    np.testing.assert_array_equal(got, want)
    assert (got != tokens(given, implementation)).any()
    assert (got != tokens(given | {"position": position}, implementation)).any()


def test_rows_that_are_all_greedy_make_no_keys():
    """XLA's form folds numbers into keys inside the branch for rows that are drawn at random."""
    given = arguments(300) | {"position": jnp.arange(ROWS)}
    form = functools.partial(sample_tokens, implementation="xla")
    outside = jax.make_jaxpr(lambda given: form(**given))(given).jaxpr.eqns
    names = [equation.primitive.name for equation in outside]
    assert "cond" in names and not any(name.startswith("random") for name in names)


def test_the_engine_draws_the_same_either_way():
    given = arguments(3000)
    want = tokens(given, "pallas")
    rng = np.random.default_rng(5)
    rows = sampling.SamplingRows(
        seed=jnp.asarray(rng.integers(0, 2**32, (ROWS, 2), np.uint32)),
        sample_index=jnp.zeros(ROWS, jnp.int32),
        **{name: given[name] for name in ("temperature", "top_k", "top_p", "min_p")},
        min_end=jnp.where(jnp.arange(ROWS) % 2 == 0, 99, 0),
        stop_ids=given["banned"],
    )
    positions = jnp.arange(ROWS)
    run = jax.jit(sampling.sample, static_argnums=3)
    got = [np.asarray(run(given["logits"], rows, positions, k)) for k in ("xla", "pallas")]
    np.testing.assert_array_equal(*got)
    assert (got[0] != want).any()  # other keys


def test_tied_logits_take_the_first_and_stay_together():
    vocab = BLOCK + 3
    logits = jnp.zeros((ROWS, vocab)).at[:, BLOCK - 2 :].set(1.0)
    given = arguments(vocab, logits=logits, banned=jnp.full((ROWS, 1), -1))
    got = tokens(given, "pallas")
    np.testing.assert_array_equal(got, tokens(given, "reference"))
    greedy = np.asarray(given["temperature"]) == 0
    assert (got[greedy] == BLOCK - 2).all()


def test_nan_is_not_drawn():
    given = arguments(300)
    given |= {"logits": given["logits"].at[:, 7].set(jnp.nan)}
    got = tokens(given, "pallas")
    np.testing.assert_array_equal(got, tokens(given, "reference"))
    assert (got != 7).all()


def test_no_mass_keeps_the_most_likely():
    given = arguments(300) | {"top_p": jnp.zeros(ROWS)}
    want = tokens(given, "reference")
    for implementation in ("pallas", "xla"):
        np.testing.assert_array_equal(tokens(given, implementation), want)


def test_wishes_may_be_of_half_precision():
    given = arguments(300)
    halves = {name: given[name].astype(jnp.bfloat16) for name in ("temperature", "top_p", "min_p")}
    rounded = {name: half.astype(jnp.float32) for name, half in halves.items()}
    for implementation in ("reference", "xla", "pallas"):
        got = tokens(given | halves, implementation)
        np.testing.assert_array_equal(got, tokens(given | rounded, implementation))


def test_a_row_draws_the_same_in_any_batch():
    given = arguments(500)
    together = tokens(given, "pallas")
    alone = tokens({name: a[5:6] for name, a in given.items()}, "pallas")
    assert alone == together[5:6]
    other = tokens(given | {"keys": given["keys"] + jnp.uint32(1)}, "pallas")
    assert (other != together).any()


def test_none_chooses_by_platform():
    given = arguments(40)
    assert kernels_in(lambda given: sample_tokens(**given), given) == ["sample_tokens"]
    slow = functools.partial(sample_tokens, implementation="reference")
    assert kernels_in(lambda given: slow(**given), given) == []


def test_triton_runs_or_says_why_not(monkeypatch):
    monkeypatch.setattr(jax_triton, "why_unavailable", lambda: "needs the package jax-triton")
    with pytest.raises(NotImplementedError, match="^sample_tokens: needs the package jax-triton$"):
        sample_tokens(**arguments(40), implementation="triton")
    assert sample_tokens(**arguments(40), implementation="pallas").shape == (ROWS,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": jnp.ones((ROWS, 40), jnp.bfloat16)}, "logits must be float32, got bfloat16"),
        (
            {"keys": jnp.ones((ROWS, 3), jnp.uint32)},
            r"keys must have shape \(24, 2\), got \(24, 3\)",
        ),
        ({"top_p": jnp.ones(3)}, r"top_p must have shape \(24,\), got \(3,\)"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        sample_tokens(**arguments(40) | change)

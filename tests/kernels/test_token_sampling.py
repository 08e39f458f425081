"""Sampled tokens: the kernel, the definition by sorting, and the engine's way on a CPU agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.engine import sampling
from pallas_kernels import jax_triton
from pallas_kernels.token_sampling.kernel import BLOCK
from tests.kernels.by_name import sample_tokens
from tests.kernels.lowered import kernels_in

ROWS = 24


def arguments(vocab: int, seed: int = 0, **changes) -> dict:
    """Rows with every mixture of settings; about a third are greedy."""
    rng = np.random.default_rng(seed)
    given = {
        "logits": jnp.asarray(rng.standard_normal((ROWS, vocab)) * 3, jnp.float32),
        "keys": jnp.asarray(rng.integers(0, 2**32, (ROWS, 2), np.uint32)),
        "temperature": jnp.asarray(rng.choice([0, 0.7, 1.0, 2.0], ROWS), jnp.float32),
        "top_k": jnp.asarray(rng.choice([0, 1, 5, 50, vocab + 9], ROWS), jnp.int32),
        "top_p": jnp.asarray(rng.choice([1.0, 0.9, 0.3], ROWS), jnp.float32),
        "min_p": jnp.asarray(rng.choice([0, 0.05, 0.5], ROWS), jnp.float32),
        "banned": jnp.asarray(rng.integers(-1, vocab, (ROWS, 3)), jnp.int32),
    }
    return given | changes


def tokens(given: dict, implementation: str) -> np.ndarray:
    run = functools.partial(sample_tokens, implementation=implementation)
    return np.asarray(jax.jit(run)(**given))


@pytest.mark.parametrize("vocab", [7, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_kernel_draws_what_the_definition_draws(vocab, seed):
    given = arguments(vocab, seed)
    np.testing.assert_array_equal(tokens(given, "pallas"), tokens(given, "reference"))


def test_the_engine_on_a_cpu_draws_the_same():
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


def test_nan_is_not_drawn_and_no_mass_keeps_the_most_likely():
    given = arguments(300)
    broken = given["logits"].at[:, 7].set(jnp.nan)
    for changes in ({"logits": broken}, {"top_p": jnp.zeros(ROWS)}):
        got = tokens(given | changes, "pallas")
        np.testing.assert_array_equal(got, tokens(given | changes, "reference"))
        assert (got != 7).all()


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

"""Differences of running decay sums against float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.decay import LOWEST, lag, running_decay


def fast_and_slow(num: int) -> np.ndarray:
    """Exponents of a head that mostly forgets at once and sometimes hardly at all."""
    rng = np.random.default_rng(0)
    return np.where(rng.random(num) < 0.7, -12 * rng.random(num), -0.01 * rng.random(num)).astype(
        np.float32
    )


def relative_error(sums, exponents: np.ndarray) -> float:
    """Largest relative error of exp over one step, wherever that is not negligible."""
    late, early = ([np.asarray(p)[1:] for p in sums], [np.asarray(p)[:-1] for p in sums])
    true = np.exp(exponents[1:].astype(np.float64))
    return np.abs(np.exp(np.asarray(lag(late, early), np.float64)) / true - 1)[true > 1e-6].max()


def test_differences_keep_full_precision_where_the_sum_is_large():
    exponents = fast_and_slow(128)
    assert relative_error(running_decay(jnp.asarray(exponents), 0), exponents) < 1e-6


def test_plain_running_sums_would_not():
    exponents = fast_and_slow(128)
    plain = np.cumsum(exponents, dtype=np.float32)
    assert relative_error((plain, np.zeros_like(plain)), exponents) > 1e-5


def test_coarse_sums_are_exact_at_the_limit():
    exponents = np.full(128, -1e9, np.float32)
    coarse, fine = running_decay(jnp.asarray(exponents), 0)
    assert np.array_equal(np.asarray(coarse), LOWEST * np.arange(1, 129))
    assert not np.asarray(fine).any()

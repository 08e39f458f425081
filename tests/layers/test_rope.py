"""Rotations against complex numbers; scaled frequencies against the published rule."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import Rope, RopeScaling
from hybrid_jax.layers.attention import frequencies
from pallas_kernels.append_kv import heads

LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
)


def rotate(x, positions, rope: Rope):
    return heads.rotate(x, *heads.turns(positions, frequencies(rope)))


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("dim", "head_dim"), [(8, 8), (4, 10), (2, 8)])
def test_rotation_is_a_complex_product(dim, head_dim):
    x = draw(2, 6, 3, head_dim)
    positions = np.array([[0, 1, 2, 3, 4, 5], [7, 7, 100, 0, 4000, 2]], np.int32)
    half = dim // 2
    numbers = x[..., :half].astype(np.float64) + 1j * x[..., half:dim]
    speed = np.array([10_000.0 ** (-2 * i / dim) for i in range(half)])
    turned = numbers * np.exp(1j * positions[:, :, None, None] * speed)
    want = np.concatenate([turned.real, turned.imag, x[..., dim:]], axis=-1)
    got = rotate(jnp.asarray(x), jnp.asarray(positions), Rope(dim=dim))
    # The angle is a float32 product: an error of one ulp at position 4000 is 2.4e-4 radians.
    near = positions < 1000
    np.testing.assert_allclose(np.asarray(got)[near], want[near], atol=2e-5)
    np.testing.assert_allclose(got, want, atol=1e-3)
    assert np.array_equal(np.asarray(got)[..., dim:], x[..., dim:])


def test_dot_products_depend_on_the_distance_only():
    q, k, rope = jnp.asarray(draw(1, 1, 1, 16)), jnp.asarray(draw(1, 1, 1, 16)) + 1, Rope(dim=16)

    def score(i: int, j: int) -> float:
        at = [rotate(a, jnp.full((1, 1), p, jnp.int32), rope) for a, p in ((q, i), (k, j))]
        return float(jnp.sum(at[0] * at[1]))

    assert score(9, 4) == pytest.approx(score(105, 100), rel=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-2)


def llama3_frequency(base: float, scaling: RopeScaling) -> float:
    """The rule of the release, for one frequency."""
    wavelength = 2 * math.pi / base
    longest_kept = scaling.original_max_position / scaling.high_freq_factor
    shortest_divided = scaling.original_max_position / scaling.low_freq_factor
    if wavelength < longest_kept:
        return base
    if wavelength > shortest_divided:
        return base / scaling.factor
    share = scaling.original_max_position / wavelength - scaling.low_freq_factor
    share /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - share) * base / scaling.factor + share * base


def test_llama3_scaling_keeps_blends_and_divides():
    plain = [500_000.0 ** (-2 * i / 128) for i in range(64)]
    want = np.array([llama3_frequency(base, LLAMA3) for base in plain])
    got = frequencies(Rope(dim=128, theta=500_000.0, scaling=LLAMA3))
    np.testing.assert_allclose(got, want, rtol=2e-5)
    ratio = want / plain
    assert (ratio == 1).any() and (ratio == 1 / 8).any() and ((ratio < 1) & (ratio > 1 / 8)).any()


def test_linear_scaling_divides_every_frequency():
    scaled = Rope(dim=16, scaling=RopeScaling(kind="linear", factor=4.0))
    np.testing.assert_allclose(frequencies(scaled), frequencies(Rope(dim=16)) / 4, rtol=1e-6)


def test_frequencies_keep_float32():
    assert frequencies(Rope(dim=128, scaling=LLAMA3)).dtype == np.float32


def test_bfloat16_rotates_wide_and_returns_its_dtype():
    x = jnp.asarray(draw(1, 3, 2, 8), jnp.bfloat16)
    positions = jnp.asarray([[0, 50, 900]], jnp.int32)
    got = rotate(x, positions, Rope(dim=6))
    want = rotate(x.astype(jnp.float32), positions, Rope(dim=6))
    assert got.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(got), np.asarray(want.astype(jnp.bfloat16)))

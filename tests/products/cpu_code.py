"""Machine code of every variant that this processor runs."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.products.cpu.build import Recipe, Unavailable, compiler, object_code, recipe
from hybrid_jax.products.cpu.build import register as register_with_jax
from hybrid_jax.products.cpu.source import SHARING, Sharing
from hybrid_jax.products.cpu.variants import VARIANTS, fitting

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
NAMES = [variant.name for variant in VARIANTS]
# Threads help with the smallest product, or with none.
SHARED, ALONE = Sharing(alone_bytes=0), Sharing(most_helpers=0)


@functools.cache
def registered(name: str, sharing: Sharing = SHARING) -> Recipe:
    """What a variant's code is made of, once XLA knows the code. Skips what this processor does not run."""
    try:
        llvm, _ = compiler()
    except Unavailable as error:
        pytest.skip(str(error))
    if name not in [variant.name for variant in fitting(dict(llvm.get_host_cpu_features()))]:
        pytest.skip(f"this processor does not run {name}")
    made = recipe(name, sharing)
    register_with_jax(made, object_code(made))
    return made


def best() -> str:
    """The name of the variant that engines here would take."""
    try:
        return recipe().variant.name
    except Unavailable as error:
        pytest.skip(str(error))


def numbers(*shape: int, dtype: str = "f32", seed: int = 0):
    """Random numbers as an array of jax."""
    drawn = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return jnp.asarray(drawn, DTYPES[dtype])

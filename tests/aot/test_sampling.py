"""Sampling compiled for an H200: one launch, no loops of XLA's, no registers spilled."""

import jax.numpy as jnp
import pytest

from pallas_kernels.token_sampling import sample_tokens
from tests.aot.h200 import compile_for_h200
from tests.aot.test_kernels import assert_only, spec


@pytest.mark.parametrize("banned", [1, 16])
@pytest.mark.parametrize("vocab", [32768, 151936])
def test_sampling_is_one_launch(vocab, banned):
    rows, row = 64, spec(64)
    compiled = compile_for_h200(
        *(sample_tokens, spec(rows, vocab), spec(rows, 2, dtype="uint32")),
        *(row, spec(rows, dtype="int32"), row, row, spec(rows, banned, dtype="int32")),
    )
    assert_only(compiled, "sample_tokens")
    assert compiled.temp_bytes < 1024
    assert jnp.prod(jnp.asarray(compiled.launches[0].grid)) == rows

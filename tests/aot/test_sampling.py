"""Sampling compiled for an H200: few launches, no loops of XLA's, no registers spilled."""

import functools

import jax.numpy as jnp
import pytest

from pallas_kernels.token_sampling import SamplingArrays, sample_tokens
from tests.aot.chip import SHARED_MEMORY, compile_for_gpu
from tests.aot.kernels import assert_only, spec
from tests.aot.sass import NO_TOOLS, recorded


def asked(rows: int, vocab: int, banned: int) -> SamplingArrays:
    row = spec(rows)
    logits, keys = spec(rows, vocab), spec(rows, 2, dtype="uint32")
    top_k, bans = spec(rows, dtype="int32"), spec(rows, banned, dtype="int32")
    return SamplingArrays(logits, keys, row, top_k, row, row, bans)


@pytest.mark.parametrize("banned", [1, 16])
@pytest.mark.parametrize("vocab", [32768, 151936])
def test_sampling_is_one_launch(vocab, banned):
    rows = 64
    compiled = compile_for_gpu(sample_tokens, asked(rows, vocab, banned))
    assert_only(compiled, "sample_tokens")
    assert compiled.temp_bytes < 1024
    assert jnp.prod(jnp.asarray(compiled.launches[0].grid)) == rows


@pytest.mark.skipif(NO_TOOLS is not None, reason=str(NO_TOOLS))
@pytest.mark.parametrize("vocab", [32768, 151936])
def test_sampling_in_triton_is_five_launches(vocab):
    from pallas_kernels.token_sampling import triton_kernel

    names = ["_maxima", "_narrow", "_narrow_more", "_gather", "_choose"]
    run = functools.partial(sample_tokens, implementation="triton")
    with recorded(*(getattr(triton_kernel, name) for name in names)) as kernels:
        compiled = compile_for_gpu(run, asked(64, vocab, 16))
    assert [kernel.name for kernel in kernels] == names
    assert all(kernel.spilled_bytes == 0 for kernel in kernels), kernels
    assert all(kernel.shared_bytes <= SHARED_MEMORY for kernel in kernels), kernels
    assert compiled.kinds == {"kCustomCall": len(names)}  # and not a copy
    assert compiled.temp_bytes < 5e6  # most of it 8,192 candidates a row

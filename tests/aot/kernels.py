"""Arguments of kernels in the shapes of models, and what their code may hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.records import RecordSizes
from tests.aot import sass
from tests.aot.chip import SHARED_MEMORY, Compiled

NEMOTRON_H_8B = RecordSizes(num_heads=128, head_dim=64, num_groups=8, state_size=128)
GRANITE_4_H_SMALL = RecordSizes(num_heads=128, head_dim=64, num_groups=1, state_size=128)
GRANITE_4_H_TINY = RecordSizes(num_heads=48, head_dim=64, num_groups=1, state_size=128)
ROWS, LAYERS, FRAMES, PER_LAYER, SLOTS = 64, 3, 256, 16, 32
REGISTERS = 65_536  # of a multiprocessor
needs_disassembler = pytest.mark.skipif(sass.NO_TOOLS is not None, reason=str(sass.NO_TOOLS))


def spec(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def arena_of(records: RecordSizes, frames: int = FRAMES) -> jax.ShapeDtypeStruct:
    words = records.num_heads // PER_LAYER * records.head_words
    return spec(frames, words, dtype="uint32")


def assert_only(compiled: Compiled, kernel: str, *, others: int = 0) -> None:
    """The program is one launch of `kernel` and a few small ones for its arguments."""
    assert set(compiled.kinds) == {"kCustomKernel"}
    (launch,) = compiled.named(kernel)
    assert launch.shared_bytes <= SHARED_MEMORY
    assert len(compiled.launches) <= 1 + others


def assert_one_launch(compiled: Compiled, kernel: str) -> None:
    (launch,) = compiled.launches
    assert compiled.named(kernel) == [launch] and launch.kind == "kCustomKernel"
    assert launch.shared_bytes <= SHARED_MEMORY and compiled.temp_bytes < 1024

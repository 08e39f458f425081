"""Mistakes of a divided model, planted on purpose: each changes tokens, so the comparison with one device finds it."""

from __future__ import annotations

import pytest

from hybrid_jax.api import starting
from hybrid_jax.layers import mamba2
from hybrid_jax.mesh.split import Split
from hybrid_jax.models import decoder
from tests.mesh.running import answers, make, of_one_device


def rows_of_the_next_device(patch):
    """Each device reads its heads, and multiplies them with the rows of out-projections of the next one."""
    cut = Split.cut

    def shifted(self, array, index):
        rows = self.axis == 0 and self.how == "parts" and array.ndim == 2
        return cut(self, array, (index + 1) % self.count if rows else index)

    patch.setattr(Split, "cut", shifted)


def norm_of_one_device(patch):
    """A norm over all heads takes the mean of those of its own device."""
    patch.setattr(mamba2, "summed_over_runs", lambda mean, run: mean * run)


def no_sum_of_blocks(patch):
    """Blocks are not summed over the devices."""
    summed = decoder._sum
    patch.setattr(decoder, "_sum", lambda results, given, shards: summed(results, given, 1))


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (rows_of_the_next_device, "attention"),
        (rows_of_the_next_device, "mamba2"),
        (rows_of_the_next_device, "gated_delta"),
        (norm_of_one_device, "mamba2"),
        (no_sum_of_blocks, "attention"),
    ],
)
def test_a_planted_mistake_is_found(monkeypatch, mistake, name):
    expected = of_one_device(name)[0][0]
    monkeypatch.setattr(starting, "open_store", lambda *_: None)  # no program of another model
    mistake(monkeypatch)
    with make(name, 2) as llm:
        found, _ = answers(llm)
    assert found != expected
    assert sum(one == other for one, other in zip(found, expected, strict=True)) <= 1

"""Everything once: a tiny model of each kind of layer hits, chunks, folds, forks, is preempted, and speculates."""

from __future__ import annotations

import pytest

from hybrid_jax.config import SpeculationConfig
from hybrid_jax.kinds.table import KINDS
from tests.drawing import spine
from tests.exactness.engines import short_of_memory
from tests.exactness.jobs import Job
from tests.exactness.speculation_matrix import ROWS, Maker, subject_of
from tests.tiny_models import tiny_model

pytestmark = spine
# By the layer that is described; the last one is a kind that the package does not have.
MODELS = {
    "Attention": "windowed",
    "Mamba2": "mamba2",
    "GatedDelta": "qwen3_next",
    "Mamba1": "jamba",
    "ShortConv": "lfm2",
    "Gated": "with_unknown_kind",
}
RECURRENT = [name for name in MODELS if name != "Attention"]


def test_every_kind_of_the_package_has_a_model_here():
    layers = [layer for name in MODELS.values() for layer in tiny_model(name)[0].layers]
    own = {spec for spec in KINDS if spec.__module__.startswith("hybrid_jax.")}
    missing = own - {type(x) for layer in layers for x in layer.parts}
    assert not missing, f"name a tiny model with {missing} in MODELS"


@pytest.mark.parametrize("kind", MODELS)
def test_a_kind_hits_chunks_folds_forks_and_is_preempted(kind, bench_of):
    bench = bench_of(MODELS[kind], "padded")
    shared = bench.prompt(100, seed=6)
    cold = bench.check([Job(prompt=shared + bench.prompt(5, seed=5), max_tokens=45)])
    assert cold.moved["prefill_rows"] >= 2
    assert cold.folds or kind not in RECURRENT
    hit = bench.check([Job(prompt=shared + bench.prompt(20, seed=20), max_tokens=10)])
    assert hit.cached == [96]
    first = Job(prompt=bench.prompt(50, seed=9), max_tokens=20, temperature=0.9, seed=7, group="g")
    second = Job(**vars(first) | {"sample_index": 1})
    assert bench.check([first, second]).moved["forks"] == 1
    with short_of_memory(bench.engine, at=(45,)):
        tight = bench.check([Job(prompt=bench.prompt(n, seed=n)) for n in (25, 20, 31)])
    assert tight.moved["preemptions"] >= 1


@pytest.mark.parametrize("kind", MODELS)
def test_a_kind_speculates_whatever_happens(kind, plain_of):
    drafts = SpeculationConfig(num_tokens=3, adaptive=False)
    maker = Maker(MODELS[kind], drafts, planted=True)
    cell = {"wrong": 0.3, "cache": "tiny", "rows": ROWS, "temperature": 0.6, "asks": "three"}
    with subject_of(maker, plain_of(maker.model), ()) as subject:
        assert subject.check(cell, seed=0) == []
        assert set(subject.accepted) == {0, 1, 2, 3}
        seen = ("cache_hits", "preemptions", "forks")
        seen += ("folds_to_new",) * (kind in RECURRENT)
        assert not [what for what in seen if not subject.moved[what]], subject.moved

"""What the compiler made of divided steps: how often devices speak to each other; each keeps its arena in place."""

from __future__ import annotations

import math
import re
from collections import Counter

import jax
import pytest

from hybrid_jax.config import Attention, Mamba1, Mamba2
from hybrid_jax.engine.programs.compiling import signature_of
from hybrid_jax.engine.steps.step import PLAIN
from tests.mesh.models import DIVIDED
from tests.mesh.running import make

COLLECTIVES = "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"
FOUND = re.compile(rf"= [^=]*? ({'|'.join(COLLECTIVES)})(?:-start)?\(")

pytestmark = pytest.mark.usefixtures("no_compile_cache")


def sums_of(config):
    """How often devices sum something in a step: the embeddings, each block, and what a kind needs beside that."""
    beside = sum(isinstance(part, Mamba1) for part in config.recurrent)
    return 1 + sum(len(layer.blocks) for layer in config.layers) + beside


def gathers_of(config, count):
    """How often they show each other something: the logits, and mean squares of norms that go over devices."""
    norms = [
        mixer
        for mixer in config.recurrent
        if isinstance(mixer, Mamba2) and mixer.gated_norm != "none" and mixer.norm_groups < count
    ]
    return 1 + len(norms)


def compiled(engine, name):
    """The largest program of a kind of step, compiled for the engine's devices."""
    runner = engine.runner
    [kind] = [kind for kind in runner.kinds if kind.name == name]
    bucket = kind.buckets()[-1]
    program = runner.programs.get(name, bucket, PLAIN)
    shapes = signature_of(runner._inert(kind, bucket, PLAIN))
    return program.lower(*jax.tree.map(program._placed, shapes)).compile()


@pytest.mark.parametrize("step", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["attention", "mamba2", "gated_delta", "mamba1", "experts"])
def test_devices_speak_as_often_as_they_must(name, step):
    config, count = DIVIDED[name][0], 2
    with make(name, count) as llm:
        engine = llm._engine
        program = compiled(engine, step)
        state = engine.runner.state
    found = Counter(FOUND.findall(program.as_text()))
    assert found == {"all-reduce": sums_of(config), "all-gather": gathers_of(config, count)}
    own = [
        leaf.sharding.shard_shape(leaf.shape)
        for leaf in (state.arena, *jax.tree.leaves(state.rings))
    ]
    kept = 4 * sum(map(math.prod, own))
    assert program.memory_analysis().alias_size_in_bytes >= kept > 0


def test_a_step_of_one_device_speaks_to_nobody():
    with make("mamba2") as llm:
        assert not FOUND.search(compiled(llm._engine, "decode").as_text())


def test_the_arena_grows_and_nothing_else_does():
    """Temporaries do not depend on the number of frames."""
    temporaries = set()
    for memory in ("2MB", "20MB"):
        with make("two_kv", 2, memory=memory) as llm:
            assert any(isinstance(part, Attention) for part in DIVIDED["two_kv"][0].paged)
            found = compiled(llm._engine, "decode").memory_analysis()
            temporaries.add(found.temp_size_in_bytes)
    assert len(temporaries) == 1

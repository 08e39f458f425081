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


def lowered(engine, name):
    """The largest program of a kind of step, for the engine's devices, and its bucket."""
    runner = engine.runner
    [kind] = [kind for kind in runner.kinds if kind.name == name]
    bucket = kind.buckets()[-1]
    program = runner.programs.get(name, bucket, PLAIN)
    shapes = signature_of(runner._inert(kind, bucket, PLAIN))
    return program.lower(*jax.tree.map(program._placed, shapes)), bucket


def compiled(engine, name):
    """As `lowered`, compiled."""
    return lowered(engine, name)[0].compile()


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


SPOKEN = re.compile(
    r'"stablehlo\.(all_reduce|all_gather)"(?:[^\n]*<\{|.*?\}\)).*?: \(tensor<([^>]*)>\)', re.S
)


@pytest.mark.parametrize("step", ["decode", "prefill"])
@pytest.mark.parametrize("dtype, short", [("bfloat16", "bf16"), ("float32", "f32")])
def test_what_devices_send_is_as_wide_as_activations(step, dtype, short):
    """Bytes that devices send in a step; mamba2's gated norm goes over devices."""
    config, count = DIVIDED["mamba2"][0], 2
    with make("mamba2", count, dtype=dtype) as llm:
        program, bucket = lowered(llm._engine, step)
    found = Counter(SPOKEN.findall(program.as_text()))
    tokens, vocab = f"{bucket.rows}x{bucket.tokens}", -(-config.vocab_size // count)
    squares = f"1x{tokens}x1x1xf32"
    drawn = bucket.rows  # a logit is needed where a token is drawn
    assert found == {
        ("all_reduce", f"{tokens}x{config.width}x{short}"): sums_of(config),
        ("all_gather", squares): gathers_of(config, count) - 1,
        ("all_gather", f"{drawn}x{vocab}x{short}"): 1,
    }


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

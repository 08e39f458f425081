"""Steps of a divided model, compiled for several H200s: one command buffer, and no sum too many."""

from __future__ import annotations

import math

import jax
import pytest
from jax.sharding import NamedSharding

from hybrid_jax.engine.programs.loops import DIVIDED_LOOP_OPTIONS
from hybrid_jax.mesh.shards import EVERYWHERE, Shards, along, of_state
from hybrid_jax.mesh.split import Split, shard_config
from hybrid_jax.state import State
from tests.aot.chip import compile_for_gpu, devices
from tests.aot.models import decode_step, hybrid_7b, mixture, prefill_step, verify_step

COLLECTIVES = "kAllReduce", "kAllGather", "kAllToAll", "kCollectivePermute", "kReduceScatter"


def divided(step, config, count, **sizes):
    """As `decode_step` or another one, of a model that so many H200s divide; shapes are placed on them."""
    shards = Shards(config, devices(count))
    run, (weights, state, *rest) = step(shards.local, **sizes)

    def joined(spec, where):
        axes = [axis for axis, name in enumerate(where) if name is not None]
        shape = [size * count if axis in axes else size for axis, size in enumerate(spec.shape)]
        placed = NamedSharding(shards.mesh, where)
        return jax.ShapeDtypeStruct(tuple(shape), spec.dtype, sharding=placed)

    is_split = lambda leaf: isinstance(leaf, Split)  # noqa: E731
    of_weights = jax.tree.map(lambda s: along(s.axis), shards._splits, is_leaf=is_split)
    specs = of_weights, of_state(state), *[EVERYWHERE] * len(rest)
    arguments = [
        jax.tree.map(joined, part, where)
        if isinstance(where, dict | State)
        else joined(part, where)
        for part, where in zip((weights, state, *rest), specs, strict=True)
    ]
    results = of_state(state), EVERYWHERE, EVERYWHERE
    return shards.over(run, specs, results), arguments


@pytest.mark.parametrize(
    ("make", "count"), [(hybrid_7b, 2), (hybrid_7b, 8), (mixture, 2)], ids=["7b", "7b_8", "mixture"]
)
def test_a_step_is_one_command_buffer_with_a_sum_after_each_block(make, count):
    """The mixture's gated norms go over all heads, so devices show each other their mean squares."""
    config = hybrid_7b(1) if make is hybrid_7b else make()
    made = compiled(decode_step, config, count, rows=64)
    assert made.kinds["kWhile"] == 1


@pytest.mark.parametrize(
    "step, sizes",
    [(prefill_step, {"rows": 2, "chunk": 1024}), (verify_step, {"rows": 16})],
    ids=["prefill", "verify"],
)
def test_chunks_of_prompts_and_drafts_have_the_same_sums(step, sizes):
    compiled(step, hybrid_7b(1), 2, **sizes)


def compiled(step, config, count, **sizes):
    """A step whose collectives are as said, all in one command buffer, with the arena in its place."""
    run, arguments = divided(step, config, count, num_frames=20_000, tokens=4096, **sizes)
    made = compile_for_gpu(
        run, *arguments, donate=(1,), options=DIVIDED_LOOP_OPTIONS, spills=True, on_mesh=True
    )
    assert set(made.outer) == {"kCommandBuffer"} and len(made.outer) == 1
    spoken = {kind: many for kind, many in made.kinds.items() if kind in COLLECTIVES}
    norms = sum(spec.norm_shards > 1 for spec in shard_config(config, count).recurrent)
    blocks = sum(len(layer.blocks) for layer in config.layers)
    assert spoken == {"kAllReduce": 1 + blocks, "kAllGather": 1 + norms}
    arena = arguments[1].arena
    assert made.alias_bytes >= 4 * math.prod(arena.sharding.shard_shape(arena.shape))
    return made

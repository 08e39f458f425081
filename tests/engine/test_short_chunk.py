"""A prompt that stops at the cut leaves what all layers leave of it, and its last token gets the same numbers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import EngineConfig, with_cut
from hybrid_jax.costs import prefill_flops
from hybrid_jax.engine.kernel_choice import choose_kernels
from hybrid_jax.engine.runner import Runner
from hybrid_jax.engine.steps.step import Variant
from hybrid_jax.engine.walk import Ends, chunk, short_chunk
from hybrid_jax.geometry import make_geometry
from hybrid_jax.models.initialize import random_params
from hybrid_jax.schedule.bucket import AfterCut
from hybrid_jax.sizing.devices import Device
from hybrid_jax.state import Model, State
from hybrid_jax.weights import BUNDLED
from hybrid_jax.weights.load import load_config
from tests.engine.walks import ROWS, prompt_chunk, setting

NAMES = ["with_cut", "with_cut_delta"]
TOLERANCE = 1e-5


def floats(bits: jax.Array) -> np.ndarray:
    return np.asarray(jax.lax.bitcast_convert_type(bits, jnp.float32))


def kept(state: State, model: Model, counts: list[int]) -> list[np.ndarray]:
    """Pages and checkpoints, and of each row's ring what a step may read."""
    found = [floats(state.arena[1:])]
    for group, rings in zip(model.geometry.groups, state.rings, strict=True):
        for name, ring in rings.items():
            values = np.asarray(ring) if ring.dtype == jnp.float32 else floats(ring)
            for row, count in enumerate(counts):
                last = group.layout.columns if name == "conv" else count
                found.append(values[:, row, :last])
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("samples", [(1, 1), (1, 0), None])
def test_it_leaves_what_all_layers_leave(name, samples):
    model, params, state = setting(name)
    rows = prompt_chunk(model, state)
    ends = samples and Ends(jnp.array(samples), rows.start + rows.state_len, 1 + jnp.arange(ROWS))
    h, whole = jax.jit(functools.partial(chunk, rows=rows, model=model))(params, state)
    short = jax.jit(functools.partial(short_chunk, rows=rows, ends=ends, model=model))
    last, stopped = short(params, state)
    counts = [int(count) for count in rows.length - rows.state_len]
    for one, other in zip(kept(stopped, model, counts), kept(whole, model, counts), strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)
    for row, ending in enumerate(samples or ()):
        if ending:
            np.testing.assert_allclose(last[row], h[row, rows.length[row] - 1], atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_two_chunks_leave_what_one_leaves(name):
    """The first one ends on the grain, as all chunks but a prompt's last do."""
    model, params, state = setting(name)
    rows, grain = prompt_chunk(model, state), model.geometry.grain
    before = rows._replace(
        tokens=rows.tokens[:, :grain],
        length=jnp.full(ROWS, grain),
        read=jnp.zeros_like(rows.read),
    )
    rest = rows._replace(
        tokens=rows.tokens[:, grain:],
        start=jnp.full(ROWS, grain),
        length=rows.length - grain,
        state_len=jnp.zeros_like(rows.state_len),
        write=jnp.zeros_like(rows.write),
    )
    ends = Ends(jnp.ones(ROWS, jnp.int32), jnp.full(ROWS, grain), 1 + jnp.arange(ROWS))
    walk = functools.partial(short_chunk, model=model)
    run = jax.jit(lambda params, state: walk(params, state, rows, ends))
    last, want = run(params, state)

    @jax.jit
    def in_two(params, state):
        _, state = walk(params, state, before, None)
        return walk(params, state, rest, ends)

    found, stopped = in_two(params, state)
    np.testing.assert_allclose(found, last, atol=TOLERANCE)
    counts = [int(count) for count in rest.length]
    for one, other in zip(kept(stopped, model, counts), kept(want, model, counts), strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)


@pytest.mark.usefixtures("no_compile_cache")
@pytest.mark.parametrize("cut, group", [(None, 1), (4, 1), (4, 3)])
def test_the_compiler_counts_the_flops_that_are_counted_for_a_prompt(cut, group):
    """Of the bundled model, for few tokens: the compiler counts one turn of each loop."""
    config = load_config(BUNDLED)
    after_cut = AfterCut.ALL
    if cut is not None:
        config, after_cut = with_cut(config, cut, state_group=group), AfterCut.ENDS
    engine = EngineConfig(max_rows=1, prefill_tokens=64)
    geometry = make_geometry(config, engine)
    params = jax.eval_shape(lambda: random_params(config, 0))
    runner = Runner(
        config,
        params,
        engine,
        geometry,
        kernels=choose_kernels(config, geometry, engine, Device()),
        num_frames=200,
        max_slots=9,
        max_model_len=256,
    )
    prefill = next(kind for kind in runner.kinds if kind.name == "prefill")
    shape = next(
        shape for shape in prefill.buckets() if (shape.tokens, shape.after_cut) == (64, after_cut)
    )
    state = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), runner.specs)
    size = runner.programs.layout("prefill", shape, adjusts=False).size
    batch = jax.ShapeDtypeStruct((1, size), np.int32)
    lowered = runner.programs.get("prefill", shape, Variant()).lower(params, state, None, batch)
    found = lowered.compile().cost_analysis()["flops"]
    assert found == pytest.approx(prefill_flops(config, 64), rel=0.03)

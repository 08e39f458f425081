"""Engines on kernels of a name, what they answer, and their steps."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import (
    BACKENDS,
    EngineConfig,
    ModelConfig,
)
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.steps.decode import Decode
from hybrid_jax.engine.steps.exact import Exact, ExactBucket
from hybrid_jax.engine.steps.prefill import Prefill
from hybrid_jax.geometry import make_geometry
from hybrid_jax.schedule.bucket import DecodeBucket, PrefillBucket
from hybrid_jax.schedule.request import Request
from hybrid_jax.state import Model, state_specs
from pallas_kernels.plan import Chip
from tests.tiny_models import VOCAB, tiny_model

SMALL = {
    "max_rows": 2,
    "grain": 16,
    "page_tokens": 16,
    "prefill_tokens": 16,
    "steps_per_dispatch": 4,
    "max_model_len": 128,
    "memory": 96 << 10,
}


def engine_on(kernels: str, name: str, dtype: str = "float32", **settings) -> Engine:
    return engine_of(kernels, *tiny_model(name, dtype), dtype=dtype, **settings)


def engine_of(kernels: str, config: ModelConfig, params: dict, **settings) -> Engine:
    return Engine(config, params, EngineConfig(kernels=kernels, **SMALL | settings))


def requests() -> list[Request]:
    """Greedy and sampled ones, a prompt of several chunks, a shared prefix, and two completions of one prompt."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (5, 17, 50)]
    prompts += [prompts[2][:48] + [1, 2, 3], prompts[1], prompts[1]]
    ways = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.2, top_k=20),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
        SamplingParams(temperature=0.8, top_p=0.8, min_p=0.02),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0),
    ]
    return [
        Request(
            request_id=str(i),
            prompt=prompt,
            params=params,
            seed=3,
            max_tokens=20,
            sample_index=int(i == 5),
            sibling_group="pair" if i > 3 else None,
        )
        for i, (prompt, params) in enumerate(zip(prompts, ways, strict=True))
    ]


def outputs(engine: Engine, *, adjusted: bool = True) -> tuple[list[list[int]], int]:
    """What every request got, and how many prompt tokens came from the cache.

    Args:
        adjusted: also of the request whose logits are adjusted, for which programs of their own are compiled.
    """
    asked = [x for x in requests() if adjusted or not x.adjusts_logits]
    for request in asked[:3]:
        engine.add(request)
    while engine.has_work:
        engine.step()
    for request in asked[3:]:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [r.output.token_ids for r in asked], sum(r.hit.num_tokens for r in asked)


def step_and_specs(
    kind: str,
    kernels: str = "pallas",
    name: str = "bamba",
    sampling: str | None = None,
    chip: Chip | None = None,
    without: tuple[str, ...] = (),
):
    """One of the engine's steps and the shapes of its arguments."""
    config, params = tiny_model(name, "bfloat16")
    rows = 1 if kind == "lone" else SMALL["max_rows"]
    settings = SMALL | {"exact": kind == "exact", "max_rows": rows}
    engine = EngineConfig(dtype="bfloat16", **settings)
    geometry = make_geometry(config, engine)
    specs = state_specs(
        geometry,
        num_frames=64,
        max_slots=8,
        max_rows=rows,
        window=1,
        aligned=kind == "exact",
    )
    state = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(s.dtype)), specs)
    backend = BACKENDS[kernels]
    asked = {"sampling": sampling, "chip": chip, "without": without}
    backend = replace(backend, **{name: value for name, value in asked.items() if value})
    model = Model(config, geometry, backend)
    buckets = {
        "decode": (Decode, DecodeBucket(rows, 4, 8)),
        "lone": (Decode, DecodeBucket(rows, 4, 8)),
        "prefill": (Prefill, PrefillBucket(rows, 32, 8)),
        "exact": (Exact, ExactBucket(rows, engine.grain, 8)),
    }
    step, bucket = buckets[kind]
    layout = step(engine, model, bucket.width).layout(bucket)
    batch = jax.ShapeDtypeStruct((rows, layout.size), jnp.int32)
    static = {"model": model, "layout": layout, "num_logprobs": 0}
    if kind in ("decode", "lone"):
        run = functools.partial(step.run, max_steps=4, **static)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        return lambda p, s, b, n: run(p, s, None, b, n), (params, state, batch, count)
    run = functools.partial(step.run, **static)
    return lambda p, s, b: run(p, s, None, b), (params, state, batch)

"""Engines and definitions, made once per model and settings: compiling them is what takes the time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.config.engine import FP8
from hybrid_jax.engine.engine import Engine
from hybrid_jax.weights import load_model
from tests.drawing import EVERYTHING
from tests.exactness.definition import Plain
from tests.exactness.engines import kept_by_arguments, make_engine, one_shape, start_over
from tests.exactness.jobs import Job, Run, drive, random_prompt
from tests.exactness.poison import Poison
from tests.parity.goldens import FOLDER, GOLDENS
from tests.tiny_models import MODELS, tiny_model

if EVERYTHING:  # every golden, not one with both mixers
    CHOSEN = tuple(golden.name for golden in GOLDENS)
else:
    CHOSEN = ("nemotron_h_biases_limits",)
# The draw of `make test`: each kind of layer, of cached shape and of block is in one of these, in exact mode too.
# Others have what these have: with_unknown_kind two shapes of KV, nemotron_h_biases_limits, qwen3_next and with_cut the
# rest.
LEFT_TO_ALL = (
    *("with_two_shapes", "nemotron_h", "granite", "bamba", "with_cut_delta"),
    *("with_int8", "with_int4"),
)
NAMES = tuple(name for name in (*MODELS, *CHOSEN) if EVERYTHING or name not in LEFT_TO_ALL)
DRAWN = (
    "mamba2",
    "qwen3_next",
    "jamba",
    "windowed",
    "with_unknown_kind",
    "with_cut",
    "with_latent",
    "with_fixed_decay",
)
EXACT_NAMES = NAMES if EVERYTHING else DRAWN
FORCED_NAMES = ("qwen3_next", "jamba", "with_unknown_kind", "with_latent", "with_fixed_decay")
if EVERYTHING:
    FORCED_NAMES += ("llama", "parallel", "with_two_shapes")
FLOAT32 = EngineConfig(max_rows=3, prefill_tokens=128, steps_per_dispatch=3, page_tokens=64)
SETTINGS = {
    "padded": FLOAT32,
    "fine": EngineConfig(max_rows=3, prefill_tokens=32, steps_per_dispatch=1, page_tokens=16),
    "coarse": EngineConfig(max_rows=4, prefill_tokens=512, steps_per_dispatch=8, page_tokens=128),
    # As on a GPU: many rows, long chunks, few shapes.
    "many_rows": EngineConfig(
        max_rows=24, prefill_tokens=2048, steps_per_dispatch=4, page_tokens=64, shapes="coarse"
    ),
    "fp8": replace(FLOAT32, kv_cache_dtype="fp8"),
    "exact": EngineConfig(max_rows=3, prefill_tokens=64, page_tokens=64, exact=True),
    "exact_fp8": EngineConfig(
        max_rows=3, prefill_tokens=64, page_tokens=64, exact=True, kv_cache_dtype="fp8"
    ),
    "exact_many_rows": EngineConfig(max_rows=24, prefill_tokens=64, page_tokens=64, exact=True),
    "bfloat16": EngineConfig(
        max_rows=3, prefill_tokens=128, steps_per_dispatch=3, page_tokens=64, dtype="bfloat16"
    ),
}
ROOM = 2.2
ROOMS = {"many_rows": 20.0, "exact_many_rows": 20.0}
# Settings with one prefill and one decode shape, and the tokens of that chunk; the others go through the
# real shapes.
ONE_SHAPE = {"padded": 64, "bfloat16": 64, "fp8": 64, "coarse": 256}


@functools.cache
def load(name: str, dtype: str = "float32") -> tuple[ModelConfig, dict]:
    """A tiny model, or a golden by its folder's name."""
    return tiny_model(name, dtype) if name in MODELS else load_model(FOLDER / name)


@dataclass
class Bench:
    """One model under one engine's settings, its memory poisoned, and what it should answer."""

    config: ModelConfig
    engine: Engine
    plain: Plain
    poison: Poison
    shapes: Callable

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def run(self, jobs: Sequence[Job], **options) -> Run:
        """Runs jobs on what the jobs before left in the cache; options as in `drive`."""
        with self.shapes():
            return drive(self.engine, jobs, self.poison, **options)

    def check(self, jobs: Sequence[Job], **options) -> Run:
        """Runs jobs; every output must be the definition's."""
        run = self.run(jobs, **options)
        assert self.plain.mismatches(run.requests) == []
        return run

    def prompt(self, length: int, seed: int) -> tuple[int, ...]:
        return random_prompt(length, seed, self.config.vocab_size)

    def forget(self) -> None:
        """Empties the prefix cache, and poisons what that freed."""
        self.engine.reset_prefix_cache()
        self.poison.spread()

    def start_over(self, room: float = ROOM, *, policy: str = "adaptive") -> None:
        """A new scheduler with room for so many sequences of 192 tokens; the arena stays."""
        start_over(self.engine, room, policy=policy)
        self.poison.spread()


@pytest.fixture(scope="session")
def plain_of() -> Callable[..., Plain]:
    """The definition of a model by name and the dtype of pages that are not float32, compiled once."""
    made = functools.cache(lambda name, kv_dtype: Plain(*load(name), kv_dtype))
    return lambda name, kv_dtype=None: made(name, kv_dtype)


@pytest.fixture(scope="session")
def bench_of(plain_of) -> Callable[..., Bench]:
    """A model's bench by name and settings, its cache empty, with room for two sequences and a bit."""

    @kept_by_arguments
    def make(name: str, settings: str) -> Bench:
        config, params = load(name, SETTINGS[settings].dtype)
        shapes = contextlib.nullcontext
        if settings in ONE_SHAPE:
            shapes = functools.partial(one_shape, ONE_SHAPE[settings])
        with shapes():
            room = ROOMS.get(settings, ROOM)
            engine = make_engine(config, params, SETTINGS[settings], room=room)
        kv_dtype = SETTINGS[settings].kv_dtype
        plain = plain_of(name, kv_dtype if kv_dtype == FP8 else None)
        return Bench(config, engine, plain, Poison(engine), shapes)

    def fresh(name: str, settings: str) -> Bench:
        bench = make(name, settings)
        bench.start_over(ROOMS.get(settings, ROOM))
        return bench

    return fresh

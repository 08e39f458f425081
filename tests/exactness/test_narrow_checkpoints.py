"""Checkpoints as int8 in the cache: rows go on from what NumPy makes of them, bit for bit, and from nothing else."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid_jax.config import CacheConfig
from hybrid_jax.config.arrays import FP8
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.runner import Runner
from hybrid_jax.engine.steps.narrow import SMALLEST, quantized
from tests.drawing import left_to_all
from tests.exactness import narrow_definition
from tests.exactness.conftest import FLOAT32, ROOM, load
from tests.exactness.definition import Plain
from tests.exactness.engines import make_engine, one_shape, short_of_memory
from tests.exactness.jobs import Job, Run, conversations, drive, random_prompt
from tests.exactness.poison import Poison
from tests.exactness.speculation_matrix import ENGINES, with_drafter

INT8, BELOW = CacheConfig(checkpoints="int8"), 10.0
NAMES = ("mamba2", "bamba", "qwen3_next", "jamba", "windowed", "with_unknown_kind")
NAMES += ("with_cut", "with_latent", "with_fixed_decay")


def frames_of(engine: Engine, frames: np.ndarray) -> np.ndarray:
    return np.asarray(engine.runner.state.arena)[frames]


@contextlib.contextmanager
def checked(engine: Engine) -> Iterator[Counter[str]]:
    """Compares each checkpoint that is narrowed or widened with the definition, in all its bits; counts them."""
    recast, seen = Runner._recast, Counter()
    define = {
        "narrow_checkpoint": narrow_definition.narrow,
        "widen_checkpoint": narrow_definition.widen,
    }

    def compared(self, name, pair):
        expected = define[name](frames_of(engine, pair.source), engine.geometry)
        recast(self, name, pair)
        np.testing.assert_array_equal(frames_of(engine, pair.target), expected)
        seen[name] += 1

    with mock.patch.object(Runner, "_recast", compared):
        yield seen


def one_after_another(vocab: int) -> list[Job]:
    """Prompts that go on from each other and from a shared beginning, some ten times in a row."""
    shared = random_prompt(70, 5, vocab)
    jobs = [Job(prompt=shared + random_prompt(n, n, vocab), max_tokens=9) for n in (40, 9, 26)]
    text = random_prompt(45, 9, vocab)
    for turn in range(10):
        jobs.append(Job(prompt=text, max_tokens=5 + turn))
        text += random_prompt(13, 40 + turn, vocab)
    return [*jobs, jobs[0], jobs[1]]


def reference(engine: Engine, jobs: list[Job]) -> list[tuple]:
    """An engine with float32 checkpoints; NumPy rounds each that the cache has got, before anybody goes on from it."""
    bits, done = [], set()
    memory, geometry = engine.scheduler.memory, engine.geometry
    for job in jobs:
        bits += drive(engine, [job]).bits
        for slot in memory.tree.arena.slot_nodes.keys() - done:
            done.add(slot)
            frames = np.array(memory.slots.frames(slot))
            new = narrow_definition.rounded(frames_of(engine, frames), geometry)
            state = engine.runner.state
            engine.runner.state = state.replace(arena=state.arena.at[frames].set(new))
    return bits


@pytest.mark.parametrize("name", NAMES)
@left_to_all("mamba2", "bamba", "windowed", "with_latent", "with_fixed_decay")
def test_rows_go_on_from_what_the_definition_makes_of_a_checkpoint(name):
    config, params = load(name)
    jobs = one_after_another(config.vocab_size)
    with one_shape(64):
        engine = make_engine(config, params, replace(FLOAT32, cache=INT8), room=20)
        with checked(engine) as seen:
            runs = [drive(engine, [job]) for job in jobs]
        hits = [run.cached[0] for run in runs]
        assert sum(map(bool, hits)) >= 11 and seen["widen_checkpoint"] == sum(map(bool, hits))
        assert engine.stats()["cache_leaf_evictions"] == 0
        bits = [run.bits[0] for run in runs]
        other = make_engine(config, params, FLOAT32, room=20)
        assert bits == reference(other, jobs)
        engine.close()
        other.close()


def test_codes_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    for scale in (1.0, 1e-3, 1e30, 1e-37, 1e-39, 0.0):
        x = (rng.standard_normal((5, 24, 7)) * scale).astype(np.float32)
        x[0, :, 2] = 0
        scales, codes = quantized(jnp.asarray(x))
        expected = [narrow_definition.quantize(unit) for unit in x]
        np.testing.assert_array_equal(codes, [code for _, code in expected])
        np.testing.assert_array_equal(np.asarray(scales)[:, 0], [each for each, _ in expected])
        widened = np.asarray(codes).astype(np.float32) * np.asarray(scales)
        again, same = quantized(jnp.asarray(widened))
        np.testing.assert_array_equal(same, codes)
        np.testing.assert_array_equal(again, scales)
        assert np.abs(widened - x).max() <= np.abs(x).max() / 250 + 127 * SMALLEST


TINY, LARGEST = (float(f(np.finfo(np.float32))) for f in (lambda i: i.tiny, lambda i: i.max))
NOT_FINITE = (0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000)


def codes_of(x: np.ndarray, how: str) -> tuple[np.ndarray, np.ndarray]:
    """Bits of scales uint32[n] and codes int8[m, n] of values float32[m, n], as the definition has them too."""
    scales, codes = (jax.jit(quantized) if how == "jitted" else quantized)(jnp.asarray(x))
    scale, code = narrow_definition.quantize(x)
    bits = np.asarray(scales)[0].view(np.uint32)
    np.testing.assert_array_equal(bits, scale.view(np.uint32))
    np.testing.assert_array_equal(codes, code)
    return bits, np.asarray(codes)


@pytest.mark.parametrize("how", ["jitted", "one by one"])
def test_a_column_with_a_number_that_is_not_finite_is_nan_when_it_is_widened(how):
    x = np.random.default_rng(0).standard_normal((24, 2 * len(NOT_FINITE))).astype(np.float32)
    for n, bits in enumerate(NOT_FINITE):  # every other column is sound
        x.view(np.uint32)[(5 * n) % 24, 2 * n] = bits
    scales, codes = codes_of(x, how)
    assert set(scales[::2]) == {0x7FC00000} and not codes[:, ::2].any()
    widened = codes.astype(np.float32) * scales.view(np.float32)
    assert np.isnan(widened[:, ::2]).all() and np.isfinite(widened[:, 1::2]).all()
    again, same = codes_of(widened, how)
    np.testing.assert_array_equal(again, scales)
    np.testing.assert_array_equal(same, codes)


@pytest.mark.parametrize("how", ["jitted", "one by one"])
def test_the_largest_numbers_stay_finite_and_the_smallest_become_zero(how):
    below = np.nextafter(np.float32(LARGEST), np.float32(0))
    near = [LARGEST * (1 - n * 2.0**-18) for n in range(64)]  # scales rounded up and down
    large = np.array([[LARGEST, -LARGEST, below, *near]], np.float32).repeat(2, 0)
    large[1] *= np.float32(0.5)
    scales, codes = codes_of(large, how)
    widened = codes.astype(np.float32) * scales.view(np.float32)
    assert np.isfinite(widened).all() and (np.abs(codes[0]) == 127).all()
    assert np.abs(widened[0] / large[0] - 1).max() < 2.0**-16

    least, most = np.array([1, 0x007FFFFF], np.uint32).view(np.float32)  # of the subnormal
    small = np.array(
        [[least, most, 126 * TINY, 128 * TINY, 150 * TINY], [most, -most, most, most, -TINY]],
        np.float32,
    )
    scales, codes = codes_of(small, how)
    assert not scales[:3].any() and scales[3:].all()
    np.testing.assert_array_equal(codes, [[0, 0, 0, 127, 127], [0, 0, 0, 0, -1]])


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000])
def test_a_row_that_goes_on_from_a_damaged_checkpoint_fails(bits):
    config, params = load("bamba")
    prompt = random_prompt(70, 5, config.vocab_size)
    jobs = [Job(prompt=prompt, max_tokens=9), Job(prompt=(*prompt, 1, 2, 3), max_tokens=9)]
    recast = Runner._recast

    def plant(runner, frame, word):
        runner.state = runner.state.replace(arena=runner.state.arena.at[frame, 0].set(word))

    def damaged(self, name, pair):
        if name == "widen_checkpoint":
            return recast(self, name, pair)
        frame = int(pair.source[self.model.geometry.groups[0].state_frame(0)])
        sound = self.state.arena[frame, 0]
        plant(self, frame, np.uint32(bits))
        recast(self, name, pair)
        plant(self, frame, sound)  # the row that made it goes on

    with one_shape(64):
        engine = make_engine(config, params, replace(FLOAT32, cache=INT8), room=20)
        with mock.patch.object(Runner, "_recast", damaged):
            first, second = (drive(engine, [job]) for job in jobs)
        assert first.requests[0].output.finish_reason == "length"
        assert second.cached[0] and second.moved["widened_checkpoints"] == 1
        output = second.requests[0].output
        assert (output.finish_reason, output.token_ids) == ("error", [])
        engine.close()


# --- with little memory ---------------------------------------------------------------------------


@dataclass
class Near(Plain):
    """The definition, for engines that go on from rounded states: other tokens and log-probabilities may be as far off.

    What rows read is checked in all its bits (`checked`); this is for all else that may go wrong, which is far off.
    """

    @property
    def gap(self) -> float:
        return 0.05

    @property
    def logprob_error(self) -> float:
        return 0.05


def judged(
    engine: Engine, jobs: list[Job], *, kv_dtype: str | None = None, widened: int = 6
) -> Run:
    """Runs jobs with poison in free memory, and asks the definition."""
    with checked(engine) as seen:
        run = drive(engine, jobs, Poison(engine))
    moved = run.moved
    assert min(moved["widened_checkpoints"], seen["widen_checkpoint"]) >= widened
    if not moved["restarts"]:
        assert moved["widened_checkpoints"] == seen["widen_checkpoint"]
        # Those of the last sequences wait for the next plan.
        waits = moved["narrowed_checkpoints"] - seen["narrow_checkpoint"]
        assert 0 <= waits <= engine.engine_config.max_rows < seen["narrow_checkpoint"]
    near = Near(engine.config, engine.runner.params, kv_dtype)
    assert near.mismatches(run.requests) == []
    return run


TIGHT = {
    "arena": FLOAT32,
    "fp8": replace(FLOAT32, kv_cache_dtype="fp8"),
    "small pages": replace(FLOAT32, page_tokens=16),
    "one long step": replace(FLOAT32, steps_per_dispatch=8, max_rows=2),
}


@pytest.mark.parametrize("below", [0, BELOW])
@pytest.mark.parametrize("how", TIGHT)
@left_to_all("fp8-0", "small pages-10", "one long step-0", "arena-0")
def test_with_an_arena_of_two_prompts(how, below):
    config, params = load("with_cut")
    jobs, settings = conversations(config.vocab_size), replace(TIGHT[how], cache=INT8)
    with one_shape(64):
        engine = make_engine(config, params, settings, room=ROOM, below=below)
        run = judged(engine, jobs, kv_dtype=FP8 if how == "fp8" else None)
        assert run.moved["evicted_checkpoint_frames"] > 0
        if below:
            assert min(run.moved["host_saves"], run.moved["host_loads"]) > 3
        engine.close()


@pytest.mark.parametrize("name", ["jamba", "qwen3_next", "with_unknown_kind", "windowed"])
@left_to_all("windowed", "with_unknown_kind")
def test_with_other_kinds_of_layers(name):
    config, params = load(name)
    with one_shape(64):
        engine = make_engine(config, params, replace(FLOAT32, cache=INT8), room=ROOM, below=BELOW)
        judged(engine, conversations(config.vocab_size))
        engine.close()


def test_preempted_rows_go_on_from_narrow_checkpoints():
    config, params = load("bamba")
    prompts = [random_prompt(40, n, config.vocab_size) for n in range(3)]
    jobs = [Job(prompt=prompt, max_tokens=60) for prompt in prompts]
    with one_shape(64):
        engine = make_engine(config, params, replace(FLOAT32, cache=INT8), room=6)
        with short_of_memory(engine, at=(60, 75, 90)):
            run = judged(engine, jobs, widened=2)
        assert run.moved["preemptions"] > 1
        engine.close()


def test_siblings_share_a_checkpoint_while_the_cache_takes_it():
    config, params = load("bamba")
    vocab = config.vocab_size
    shared, jobs = random_prompt(70, 1, vocab), []
    for turn in range(5):
        jobs += [
            Job(
                prompt=shared + random_prompt(9 * turn, turn, vocab),
                max_tokens=8 + 20 * index,
                temperature=0.7,
                sample_index=index,
                group=f"g{turn}",
                arrive=40 * turn,
            )
            for index in range(3)
        ]
    with one_shape(64):
        engine = make_engine(config, params, replace(FLOAT32, cache=INT8), room=8)
        run = judged(engine, jobs, widened=4)
        assert run.moved["forks"] > 5
        engine.close()


@pytest.mark.parametrize("name", ["ngram-parallel", "mtp_tree-qwen3_next", "exit-with_cut"])
@left_to_all("exit-with_cut")
def test_with_drafts(name):
    maker = ENGINES[name]
    config, params = with_drafter(maker)
    settings = replace(maker.settings, max_rows=3, cache=INT8)
    with one_shape(64):
        engine = make_engine(config, params, settings, room=ROOM, below=BELOW)
        run = judged(engine, conversations(config.vocab_size))
        assert run.moved["draft_tokens"] > 0
        engine.close()


def test_after_lost_device_memory():
    """What lies below the arena is still there, narrow as it was."""

    class Lost(RuntimeError):
        pass

    config, params = load("bamba")
    step, dispatch, calls = Engine.step, Runner._dispatch, Counter[str]()

    def failing(self, plan):
        calls["all"] += 1
        if calls["all"] % 25 == 0:
            raise Lost
        return dispatch(self, plan)

    def caught(self):
        try:
            return step(self)
        except Lost:
            return []

    with (
        one_shape(64),
        mock.patch.object(Runner, "_dispatch", failing),
        mock.patch.object(Engine, "step", caught),
    ):
        engine = make_engine(config, params, replace(FLOAT32, cache=INT8), room=ROOM, below=BELOW)
        run = judged(engine, conversations(config.vocab_size))
        assert run.moved["restarts"] > 2 and run.moved["host_loads"] > 3
        engine.close()

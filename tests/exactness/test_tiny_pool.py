"""A pool far too small for its load: many preemptions and evictions, and not one other token.

The loads are the published ones for allocators (`sim.allocators.loads`), lengths scaled down to a tiny model, all at
once:
short prompts, mixed lengths, and bursts. They run twice, where memory holds everything and where it holds
one long sequence and a bit. The scheduler of either is told of another part of the same arena, so that both run
the same executables.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest

from benchmarks.pools.loads import make_load
from hybrid_jax.config import EngineConfig
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.runner import Runner
from hybrid_jax.schedule.memory import Memory
from hybrid_jax.schedule.sequence import Sequence
from tests.drawing import EVERYTHING, left_to_all, spine
from tests.exactness.conftest import load
from tests.exactness.engines import kept_by_arguments, make_engine, one_shape, start_over
from tests.exactness.jobs import Job, Run, drive, random_prompt
from tests.exactness.poison import Poison

MODEL = "bamba"
SETTINGS = EngineConfig(max_rows=6, prefill_tokens=64)
# What a published prompt and generation are divided by, so that both may grow to a hundred tokens and more.
SCALES = {"uniform_short": (8, 2.4), "mixed_long": (256, 4.8), "agentic_burst": (64, 2.4)}
LONGEST_PROMPT, MOST_TOKENS = 144, 105
STEPS_PER_TICK = 6
SAMPLED = {"temperature": 0.9, "top_p": 0.9}


@dataclass(frozen=True, kw_only=True)
class Case:
    """How much of the loads, in how little memory, makes rows run out of it again and again.

    Attributes:
        steps: of a dispatch.
        count: requests of each load.
        ample, tight: room in sequences of 192 tokens, as in `frames_for`.
        preemptions: at least so many with `tight`.
    """

    steps: int
    count: int
    ample: float
    tight: float
    preemptions: int


if EVERYTHING:
    CASES = {  # by tokens of a page
        16: Case(steps=8, count=120, ample=420, tight=1.2, preemptions=100),
        64: Case(steps=4, count=160, ample=600, tight=1.2, preemptions=50),
    }
else:
    CASES = {
        16: Case(steps=8, count=60, ample=210, tight=1.2, preemptions=50),
        64: Case(steps=4, count=84, ample=330, tight=1.2, preemptions=25),
    }
LEFT = [(16, "lru"), (64, "adaptive")]
RUNS = [(16, "adaptive"), (64, "lru"), *(pytest.param(*run, marks=left_to_all) for run in LEFT)]


def jobs_of(workload: str, count: int, vocab: int) -> list[Job]:
    """The first requests of a load: every other one draws its tokens, one in sixteen has two completions.

    Half, most or all of many prompts is the beginning of one of four texts.
    """
    drawn, rng, jobs = make_load(workload), np.random.default_rng(5), []
    for index in range(count):
        prompt_scale, most_scale = SCALES[workload]
        length = int(np.clip(drawn.prompt_lens[index] // prompt_scale, 2, LONGEST_PROMPT))
        shared, text = int(length * rng.choice((0, 0.5, 0.8, 1))), int(rng.integers(4))
        own = random_prompt(length - shared, 1000 + index, vocab)
        job = Job(
            prompt=random_prompt(shared, text, vocab) + own,
            max_tokens=int(np.clip(drawn.gen_lens[index] // most_scale, 4, MOST_TOKENS)),
            arrive=STEPS_PER_TICK * int(drawn.arrivals[index]),
            logprobs=None,
            seed=index,
            **(SAMPLED if index % 2 else {}),
        )
        jobs.append(job)
        if index % 16 == 1:
            jobs[-1] = first = replace(job, group=f"{workload} {index}")
            jobs.append(replace(first, sample_index=1))
    return jobs


@functools.cache
def all_jobs(count: int) -> list[Job]:
    """So many requests of each load; with the completions they are a few more."""
    vocab = load(MODEL)[0].vocab_size
    return [job for workload in SCALES for job in jobs_of(workload, count, vocab)]


def new_engine(page_tokens: int, room: float) -> Engine:
    steps = CASES[page_tokens].steps
    settings = replace(SETTINGS, page_tokens=page_tokens, steps_per_dispatch=steps)
    with one_shape(32):
        return make_engine(*load(MODEL), settings, room=room)


@kept_by_arguments
def engine_of(page_tokens: int) -> Engine:
    """With an arena that holds whatever the loads leave behind."""
    return new_engine(page_tokens, CASES[page_tokens].ample)


def serve(engine: Engine, jobs: list[Job], *, rate: float = 0.03, check_every: int = 8) -> Run:
    """Runs the jobs while free memory is poisoned at so many of the steps; leaves an empty pool after."""
    poison = Poison(engine, rate=rate)
    with one_shape(32):
        run = drive(engine, jobs, poison, check_every=check_every)
    engine.reset_prefix_cache()
    engine.scheduler.check_invariants()
    stats = engine.stats()
    assert stats["free_frames"] == stats["num_frames"] and stats["checkpoints"] == 0
    return run


def num_evictions(run: Run) -> float:
    return run.moved["cache_leaf_evictions"] + run.moved["cache_tombstone_evictions"]


@functools.cache
def undisturbed(page_tokens: int, policy: str) -> list[list[int]]:
    """Outputs where memory holds everything."""
    engine, case = engine_of(page_tokens), CASES[page_tokens]
    start_over(engine, case.ample, policy=policy)
    run = serve(engine, all_jobs(case.count), rate=0, check_every=64)
    assert run.moved["preemptions"] == num_evictions(run) == 0
    return run.outputs


def check(run: Run, page_tokens: int, policy: str) -> None:
    """Short of memory again and again, and the same outputs, token for token."""
    moved = run.moved
    assert moved["preemptions"] >= CASES[page_tokens].preemptions and num_evictions(run) >= 200, (
        moved
    )
    assert min(moved[name] for name in ("cache_hits", "forks", "copies")) > 0, moved
    assert min(moved[name] for name in ("folds_to_new", "folds_in_place")) >= 100, moved
    assert run.outputs == undisturbed(page_tokens, policy)
    assert {request.output.finish_reason for request in run.requests} == {"length"}


@pytest.mark.slow
@pytest.mark.parametrize(("page_tokens", "policy"), RUNS)
@left_to_all("64")
def test_preemptions_and_evictions_change_no_token(page_tokens, policy):
    engine, case = engine_of(page_tokens), CASES[page_tokens]
    start_over(engine, case.tight, policy=policy)
    check(serve(engine, all_jobs(case.count)), page_tokens, policy)


@pytest.mark.slow
@left_to_all
def test_an_engine_whose_memory_is_that_tiny_gives_the_same_tokens():
    """An arena of 19 frames, as `EngineConfig(memory=...)` makes it, and executables of its own."""
    engine = new_engine(16, CASES[16].tight)
    assert engine.stats()["num_frames"] == 19
    check(serve(engine, all_jobs(CASES[16].count)), 16, "adaptive")


# --- mistakes that the books do not notice --------------------------------------------------------


def given_away_while_read(memory: Memory, sequence: Sequence, checkpoint: int, slot: int) -> None:
    """`Memory.advance` that does not wait for the end of the plan, whose chunk reads the old checkpoint."""
    if slot != sequence.held.slot and sequence.held.slot:
        memory.holds.release_slot(sequence.held.slot)
    sequence.held.slot = sequence.held.real_slot = slot
    sequence.held.real_checkpoint = checkpoint


class OnlyOnce:
    """`Runner._write_slots` that leaves a slot which is used again with the frames of its last life."""

    def __init__(self):
        self.written: set[int] = set()

    def __get__(self, runner: Runner, owner: type):
        return functools.partial(self, runner)

    def __call__(self, runner: Runner, new_slots: list) -> None:
        unseen = [(slot, frames) for slot, frames in new_slots if slot not in self.written]
        self.written |= {slot for slot, _ in unseen}
        if unseen:
            WRITE_SLOTS(runner, unseen)


WRITE_SLOTS = Runner._write_slots
MISTAKES = {
    "a checkpoint given away while it is read": (Memory, "advance", lambda: given_away_while_read),
    "a slot with the frames of its last life": (Runner, "_write_slots", OnlyOnce),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_short_memory_is_seen_in_the_tokens(mistake):
    owner, name, make = MISTAKES[mistake]
    engine = engine_of(16)
    start_over(engine, CASES[16].ample, policy="lru")
    expected = serve(engine, all_jobs(20), rate=0).outputs
    start_over(engine, CASES[16].tight, policy="lru")
    assert serve(engine, all_jobs(20)).outputs == expected
    start_over(engine, CASES[16].tight, policy="lru")
    with mock.patch.object(owner, name, make()):
        assert serve(engine, all_jobs(20)).outputs != expected


@spine
def test_a_fold_forgotten_is_noticed_by_the_books():
    settle = Memory.settle

    def forgotten(memory: Memory, sequence: Sequence) -> None:
        """`Memory.settle` that leaves the new checkpoint at the old one's position."""
        before = sequence.held.real_checkpoint
        settle(memory, sequence)
        sequence.held.real_checkpoint = before

    engine = engine_of(16)
    start_over(engine, CASES[16].tight, policy="lru")
    with (
        mock.patch.object(Memory, "settle", forgotten),
        pytest.raises(AssertionError, match=r"job-\d+ at \d+, checkpoint \d+"),
    ):
        serve(engine, all_jobs(20))

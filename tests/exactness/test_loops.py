"""The loop over the steps of a dispatch: inside the program, or started by the host step by step, after a trial or not.

Tokens are the same in each case. What a GPU may get wrong in its trial is planted.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hybrid_jax.config import EngineConfig
from hybrid_jax.engine import loop_trial, trial_errors
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs import loops
from hybrid_jax.engine.programs.compiling import Program
from hybrid_jax.engine.programs.loops import Begun, Loops, choose_loops
from hybrid_jax.engine.programs.store import PASSED, ProgramStore
from tests.drawing import left_to_all
from tests.exactness.conftest import load
from tests.exactness.engines import make_engine, one_shape
from tests.exactness.jobs import Job, Run, drive, random_prompt
from tests.exactness.speculation_matrix import ENGINES, with_drafter

ROOM = 12.0
PLAIN = EngineConfig(max_rows=3, prefill_tokens=128, steps_per_dispatch=4, page_tokens=64)
# The last one finds tokens in its prompt, so that the host drafts.
PROMPTS = (*((20 + 7 * n, n) for n in range(4)), (64, 9))
NAMES = ("decode-bamba", "decode-with_unknown_kind", "decode-windowed")
NAMES += ("ngram-parallel", "mtp_tree-qwen3_next", "draft-jamba", "exit-with_cut")


def engine_of(name: str, store: ProgramStore | None = None) -> Engine:
    if name.startswith("decode-"):
        return make_engine(*load(name.partition("-")[2]), PLAIN, room=ROOM)
    maker = ENGINES[name]
    return make_engine(*with_drafter(maker), maker.settings, room=ROOM)


def jobs(vocab: int) -> list[Job]:
    """More than rows, longer than two rings, drawn and greedy, some with a stop token or penalties."""
    made = []
    for index, (length, seed) in enumerate(PROMPTS):
        prompt = random_prompt(length, seed, vocab)
        asks = {"temperature": 0.9 * (index % 2), "seed": index, "max_tokens": 40 + 9 * index}
        asks |= {"presence_penalty": 0.5} if index == 0 else {}
        asks |= {"stop_ids": frozenset({int(prompt[3])})} if index == 3 else {}
        made.append(Job(prompt=prompt, arrive=index, **asks))
    return [*made, Job(prompt=made[-1].prompt[:32] * 2, max_tokens=50)]


@functools.cache
def wanted(name: str) -> Run:
    """What comes of a loop that is part of the program."""
    return run(name, lambda engine: None)


def run(name: str, change: Callable[[Engine], None], store: ProgramStore | None = None) -> Run:
    with one_shape(64):
        engine = engine_of(name)
        engine.runner._trial.store = store
        change(engine)
        try:
            return drive(engine, jobs(engine.config.vocab_size))
        finally:
            engine.close()


def by_the_host(engine: Engine) -> None:
    engine.runner.loops.by_the_host("is not wanted")


def untried(engine: Engine) -> None:
    engine.runner.loops.untried = True


@pytest.fixture
def store(tmp_path) -> ProgramStore:
    return ProgramStore(tmp_path / "programs", jax.devices()[0])


@pytest.mark.parametrize("name", NAMES)
@left_to_all("decode-w", "exit", "mtp_tree")
def test_steps_that_the_host_starts_give_the_same_tokens(name):
    found = run(name, by_the_host)
    assert found.outputs == wanted(name).outputs
    assert found.moved["folds_in_place"] == wanted(name).moved["folds_in_place"] > 0
    for ours, theirs in zip(found.requests, wanted(name).requests, strict=True):
        assert ours.course.drafts.windows == theirs.course.drafts.windows
        values = [[e.logprob for e in r.output.logprobs] for r in (ours, theirs)]
        np.testing.assert_allclose(*values, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@left_to_all("decode-w", "exit", "mtp_tree")
def test_a_trial_leaves_nothing_behind(name, store):
    tried = []

    def watch(engine: Engine) -> None:
        untried(engine)
        tried.append(engine.runner)

    found = run(name, watch, store)
    assert tried[0].loops == Loops() and store.verdict(tried[0]._trial.name) == PASSED
    assert found.outputs == wanted(name).outputs and found.bits == wanted(name).bits


# --- what a trial finds -------------------------------------------------------------------------------

NAME = "decode-bamba"


def wrong_programs(monkeypatch, mistake: Callable) -> list[int]:
    """Decode programs that loop make a mistake: `mistake(run, arguments, n)` stands for the n-th call of one."""
    calls: list[int] = []
    call = Program.__call__

    def wrong(self, *args):
        decodes = self._does == "writing tokens" and "'loops': False" not in self._identity
        if not decodes:
            return call(self, *args)
        calls.append(len(calls))
        return mistake(functools.partial(call, self), args, len(calls))

    monkeypatch.setattr(Program, "__call__", wrong)
    return calls


def one_step_less(run, args, number):
    *others, num_steps = args
    return run(*others, num_steps - (num_steps > 1))


def other_bits_the_second_time(run, args, number):
    state, adjust, made = run(*args)
    if number == 3:  # after one without a step, to compile it
        conv = state.rings[0]["conv"]
        state = state.with_ring(0, conv=conv.at[:, :, -1].add(1))
    return state, adjust, made


def ignores_the_number_of_steps(run, args, number):
    *others, num_steps = args
    return run(*others, num_steps + 9 * (num_steps > 0))


def refuses(run, args, number):
    raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_NOT_SUPPORTED\nand more")


def takes_the_state_along(run, args, number):
    run(*args)
    raise jax.errors.JaxRuntimeError("INTERNAL: Failed to update graph exec")


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (one_step_less, "failed a trial: 2 steps in one call differ from the same in 2 calls"),
        (other_bits_the_second_time, "failed a trial: its second run differs from its first"),
        (ignores_the_number_of_steps, "failed a trial: one step drew more than a step can"),
        (refuses, "failed a trial: JaxRuntimeError: INTERNAL: CUDA_ERROR_NOT_SUPPORTED"),
        (takes_the_state_along, "failed a trial: JaxRuntimeError: INTERNAL: Failed to update"),
    ],
)
def test_after_a_trial_that_failed_the_host_starts_each_step(
    mistake, said, store, monkeypatch, caplog
):
    want = wanted(NAME).outputs
    caplog.set_level(logging.WARNING, "hybrid_jax")
    calls = wrong_programs(monkeypatch, mistake)
    tried = []

    def watch(engine: Engine) -> None:
        untried(engine)
        tried.append(engine)

    assert run(NAME, watch, store).outputs == want
    (engine,) = tried
    chosen = engine.runner.loops
    assert not chosen.inside and not chosen.untried and chosen.why_not.startswith(said)
    assert 1 <= len(calls) <= 5  # the trial's own: no dispatch has run such a program
    assert [record.message.count("the host starts each") for record in caplog.records] == [1]
    verdict = store.verdict(engine.runner._trial.name)
    assert verdict and verdict in chosen.why_not


def broken_off(
    store: ProgramStore | None, error: type[BaseException], match: str | None = None
) -> Engine:
    """An engine, closed by now, whose trial raised this to its caller."""
    with one_shape(64):
        engine = engine_of(NAME)
        engine.runner._trial.store = store
        untried(engine)
        with pytest.raises(error, match=match):
            drive(engine, jobs(engine.config.vocab_size))
    engine.close()
    return engine


def says_nothing(engine: Engine, store: ProgramStore) -> None:
    """The trial left no verdict."""
    assert engine.runner.loops == Loops(untried=True)
    assert store.verdict(engine.runner._trial.name) is None


def test_too_little_memory_says_nothing_about_the_loop(store, monkeypatch):
    def mistake(run, args, number):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    wrong_programs(monkeypatch, mistake)
    says_nothing(broken_off(store, jax.errors.JaxRuntimeError, "RESOURCE_EXHAUSTED"), store)


def test_a_compiler_that_compiles_nothing_at_the_moment_says_nothing_about_the_loop(
    store, monkeypatch
):
    def full(device):
        raise OSError("No space left on device")

    wrong_programs(monkeypatch, refuses)
    monkeypatch.setattr(trial_errors, "compile_something", full)
    says_nothing(broken_off(store, jax.errors.JaxRuntimeError, "NOT_SUPPORTED"), store)


@pytest.mark.parametrize("kept", [True, False])
def test_a_device_that_stops_in_a_trial_is_said_and_the_next_process_does_without(
    kept, store, monkeypatch
):
    def stopped(device):
        raise jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    wrong_programs(monkeypatch, refuses)
    monkeypatch.setattr(trial_errors, "copy_there_and_back", stopped)
    remedy = "start again$" if kept else "start again with XLA_FLAGS=--xla_gpu_enable_command_buf"
    said = f"stopped working in a trial of a loop.*{remedy}"
    engine = broken_off(store if kept else None, RuntimeError, said)
    verdict = "the GPU stopped working" if kept else None
    assert store.verdict(engine.runner._trial.name) == verdict


def test_a_process_that_is_ended_in_a_trial_says_nothing_about_the_loop(store, monkeypatch):
    noted = []

    def mistake(run, args, number):
        if number > 1:  # the first one compiles
            noted.extend(file.read_text() for file in store._folder.iterdir())
            raise KeyboardInterrupt
        return run(*args)

    wrong_programs(monkeypatch, mistake)
    says_nothing(broken_off(store, KeyboardInterrupt), store)
    (begun,) = map(Begun.read, noted)
    assert (begun.ends, begun.pid, begun.ended) == (0, os.getpid(), 0)


def test_programs_of_the_other_form_serve_no_more():
    config, params = load("bamba")
    engine = Engine(config, params, replace(PLAIN, shapes="coarse", memory=1 << 22))
    programs = engine.runner.programs
    job = Job(prompt=tuple(range(20)), max_tokens=9)
    want = drive(engine, [job]).outputs

    def known() -> set[str]:
        return {key[0] for key in (*programs.made, *programs.serving.since)}

    assert "decode" in known() and programs.serving.since
    engine.runner.loops.by_the_host("is not wanted")
    programs.forget_loops()
    assert "decode" not in known() and "prefill" in known()
    assert not [key for key in programs._background._begun if key[0] == "decode"]
    assert drive(engine, [job]).outputs == want
    engine.close()


@pytest.mark.parametrize("always", [True, False])
def test_calls_that_wait_for_their_steps_are_left_to_the_host(always, store, monkeypatch):
    """That is a loop which the compiler left out of the command buffer: its tokens are right.

    A host that was busy once is no loop that waits.
    """
    monkeypatch.setattr(loop_trial, "WAITED_SECONDS", 0.5)

    def waits(run, args, number):
        made = jax.block_until_ready(run(*args))
        time.sleep(0.6 if always or number == 3 else 0.0)
        return made

    wrong_programs(monkeypatch, waits)
    tried = []

    def watch(engine: Engine) -> None:
        untried(engine)
        engine.runner._trial.may_wait = False
        tried.append(engine.runner)

    if always:
        assert run(NAME, watch, store).outputs == wanted(NAME).outputs
        assert "its call waited for its steps" in tried[0].loops.why_not
    else:
        run(NAME, watch, store)
        assert tried[0].loops == Loops()


def test_a_row_that_stops_at_once_decides_nothing(store):
    """Its first token, or its second, ends it. A later row passes the trial."""
    config, _ = load("bamba")
    prompt = random_prompt(20, 1, config.vocab_size)
    plain = drive_alone(Job(prompt=prompt, max_tokens=8))
    for count in (1, 2):
        stopped = Job(prompt=prompt, max_tokens=8, stop_ids=frozenset({plain[count - 1]}))
        with one_shape(64):
            engine = engine_of(NAME, store)
            engine.runner._trial.store = store
            untried(engine)
            drive(engine, [stopped])
            assert engine.runner.loops == Loops(untried=True), count
            assert store.verdict(engine.runner._trial.name) is None
            assert drive(engine, [Job(prompt=prompt, max_tokens=8)]).outputs == [plain]
            assert engine.runner.loops == Loops()
            store.note(engine.runner._trial.name, None)
            engine.close()


def drive_alone(job: Job) -> list[int]:
    with one_shape(64):
        engine = engine_of(NAME)
        (tokens,) = drive(engine, [job]).outputs
        engine.close()
    return tokens


@pytest.mark.parametrize("where", ["warm-up", "dispatch"])
def test_a_loop_that_raises_before_its_trial_is_left_to_the_host(where, store, monkeypatch):
    """In a warm-up, or in a dispatch of which no row can be tried: each ends after two tokens."""
    job = Job(prompt=tuple(range(20)), max_tokens=3)
    want = drive_alone(job)
    wrong_programs(monkeypatch, refuses)
    with one_shape(64):
        engine = engine_of(NAME)
        engine.runner._trial.store = store
        untried(engine)
        if where == "warm-up":
            for program in engine.warm_ups():
                program.run()
            assert not engine.runner.loops.inside
        assert drive(engine, [job]).outputs == [want]
        assert "CUDA_ERROR_NOT_SUPPORTED" in engine.runner.loops.why_not
        assert "CUDA_ERROR_NOT_SUPPORTED" in store.verdict(engine.runner._trial.name)
        engine.close()


@pytest.mark.parametrize(
    ("length", "num_tokens", "fits"),
    [(1, 3, True), (1, 2, False), (30, 4, True), (31, 4, False), (32, 4, False), (33, 4, True)],
)
def test_no_row_is_tried_that_folds_or_ends_at_once(length, num_tokens, fits):
    """A ring of 32 tokens is full at 32; the first of two tokens after 31 would fill it, and the second fold it."""
    row = SimpleNamespace(row=1, num_steps=num_tokens, num_tokens=num_tokens)
    find = functools.partial(loop_trial.row_for_trial, tokens=1, grain=32)
    held = np.array([5, 5, -1]), np.array([9, length, 9])
    assert find([row], lambda: held) is (row if fits else None)
    other, stopped = (SimpleNamespace(row=n, num_steps=8, num_tokens=8) for n in (0, 2))
    assert find([stopped, row, other], lambda: held) is (row if fits else other)


# --- the choice -----------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A device that says it is a GPU, with CUDA 12.9, a driver of 13.0 and a compiler that takes the options."""
    monkeypatch.setattr(loops, "cuda_driver", lambda: (13, 0))
    monkeypatch.setattr(loops, "refused", lambda device: None)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return SimpleNamespace(
        platform="gpu", client=SimpleNamespace(platform_version="PJRT C API\ncuda 12090")
    )


def test_a_new_gpu_loops_after_a_trial(gpu, store):
    assert choose_loops(gpu, None, "t") == choose_loops(gpu, store, "t") == Loops(untried=True)
    assert Loops(untried=True).about == "the GPU loops over them, which is not tried yet"
    store.note("t", PASSED)
    assert choose_loops(gpu, store, "t") == Loops()
    assert choose_loops(gpu, store, "t").about == "the GPU loops over them"
    assert choose_loops(jax.devices()[0], store, "other") == Loops()


def test_a_trial_in_which_processes_ended_is_left_alone_after_the_second(gpu, store):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    here, gone = socket.gethostname(), process.pid
    untried = Loops(untried=True)
    for begun, found in (
        (Begun(0, here, os.getppid(), 0.0), untried),  # it runs
        (Begun(0, here, gone, 0.0), untried),  # somebody may have killed it
        (Begun(1, here, os.getppid(), 0.0), untried),
        (Begun(1, here, gone, 0.0), None),
        (Begun(1, "another", gone, time.time()), untried),
        (Begun(1, "another", gone, time.time() - 700), None),
    ):
        store.note("t", str(begun))
        assert Begun.read(store.verdict("t")) == begun
        why = "failed a trial: 2 processes ended while they tried it"
        assert choose_loops(gpu, store, "t") == (found or Loops(inside=False, why_not=why)), begun


def test_a_damaged_note_is_another_one():
    for note in (None, "", "begun", "begun x here 1 0", "begun 0 here 1 now", "its second run"):
        assert Begun.read(note) is None


def test_a_trial_counts_the_processes_that_ended_in_it_before(store):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    trial = loop_trial.LoopTrial(Loops(untried=True), jax.devices()[0], store, "t")
    store.note("t", str(Begun(0, socket.gethostname(), process.pid, 0.0)))
    found = []
    for _ in range(2):  # a warm-up, and the trial
        with trial._begun():
            found.append(Begun.read(store.verdict("t")).ends)
        trial._note(None)
    assert found == [1, 1]


def test_what_went_wrong_is_not_tried_again(gpu, store):
    verdict = "its second run differs from its first"
    store.note("t", verdict)
    found = choose_loops(gpu, store, "t")
    assert found == Loops(inside=False, why_not=f"failed a trial: {verdict}")
    assert found.about == f"the host starts each step, because a loop failed a trial: {verdict}"


@pytest.mark.parametrize(
    ("driver", "version", "why"),
    [
        ((12, 2), "cuda 12090", "needs a driver of CUDA 12.3, found 12.2"),
        ((12, 3), "cuda 12030", None),
        ((13, 0), "cuda 12020", "needs a toolkit of CUDA 12.3, found 12.2"),
        (None, "PJRT C API", None),  # nothing is known: the trial will tell
        (None, "PJRT C API\nrocm 70000", "needs CUDA, found ROCm"),
    ],
)
def test_old_drivers_and_toolkits_have_no_loops(gpu, monkeypatch, driver, version, why):
    monkeypatch.setattr(loops, "cuda_driver", lambda: driver)
    gpu.client.platform_version = version
    assert choose_loops(gpu, None, "t") == Loops(why is None, why, untried=why is None)


def test_a_choice_of_the_users_own_stands(gpu, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    found = choose_loops(gpu, None, "t")
    assert found.why_not == "is left to XLA_FLAGS, which sets xla_gpu_enable_command_buffer"


def test_an_option_that_this_jax_does_not_know_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(loops, "LOOP_OPTIONS", {"xla_gpu_no_such_option": True})
    device = jax.devices()[0]
    found = loops.refused(device)
    assert found.startswith("is refused by this jax: ") and "xla_gpu_no_such_option" in found
    monkeypatch.setattr(loops, "_why_not", lambda device: found)
    gpu = SimpleNamespace(platform="gpu")
    assert choose_loops(gpu, None, "t") == Loops(inside=False, why_not=found)
    assert [record.message for record in caplog.records] == [
        f"the host starts each decode step, because a loop {found}"
    ]


def test_this_jax_knows_the_options():
    assert loops.refused(jax.devices()[0]) is None


def test_options_are_for_a_gpu_and_for_programs_that_loop():
    assert loops.options_for("cpu", Loops()) is None
    assert "WHILE" in loops.options_for("gpu", Loops())[loops.FLAG]
    for others in (None, Loops(inside=False)):
        assert loops.options_for("gpu", others) == loops.GPU_OPTIONS

"""An exception at every line of a turn: the next steps give every live request the tokens it would have had.

A trace function raises when a chosen line of the engine, the runner or the scheduler is about to run; the caller
goes on with the same engine. What was reported before and after, put together, must be the undisturbed output.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from types import CodeType, FrameType

import jax
import numpy as np
import pytest

from hybrid_jax.cache.tree import copies
from hybrid_jax.config import CacheConfig, SpeculationConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs.programs import Programs
from hybrid_jax.engine.programs.serving import Serving
from hybrid_jax.engine.runner import Pending, Runner
from hybrid_jax.engine.steps import step as kinds
from hybrid_jax.engine.steps.decode import Decode
from hybrid_jax.engine.steps.exact import Exact
from hybrid_jax.engine.steps.prefill import Prefill
from hybrid_jax.engine.steps.step import StepKind
from hybrid_jax.engine.steps.verify import Verify
from hybrid_jax.engine.tiers import host_frames
from hybrid_jax.engine.tiers.host_frames import HostFrames
from hybrid_jax.schedule.admission import Admission
from hybrid_jax.schedule.memory import Memory
from hybrid_jax.schedule.narrowing import Narrowing
from hybrid_jax.schedule.pace import Pace
from hybrid_jax.schedule.request import Request
from hybrid_jax.schedule.scheduler import Scheduler
from hybrid_jax.schedule.sequence import Sequence
from hybrid_jax.schedule.suffix import SuffixDrafter
from hybrid_jax.schedule.tiers import arrivals
from hybrid_jax.schedule.tiers.below import Below
from hybrid_jax.schedule.tiers.on_disk import OnDisk
from hybrid_jax.tiers.disk import Disk
from hybrid_jax.tiers.folder import files_of
from tests.drawing import left_to_all
from tests.tiny_models import VOCAB, tiny_engine

TURN = (
    Engine.step,
    Runner.execute,
    Runner._dispatch,
    Runner._write_slots,
    Programs.choose,
    *(Serving.choose, Serving.begin),
    Runner._run,
    Runner._arguments,
    StepKind.variant,
    Runner._load_adjust,
    *(Programs.get, Programs.layout),
    *(Prefill.bucket, Decode.bucket),
    *(StepKind.pack, StepKind.values),
    Pending.read,
    *(StepKind.unpack, kinds.logprobs_at, Decode.drawn_at),
    Scheduler.plan,
    Scheduler._turn,
    Admission.admit,
    Admission.fork,
    Scheduler.receive,
    Scheduler._settle,
    Scheduler._accept,
    Sequence.settle,
    Sequence.report,
    Scheduler._finish,
    Memory._start,
    Memory.fork,
    Memory.grow,
    Memory.slot_to_write,
    Memory.publish,
    Memory.finish,
    Memory.settle,
    Memory.end_plan,
)
RECOVERY = (Engine._recover, Runner.rebuild, Scheduler.restarted, Scheduler.add)
Line = tuple[CodeType, int]


class Interrupted(RuntimeError):
    """What the test raises, so that nothing else is taken for it."""


def make_requests(again: str = "") -> list[Request]:
    """A shared prefix, chunks and folds, a stop token, noise, log-probabilities, a fork, a penalty.

    Args:
        again: of which names end, where the same is asked once more.
    """
    rng = np.random.default_rng(7)
    shared = rng.integers(0, VOCAB, 48).tolist()
    prompts = [shared + [1, 2], shared[:40] + [3], shared, [5, 6, 7], [5, 6, 7]]
    params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.9, top_k=7, seed=1),
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(temperature=1.0, top_p=0.9, seed=2),
        SamplingParams(temperature=1.0, top_p=0.9, logprobs=1, repetition_penalty=1.2),
    ]
    return [
        Request(
            request_id=f"{i}{again}",
            prompt=list(prompt),
            params=params[i],
            seed=i,
            sibling_group=f"fork{again}" if i >= 3 else None,
            max_tokens=(14, 9, 5, 36, 11)[i],
            stop_ids=frozenset({21}) if i == 2 else frozenset(),
        )
        for i, prompt in enumerate(prompts)
    ]


def make_engine(
    name: str = "with_unknown_kind", checkpoints: str = "float32", **settings
) -> Engine:
    cache = CacheConfig(checkpoints=checkpoints, loads="always")
    sizes = dict(max_rows=3, prefill_tokens=32, max_model_len=128)
    return tiny_engine(name, cache=cache, **sizes, **settings)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


def serve(engine: Engine, requests: list[Request]) -> tuple[dict[str, list[int]], int]:
    """Steps until nothing is left, going on after what the test raises; what was reported, and how often it was."""
    reported = {request.request_id: [] for request in requests}
    finished, raised = [], 0
    for request in requests:
        try:
            engine.add(request)
        except (Interrupted, KeyboardInterrupt):  # nothing of it was added
            raised += 1
            engine.add(request)
    for _ in range(400):
        if not engine.has_work:
            break
        try:
            results = engine.step()
        except (Interrupted, KeyboardInterrupt):
            raised += 1
            continue
        engine.scheduler.check_invariants()
        for entry in results:
            reported[entry.request.request_id] += entry.new_token_ids
            finished += [entry.request.request_id] * entry.finished
            if entry.request.params.logprobs is not None:
                assert [e.token_id for e in entry.new_logprobs] == entry.new_token_ids
    assert sorted(finished) == sorted(reported), f"finished {finished}"
    for request in requests:
        assert request.output.token_ids == reported[request.request_id]
        assert request.output.finish_reason in ("stop", "length")
    return reported, raised


@pytest.fixture(scope="module")
def expected(engine) -> dict[str, list[int]]:
    """Undisturbed, from an empty cache."""
    engine.reset_prefix_cache()
    requests = make_requests()
    reported = serve(engine, requests)[0]
    reasons = [request.output.finish_reason for request in requests]
    assert reasons == ["length", "length", "stop", "length", "length"]
    return reported


class Tracer:
    """Counts the lines of some functions as they run, and raises before the nth time one of them does."""

    def __init__(self, functions, *targets: tuple[Line, int], error=Interrupted):
        self.codes = {function.__code__ for function in functions}
        self.codes |= {
            constant
            for code in self.codes
            for constant in code.co_consts
            if isinstance(constant, CodeType)
        }
        self.targets, self.error = list(targets), error
        self.hits: dict[Line, int] = {}

    def _call(self, frame: FrameType, event: str, arg):
        return self._line if frame.f_code in self.codes else None

    def _line(self, frame: FrameType, event: str, arg):
        if event == "line":
            line = (frame.f_code, frame.f_lineno)
            self.hits[line] = self.hits.get(line, 0) + 1
            if self.targets and self.targets[0] == (line, self.hits[line]):
                self.targets.pop(0)
                raise self.error(f"line {frame.f_lineno} of {frame.f_code.co_name}")
        return self._line

    @contextlib.contextmanager
    def installed(self):
        old = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield self
        finally:
            sys.settrace(old)


def lines_of(function) -> list[int]:
    """Numbers of the lines of a function's body."""
    code = function.__code__
    return sorted({n for _, _, n in code.co_lines() if n and n > code.co_firstlineno})


def lines_that_run(engine: Engine, functions, asked=make_requests) -> list[tuple[Line, int]]:
    """Every line of the functions that the workload reaches, with how often."""
    engine.reset_prefix_cache()
    with Tracer(functions).installed() as tracer:
        serve(engine, asked())
    return sorted(tracer.hits.items(), key=lambda item: (item[0][0].co_qualname, item[0][1]))


@pytest.mark.parametrize("function", TURN, ids=lambda function: function.__qualname__)
def test_an_exception_at_any_line_loses_and_repeats_nothing(engine, expected, function):
    raise_at_each_line(engine, expected, function)


def test_an_exception_at_any_line_of_exact_mode_loses_and_repeats_nothing():
    engine = make_engine("mamba2", exact=True)
    expected = serve(engine, make_requests())[0]
    raise_at_each_line(engine, expected, Exact.dispatches)
    raise_at_each_line(engine, expected, Exact.pack)
    raise_at_each_line(engine, expected, Exact.unpack)
    raise_at_each_line(engine, expected, Runner._dispatch)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@left_to_all("suffix", "ngram")
def test_an_exception_at_any_line_of_speculation_loses_and_repeats_nothing(
    expected, method, monkeypatch
):
    speculation = SpeculationConfig(method=method, num_tokens=3, ngram_min=1)
    engine = make_engine(speculation=speculation)
    assert serve(engine, make_requests())[0] == expected
    assert engine.stats()["verifications"] > 10
    own = [Runner._load_history] if method == "ngram" else [Pace._drafted, SuffixDrafter.draft]
    forget = engine.reset_prefix_cache

    def start_over() -> None:
        """Whether drafts paid in earlier runs decides which lines run."""
        forget()
        vars(engine.scheduler.pace).update(_common=0.0, _windows=0, _since_trial=0.0)

    monkeypatch.setattr(engine, "reset_prefix_cache", start_over)
    own += [Pace.stride, Pace.learn, Pace.ran, Verify.pack, Verify.unpack, Scheduler._settle]
    for function in own:
        raise_at_each_line(engine, expected, function)


def twice() -> list[Request]:
    """The requests, and the same once more, when the arena has given away what the first left."""
    return make_requests() + make_requests("again")


COPIES = (Below.keep, Below.fetch, Below.end_plan, Below.received, copies.copy_of, copies.to_save)
COPIES += (copies.publish, HostFrames.save, HostFrames.load)


@pytest.mark.parametrize("function", COPIES, ids=lambda function: function.__qualname__)
@left_to_all("Below.end_plan", "Below.received", "to_save", "publish")
def test_an_exception_at_any_line_of_a_copy_loses_and_repeats_nothing(function, monkeypatch):
    engine = make_engine(memory=850_000, host_memory=4 << 20)
    undisturbed = serve(engine, twice())[0]
    assert min(engine.stats()["host_saves"], engine.stats()["host_loads"]) > 0
    raise_at_each_line(engine, undisturbed, function, twice)
    engine.close()


NARROW = (Narrowing.in_place, Narrowing.widen, Narrowing.end_plan)
NARROW += (Memory._leave, Below.end_plan, OnDisk.end_plan)


@pytest.mark.parametrize("function", NARROW, ids=lambda function: function.__qualname__)
@left_to_all("Below.end_plan", "OnDisk", "Memory", "Narrowing.end_plan")
def test_an_exception_at_any_line_with_checkpoints_as_int8_leaves_nothing_behind(
    function, tmp_path
):
    """Of three tiers. Which hits there are may change the text, so it is not compared."""
    engine = make_engine(
        checkpoints="int8", memory=850_000, host_memory=4 << 20,
        cache_dir=str(tmp_path), disk_memory=1 << 30,
    )  # fmt: skip
    for index, (line, count) in enumerate(lines_that_run(engine, [function], twice)):
        engine.reset_prefix_cache()
        target = (line, 1 + index * 5 % count)
        with Tracer(
            [function], target, error=(Interrupted, KeyboardInterrupt)[index % 2]
        ).installed():
            _, raised = serve(engine, twice())
        assert raised <= 1  # what is on the disk by now decides which lines run
        while engine.has_saves or engine.has_work:
            engine.step()
        engine.reset_prefix_cache()
        engine.scheduler.check_invariants()
        stats = engine.stats()
        assert (stats["free_frames"], stats["host_bytes"]) == (stats["num_frames"], 0)
    assert engine.stats()["restarts"] > 1
    assert min(engine.stats()["widened_checkpoints"], engine.stats()["disk_saves"]) > 0
    engine.close()


ON_DISK = (OnDisk.note, OnDisk.settle, OnDisk.fetch, OnDisk.end_plan, Disk.wants, Disk.read)
ON_DISK += (arrivals.arrive, host_frames.copy_in)


@pytest.mark.parametrize("function", ON_DISK, ids=lambda function: function.__qualname__)
@left_to_all("OnDisk.note", "OnDisk.settle", "Prefixes", "Disk", "arrive", "copy_in")
def test_an_exception_at_any_line_of_a_copy_to_disk_loses_nothing(function, tmp_path):
    engine = make_engine(cache_dir=str(tmp_path), disk_memory=1 << 30)

    def from_disk() -> tuple[dict[str, list[int]], int]:
        """The requests, then the same from what they have left in a folder that was empty."""
        engine.reset_prefix_cache()
        engine.disk.flush()
        for file in files_of(tmp_path):
            file.path.unlink()
        engine.disk.folder.scan()
        first, raised = serve(engine, make_requests())
        while engine.has_saves or engine.has_work:
            with contextlib.suppress(Interrupted, KeyboardInterrupt):
                engine.step()
        engine.disk.flush()
        engine.reset_prefix_cache()
        second, more = serve(engine, make_requests("again"))
        return first | second, raised + more

    undisturbed = from_disk()[0]
    assert min(engine.stats()["disk_saves"], engine.stats()["disk_loads"]) > 0
    with Tracer([function]).installed() as tracer:
        from_disk()
    reached = 0
    for index, line in enumerate(sorted(tracer.hits, key=lambda line: line[1])):
        error = (Interrupted, KeyboardInterrupt)[index % 2]
        with Tracer([function], (line, 1), error=error).installed():
            reported, raised = from_disk()
        reached += raised  # threads may be so fast that a line does not run
        assert reported == undisturbed, f"after {function.__qualname__} line {line[1]}"
    assert reached > 0
    engine.close()


def raise_at_each_line(
    engine: Engine, expected: dict[str, list[int]], function, asked=make_requests
) -> None:
    lines = lines_that_run(engine, [function], asked)
    assert len(lines) > 1 or len(lines) == len(lines_of(function))
    for index, (line, count) in enumerate(lines):
        error = (Interrupted, KeyboardInterrupt)[index % 2]
        target = (line, 1 + index * 5 % count)
        engine.reset_prefix_cache()
        with Tracer([function], target, error=error).installed():
            reported, raised = serve(engine, asked())
        assert raised == 1, f"{function.__qualname__} line {line[1]} was not reached"
        assert reported == expected, f"after {function.__qualname__} line {line[1]}"


@pytest.mark.parametrize("function", RECOVERY, ids=lambda function: function.__qualname__)
def test_an_exception_during_the_recovery_is_recovered_from_too(engine, expected, function):
    reached = 0
    for number in lines_of(function):
        engine.reset_prefix_cache()
        reported, raised = serve_with_two_interrupts(engine, function, number)
        reached += raised == 2
        assert reported == expected, f"after {function.__qualname__} line {number}"
    assert reached > 1


def serve_with_two_interrupts(engine: Engine, function, number: int):
    """The first in a decode's dispatch, the second at a line of what follows from it."""
    real, state = Decode.pack, {"calls": 0}
    tracer = Tracer([function], ((function.__code__, number), 1))

    def decode(self, *args):
        state["calls"] += 1
        if state["calls"] == 3:
            sys.settrace(tracer._call)  # from the next call on: the engine's recovery
            raise Interrupted("third decode")
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decode, "pack", decode)
        try:
            return serve(engine, make_requests())
        finally:
            sys.settrace(None)


@pytest.mark.parametrize("kind", ["prefill", "decode", "write_slots"])
@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_dispatch_that_fails_or_is_never_bound(engine, expected, monkeypatch, kind, error, when):
    """`after`: the state was donated and consumed, and what came back was never bound."""
    real, calls, consumed = Programs.get, [], []

    def get(self, name, *key):
        run = real(self, name, *key)
        if name != kind:
            return run

        def failing(*args):
            calls.append(name)
            if len(calls) != 2:
                return run(*args)
            if when == "after":
                state = engine.runner.state
                jax.block_until_ready(run(*args))
                consumed.append(state.arena.is_deleted())
            raise error(f"{kind} failed")

        return failing

    engine.reset_prefix_cache()
    monkeypatch.setattr(Programs, "get", get)
    reported, raised = serve(engine, make_requests())
    assert raised == 1 and reported == expected
    assert consumed == ([True] if when == "after" else [])


def test_an_error_on_the_device_surfaces_where_results_are_read(engine, expected, monkeypatch):
    real, calls = Pending.read, []

    def read(self):
        calls.append(self)
        if len(calls) == 2:
            raise Interrupted("the device reports an error")
        return real(self)

    engine.reset_prefix_cache()
    monkeypatch.setattr(Pending, "read", read)
    reported, raised = serve(engine, make_requests())
    assert raised == 1 and reported == expected


def test_a_failure_that_stays_is_raised_every_time_and_ends_with_its_cause(
    engine, expected, monkeypatch
):
    def get(self, name, *key):
        raise Interrupted(f"no {name} today")

    requests = make_requests()
    with monkeypatch.context() as patch:
        patch.setattr(Programs, "get", get)
        for request in requests:
            engine.add(request)
        for _ in range(3):
            with pytest.raises(Interrupted, match="today"):
                engine.step()
    for request in requests[1:]:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_invariants()
    assert requests[0].output.token_ids == expected["0"]


def test_recovery_is_counted_and_keeps_the_other_counters(engine):
    before = engine.stats()
    engine._books_open = True
    engine.abort("nobody")
    after = engine.stats()
    assert after["restarts"] == before["restarts"] + 1
    assert after["plans"] == before["plans"] and after["running"] == 0


@pytest.mark.parametrize("function", [Engine.add, Engine.abort, Scheduler.abort])
def test_an_exception_while_adding_or_aborting_leaves_the_others_alone(engine, expected, function):
    """The caller of the interrupted call gives its own request up; the others do not notice."""
    for line in lines_of(function):
        engine.reset_prefix_cache()
        requests, extra = make_requests(), replace(make_requests()[0], request_id="extra")
        reported = {request.request_id: [] for request in requests}
        for request in requests:
            engine.add(request)
        with Tracer([function], ((function.__code__, line), 1)).installed():
            for call in (lambda e=extra: engine.add(e), engine.step, lambda: engine.abort("extra")):
                try:
                    result = call()
                except Interrupted:
                    continue
                for entry in result or ():
                    if entry.request is not extra:
                        reported[entry.request.request_id] += entry.new_token_ids
        engine.abort("extra")
        while engine.has_work:
            for entry in engine.step():
                reported[entry.request.request_id] += entry.new_token_ids
            engine.scheduler.check_invariants()
        assert reported == expected, f"after {function.__qualname__} line {line}"

"""Workers that compute prompts for others, and are slow or have no room: the bundled model in threads."""

from __future__ import annotations

import errno
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.api.threads.prefill_side import PrefillSide
from hybrid_jax.cluster.router import ReplicaCosts, Router
from hybrid_jax.schedule.request import Request
from hybrid_jax.tiers.chain import root_of
from hybrid_jax.tiers.hand_over import HandOver
from tests.api.books import left_in_the_end, wait_until
from tests.api.thread_workers import ThreadWorkers
from tests.api.tree_engine import COSTS
from tests.llms import BUNDLED, HEAD, engines_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LONG = [f"# File {n}.\n" + HEAD * 3 for n in range(3)]
SIDES = ("prefill", "caller", "decode")


def make() -> LLM:
    links = ThreadWorkers("prefill=1,decode=1", {})
    return LLM._elsewhere(None, links, quiet=True, **BUNDLED)


@pytest.fixture(scope="module")
def workers():
    with make() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(bundled):
    return tokens(bundled.generate(LONG, GREEDY))


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def links(llm):
    return [thread._loop._link for thread in llm._thread._dispatcher.threads]


def stores(llm):
    """What has come and was not taken yet: at the worker that computes prompts, at the caller, and at the other one."""
    prefill, decode = (link.worker._hand_over for link in links(llm))
    over = llm._thread._dispatcher.prefill._hand_over
    return dict(zip(SIDES, (prefill.folder, over.folder, decode.folder), strict=True))


def assert_tidy(llm):
    """Nothing is left of any promise."""
    assert left_in_the_end(llm) == []
    assert {name: store.num_files for name, store in stores(llm).items()} == dict.fromkeys(SIDES, 0)
    for replica in llm._thread._dispatcher.present:
        engines_of(llm)[replica].scheduler.check_invariants()


# --- no room ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
def test_parts_that_have_no_room_cost_time_and_no_token(
    workers, expected, monkeypatch, side, error
):
    """And the next ones come again."""
    before, threads = workers.stats(), list(workers._thread._dispatcher.threads)
    puts = []

    def put(name, part):
        puts.append(name)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(stores(workers)[side], "put", put)
        workers.reset_prefix_cache()
        assert tokens(workers.generate(LONG, GREEDY)) == expected
        assert_tidy(workers)
    after = workers.stats()
    assert puts and after["handed_over_prefixes"] == before["handed_over_prefixes"]
    assert workers._thread._dispatcher.threads == threads  # no worker has ended
    workers.reset_prefix_cache()
    assert tokens(workers.generate(LONG, GREEDY)) == expected
    assert workers.stats()["handed_over_prefixes"] == after["handed_over_prefixes"] + len(LONG)
    assert_tidy(workers)


# --- slow -------------------------------------------------------------------------------------------


@pytest.fixture
def held(workers):
    """Holds back what the worker says that computes prompts, until this is called."""
    goes_on, link = threading.Event(), links(workers)[0]
    workers.reset_prefix_cache()
    link.spoil = lambda frame: [frame] if goes_on.wait(60) else []
    yield goes_on.set
    goes_on.set()
    link.spoil = lambda frame: [frame]


def begun(llm):
    """A call in a thread of its own, and what will have come of it."""
    found = []
    call = threading.Thread(target=lambda: found.extend(llm.generate(LONG, GREEDY)))
    call.start()
    return call, found


def test_others_go_on_while_prompts_come_late(workers, bundled, expected, held):
    call, found = begun(workers)
    short = bundled.generate("import ", GREEDY)
    assert tokens(workers.generate("import ", GREEDY)) == tokens(short)
    assert call.is_alive()
    held()
    call.join(60)
    assert tokens(found) == expected
    assert_tidy(workers)


def test_calls_are_served_while_a_part_is_fetched(workers, bundled, expected, monkeypatch):
    """As from another machine."""
    goes_on, link = threading.Event(), links(workers)[1].worker._link
    read, fetched = link.read, []
    slowly = lambda found: fetched.append(found) or goes_on.wait(60) and read(found)
    monkeypatch.setattr(link, "read", slowly)
    workers.reset_prefix_cache()
    call, found = begun(workers)
    wait_until(lambda: fetched)
    short = bundled.generate("import ", GREEDY)
    assert tokens(workers.generate("import ", GREEDY)) == tokens(short)
    assert call.is_alive()
    goes_on.set()
    call.join(60)
    assert tokens(found) == expected and len(fetched) > 1
    assert_tidy(workers)


def test_a_caller_that_does_not_wait_for_a_late_prompt_leaves_nothing(workers, expected, held):
    """It leaves with the first token of a short prompt."""
    stream = workers.stream(["import ", *LONG], GREEDY)
    assert next(stream).prompt_index == 0
    stream.close()
    held()
    assert_tidy(workers)
    assert tokens(workers.generate(LONG, GREEDY)) == expected


def test_a_worker_that_is_late_for_ever_may_be_taken_out(expected):
    """Until then the prompts wait that it has. Then the other one computes them."""
    goes_on = threading.Event()
    with make() as llm, closing_event(goes_on):
        links(llm)[0].spoil = lambda frame: [frame] if goes_on.wait(60) else []
        call, found = begun(llm)
        wait_until(lambda: llm._thread._dispatcher.prefill.num_promises == len(LONG))
        call.join(0.5)
        assert call.is_alive()
        llm._thread.take_out(0)
        call.join(60)
        assert tokens(found) == expected
        assert llm.stats()["handed_over_prefixes"] == 0
        goes_on.set()
        assert left_in_the_end(llm) == []


@contextmanager
def closing_event(event):
    """Nothing is held back any more in the end."""
    try:
        yield
    finally:
        event.set()


# --- asked for anew ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, RuntimeError("it has ended")])
def test_the_end_of_a_prompt_is_none_of_the_one_that_is_asked_for_in_its_place(error):
    """A decode worker has ended, and another one gets its request. What was computed for the first one ends late."""
    costs = ReplicaCosts(costs=COSTS, grain=32, max_rows=2, steps=1, flops_per_byte=1.0)
    over, router, told = HandOver(root_of("a model")), Router(1, costs), []
    side = PrefillSide(over, router, grain=32, chunk=64)
    end = SimpleNamespace(
        promise=lambda tokens, position: None,
        take_back=lambda name: None,
        drop_prefix=lambda request_id: None,
        compute_prefix=lambda request, name, tell: told.append((name, tell)),
    )
    side.threads, params = [end], SamplingParams(max_tokens=1)
    request = Request(request_id="one", prompt=[*range(300)], params=params, seed=0)
    job = SimpleNamespace(unfinished=[SimpleNamespace(request=request)])
    side.ask("one", job, 0, end)
    side.let_go("one")
    side.ask("one", job, 0, end)
    (_, first), (name, second) = told
    first(error)
    assert router.num_live == 1 and over.known(name).state == "coming"
    second(error)
    assert router.num_live == 0 and (over.known(name) is None) == (error is not None)
    side.let_go("one")
    assert not len(over)


@pytest.mark.parametrize(
    "chunk, ends", [(8192, [2048, 4096, 4992]), (1024, [*range(1024, 4992, 1024), 4992])]
)
def test_pages_go_after_chunks_that_are_not_too_long(chunk, ends):
    """So that little is left to copy after the last one."""
    costs = ReplicaCosts(costs=COSTS, grain=32, max_rows=2, steps=1, flops_per_byte=1.0)
    over, asked = HandOver(root_of("a model")), []
    side = PrefillSide(over, Router(1, costs), grain=32, chunk=chunk)
    end = SimpleNamespace(
        promise=lambda tokens, position: None,
        compute_prefix=lambda request, name, tell: asked.append(request),
    )
    side.threads, params = [end], SamplingParams(max_tokens=1)
    request = Request(request_id="one", prompt=[*range(5000)], params=params, seed=0)
    side.ask("one", SimpleNamespace(unfinished=[SimpleNamespace(request=request)]), 0, end)
    assert [list(one.cache_breakpoints) for one in asked] == [ends]

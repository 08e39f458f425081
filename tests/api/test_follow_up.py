"""A prompt that goes on from an answer, sent the moment the answer has ended, finds what the answer left."""

from __future__ import annotations

import functools

import pytest

from hybrid_jax import RequestOutputKind, SamplingParams
from hybrid_jax.api.completions import Job
from hybrid_jax.api.feed import Ticket
from hybrid_jax.api.threads.calls import Call
from hybrid_jax.api.threads.loop import Loop
from hybrid_jax.cache.tree.node import Why
from hybrid_jax.config import SpeculationConfig
from hybrid_jax.constraints import TokenLimits
from hybrid_jax.text.prompts import Prompt
from hybrid_jax.text.tokenizer import Tokenizer
from tests.schedule.simulated_device import plain_loop
from tests.schedule.simulated_engine import GRAIN, Engine, make_geometry

VOCAB = 1000
PROMPT = list(range(1, 111))


class Letters(Tokenizer):
    """A character for each token id."""

    def decode(self, ids, *, skip_special_tokens=True):
        return "".join(chr(0x4E00 + token) for token in ids)


class Simulated:
    """The engine's interface around a scheduler and a simulated device, with a plan in flight as on a device."""

    def __init__(self, **options):
        self.inner = Engine.make(vocab=VOCAB, num_frames=600, max_slots=150, **options)
        self.scheduler = self.inner.scheduler

    def watch_compiling(self, listener):
        pass

    def compile_seconds(self):
        return 0.0

    def peak_memory_bytes(self):
        return None

    def order(self, prompts):
        return list(range(len(prompts)))

    def add(self, request):
        self.scheduler.add(request)

    def abort(self, request_id):
        self.scheduler.abort(request_id)
        self.scheduler.check_invariants()

    @property
    def has_work(self):
        return self.scheduler.has_work

    def step(self):
        plan, pending = self.scheduler.plan(), self.inner.pending
        self.scheduler.check_invariants()
        if plan:
            self.inner.device.execute(plan)
            pending.append(plan)
        if pending and (len(pending) > 1 or not plan):
            return self.scheduler.receive(pending.popleft())
        return []


class Caller:
    """Drives the engine's thread turn by turn, and acts between two turns as the fastest caller could."""

    def __init__(self, **options):
        self.engine = Simulated(**options)
        self.loop = Loop(self.engine, record=lambda job: None, quiet=True)
        self.num_requests = 0

    def job(self, prompt, **params):
        self.num_requests += 1
        params = SamplingParams(temperature=0.0, **params)
        return Job(
            str(self.num_requests), 0, Prompt(None, tuple(prompt), ()), params, Letters(None), seed=0,
            stop_ids=frozenset(params.stop_token_ids or ()), max_tokens=params.max_tokens or 200,
            limits=TokenLimits(),
        )  # fmt: skip

    def turns(self, until):
        for _ in range(1000):
            if until():
                return
            self.loop.turn()
        raise AssertionError("no end in sight")

    def settle(self):
        self.turns(lambda: not self.engine.has_work)

    def follow_up(self, prompt):
        """How much of a prompt comes from the cache, and the reason why no more does."""
        job = self.job(prompt, max_tokens=1)
        call = Call([job])
        self.loop.start([call])
        self.turns(lambda: call.over)
        request = job.completions[0].request
        return request.hit.num_tokens, request.hit.look_up


def ends_by_itself(caller, call, job, shown):
    caller.turns(lambda: call.over)


def ends_when_closed(caller, call, job, shown):
    caller.turns(lambda: job.num_tokens >= shown)
    caller.loop.end_call(call)


def ends_beside_a_sibling(caller, call, job, shown):
    caller.turns(lambda: job.completions[0].finish_reason is not None)


def answered(shown):
    """The text of the first `shown` tokens that follow the prompt, and the last token of them."""
    tokens = plain_loop(PROMPT, vocab=VOCAB, stop_ids=(), limit=len(PROMPT) + shown)
    return Letters(None).decode(tokens), tokens[-1]


def stops_at_text(shown):
    return {"max_tokens": 200, "stop": [answered(shown)[0][-3:]]}


WAYS = {
    "a stop string": (Call, stops_at_text, ends_by_itself),
    "a stop string, streamed": (functools.partial(Call, streams=True), stops_at_text, ends_by_itself),
    "a stop string, at the end only": (
        functools.partial(Call, streams=True),
        lambda shown: stops_at_text(shown) | {"output_kind": RequestOutputKind.FINAL_ONLY},
        ends_by_itself,
    ),
    "a stop string of a ticket": (
        functools.partial(Ticket, stepped=True), stops_at_text, ends_by_itself,
    ),
    "a stop string of one of two": (
        Call, lambda shown: stops_at_text(shown) | {"n": 2}, ends_beside_a_sibling,
    ),
    "a stop token": (
        Call, lambda shown: {"stop_token_ids": [answered(shown)[1]], "max_tokens": 200}, ends_by_itself,
    ),
    "max_tokens": (Call, lambda shown: {"max_tokens": shown}, ends_by_itself),
    "closing the stream": (
        functools.partial(Call, streams=True), lambda shown: {"max_tokens": 200}, ends_when_closed,
    ),
}  # fmt: skip


def asked(way, shown, *, at_once, **options):
    """The hit of a prompt that goes on from an answer, its reason, and how many tokens both have in common."""
    make, params, end = WAYS[way]
    caller = Caller(**options)
    job = caller.job(PROMPT, **params(shown))
    call = make([job])
    caller.loop.start([call])
    end(caller, call, job, shown)
    assert call.error is None
    if not at_once:
        caller.settle()
    common = PROMPT + job.completions[0].token_ids
    hit, look_up = caller.follow_up(common + list(range(500, 560)))
    return hit, look_up, len(common)


ENGINES = {
    "plain": {},
    "exact": {"exact": True},
    "attention": {"geometry": make_geometry(kind="attention")},
    "recurrent": {"geometry": make_geometry(kind="recurrent")},
    "drafts": {
        "speculation": SpeculationConfig(method="ngram", num_tokens=3),
        "keep": lambda count: max(1, count // 2),
    },
}
# Tokens of the answer: they end in the middle, and around a fold, which comes at 19 and 51.
SHOWN = (7, 17, 18, 19, 51)


CASES = [(way, "plain") for way in WAYS]
CASES += [(way, engine) for way in ("a stop string", "closing the stream") for engine in ENGINES]


@pytest.mark.parametrize(("way", "engine"), dict.fromkeys(CASES))
def test_a_follow_up_at_once_hits_what_a_later_one_hits(way, engine):
    options = ENGINES[engine]
    for shown in SHOWN:
        found = asked(way, shown, at_once=True, **options)
        later = asked(way, shown, at_once=False, **options)
        assert found[::2] == later[::2], shown
        assert found[1].match_len >= later[1].match_len == later[2]


@pytest.mark.parametrize("way", [way for way in WAYS if "stop string" in way])
def test_a_stop_string_keeps_the_last_state_before_it(way):
    # Steps past it are under way when it is found. They may write the next state.
    for shown in SHOWN:
        hit, look_up, length = asked(way, shown, at_once=True)
        assert hit >= (length - 1) // GRAIN * GRAIN, shown
        assert look_up.match_len == length


def test_an_answer_that_ends_before_its_next_state_is_told_so():
    # 129 tokens: the last is never fed, so the state at 128 is not written.
    hit, look_up, length = asked("max_tokens", 19, at_once=True)
    assert (length, hit) == (129, 96)
    assert (look_up.why, look_up.position, look_up.tail) == (Why.ENDED, 96, 33)
    assert look_up.match_len == 129


def test_the_last_state_before_a_stop_string_needs_no_memory_that_others_need():
    # 5 pages of 2 frames, and two states of 3: no third one fits.
    engine = Engine.make(num_frames=17, max_slots=30, vocab=VOCAB)
    request = engine.add(PROMPT, max_tokens=200, stop=["none"], stop_ids=())
    engine.run()
    assert len(request.output.token_ids) == 200 and engine.counters["memory_shortages"] == 0

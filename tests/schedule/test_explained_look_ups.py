"""What is said of a look-up agrees with a recount from the tokens of all requests, under random traffic."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from hybrid_jax.cache.tree import node as nodes
from hybrid_jax.cache.tree import span_tree
from hybrid_jax.cache.tree.node import Why
from hybrid_jax.cache.tree.radix import RadixTree
from hybrid_jax.schedule.history import History
from tests.schedule.simulated_engine import GRAIN, Engine, make_geometry, tokens_of


def common(a, b):
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


class Recount:
    """Follows an engine by its tokens alone, and checks each look-up when it is made.

    Attributes:
        states: what became of the state after each prefix: True while it is saved, else how and after how many look-ups
            it was given away.
        reasons: how often each was given.
    """

    def __init__(self):
        self.engine, self.states, self.reasons = None, {}, {}
        self.saved = {}  # of ended requests, by name: how many of their tokens

    def start(self, engine):
        self.engine, self.states, self.saved = engine, {}, {}

    def fill(self, real):
        def fill(tree, tokens, pages, slot=0):
            node = real(tree, tokens, pages, slot)
            self.states[tuple(tokens.tolist())] = True
            return node

        return fill

    def gone(self, real, why):
        def gone(tree, what, *tier):
            node = tree.arena.slot_nodes.get(what) if why is Why.TAKEN_BACK else what
            prefix = tuple(t for part in node.path() for t in part.tokens.tolist()) if node else ()
            if prefix in self.states:
                self.states[prefix] = (why, tree.counters.lookups)
            return real(tree, what, *tier)

        return gone

    def ended(self, real):
        def ended(history, sequence, node, *, saved):
            real(history, sequence, node, saved=saved)
            if sequence.real_position >= sequence.goal:
                self.saved[sequence.owner] = (list(sequence.tokens), saved)

        return ended

    def explain(self, real):
        def explain(history, sequence, match, hit_len, **loaded):
            found = real(history, sequence, match, hit_len, **loaded)
            self.check(sequence, found, hit_len)
            return found

        return explain

    def check(self, sequence, found, hit_len):
        self.reasons[found.why] = self.reasons.get(found.why, 0) + 1
        prompt, tree = sequence.prompt.tolist(), self.engine.scheduler.memory.tree
        requests = list(self.engine.requests.values())
        place = requests.index(sequence.request)
        ended = [tokens for tokens, _ in self.saved.values()]
        shared = [common(prompt, tokens) for tokens in ended]
        before = [common(prompt, request.prompt) for request in requests[:place]]
        after = [common(prompt, request.prompt) for request in requests[place + 1 :]]
        # Of those that came later it may know the prompts, because some of them were computed first.
        least, most = max([0, *shared, *before]), max([0, *shared, *before, *after])
        assert found.hit_len == hit_len and least <= found.match_len <= most
        possible = (len(prompt) - 1) // GRAIN * GRAIN
        reach = min(found.match_len // GRAIN * GRAIN, possible)
        state = lambda position: self.states.get(tuple(prompt[:position]))
        if found.why is Why.COMPLETE:
            assert hit_len == possible
            return
        assert hit_len < possible
        if found.why is Why.NEVER_SEEN:
            assert hit_len == reach
        elif found.why in (Why.EVICTED, Why.TAKEN_BACK):
            assert hit_len < found.position <= reach
            look_ups = tree.counters.lookups - 1
            how, then = state(found.position)
            assert (how, look_ups - then) == (found.why, found.ago)
        elif found.why is Why.NOT_ADMITTED:
            assert hit_len < found.position == reach
            assert not any(state(p) for p in range(hit_len + GRAIN, reach + 1, GRAIN))
        elif found.why is Why.ENDED:
            assert found.position <= hit_len < reach
            ends = [
                (saved, len(tokens) - saved, common(prompt, tokens))
                for tokens, saved in self.saved.values()
            ]
            assert (found.position, found.tail, found.match_len) in ends
        else:
            assert found.why is Why.NO_ROOM and state(found.position) is not None


@pytest.fixture
def recount():
    recount = Recount()
    with (
        mock.patch.object(RadixTree, "fill", recount.fill(RadixTree.fill)),
        mock.patch.object(RadixTree, "_evict", recount.gone(RadixTree._evict, Why.EVICTED)),
        mock.patch.object(RadixTree, "disown", recount.gone(RadixTree.disown, Why.TAKEN_BACK)),
        mock.patch.object(History, "ended", recount.ended(History.ended)),
        mock.patch.object(History, "explain", recount.explain(History.explain)),
        # Otherwise some of what was given away is forgotten, and a look-up may tell of less.
        mock.patch.object(nodes, "LOSSES_KEPT", 999),
        mock.patch.object(nodes, "ENDINGS_KEPT", 999),
        mock.patch.object(span_tree, "LOSSES_KEPT", 999),
        mock.patch.object(span_tree, "ENDINGS_KEPT", 999),
    ):
        yield recount


def conversations(seed, engine, num_requests=40):
    """Prompts that go on from others and from answers, whole or in part, while some are cut off."""
    rng, made = random.Random(seed), []
    while len(made) < num_requests or engine.scheduler.has_work:
        if len(made) < num_requests and rng.random() < 0.3:
            begin = []
            if made and rng.random() < 0.8:
                earlier = rng.choice(made[-6:])
                begin = earlier.prompt + earlier.output.token_ids
                begin = begin[: rng.choice([len(begin), rng.randint(1, len(begin))])][:200]
            prompt = begin + tokens_of(rng, rng.choice([1, 10, 60]))
            stop = rng.choice([None, "x"])
            count = rng.choice([1, 1, 1, 2])
            options = {"max_tokens": rng.choice([1, 20, 40, 70]), "stop_ids": (), "stop": stop}
            made += engine.add_siblings(count, prompt, **options)
        live = list(engine.scheduler._sequences)
        if live and rng.random() < 0.1:
            engine.scheduler.abort(rng.choice(live))
        engine.step()
    engine.check()


@pytest.mark.parametrize("kind", ["hybrid", "recurrent"])
def test_reasons_agree_with_a_recount(recount, kind):
    for num_frames in (26, 60, 200):
        engine = Engine.make(geometry=make_geometry(kind=kind), num_frames=num_frames, vocab=200)
        recount.start(engine)
        conversations(num_frames, engine)
    rare = {Why.NO_ROOM, Why.SLOWER, Why.TAKEN_BACK, Why.ASKED_FOR, Why.GIVEN_BACK}
    assert not set(Why) - rare - set(recount.reasons), recount.reasons

"""On a CPU a program that can do more serves in place of one that is missing.

No clock decides: the same requests in the same order have the same programs compiled.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.programs import serving
from hybrid_jax.engine.programs.serving import StepKey
from hybrid_jax.engine.steps.step import PLAIN, WHOLE, StepKind
from hybrid_jax.schedule.bucket import AfterCut, DecodeBucket, PrefillBucket
from hybrid_jax.schedule.request import EngineNotes, Request
from tests.drawing import left_to_all
from tests.tiny_models import VOCAB, tiny_engine

WIDTH = 4  # pages of the longest sequence of the tiny models
# What may be compiled for a mixed load: decode, fork, two or three prefills, and four small ones.
MOST_PROGRAMS = 9
COMPILED = SimpleNamespace(compiled=True)


@pytest.fixture
def engine():
    made = tiny_engine(max_rows=8, prefill_tokens=512)
    yield made
    made.close()


class Chooser:
    """What an engine chooses where the given programs are there."""

    def __init__(self, engine: Engine, *there: StepKey) -> None:
        self.serving = engine.runner.programs.serving
        self.serving._programs = dict.fromkeys(there, COMPILED)
        self.kinds = {kind.name: kind for kind in engine.runner.kinds}

    def kind(self, key: StepKey) -> StepKind:
        return self.kinds[key.kind]

    def __call__(self, own: StepKey, generation: int | None = None) -> StepKey:
        """What would run, for requests that begin now or are of a generation."""
        rows = [] if generation is None else [row_of(generation)]
        return self.serving.choose(self.kind(own), own.bucket, own.variant, rows)

    def run(self, own: StepKey, generation: int | None = None) -> StepKey:
        """Chooses as a dispatch does, and compiles what is to be compiled for later."""
        chosen = self(own, generation)
        if chosen != own and (better := self.serving.stood_in(self.kind(own), own, chosen, [])):
            self.serving._programs[better] = COMPILED
        return chosen


def row_of(generation: int) -> SimpleNamespace:
    return SimpleNamespace(request=SimpleNamespace(notes=EngineNotes(generation=generation)))


def plain_request(**asks) -> Request:
    return Request(request_id="a", prompt=[1], params=SamplingParams(**asks), seed=0, max_tokens=1)


def prefill(rows: int, tokens: int, variant=PLAIN) -> StepKey:
    return StepKey("prefill", PrefillBucket(rows, tokens, WIDTH), variant)


def decode(rows: int, variant=PLAIN) -> StepKey:
    return StepKey("decode", DecodeBucket(rows, 4, WIDTH), variant)


def test_the_buckets_are_those_of_the_engine(engine):
    buckets = {kind.name: kind.buckets() for kind in engine.runner.kinds}
    assert prefill(4, 128).bucket in buckets["prefill"] and decode(8).bucket in buckets["decode"]


def test_of_a_model_with_a_cut_what_is_expected_computes_what_prompts_need():
    engine = tiny_engine("with_cut", max_rows=8, prefill_tokens=64)
    [kind] = [kind for kind in engine.runner.kinds if kind.name == "prefill"]
    engine.close()

    def through(length: int, **asks) -> list[AfterCut]:
        request = replace(plain_request(**asks), prompt=[1] * length)
        return [bucket.after_cut for bucket in kind.expected([request])]

    assert through(30) == [AfterCut.ENDS]
    assert through(90) == [AfterCut.NOTHING]  # the first chunk of two
    assert through(30, prompt_logprobs=0) == through(90, prompt_logprobs=0) == [AfterCut.ALL]


def test_the_cheapest_program_that_can_do_the_work_serves(engine):
    choose = Chooser(engine, prefill(1, 512), prefill(4, 128), prefill(1, 128), decode(8, WHOLE))
    assert choose(prefill(1, 128)) == prefill(1, 128)
    assert choose(prefill(1, 32)) == prefill(1, 128)
    assert choose(prefill(4, 32)) == prefill(4, 128)
    assert choose(prefill(1, 256)) == prefill(1, 512)
    assert choose(prefill(8, 32)) == prefill(8, 32)  # none can
    assert choose(decode(1)) == choose(decode(4)) == decode(8, WHOLE)


def test_a_plain_program_serves_no_row_that_asks_for_more(engine):
    choose = Chooser(engine, prefill(1, 128), decode(8))
    assert choose(prefill(1, 128, WHOLE)) == prefill(1, 128, WHOLE)
    assert choose(decode(8, WHOLE)) == decode(8, WHOLE)


def test_one_that_only_can_do_more_for_its_rows_serves_for_good(engine, monkeypatch):
    monkeypatch.setattr(serving, "PROGRAM_FLOPS", 0.0)
    choose = Chooser(engine, prefill(1, 32, WHOLE))
    for _ in range(50):
        assert choose.run(prefill(1, 32)) == prefill(1, 32, WHOLE)


def test_padding_ends_when_it_has_cost_as_much_as_a_program(engine, monkeypatch):
    choose = Chooser(engine, prefill(1, 128))
    choose.serving.thrifty = True
    own = prefill(1, 32)
    once = choose.serving._padded(choose.kind(own), own, prefill(1, 128), [])
    layers = choose.serving._flops_of_layers[True]
    assert once == 96 * layers > 0
    monkeypatch.setattr(serving, "PROGRAM_FLOPS", 3.5 * once)
    assert [choose.run(own) for _ in range(5)] == [prefill(1, 128)] * 3 + [own] * 2
    assert choose.run(decode(8)) == decode(8)
    # It ends at once where a single use costs as much.
    monkeypatch.setattr(serving, "PROGRAM_FLOPS", 0.5 * once)
    assert choose.run(prefill(4, 32)) == prefill(4, 32)


def test_what_fits_is_compiled_for_requests_that_begin_later(engine):
    choose = Chooser(engine, prefill(1, 128), decode(8))
    now = choose.serving.begin(plain_request())
    assert choose.run(prefill(1, 32), now) == prefill(1, 128)
    assert prefill(1, 32) in choose.serving._programs
    assert choose.run(prefill(1, 32), now) == prefill(1, 128)  # a request keeps its programs
    later = choose.serving.begin(plain_request())
    assert choose.run(prefill(1, 32), later) == prefill(1, 32)
    assert choose.run(prefill(1, 32), now) == prefill(1, 128)


def test_few_programs_are_compiled_in_the_first_crowd_and_what_fits_in_the_second(engine):
    choose = Chooser(engine, prefill(1, 128))
    rows = engine.engine_config.max_rows

    def note(count: int) -> None:
        choose.serving.note_requests([plain_request()] * count)

    note(rows)
    assert not choose.serving.thrifty
    note(rows + 1)
    note(1)
    assert choose.serving.thrifty
    assert choose.run(prefill(1, 32)) == prefill(1, 128)
    assert list(choose.serving._programs) == [prefill(1, 128)]
    note(0)
    note(rows + 1)
    assert not choose.serving.thrifty
    assert choose.run(prefill(1, 32)) == prefill(1, 128)
    assert list(choose.serving._programs) == [prefill(1, 128), prefill(1, 32)]


def test_a_thrifty_engine_compiles_what_serves_for_most(engine):
    choose = Chooser(engine)
    assert choose(prefill(1, 32)) == prefill(1, 32) and choose(decode(1)) == decode(1)
    choose.serving.thrifty = True
    assert choose(decode(1)) == decode(8)
    assert choose(prefill(4, 32)) == prefill(4, 128)
    assert choose(prefill(1, 256)) == prefill(1, 512)
    assert choose(prefill(8, 32)) == prefill(8, 32)


def test_a_thrifty_engine_does_not_where_padding_costs_much(engine, monkeypatch):
    choose = Chooser(engine)
    choose.serving.thrifty = True
    own = prefill(1, 256)
    once = choose.serving._padded(choose.kind(own), own, prefill(1, 512), [])
    monkeypatch.setattr(serving, "PROGRAM_FLOPS", (serving.LEAST_USES - 1) * once)
    assert choose(own) == own
    monkeypatch.setattr(serving, "PROGRAM_FLOPS", serving.LEAST_USES * once)
    assert choose(own) == prefill(1, 512)


def test_once_a_row_asked_for_more_new_programs_can_do_everything(engine):
    choose = Chooser(engine, prefill(1, 32))
    choose.serving.begin(plain_request())
    assert choose(decode(1)) == decode(1)
    choose.serving.begin(plain_request(logprobs=0))
    assert choose(decode(1)) == decode(1, WHOLE)
    assert choose(prefill(1, 32)) == prefill(1, 32)  # what is there serves on


# --- with programs --------------------------------------------------------------------------------


def mixed_requests(count: int = 24) -> list[Request]:
    """Plain ones, log-probabilities, penalties, biases, siblings, noise; short and long prompts."""
    rng, requests = np.random.default_rng(5), []
    for number in range(count):
        asks: list[dict] = [
            {},
            {"logprobs": 3},
            {"repetition_penalty": 1.3},
            {"logit_bias": {3: 2.0}},
        ]
        params = SamplingParams(temperature=float(rng.choice([0.0, 0.8])), **asks[number % 4])
        prompt = rng.integers(0, VOCAB, int(rng.choice([5, 40, 100, 200]))).tolist()
        for sample in range(2 if number % 6 == 5 else 1):
            requests.append(
                Request(
                    request_id=f"{number}.{sample}",
                    prompt=prompt,
                    params=params,
                    seed=number,
                    sample_index=sample,
                    sibling_group=str(number),
                    max_tokens=int(rng.integers(2, 20)),
                )
            )
    return requests


def answers(engine: Engine, requests: list[Request]) -> dict[str, tuple]:
    """Tokens, and log-probabilities, of requests that come together."""
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return {r.request_id: (tuple(r.output.token_ids), tuple(r.output.logprobs)) for r in requests}


def programs(engine: Engine) -> list[tuple]:
    return list(engine.runner.programs.made)


def test_a_mixed_load_compiles_few_programs_and_says_the_same_as_one_request_at_a_time(monkeypatch):
    together = tiny_engine(max_rows=8, prefill_tokens=128)
    found = answers(together, mixed_requests())
    few = programs(together)
    assert len(few) <= MOST_PROGRAMS and together.stats()["num_traces"] == len(few)
    assert {key[2] for key in few if len(key) == 3} == {WHOLE}
    again = tiny_engine(max_rows=8, prefill_tokens=128)
    assert answers(again, mixed_requests()) == found and programs(again) == few
    # With a program for each shape and each thing that is asked for.
    monkeypatch.setattr(serving, "PROGRAM_FLOPS", -1.0)
    fitting = tiny_engine(max_rows=8, prefill_tokens=128)
    for request in mixed_requests():
        tokens, logprobs = found[request.request_id]
        [(alone, reported)] = answers(fitting, [request]).values()
        assert alone == tokens and len(reported) == len(logprobs)
        for one, other in zip(reported, logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=3e-4)
    assert {key[1].rows for key in programs(fitting) if key[0] in ("prefill", "decode")} == {1}
    assert {key[1].rows for key in few if key[0] == "decode"} == {8}
    for engine in (together, again, fitting):
        engine.close()


@pytest.mark.parametrize("model", ["qwen3_next", pytest.param("bamba", marks=left_to_all)])
def test_a_program_that_can_do_everything_gives_plain_rows_the_same_bits(model):
    """State, rings and logits too, not only the tokens."""
    states = {}
    for asks_more in (False, True):
        engine = tiny_engine(model, max_rows=2, prefill_tokens=64, max_model_len=128)
        engine.runner.programs.serving.asks_more = asks_more
        requests = [
            Request(
                request_id=str(number),
                prompt=list(range(1, 50 - number)),
                params=SamplingParams(temperature=temperature),
                seed=number,
                max_tokens=40,
            )
            for number, temperature in enumerate((0.0, 0.9))
        ]
        outputs = answers(engine, requests)
        variants = {key[2] for key in programs(engine) if len(key) == 3}
        assert variants == {WHOLE if asks_more else PLAIN}
        state = engine.runner.state
        states[asks_more] = (
            outputs,
            np.asarray(state.arena),
            [np.asarray(r) for r in jax.tree.leaves(state.rings)],
        )
        engine.close()
    (plain, arena, rings), (whole, other_arena, other_rings) = states[False], states[True]
    assert plain == whole
    np.testing.assert_array_equal(arena, other_arena)
    for one, other in zip(rings, other_rings, strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_get_what_they_ask_for_beside_rows_that_ask_for_nothing():
    """One dispatch holds a plain row, one with log-probabilities and one with a penalty; each is as it is alone."""
    asked = ({}, {"logprobs": 2}, {"repetition_penalty": 1.5})

    def request(number: int) -> Request:
        return Request(
            request_id=str(number),
            prompt=list(range(1, 30)),
            params=SamplingParams(temperature=0.0, **asked[number]),
            seed=0,
            max_tokens=12,
        )

    engine = tiny_engine(max_rows=4)
    engine.expect_everything()
    together = answers(engine, [request(number) for number in range(3)])
    for number in range(3):
        alone = answers(engine, [request(number)])[str(number)]
        assert alone[0] == together[str(number)][0]
        assert len(alone[1]) == len(together[str(number)][1]) == (12 if number == 1 else 0)
    assert together["0"][0] == together["1"][0] != together["2"][0]
    engine.close()

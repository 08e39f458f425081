"""Prompts that one engine computes and another goes on from: the tokens of one engine alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest

from hybrid_jax.config import CacheConfig
from hybrid_jax.config.arrays import FP8
from hybrid_jax.engine.engine import Engine
from hybrid_jax.schedule.tiers import on_disk
from hybrid_jax.tiers import chain, disk, hand_over
from hybrid_jax.tiers.hand_over import FramesPart, MemoryParts, Sender
from hybrid_jax.tiers.part_file import Part
from hybrid_jax.tiers.workers import Workers
from tests.drawing import left_to_all
from tests.exactness.conftest import FLOAT32, load
from tests.exactness.engines import make_engine, one_shape
from tests.exactness.jobs import Job, Run, conversations, drive, random_prompt
from tests.exactness.pair import Pair
from tests.exactness.poison import Poison
from tests.exactness.speculation_matrix import ENGINES, with_drafter
from tests.exactness.tiers import DRAFTING, EXACT, NAMES, ROOM


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """Prefixes of several runs, although prompts are short."""
    for module in (chain, disk):
        monkeypatch.setattr(module, "RUN_TOKENS", 64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["frames", "parts"])
@left_to_all(
    *(f"frames-{name}" for name in ("mamba2", "bamba", "jamba", "with_l", "with_f", "llama")),
    *(f"parts-{name}" for name in NAMES if name != "windowed"),
)
def test_tokens_are_those_of_one_engine(name, form, plain_of):
    """Between engines that are alike frames go as they are; in other processes they have no frames in common."""
    config, params = load(name)
    jobs = conversations(config.vocab_size)
    with one_shape(64):
        pair = Pair(config, params, FLOAT32, room=ROOM)
        assert pair.shared.is_direct
        pair.shared.is_direct = form == "frames"
        run = drive(pair, jobs, Poison(pair.decode))
        assert plain_of(name).mismatches(run.requests) == []
    assert pair.handed_over > 10 and run.moved["handed_over_prefixes"] > 5, run.moved
    assert not len(pair.shared) and not pair.shared.folder.num_files


OTHER = {
    "other pages": {"page_tokens": 16},
    "coarser grain": {"grain": 64},
    "finer grain": {"grain": 8},
    "other rows": {"max_rows": 1, "steps_per_dispatch": 8, "prefill_tokens": 64},
    "its cache off no more": {"cache": CacheConfig(policy="lru")},
}


@pytest.mark.parametrize("how", OTHER)
@pytest.mark.parametrize("name", ["with_cut", "windowed", "qwen3_next"])
@left_to_all("qwen3_next-", "windowed-other", "windowed-its", "with_cut-finer", "with_cut-its")
def test_the_two_engines_may_differ(name, how, plain_of):
    config, params = load(name)
    jobs = conversations(config.vocab_size)
    with one_shape(64):
        pair = Pair(config, params, FLOAT32, room=ROOM, other=OTHER[how])
        assert pair.shared.is_direct == (how in ("other rows", "its cache off no more"))
        run = drive(pair, jobs, Poison(pair.decode))
        assert plain_of(name).mismatches(run.requests) == []
    assert pair.handed_over > 10 and run.moved["handed_over_failed"] == 0


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_pages_of_fp8_are_handed_over_as_they_are(plain_of, page_tokens):
    config, params = load("with_cut")
    settings = replace(FLOAT32, kv_cache_dtype="fp8")
    jobs = conversations(config.vocab_size)
    with one_shape(64):
        pair = Pair(config, params, settings, room=ROOM, other={"page_tokens": page_tokens})
        assert pair.shared.is_direct == (page_tokens == settings.page_tokens)
        run = drive(pair, jobs, Poison(pair.decode))
        assert plain_of("with_cut", FP8).mismatches(run.requests) == []
    assert pair.handed_over > 10


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", ["qwen3_next", "with_cut", "windowed"])
@pytest.mark.parametrize("other", [{}, {"page_tokens": 16}], ids=["alike", "unlike"])
@left_to_all(
    "alike-qwen3_next-f", "alike-with_cut", "unlike-windowed", "unlike-with_cut", "unlike-qwen"
)
def test_exact_mode_gives_the_same_bits(name, dtype, other):
    config, params = load(name, EXACT[dtype].dtype)
    jobs = conversations(config.vocab_size, rounds=2)
    pair = Pair(config, params, EXACT[dtype], room=ROOM, other=other)
    assert pair.shared.is_direct == (not other)
    run = drive(pair, jobs, Poison(pair.decode))
    alone = make_engine(
        config, params, replace(EXACT[dtype], cache=CacheConfig(policy="off")), room=ROOM
    )
    assert run.bits == drive(alone, jobs).bits
    assert pair.handed_over > 5


@pytest.mark.parametrize("name", DRAFTING)
@left_to_all("mtp", "draft-jamba", "exit")
def test_with_drafts(name):
    maker = ENGINES[name]
    config, params = with_drafter(maker)
    jobs = conversations(config.vocab_size, rounds=2)
    settings = replace(maker.settings, max_rows=3)
    with one_shape(64):
        pair = Pair(config, params, settings, room=ROOM)
        run = drive(pair, jobs, Poison(pair.decode))
        alone = make_engine(
            config, params, replace(settings, cache=CacheConfig(policy="off")), room=ROOM
        )
        assert run.outputs == drive(alone, jobs).outputs
    assert run.moved["draft_tokens"] > 0 and pair.handed_over > 5


def mixed(vocab: int) -> list[Job]:
    """Samples of one prompt, seeds, penalties, limits, log-probabilities of prompts, hidden states, and ends."""
    prompts = [random_prompt(90 + 17 * n, n // 2, vocab) for n in range(6)]
    sampled = {"temperature": 0.8, "max_tokens": 24}
    return [
        *(Job(prompt=prompts[0], seed=3, sample_index=n, group="all", **sampled) for n in range(3)),
        Job(prompt=prompts[1], seed=4, top_p=0.9, repetition_penalty=1.3, arrive=2, **sampled),
        Job(prompt=prompts[2], presence_penalty=0.5, frequency_penalty=0.4, arrive=3),
        Job(prompt=prompts[2], allowed_token_ids=tuple(range(0, vocab, 3)), arrive=5),
        Job(prompt=prompts[3], prompt_logprobs=2, logprobs_from=70, max_tokens=3, arrive=6),
        Job(prompt=prompts[3], prompt_logprobs=1, max_tokens=2, arrive=7),
        Job(prompt=prompts[4], pooling="last", max_tokens=1, arrive=8),
        Job(prompt=prompts[4], abort_at=5, arrive=9),
        Job(prompt=prompts[4][:31], max_tokens=9, arrive=9),
        Job(
            prompt=prompts[5], stop_ids=frozenset(range(0, vocab, 7)), seed=9, arrive=10, **sampled
        ),
    ]


def told(run: Run) -> list[tuple]:
    """All that came of requests; of one that was ended in the middle, its first tokens."""
    return [
        (
            r.output.token_ids[:5] if r.output.finish_reason == "abort" else r.output.token_ids,
            r.output.finish_reason,
            [entry and entry.token_id for entry in r.output.prompt_logprobs],
            r.output.pooled is not None,
        )
        for r in run.requests
    ]


@pytest.mark.parametrize("name", ["bamba", "jamba", "windowed"])
@left_to_all("jamba", "windowed")
def test_everything_a_request_may_ask_for(name):
    config, params = load(name)
    jobs = mixed(config.vocab_size)
    with one_shape(64):
        pair = Pair(config, params, FLOAT32, room=6.0)
        run = drive(pair, jobs, Poison(pair.decode))
        alone = make_engine(
            config, params, replace(FLOAT32, cache=CacheConfig(policy="off")), room=6.0
        )
        expected = drive(alone, jobs)
    assert told(run) == told(expected)
    assert run.moved["forks"] > 0 and pair.handed_over > 4 and not len(pair.shared)


def test_a_prompt_that_resumes_elsewhere_says_so():
    config, params = load("bamba")
    prompt = random_prompt(150, 1, config.vocab_size)
    with one_shape(64):
        pair = Pair(config, params, FLOAT32, room=6.0)
        first, again = drive(pair, [Job(prompt=prompt), Job(prompt=prompt, arrive=90)]).requests
    assert (first.hit.num_tokens, first.hit.look_up.loaded, first.hit.look_up.loaded_from) == (
        128, 128, "another engine",
    )  # fmt: skip
    assert (again.hit.num_tokens, again.hit.look_up.loaded) == (128, 0)  # its own cache has it


def test_pages_go_while_later_chunks_are_computed(monkeypatch):
    config, params = load("bamba")
    order: list[str] = []
    monkeypatch.setattr(Workers, "do", lambda self, job: job())  # without threads
    put, end = MemoryParts.put, Pair._end_prefix
    monkeypatch.setattr(
        MemoryParts, "put", lambda self, name, part: order.append(name) or put(self, name, part)
    )
    monkeypatch.setattr(
        Pair, "_end_prefix", lambda self, r: order.append("computed") or end(self, r)
    )
    with one_shape(64):
        pair = Pair(config, params, FLOAT32, room=6.0, other={"prefill_tokens": 64})
        [request] = drive(
            pair, [Job(prompt=random_prompt(235, 1, config.vocab_size), max_tokens=8)]
        ).requests
    assert request.hit.num_tokens == 224
    kinds = "".join("!" if name == "computed" else name[0] for name in order)
    assert sorted(kinds) == sorted("pppp!c") and kinds.endswith("c"), kinds
    assert kinds.index("!") >= 2, kinds


# --- what goes wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("seed", range(10))
@left_to_all(*(f"{seed}-" for seed in range(2, 10)))
def test_an_engine_that_fails_costs_no_token(side, seed, plain_of, monkeypatch):
    """Of twenty turns at random, each fails after it was dispatched, so that the memory of the engine is lost."""
    config, params = load("bamba")
    jobs = conversations(config.vocab_size, rounds=2)
    rng = Random(seed)
    with one_shape(64):
        pair = failing_pair(config, params)
        engine, receive = getattr(pair, side), Engine._receive
        failures = {rng.randrange(60) for _ in range(20)}
        turns = iter(range(10_000))

        def fails(self):
            if self is engine and next(turns) in failures:
                raise RuntimeError("lost")
            return receive(self)

        monkeypatch.setattr(Engine, "_receive", fails)
        run = drive(pair, jobs)
        assert plain_of("bamba").mismatches(run.requests) == []
    assert engine.stats()["restarts"] > 3 and pair.handed_over > 1
    assert not len(pair.shared)


def failing_pair(config, params):
    """A pair that goes on after a turn has failed, as the loop of an engine's thread does."""

    class Going(Pair):
        def step(self):
            while True:
                try:
                    return super().step()
                except RuntimeError as error:
                    assert str(error) == "lost"

    return Going(config, params, FLOAT32, room=ROOM)


def test_what_never_comes_is_computed(plain_of, monkeypatch):
    config, params = load("bamba")
    jobs = conversations(config.vocab_size, rounds=1)
    monkeypatch.setattr(Sender, "save", lambda self, save, copies: None)
    with one_shape(64):
        pair = Pair(config, params, FLOAT32, room=ROOM)
        run = drive(pair, jobs)
        assert plain_of("bamba").mismatches(run.requests) == []
    assert run.moved["handed_over_prefixes"] == 0 and not len(pair.shared)


def test_frames_that_one_device_cannot_give_to_another_cost_time_and_no_token(plain_of, caplog):
    config, params = load("bamba")
    jobs = conversations(config.vocab_size, rounds=1)
    with one_shape(64):
        pair = Pair(config, params, FLOAT32, room=ROOM)
        bring, count = pair.decode.disk.bring, itertools.count()

        def fails(words):
            if next(count) % 2:
                raise RuntimeError("no way between both")
            return bring(words)

        pair.decode.disk.bring = fails
        run = drive(pair, jobs)
        assert plain_of("bamba").mismatches(run.requests) == []
    assert run.moved["handed_over_failed"] > 0 and "no way between both" in caplog.text
    assert not len(pair.shared) and not pair.shared.folder.num_files


@pytest.mark.parametrize("name", ["bamba", "windowed"])
def test_frames_beyond_what_may_be_pinned_go_as_parts(monkeypatch, name):
    """One prefix comes in both forms."""
    config, params = load(name)
    monkeypatch.setattr(hand_over, "MOST_PINNED", 1)
    forms, put = [], MemoryParts.put
    monkeypatch.setattr(
        MemoryParts, "put", lambda self, n, part: forms.append(type(part)) or put(self, n, part)
    )
    jobs = [Job(prompt=random_prompt(235, 1, config.vocab_size), max_tokens=8)]
    with one_shape(64):
        settings = replace(FLOAT32, prefill_tokens=64)
        pair = Pair(config, params, settings, room=6.0)
        run = drive(pair, jobs, Poison(pair.decode))
        off = replace(settings, cache=CacheConfig(policy="off"))
        assert run.outputs == drive(make_engine(config, params, off, room=6.0), jobs).outputs
    assert forms[0] is FramesPart and forms[-1] is Part and pair.handed_over == 1


def test_parts_of_another_model_are_refused_and_the_prompt_is_computed(
    plain_of, caplog, monkeypatch
):
    config, params = load("bamba")
    jobs = conversations(config.vocab_size, rounds=1)
    write = MemoryParts.write

    def cut(self, name, marks, arrays):
        return write(self, name, marks, dict(list(arrays.items())[:-1]))

    monkeypatch.setattr(MemoryParts, "write", cut)
    with one_shape(64):
        pair = Pair(config, params, FLOAT32, room=ROOM)
        pair.shared.is_direct = False
        run = drive(pair, jobs)
        assert plain_of("bamba").mismatches(run.requests) == []
    assert run.moved["handed_over_prefixes"] == 0 < run.moved["handed_over_failed"]
    assert "other arrays than the model" in caplog.text


@pytest.mark.parametrize("refused", ["two of three", "always"])
def test_what_comes_where_there_is_no_room_is_computed(refused, plain_of, monkeypatch):
    """What has come waits as long as its prompt does. Then it goes, too."""
    config, params = load("bamba")
    jobs = conversations(config.vocab_size, rounds=2)
    real, asked = on_disk.arrive, []

    def arrive(*args):
        asked.append(None)
        return real(*args) if refused == "two of three" and len(asked) % 3 == 0 else None

    monkeypatch.setattr(on_disk, "arrive", arrive)
    with one_shape(64):
        pair = Pair(config, params, FLOAT32, room=ROOM)
        run = drive(pair, jobs)
        assert plain_of("bamba").mismatches(run.requests) == []
    counters = pair.decode.disk.counters
    assert counters.loads_without_room > 0 and (counters.loads == 0) == (refused == "always")
    assert not len(pair.shared) and not pair.shared.folder.num_files


@pytest.mark.parametrize("what", ["pages", "checkpoint"])
def test_a_part_that_was_copied_too_early_is_seen(what, plain_of, monkeypatch):
    """What is there before the chunk that writes it has run: another prompt's."""
    config, params = load("bamba")
    write, last = MemoryParts.write, {}

    def late(self, name, marks, arrays):
        kind = marks["kind"]
        if kind != what:
            return write(self, name, marks, arrays)
        shape = tuple(array.shape for array in arrays.values())
        before, last[shape] = last.get(shape, arrays), arrays
        return write(self, name, marks, before)

    monkeypatch.setattr(MemoryParts, "write", late)
    with one_shape(64):
        pair = Pair(config, params, FLOAT32, room=ROOM)
        run = drive(pair, conversations(config.vocab_size, rounds=1))
        assert plain_of("bamba").mismatches(run.requests) != []

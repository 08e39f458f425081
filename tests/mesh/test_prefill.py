"""Replicas that compute prompts for others: the tokens of one device, whatever is asked for and whoever ends."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from hybrid_jax import CacheConfig, SamplingParams
from hybrid_jax.engine.engine import Engine
from tests.drawing import EVERYTHING, left_to_all
from tests.llms import engines_of
from tests.mesh.models import VOCAB
from tests.mesh.running import GREEDY, make_on, tokens_of

MESHES = ("prefill=2,decode=2", "prefill=1,decode=1,tp=2")
if EVERYTHING:
    MESHES += ("prefill=1,decode=1",)
PROMPTS = [[(7 * n + k * k + k // 9) % VOCAB for k in range(150 + 37 * n)] for n in range(6)]
GIVEN = [{"prompt_token_ids": ids} for ids in PROMPTS]
SAMPLED = SamplingParams(n=3, max_tokens=20, temperature=0.9, top_k=20, seed=5, ignore_eos=True)


def make(mesh=None, *, name="two_kv", **settings):
    return make_on(mesh, name, **settings)


@pytest.fixture(scope="module")
def one():
    with make() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(one):
    return tokens_of(one.generate(GIVEN, GREEDY))


@pytest.fixture(scope="module", params=MESHES)
def llm(request):
    with make(request.param) as llm:
        yield llm


@pytest.fixture(autouse=True)
def is_tidy(request):
    """Nothing is left of any promise."""
    yield
    if "llm" not in request.fixturenames:
        return
    llm = request.getfixturevalue("llm")
    assert_tidy(llm)


def assert_tidy(llm):
    llm.stats()
    side = llm._thread._dispatcher.prefill
    deadline = time.monotonic() + 20
    while side.num_promises or len(side._hand_over) or side._router.num_live:
        assert time.monotonic() < deadline, side._asked
        llm.stats()
    assert not side._hand_over.folder.num_files
    for engine in engines_of(llm):
        engine.scheduler.check_invariants()


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_what_a_warm_up_compiles_takes_what_is_handed_over(expected, mesh):
    with make(mesh) as llm:
        llm.warmup()
        assert tokens_of(llm.generate(GIVEN, GREEDY)) == expected
        stats = llm.stats()
        assert stats["handed_over_prefixes"] == len(PROMPTS) and not stats["restarts"]
        assert_tidy(llm)


def test_a_prefix_from_a_file_and_one_that_is_handed_over_are_both_read(expected, tmp_path):
    """Words of both kinds go into the same program."""
    with make(MESHES[1]) as llm:
        llm.generate(GIVEN[:1], GREEDY)
        llm.cache.save(GIVEN[0], tmp_path / "prefix")
        llm.reset_prefix_cache()
        llm.cache.load(tmp_path / "prefix")
        assert tokens_of(llm.generate(GIVEN, GREEDY)) == expected
        assert not llm.stats()["restarts"]


def test_tokens_are_those_of_one_device(llm, expected):
    llm.reset_prefix_cache()
    before = llm.stats()
    outputs = llm.generate(GIVEN, GREEDY)
    assert tokens_of(outputs) == expected
    moved = {name: llm.stats()[name] - before[name] for name in before}
    assert moved["handed_over_prefixes"] == len(PROMPTS) and moved["handed_over_failed"] == 0
    for ids, out in zip(PROMPTS, outputs, strict=True):
        assert out.num_cached_tokens == out.metrics.num_loaded_tokens == (len(ids) - 1) // 32 * 32
        assert out.metrics.loaded_from == "another engine"
    assert tokens_of(llm.generate(GIVEN, GREEDY)) == expected
    assert llm.stats()["handed_over_prefixes"] - before["handed_over_prefixes"] == len(PROMPTS)


def test_sides_do_their_own_work_alone(llm):
    llm.reset_prefix_cache()
    num_prefill = llm._thread.mesh.prefill
    before = [engine.stats() for engine in engines_of(llm)]
    llm.generate(GIVEN, GREEDY)
    after = [engine.stats() for engine in engines_of(llm)]
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        prefill, decode = (new[name] - old[name] for name in ("prefill_tokens", "decode_rows"))
        if index < num_prefill:
            assert decode == 0 < 100 < prefill
        else:
            assert decode > 0 and prefill <= 32 * len(PROMPTS)


def test_a_second_turn_asks_for_what_is_lacking_only(llm, one):
    first = llm.generate(GIVEN[:3], GREEDY)
    turn = [*PROMPTS[0], *first[0].outputs[0].token_ids, *range(200)]
    second = [{"prompt_token_ids": [t % VOCAB for t in turn]}]
    before = llm.stats()["handed_over_tokens"]
    [out] = llm.generate(second, GREEDY)
    assert tokens_of([out]) == tokens_of(one.generate(second, GREEDY))
    own = (len(PROMPTS[0]) + 39) // 32 * 32
    came = llm.stats()["handed_over_tokens"] - before
    assert came == (len(turn) - 1) // 32 * 32 - own, (came, own)


def test_everything_one_may_ask_for(llm, one):
    async def streamed(each):
        return [delta.token_ids async for delta in each.astream(GIVEN[2], GREEDY)]

    found = []
    for each in (llm, one):
        each.reset_prefix_cache()
        with each.feed() as feed:
            ticket = feed.add(GIVEN[1], GREEDY)
            while not ticket.finished:
                feed.step()
            fed = tokens_of(ticket.outputs())
        scores = each.score(GIVEN[3:5], [[1, 2, 3], [4, 5]])
        mixed = each.generate([GIVEN[0], [], [1] * 600], GREEDY, errors="return")
        found.append(
            (
                tokens_of(each.generate(GIVEN, SAMPLED)),
                fed,
                sum(map(list, asyncio.run(streamed(each))), []),
                [delta.token_ids for delta in each.stream(GIVEN[5], GREEDY) if delta.output],
                [[round(x, 3) for x in score.token_logprobs] for score in scores],
                [type(out).__name__ for out in mixed],
                each.embed(GIVEN[:2])[0].shape,
            )
        )
    assert found[0] == found[1]


def test_a_caller_that_leaves_ends_what_is_computed_for_it(llm, expected):
    llm.reset_prefix_cache()
    for _ in range(5):
        stream = llm.stream(GIVEN, GREEDY)
        next(stream)
        stream.close()
    assert tokens_of(llm.generate(GIVEN, GREEDY)) == expected


def test_a_turn_that_fails_where_prompts_are_computed_costs_nothing(llm, expected, monkeypatch):
    receive, rng = Engine._receive, random.Random(3)
    prefill = engines_of(llm)[: llm._thread.mesh.prefill]

    def fails(self):
        if self in prefill and rng.random() < 0.2:
            raise RuntimeError("lost")
        return receive(self)

    monkeypatch.setattr(Engine, "_receive", fails)
    for _ in range(4):
        llm.reset_prefix_cache()
        assert tokens_of(llm.generate(GIVEN, GREEDY)) == expected
    assert sum(engine.stats()["restarts"] for engine in prefill) > 1


@pytest.mark.parametrize("name", ["gated_delta", "mamba1", "cut", "mixed", "mtp"])
@left_to_all("mtp", "gated_delta", "mixed")
def test_other_models(name):
    with make(name=name) as alone, make("prefill=1,decode=1", name=name) as llm:
        assert tokens_of(llm.generate(GIVEN, GREEDY)) == tokens_of(alone.generate(GIVEN, GREEDY))
        assert llm.stats()["handed_over_prefixes"] == len(PROMPTS)
        assert_tidy(llm)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("which", ["prefill", "decode"])
@left_to_all(*(f"{side}-{n}" for side in ("prefill", "decode") for n in range(2, 10)))
def test_a_replica_that_ends_in_the_middle_costs_no_token(which, seed, expected):
    rng = random.Random(seed)
    with make("prefill=2,decode=2") as llm:
        count = rng.randrange(1, 20)
        got = [[] for _ in PROMPTS]
        for number, delta in enumerate(llm.stream(GIVEN, GREEDY)):
            got[delta.prompt_index] += delta.token_ids
            if number == count:
                llm._thread.take_out(rng.randrange(2) + 2 * (which == "decode"))
        assert [[tuple(ids)] for ids in got] == expected
        assert tokens_of(llm.generate(GIVEN, GREEDY)) == expected
        assert llm.stats()["replicas"] == 3
        assert_tidy(llm)


def test_without_a_replica_that_computes_prompts_the_others_do(expected):
    with make("prefill=1,decode=1") as llm:
        llm._thread.take_out(0)
        assert tokens_of(llm.generate(GIVEN, GREEDY)) == expected
        assert llm.stats()["handed_over_prefixes"] == 0
        llm._thread.take_out(1)
        with pytest.raises(RuntimeError, match="no replica is left"):
            llm.generate(GIVEN, GREEDY)


@pytest.mark.parametrize(
    "options",
    [
        {"page_tokens": 16, "max_rows": 2, "cache": "lru", "prefill_tokens": 64},
        {"grain": 64, "prefill_tokens": 64},
        {"mesh": "tp=2"},
        pytest.param({"mesh": "tp=4", "page_tokens": 16, "memory": "4MiB"}, marks=left_to_all),
    ],
)
def test_sides_may_differ(options, expected):
    with make("prefill=1,decode=2", prefill_options=options) as llm:
        first, *others = [engine.engine_config for engine in engines_of(llm)]
        given = {
            name: value
            for name, value in options.items()
            if name not in ("mesh", "cache", "memory")
        }
        assert all(getattr(first, name) == value for name, value in given.items())
        assert all(
            getattr(other, name) != value for other in others for name, value in given.items()
        )
        assert tokens_of(llm.generate(GIVEN, GREEDY)) == expected
        stats = llm.stats()
        assert stats["handed_over_prefixes"] == len(PROMPTS) and not stats["handed_over_failed"]
        if "mesh" in options:
            said = f"1 replica of {first.tp} devices to compute prompts, 2 replicas of 1 device"
            assert said in llm.describe()
            used = [engine.shards.mesh.size if engine.shards else 1 for engine in engines_of(llm)]
            assert used == [first.tp, 1, 1]
            with make() as one:
                assert llm._digest() == one._digest()
        assert_tidy(llm)


def test_what_the_overview_says():
    with make("prefill=1,decode=2") as llm:
        assert (
            "mesh      prefill=1,decode=2: 1 replica of 1 device to compute prompts, 2 replicas of 1 device to go on "
            "from them; sizes are those of one device"
        ) in llm.describe()
        assert llm.stats()["replicas"] == 3


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"mesh": "prefill=1"}, "mesh must name both prefill and decode"),
        ({"mesh": "decode=2"}, "mesh must name both prefill and decode"),
        ({"mesh": "prefill=1,decode=1,dp=2"}, "and then no dp"),
        ({"mesh": "prefill=0,decode=1"}, "mesh must be like"),
        (
            {"mesh": "prefill=4,decode=5"},
            r"mesh needs 9 devices \(prefill=4,decode=5\), and jax has 8",
        ),
        ({"mesh": "prefill=1,decode=1", "cache": "off"}, "leave cache='off' out"),
        (
            {"mesh": "prefill=1,decode=1", "prefill_options": {"cache": "off"}},
            "leave cache='off' out",
        ),
        (
            {"mesh": "prefill=1,decode=1", "prefill_options": {"exact": True}},
            "prefill_options must be among cache, grain, .*, got 'exact'; what is the same",
        ),
        (
            {"mesh": "prefill=1,decode=1", "prefill_options": {"mesh": "dp=2"}},
            "how each of these replicas is divided, like 'tp=2'; got 'dp=2'",
        ),
        ({"mesh": "dp=2", "prefill_options": {"max_rows": 2}}, "and there are none; add mesh="),
        (
            {"mesh": "prefill=1,decode=1", "prefill_options": {"max_rows": 0}},
            "max_rows must be positive, got 0",
        ),
        (
            {"mesh": "prefill=2,decode=1", "prefill_options": {"mesh": "tp=4"}},
            "mesh needs 9 devices",
        ),
        ({"mesh": "prefill=1,decode=1", "cache_dir": "x"}, "leave one of the two out"),
    ],
)
def test_settings_that_do_not_go_together(settings, told):
    with pytest.raises(ValueError, match=told):
        make(**settings)


def test_states_that_are_kept_as_int8_are_handed_over():
    narrow = CacheConfig(checkpoints="int8")
    with make("prefill=1,decode=1", cache=narrow) as llm, make(cache=narrow) as alone:
        alone.generate(GIVEN, GREEDY)
        again = tokens_of(alone.generate(GIVEN, GREEDY))  # from rounded states
        assert tokens_of(llm.generate(GIVEN, GREEDY)) == again
        assert llm.stats()["handed_over_prefixes"] == len(PROMPTS)

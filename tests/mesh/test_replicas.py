"""Replicas on devices of their own: the tokens of one device, whatever is asked for and whoever leaves."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time

import jax
import numpy as np
import pytest

from hybrid_jax import CacheConfig, SamplingParams
from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.cluster.watch import resume_points
from hybrid_jax.engine.engine import Engine
from hybrid_jax.schedule.request import Request
from tests.drawing import left_to_all
from tests.llms import engines_of
from tests.mesh.models import VOCAB
from tests.mesh.running import GREEDY, PROMPTS, answers, make_on, of_one_device, tokens_of

NAME = "two_kv"
MESHES = ("dp=2", "dp=4", "dp=2,tp=2")
GIVEN = [{"prompt_token_ids": ids} for ids in PROMPTS]
SAMPLED = SamplingParams(n=2, max_tokens=20, temperature=0.9, top_k=20, logprobs=2, ignore_eos=True)
ALL = CacheConfig(loads="always")
SMALL = {"max_rows": 2, "max_model_len": 256}


def make(mesh=None, *, name=NAME, **settings):
    return make_on(mesh, name, **settings)


@pytest.fixture(scope="module")
def one():
    with make() as llm:
        yield llm


@pytest.fixture(scope="module", params=MESHES)
def llm(request):
    with make(request.param) as llm:
        yield llm


def test_devices_are_apart_and_weights_are_those_of_one(llm, one, devices):
    engines = engines_of(llm)
    places = [engine.runner.state.arena.devices() for engine in engines]
    assert sorted(d.id for place in places for d in place) == list(range(sum(map(len, places))))
    for engine, place in zip(engines, places, strict=True):
        assert all(leaf.devices() == place for leaf in jax.tree.leaves(engine.runner.params))
        assert engine.device.num_bytes == one._engine.device.num_bytes // sum(map(len, places))
    assert f"{len(engines)} replicas of" in llm.describe()
    assert llm.engine_config.tp == len(places[0])
    assert llm.fingerprint() == one.fingerprint() or llm.engine_config.tp > 1


def test_tokens_are_those_of_one_device(llm):
    llm.reset_prefix_cache()
    assert [answers(llm)[0] for _ in range(2)] == [found for found, _ in of_one_device(NAME)]
    assert llm.stats()["replicas"] == len(engines_of(llm))
    assert all(engine.stats()["plans"] > 0 for engine in engines_of(llm))
    for engine in engines_of(llm):
        engine.scheduler.check_invariants()


@left_to_all("dp=4")
def test_noise_depends_on_seeds_alone(llm, one):
    """Those of the LLM, by the number of the request, and those of the parameters."""
    for params in (SAMPLED, SamplingParams(max_tokens=9, temperature=1.0, seed=3)):
        first = [each._intake.num_requests for each in (llm, one)]
        for each in (llm, one):  # the same numbers from here on
            each._intake.num_requests = max(first)
        assert tokens_of(llm.generate(GIVEN, params)) == tokens_of(one.generate(GIVEN, params))


@left_to_all("dp=4")
def test_streams_feeds_and_scores(llm, one):
    async def task(prompt):
        return [t async for delta in llm.astream(prompt, GREEDY) for t in delta.token_ids]

    async def tasks():
        return await asyncio.gather(*map(task, GIVEN))

    expected = [list(tokens) for tokens in of_one_device(NAME)[0][0]]
    streamed = [[] for _ in GIVEN]
    for delta in llm.stream(GIVEN, GREEDY):
        streamed[delta.prompt_index] += delta.token_ids
    assert streamed == expected and asyncio.run(tasks()) == expected
    with llm.feed() as feed:
        tickets = [feed.add(prompt, GREEDY) for prompt in GIVEN]
        while feed.num_unfinished:
            feed.step()
    assert [list(t.outputs()[0].outputs[0].token_ids) for t in tickets] == expected
    mine, other = (each.score(GIVEN, [[1, 2, 3]], errors="return") for each in (llm, one))
    assert np.allclose([s.logprob for s in mine], [s.logprob for s in other], atol=3e-4)
    mine = llm.generate([GIVEN[0], {"prompt_token_ids": [VOCAB]}], GREEDY, errors="return")
    assert isinstance(mine[1], ValueError)
    assert list(mine[0].outputs[0].token_ids) == expected[0]
    assert np.allclose(llm.embed(GIVEN), one.embed(GIVEN), atol=3e-4)


@left_to_all("dp=4")
def test_stats_are_sums_and_a_prefix_moves_between_replicas(llm, tmp_path):
    llm.reset_prefix_cache()
    [output] = llm.generate(GIVEN[3], GREEDY)
    assert llm.cache.explain(output).replica in range(len(engines_of(llm)))
    each = [engine.stats() for engine in engines_of(llm)]
    found = llm.stats()
    for name in ("plans", "prefill_tokens", "num_frames", "cache_lookups", "cached_frames"):
        assert found[name] == sum(stats[name] for stats in each), name
    assert found["cache_token_hit_rate"] == pytest.approx(
        found["cache_hit_tokens"] / found["cache_lookup_tokens"]
    )
    assert len(llm.cache.nodes()) == sum(stats["cache_nodes"] for stats in each)
    saved = llm.cache.save(PROMPTS[3], tmp_path / "prefix")
    assert saved == len(PROMPTS[3]) // 32 * 32
    llm.reset_prefix_cache()
    assert llm.cache.load(tmp_path / "prefix") == saved
    has = [engine.cached_tokens(PROMPTS[3]) for engine in engines_of(llm)]
    assert sorted(has) == [0] * (len(has) - 1) + [saved]
    assert llm.cache.what_if(policy="lru").requests >= 1


def test_a_warm_up_compiles_for_all():
    with make("dp=2", max_model_len=64, max_rows=1) as llm:
        llm.warmup(threads=1)
        before = llm.stats()["num_traces"]
        answers(llm, prompts=[ids[:20] for ids in PROMPTS])
        assert llm.stats()["num_traces"] == before
        assert len({engine.stats()["num_traces"] for engine in engines_of(llm)}) == 1


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_replica_that_left_loses_and_doubles_nothing(one, params, monkeypatch):
    """At several moments, in prompts and between tokens."""
    moved, again = [], Request.again
    monkeypatch.setattr(
        Request,
        "again",
        lambda self, num_tokens: moved.append(num_tokens) or again(self, num_tokens),
    )
    one._intake.num_requests = 0
    prompts = [*GIVEN, *GIVEN]
    expected = one.generate(prompts, params)
    draw = random.Random(0)
    for moment in (0, *(draw.randrange(1, 20) for _ in range(2))):
        with make("dp=2") as llm:
            deltas, where = [], llm._thread._dispatcher._where
            for number, delta in enumerate(llm.stream(prompts, params)):
                there = {
                    part.replica
                    for owner, part in where.copy().items()
                    if part is not None and delta.request_id in owner.split("/")
                }
                if number >= moment and llm._thread.mesh.num_replicas == 2 and there:
                    llm._thread.take_out(there.pop())  # where a text is being written
                deltas.append(delta)
            for index, out in enumerate(expected):
                for completion in out.outputs:
                    own = [
                        d for d in deltas if (d.prompt_index, d.index) == (index, completion.index)
                    ]
                    assert sum((d.token_ids for d in own), ()) == completion.token_ids
                    assert sum(d.finish_reason is not None for d in own) == 1
                    if params.logprobs:
                        assert sum(len(d.logprobs) for d in own) == len(completion.token_ids)
            assert sum(d.output is not None for d in deltas) == len(prompts)
            assert llm.stats()["replicas"] == 1
            outputs = [d.output for d in deltas if d.output is not None]
            assert all(out.metrics.compile_s >= 0 for out in outputs)
    assert len(moved) > 2 and max(moved) > 0


def test_what_is_read_of_prompts_survives_a_replica(one):
    expected = one.score(GIVEN, [[5, 6, 7]]), one.embed(GIVEN, pooling="mean")
    with make("dp=2") as llm:
        timer = threading.Timer(0.5, llm._thread.take_out, (1,))  # while programs are compiled
        timer.start()
        found = llm.score(GIVEN, [[5, 6, 7]]), llm.embed(GIVEN, pooling="mean")
        timer.join()
    assert np.allclose(
        [s.token_logprobs for s in found[0]], [s.token_logprobs for s in expected[0]], atol=3e-4
    )
    assert np.allclose(found[1], expected[1], atol=3e-4)


def test_replicas_share_a_folder(tmp_path):
    """Both write to it at once, and each reads what the other has written."""
    with make("dp=2", cache=ALL, cache_dir=tmp_path) as llm:
        assert answers(llm)[0] == of_one_device(NAME)[0][0]
        assert all(engine.disk is not None for engine in engines_of(llm))
    with make("dp=2", cache=ALL, cache_dir=tmp_path) as llm:
        found, cached = answers(llm, prompts=PROMPTS[::-1])
        assert found[::-1] == of_one_device(NAME)[0][0] and min(cached) > 0
        stats = llm.stats()
        assert stats["disk_loads"] == 4
        assert stats["disk_files"] == engines_of(llm)[0].stats()["disk_files"] > 0


def test_a_dropped_llm_frees_threads_and_devices():
    gc.collect()
    before, threads = len(jax.live_arrays()), threading.active_count()
    llm = make("dp=2", **SMALL)
    answers(llm, prompts=PROMPTS[:2])
    next(llm.stream(GIVEN, GREEDY))
    del llm
    deadline = time.monotonic() + 30
    while threading.active_count() > threads or len(jax.live_arrays()) > before:
        gc.collect()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_second_turn_goes_where_its_first_one_is_cached(llm):
    llm.reset_prefix_cache()
    longer = [[*ids, *(3 * n % VOCAB for n in range(45))] for ids in PROMPTS]
    first = llm.generate([{"prompt_token_ids": ids} for ids in longer], GREEDY)
    second = llm.generate(
        [
            {"prompt_token_ids": [*ids, *out.outputs[0].token_ids, 5, 6]}
            for ids, out in zip(longer, first, strict=True)
        ],
        GREEDY,
    )
    at = [[llm.cache.explain(out).replica for out in outs] for outs in (first, second)]
    assert at[0] == at[1] and len(set(at[0])) > 1, at
    for before, out in zip(longer, second, strict=True):
        assert out.num_cached_tokens >= (len(before) + 39) // 32 * 32


def test_the_router_knows_what_is_cached_also_after_a_turn_has_failed(llm, monkeypatch):
    router = llm._thread._dispatcher._router

    def check():
        llm.stats()  # all turns are done
        router.read_news()
        for replica, engine in enumerate(engines_of(llm)):
            tree = engine.scheduler.memory.tree
            router.marks.check(replica, ARENA, resume_points(tree, ARENA))
        router.check_invariants()

    llm.generate(GIVEN, GREEDY)
    check()
    assert all(router.marks.of(n, ARENA) for n in range(len(engines_of(llm))))
    receive, failed = Engine._receive, []

    def fails(self):
        if not failed:
            failed.append(self)
            raise RuntimeError("lost")
        return receive(self)

    stream = llm.stream(GIVEN, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    next(stream)
    monkeypatch.setattr(Engine, "_receive", fails)
    with pytest.raises(RuntimeError, match="lost"):
        list(stream)
    llm.generate(GIVEN, GREEDY)  # that engine starts over
    assert any(engine.stats()["restarts"] for engine in engines_of(llm))
    check()
    llm.reset_prefix_cache()
    check()
    assert not router.marks.of(0, ARENA)

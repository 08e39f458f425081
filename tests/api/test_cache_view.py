"""`llm.cache`: why a prompt hit no further, in words, the tree, and replays of what was asked."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest

from hybrid_jax.api.cache_view import CacheView, SeenRequest
from hybrid_jax.api.outputs import Delta
from hybrid_jax.cache.tree.node import LookUp, Why
from hybrid_jax.config import CacheConfig, EngineConfig
from tests.schedule.simulated_disk import SimulatedDisk
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of

MODEL = SimpleNamespace(vocab_size=50, recurrent=True)  # it has recurrent layers

MOST = "192 were possible"


def thread_of(engine):
    """The thread of an engine that answers at once."""
    ask = lambda question, *args: question.answer(engine, *args)  # noqa: E731
    return SimpleNamespace(settle=lambda: None, ask=ask)


class Asked:
    """A simulated engine behind the view, one request after the other."""

    def __init__(self, policy="lru", host_memory=0, **options):
        self.engine = Engine.make(cache=policy, **options)
        self.engine.describe = lambda: "an engine"
        config = EngineConfig(cache=CacheConfig(policy=policy), host_memory=host_memory)
        self.seen = {}
        self.view = CacheView(thread_of(self.engine), self.seen, MODEL, config)

    def ask(self, prompt):
        request = self.engine.add(prompt, max_tokens=1)
        self.engine.run()
        hit = request.hit.num_tokens
        seen = SeenRequest(len(request.prompt), hit, request.hit.look_up)
        self.seen[request.request_id] = seen
        return str(self.view.explain(request.request_id))


def told(why, *, hit_len=32, match_len=100, **more):
    """What is said of a prompt of 200 tokens."""
    seen = {}
    view = CacheView(thread_of(None), seen, MODEL, EngineConfig())
    look_up = LookUp(
        match_len=match_len,
        hit_len=hit_len,
        why=why,
        policy="lru",
        **more,
    )
    seen["7"] = SeenRequest(200, hit_len, look_up)
    return view.explain("7").reason


@pytest.mark.parametrize(
    "reason, expected",
    [
        (
            told(Why.EVICTED, position=96, ago=3, pages=True),
            f"{MOST}. Pages and state at 96 had been evicted by policy lru; 3 other prompts were looked up since. "
            "More memory would have kept them",
        ),
        (
            told(Why.EVICTED, position=96, ago=1),
            f"{MOST}. The state at 96 had been evicted by policy lru; 1 other prompt was looked up since. "
            "More memory would have kept it",
        ),
        (told(Why.TAKEN_BACK, position=96), f"{MOST}. The state at 96 had been given up, because the request that"),
        (
            told(Why.NOT_ADMITTED, position=96),
            f"{MOST}. The cache knew the first 100 tokens of this prompt, but had no saved state between 32 and 96",
        ),
        (told(Why.NOT_ADMITTED, position=96, hit_len=0), "but had no saved state up to 96"),
        (
            told(Why.ENDED, position=96, hit_len=96, match_len=129, tail=33),
            f"{MOST}. An earlier request had the first 129 tokens of this prompt, but it ended 33 tokens after its "
            "last saved state, at 96, and what comes after that is not kept",
        ),
        (
            told(Why.ENDED, position=0, hit_len=0, match_len=33, tail=33),
            f"{MOST}. An earlier request had the first 33 tokens of this prompt, but it ended 33 tokens after its "
            "beginning, and what comes after that is not kept",
        ),
        (
            told(Why.GIVEN_BACK, position=96),
            f"{MOST}. The cache had pages up to 96, but not all that layers with a sliding window read there, because",
        ),
        (
            told(Why.NO_ROOM, position=96),
            f"{MOST}. The cache had state at 96, but there was no room for both that and this request",
        ),
        (
            told(Why.SLOWER, position=96, slower_from="the disk"),
            f"{MOST}. The disk had state at 96, but by the speeds measured here it takes longer to load that than to "
            "compute the tokens after 32",
        ),
        (told(Why.ASKED_FOR), f"{MOST}. The request asked for numbers of its prompt's tokens (log-probabilities, or"),
        (told(Why.NEVER_SEEN, match_len=0), f"{MOST}. The cache knew no earlier request that began like this one"),
        (
            told(Why.NEVER_SEEN, hit_len=96),
            "The cache knew only the first 100 tokens of this prompt, so it could resume at 96",
        ),
        (
            told(Why.NEVER_SEEN, hit_len=0, match_len=20),
            "The cache knew only the first 20 tokens of this prompt, and the first place to resume is 32",
        ),
    ],
)  # fmt: skip
def test_every_reason_has_its_words(reason, expected):
    assert expected in reason


def test_requests_are_explained_in_words_and_numbers():
    asked, prompt = Asked(), tokens_of(random.Random(0), 200)
    assert asked.ask(prompt).startswith(
        "request r0: 0 of 200 prompt tokens came from the prefix cache; 192 were possible. The cache knew no earlier"
    )
    assert "request r1: 192 of 200 prompt tokens" in asked.ask(prompt)
    assert "the first 70 tokens of this prompt, but had no saved state up to 64" in asked.ask(
        prompt[:70] + [60]
    )
    asked.engine.scheduler.reset_prefix_cache()
    assert "The cache knew no earlier request that began like this one" in asked.ask(prompt)


def test_what_came_from_the_hosts_memory_is_said():
    asked = Asked(num_frames=24, host_frames=60, host_memory=1)
    first, *others = (tokens_of(random.Random(seed), 100) for seed in range(4))
    for prompt in (first, *others):
        asked.ask(prompt)
    assert "[0, 96)" in str(asked.view.tree()) and "in the host's memory" in str(asked.view.tree())
    said = asked.ask([*first, 7])
    assert said.endswith("computed. 96 of the skipped ones came from the host's memory")
    asked.engine.check()


def test_an_explanation_has_a_part_of_its_bar_for_what_came_from_a_tier():
    asked = Asked(num_frames=24, host_frames=60, host_memory=1)
    first = tokens_of(random.Random(0), 100)
    asked.ask(first)
    arena = asked.ask([*first, 7]), asked.view.explain("r1")
    asked.engine.scheduler.memory.make_room(23)
    asked.ask([3])  # its plan takes the save along
    host = asked.ask([*first, 8]), asked.view.explain("r3")
    assert [(e.hit_tokens, e.loaded_tokens, e.loaded_from) for _, e in (arena, host)] == [
        (96, 0, ""),
        (96, 96, "the host's memory"),
    ]
    assert "host" not in arena[0] + arena[1]._repr_html_()
    assert "title='96 tokens came from the host&#x27;s memory'" in host[1]._repr_html_()
    assert "came from the prefix cache'" not in host[1]._repr_html_()


def test_each_node_says_in_which_tiers_it_is():
    asked = Asked(num_frames=40, host_frames=60, host_memory=1)
    shared = tokens_of(random.Random(0), 64)
    asked.ask([*shared, 5])
    asked.ask([*shared, *[6] * 40])
    both = lambda: [
        line
        for line in asked.view.nodes()
        if line.span[0] in (0, 64) and line.span[1] not in (1, 65, 66)
    ]  # noqa: E731
    marks = lambda: [line.marks for line in both()]  # noqa: E731
    found = lambda: [[tuple(tier) for tier in line.below] for line in both()]  # noqa: E731
    host = "the host's memory"
    assert marks() == [["1 page", "checkpoint"], ["1 page", "checkpoint"]]
    assert found() == [[], []]
    asked.engine.scheduler.memory.make_room(39)
    way = f"on its way to {host}"
    assert marks() == [
        ["known", way],
        ["known", f"{way} up to 96"],
    ]  # joined with what was computed after it
    assert found() == [[(host, 64, True, True, way)], [(host, 96, True, True, f"{way} up to 96")]]
    assert "dotted" not in asked.view.tree()._repr_html_()
    asked.ask([1])
    there = f"1 page and a checkpoint in {host}"
    assert marks() == [[there], [there]]
    assert found() == [[(host, 64, True, False, there)], [(host, 96, True, False, there)]]
    assert asked.view.tree()._repr_html_().count("border-bottom:1px dotted") == 2
    asked.ask([*shared, 9])
    assert marks()[:2] == [["1 page", "checkpoint", f"in {host} too"], [there]]
    asked.engine.check()


def test_a_checkpoint_that_goes_down_below_pages_that_are_there():
    asked = Asked(num_frames=40, host_frames=60, host_memory=1)
    shared = tokens_of(random.Random(0), 64)
    asked.ask([*shared, *[6] * 40])
    asked.engine.scheduler.memory.make_room(39)
    asked.ask([*shared, 5])
    asked.engine.scheduler.memory.make_room(39)
    host = "the host's memory"
    assert [line.marks for line in asked.view.nodes()][0] == [
        f"1 page in {host}",
        f"checkpoint on its way to {host}",
    ]


def test_nodes_say_what_is_on_disk_and_on_its_way_there():
    disk = SimulatedDisk(make_geometry())
    asked = Asked(num_frames=40, disk=disk)
    first = tokens_of(random.Random(0), 70)
    disk.has_room = False
    asked.engine.add(first, max_tokens=1)
    while not asked.engine.scheduler.has_saves:
        asked.engine.step()
    assert asked.view.nodes()[0].marks == ["1 page", "checkpoint", "on its way to the disk"]
    disk.has_room = True
    asked.engine.run()
    assert asked.view.nodes()[0].marks == ["1 page", "checkpoint", "on disk"]
    asked.engine.scheduler.memory.make_room(39)
    assert asked.view.nodes()[0].marks == ["on disk up to 64"]
    assert "dotted" in asked.view.tree()._repr_html_()
    said = asked.ask([*first, 7])
    assert said.endswith("computed. 64 of the skipped ones came from the disk")


def test_what_the_host_has_and_the_arena_no_room_for_is_said():
    asked = Asked(num_frames=20, host_frames=60, host_memory=1)
    first, other = (tokens_of(random.Random(seed), 200) for seed in range(2))
    for prompt in (first, other):
        asked.ask(prompt)
    asked.engine.scheduler.memory.make_room(19)
    assert "there was no room for both that and this request" in asked.ask([*first, *first])


def test_a_request_that_is_not_there_is_named():
    asked = Asked()
    asked.ask([1, 2, 3])
    for request in ("99", Delta(request_id="99")):
        with pytest.raises(KeyError) as raised:
            asked.view.explain(request)
        assert "no finished request '99' among the latest 4096; pass" in raised.value.args[0]


@pytest.mark.parametrize(
    "request_, shown", [(0, "int 0"), (None, "NoneType None"), (["r0"], "list ['r0']")]
)
def test_what_is_no_request_is_told_what_is_one(request_, shown):
    asked = Asked()
    message = f"takes a RequestOutput, a Delta or the request_id of one, got {shown}"
    with pytest.raises(TypeError, match=re.escape(message)):
        asked.view.explain(request_)


def test_the_tree_is_shown_alone_or_below_the_engine():
    asked = Asked()
    assert asked.view.tree() == "(empty)"
    asked.ask([7] * 70)
    assert asked.view.tree().startswith("[0, 64) 7 7 7 7 7 7 ...: 1 page, checkpoint")
    assert asked.view.describe() == f"an engine\n{asked.view.tree()}"
    off = Asked("off")
    assert (off.view.tree(), off.view.describe()) == ("", "an engine\nthe cache is off")


def test_what_if_tells_what_other_settings_would_have_hit():
    # 60 frames of 256 bytes: a prompt of 200 tokens takes 4 pages of 2 frames, its checkpoint 3.
    asked = Asked(num_frames=60, max_slots=30)
    prompts = [tokens_of(random.Random(n), 200) for n in range(8)]
    for prompt in prompts * 2:
        asked.ask(prompt)
    found = asked.view.what_if(memory="1MB")
    assert (found.policy, found.memory, found.requests) == ("lru", 1_000_000, 16)
    assert found.hit_rate == 192 / 200 / 2  # every second prompt, but for its tail
    assert (
        found.present_hit_rate == found.measured_hit_rate == 0.0
    )  # the oldest goes just before it is used
    assert str(found) == (
        "lru with 977 KiB: 48.0 % of 16 requests' prompt tokens would come from the cache, 0.0 % with the present "
        "settings"
    )
    assert asked.view.what_if(policy="adaptive").policy == "adaptive"


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"policy": "fifo"}, "policy must be one of off, lru, .*got 'fifo'"),
        ({"policy": "off"}, "cache.what_if: policy must keep something, got 'off'"),
        ({"memory": "5XB"}, "memory: a size must look like 5GB, .*got '5XB'"),
        ({"memory": 0}, "memory: a size must look like .*got 0"),
        ({"memory": 100}, "memory must hold a checkpoint and its pages, [0-9.]+ KiB at least, got 100 B"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_replayed_are_named(asked, message):
    some = Asked()
    some.ask([1] * 40)
    with pytest.raises(ValueError, match=message):
        some.view.what_if(**asked)


def test_a_replay_takes_requests():
    with pytest.raises(ValueError, match="cache.what_if: no request has finished yet"):
        Asked().view.what_if()
    with pytest.raises(ValueError, match="policy must be one of off, .*got 'fifo'"):
        Asked().view.what_if(policy="fifo")
    with pytest.raises(ValueError, match="cache.what_if: the cache is off, so nothing was logged"):
        Asked("off").view.what_if()

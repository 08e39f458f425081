"""Layers with a window: rows give back the pages that lie behind it, and nothing else changes."""

import random
from unittest import mock

import pytest

from hybrid_jax.config import CacheConfig, EngineConfig, SpeculationConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.geometry import Geometry
from hybrid_jax.schedule.request import Request
from hybrid_jax.schedule.scheduler import Scheduler
from tests.schedule.simulated_engine import Engine, make_geometry
from tests.schedule.traffic import random_traffic

FORMS = [
    ("hybrid", 16, (None, 37)),
    ("hybrid", 64, (20, 90)),
    ("hybrid", 16, (1, 33)),
    ("attention", 16, (None, 40)),
    ("attention", 64, (50,)),
    ("attention", 16, (5, 70)),
]


@pytest.mark.parametrize(("kind", "page_tokens", "windows"), FORMS)
@pytest.mark.parametrize("lag", [0, 1])
def test_random_traffic_in_a_tight_pool(kind, page_tokens, windows, lag):
    geometry, total = make_geometry(kind=kind, page_tokens=page_tokens, windows=windows), {}
    num_frames = geometry.row_frames(340) * 4 // 3
    for seed in range(2):
        engine = Engine.make(
            geometry=geometry, num_frames=num_frames, max_model_len=340, lag=lag, vocab=200
        )
        random_traffic(seed, engine, turns=50)
        for name, count in {**engine.counters, **engine.device.events}.items():
            total[name] = total.get(name, 0) + count
    fired = ["cache_hits", "forks"]
    fired += (
        ["preemptions"] if len(windows) > 1 else []
    )  # pages of one frame: too few to be short of
    fired += ["copies"] if page_tokens == 64 else []
    assert not [name for name in fired if not total.get(name)], total


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("cache", ["off", "lru", "sglang", "marconi", "adaptive"])
def test_random_traffic_in_every_mode(exact, cache):
    for seed, (kind, page_tokens, windows) in enumerate(FORMS):
        geometry = make_geometry(kind=kind, page_tokens=page_tokens, windows=windows)
        engine = Engine.make(
            geometry=geometry, exact=exact, cache=cache, steps_per_dispatch=8, max_rows=5,
            num_frames=geometry.row_frames(340) + 9, max_slots=9, max_model_len=340,
        )  # fmt: skip
        random_traffic(seed, engine, turns=25, stop="x" if seed % 2 else None)


@pytest.mark.parametrize(("kind", "page_tokens", "windows"), FORMS)
def test_random_traffic_of_which_some_tokens_stay(kind, page_tokens, windows):
    geometry = make_geometry(kind=kind, page_tokens=page_tokens, windows=windows)
    for seed, drafts, stop in ((0, 4, None), (1, 7, "x")):
        rng = random.Random(seed)
        engine = Engine.make(
            geometry=geometry, num_frames=geometry.row_frames(340) * 4 // 3, max_model_len=340,
            vocab=200, speculation=SpeculationConfig(num_tokens=drafts, adaptive=False),
            keep=lambda most, rng=rng: most if rng.random() < 0.3 else rng.randint(1, most),
        )  # fmt: skip
        random_traffic(seed, engine, turns=25, stop=stop)


def frames_held(prompt_len, output_len, *, kind="attention", windows=(50, 90)):
    """The most frames that the allocator ever counts while one sequence runs that nobody shares anything with."""
    geometry = make_geometry(kind=kind, page_tokens=16, windows=windows)
    engine = EngineConfig(
        max_rows=1, prefill_tokens=128, steps_per_dispatch=32, cache=CacheConfig(policy="off")
    )
    total = prompt_len + output_len
    scheduler = Scheduler(geometry, engine, num_frames=2000, max_slots=9, max_model_len=total + 1)
    params = SamplingParams(max_tokens=output_len, temperature=0.0)
    prompt = [3] * prompt_len
    scheduler.add(
        Request(request_id="a", prompt=prompt, params=params, seed=0, max_tokens=output_len)
    )
    frames, counts = scheduler.memory.frames, [0]
    allocate = frames.allocate

    def counted(count):
        taken = allocate(count)
        counts.append(frames.num_held)
        return taken

    frames.allocate = counted
    while plan := scheduler.plan():
        for row in plan.rows:
            row.new_tokens = [1] * row.most_tokens
        scheduler.receive(plan)
        scheduler.check_invariants()
    assert frames.num_held == 0
    return max(counts)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_windowed_row_holds_as_many_frames_at_8000_tokens_as_at_1000(kind):
    of_prompts = {frames_held(n - 100, 100, kind=kind) for n in (1000, 2500, 8000)}
    of_outputs = {frames_held(20, n - 20, kind=kind) for n in (1000, 2500, 8000)}
    assert len(of_prompts) == len(of_outputs) == 1
    assert max(of_prompts | of_outputs) < 40
    assert frames_held(7900, 100, kind=kind, windows=(None, None)) >= 1000


def test_a_row_with_both_holds_what_the_geometry_says():
    geometry = make_geometry(page_tokens=16, windows=(None, 50))
    held = [frames_held(n, 2, kind="hybrid", windows=(None, 50)) for n in (1000, 8000)]
    assert held[1] - held[0] in (
        437,
        438,
    )  # the pages of 7000 tokens for the layers without a window
    assert held[0] <= geometry.row_frames(1001) + geometry.state_frames


def test_prompts_far_longer_than_the_pool_are_computed_through_windows():
    geometry = make_geometry(kind="attention", page_tokens=16, windows=(40, 90))
    num_frames = geometry.row_frames(10**6) + 1
    assert geometry.num_pages(600) * 2 > 1.5 * num_frames
    for cache in ("off", "lru", "sglang", "adaptive"):
        engine = Engine.make(geometry=geometry, num_frames=num_frames, cache=cache, vocab=200)
        rng = random.Random(1)
        prompts = [[rng.randrange(1, 50) for _ in range(500)] for _ in range(3)]
        for prompt in (*prompts, prompts[0]):
            engine.add(prompt, max_tokens=60, stop_ids=())
        engine.run()
        engine.check()


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize("chunk", [32, 64])
def test_a_row_alone_in_the_least_pool_is_never_preempted(kind, page_tokens, chunk):
    for window in (1, 2, 16, 17, 33, 48, 50, 64, 66):
        geometry = make_geometry(
            kind=kind, page_tokens=page_tokens, windows=(window,), longest_chunk=chunk
        )
        num_frames = geometry.row_frames(10**6) + 1
        for stop, settings in (
            (None, {"steps_per_dispatch": 32}),
            ("x", {"steps_per_dispatch": 8}),
            ("x", {"exact": True}),
            (None, {"speculation": SpeculationConfig(num_tokens=4, adaptive=False)}),
        ):
            engine = Engine.make(
                geometry=geometry, num_frames=num_frames, max_rows=1, cache="off",
                prefill_tokens=chunk, vocab=10**6, **settings,
            )  # fmt: skip
            engine.add([3] * 70, max_tokens=230, stop_ids=(), stop=stop)
            engine.run()
            engine.check()
            assert engine.counters["preemptions"] == 0, (window, stop, settings)


@pytest.mark.parametrize("windows", [(33,), (20, 90)])
@pytest.mark.parametrize("cache", ["lru", "adaptive"])
def test_a_lone_row_gets_what_the_tree_alone_holds_above_its_text(windows, cache):
    geometry = make_geometry(kind="attention", page_tokens=16, windows=windows, longest_chunk=64)
    engine = Engine.make(
        geometry=geometry, num_frames=geometry.row_frames(400) + 1, max_model_len=401,
        vocab=10**6, cache=cache, prefill_tokens=64,
    )  # fmt: skip
    freed, thin_out = [], engine.scheduler.memory.thin_out
    engine.scheduler.memory.thin_out = lambda: freed.append(thin_out()) or freed[-1]
    for last, shared, max_tokens in ((1, 0, 5), (2, 20, 5), (3, 40, 5), (4, 70, 250)):
        prompt = [3] * 70 + [5] * shared + [100 + last] * 10
        engine.add(prompt, max_tokens=max_tokens, stop_ids=())
        engine.run()
    engine.check()
    assert any(freed) and engine.counters["preemptions"] == 0


@pytest.mark.parametrize("cache", ["lru", "adaptive"])
def test_who_comes_does_not_wait_for_pages_behind_the_windows_of_those_that_run(cache):
    geometry = make_geometry(kind="attention", page_tokens=16, windows=(200, 300))
    engine = Engine.make(
        geometry=geometry, num_frames=205, max_model_len=4000, vocab=10**6, cache=cache
    )
    shared = [n * 7 % 900 + 1 for n in range(1280)]  # 160 frames, of which two rows hold 62
    for first, steps in ((1001, 16), (2001, 4)):
        engine.add([*shared, *range(first, first + 70)], max_tokens=100, stop_ids=())
        for _ in range(steps):
            engine.step()
    assert len(engine.scheduler.seats.running) == 2 and engine.counters["free_frames"] < 20
    engine.add(range(3000, 3400), max_tokens=5, stop_ids=())
    engine.step()
    assert len(engine.scheduler.seats.running) == 3
    engine.run()
    assert goes_on(engine, shared) == 1280
    engine.check()


CUTS = [end + n for end in (160, 192, 256) for n in (-9, -3, -1, 0, 1, 4)]


def goes_on(engine, text):
    """How many tokens of a prompt that begins with a text are hit."""
    request = engine.add([*text, 7, 7, 7], max_tokens=2, stop_ids=())
    engine.run()
    return request.hit.num_tokens


@pytest.mark.parametrize(
    ("kind", "windows"),
    [("attention", (None, 40)), ("attention", (16,)), ("hybrid", (None, 40))],
)
@pytest.mark.parametrize("cut", CUTS)
def test_a_text_that_a_stop_string_cuts_is_hit_up_to_the_last_grain_before(kind, windows, cut):
    geometry = make_geometry(kind=kind, page_tokens=16, windows=windows)
    engine = Engine.make(geometry=geometry, num_frames=600, vocab=10**6, steps_per_dispatch=8)
    first = engine.add([3] * 100, max_tokens=400, stop_ids=(), stop="x")
    while len(first.tokens) <= cut:  # the stop string ends with the token after the cut
        engine.step()
    text = first.tokens[:cut]
    engine.scheduler.abort("r0")
    engine.run()
    assert goes_on(engine, text) >= geometry.align(cut)


@pytest.mark.parametrize("windows", [(None, 40), (16,), (1, 200)])
@pytest.mark.parametrize("cut", CUTS)
def test_a_text_that_is_read_without_its_last_tokens_is_hit_up_to_the_last_grain(windows, cut):
    """As where a chat template strips the end of an answer."""
    geometry = make_geometry(kind="attention", page_tokens=16, windows=windows)
    engine = Engine.make(geometry=geometry, num_frames=900, vocab=10**6)
    first = engine.add([3] * 100, max_tokens=cut - 100 + 6, stop_ids=())
    engine.run()
    assert goes_on(engine, first.tokens[:cut]) == geometry.align(cut)


def give_back_too_much(geometry: Geometry, group, position):
    """One page more than may go."""
    return max(position - group.window + 1, 0) // geometry.page_tokens + 1


def hit_without_the_windows_pages(tree, node, length, grain, tier=0):
    return length


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        ("first_page", Geometry),
        ("deepest", "hybrid_jax.cache.tree.span_tree.SpanTree"),
    ],
)
def test_mistakes_are_noticed(mistake, where):
    wrong = {"first_page": give_back_too_much, "deepest": hit_without_the_windows_pages}[mistake]
    with (
        pytest.raises(AssertionError),
        (
            mock.patch.object(where, mistake, wrong)
            if where is Geometry
            else mock.patch(f"{where}.{mistake}", wrong)
        ),
    ):
        for kind, page_tokens, windows in FORMS[:1] + FORMS[3:4]:
            geometry = make_geometry(kind=kind, page_tokens=page_tokens, windows=windows)
            engine = Engine.make(
                geometry=geometry, num_frames=geometry.row_frames(340) * 4 // 3, max_model_len=340
            )
            random_traffic(1, engine, turns=60)

"""The scheduler against a device that checks every read: the plain loop's tokens, whatever happens."""

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.engine import bucket
from hybrid_jax.engine.request import Request
from hybrid_jax.engine.scheduler import NEED_RESULTS, Scheduler
from hybrid_jax.geometry import Geometry
from hybrid_jax.sampling_params import SamplingParams
from tests.engine.simulated_device import SimulatedDevice, plain_loop

GRAIN = 32


def make_geometry(*, page_tokens=64, kind="hybrid", grain=GRAIN):
    """Small numbers: a page is 2 frames, a checkpoint 3; `kind` leaves out one of them."""
    pages, state = kind != "recurrent", kind != "attention"
    return Geometry(
        frame_words=64, page_tokens=page_tokens if pages else 0, num_attention=2 * pages,
        num_mamba2=2 * state,
        layers_per_page=int(pages), frames_per_page=2 * pages, token_words=1, heads_per_frame=int(state),
        frames_per_layer=int(state), conv_frames=int(state), conv_words=1, grain=grain, dtype="float32",
    )  # fmt: skip


@dataclass
class Engine:
    """The engine's loop: at most `lag` results are held back while the next plan is made."""

    scheduler: Scheduler
    device: SimulatedDevice
    vocab: int
    lag: int = 1
    pending: deque = field(default_factory=deque)
    requests: dict[str, Request] = field(default_factory=dict)
    reported: dict[str, list[int]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    plans: list = field(default_factory=list)

    @classmethod
    def make(
        cls,
        *,
        num_frames=400,
        max_slots=100,
        max_model_len=600,
        vocab=50,
        lag=1,
        geometry=None,
        **options,
    ):
        geometry = geometry or make_geometry()
        cache = CacheConfig(policy=options.pop("cache", "lru"))
        engine = EngineConfig(**{"max_rows": 4, "prefill_tokens": 128, "cache": cache} | options)
        scheduler = Scheduler(
            geometry,
            engine,
            num_frames=num_frames,
            max_slots=max_slots,
            max_model_len=max_model_len,
        )
        device = SimulatedDevice(
            geometry,
            num_frames=num_frames,
            max_rows=engine.max_rows,
            vocab=vocab,
            exact=engine.exact,
        )
        return cls(scheduler, device, vocab, lag)

    def add(
        self, prompt, *, max_tokens=20, explicit=True, stop_ids=(0,), name=None, stop=None, **more
    ):
        name = name or f"r{len(self.requests)}"
        limit = max_tokens if explicit else None
        params = SamplingParams(max_tokens=limit, temperature=0.0, stop=stop)
        request = Request(
            request_id=name, prompt=list(prompt), params=params, seed=0, stop_ids=frozenset(stop_ids),
            max_tokens=max_tokens, **more,
        )  # fmt: skip
        self.scheduler.add(request)
        self.requests[name], self.reported[name] = request, []
        self.scheduler.check_invariants()
        return request

    def add_siblings(self, count, prompt, **options):
        """Completions of one prompt, which may fork from each other."""
        group = f"g{len(self.requests)}" if count > 1 else None
        return [self.add(prompt, group=group, **options) for _ in range(count)]

    def step(self):
        """One turn of the loop; False when nothing is left to do."""
        plan = self.scheduler.plan()
        self.scheduler.check_invariants()
        if plan:
            self.check_shapes(plan)
            self.plans.append(plan)
            self.pending.append((plan, self.device.execute(plan)))
        if self.pending and (len(self.pending) > self.lag or not plan):
            for progress in self.scheduler.receive(*self.pending.popleft()):
                name = progress.request.request_id
                assert name not in self.ended and progress.tokens
                self.reported[name] += progress.tokens
                if progress.finished:
                    self.ended.append(name)
            self.scheduler.check_invariants()
            return True
        return bool(plan)

    def crash(self):
        """A dispatch fails: the device and all results that are not in are lost."""
        self.scheduler.plan()
        live = [r for r in self.requests.values() if r.finish_reason is None]
        self.scheduler = self.scheduler.restarted(live)
        self.scheduler.check_invariants()
        self.pending.clear()
        self.device = SimulatedDevice(
            self.scheduler.geometry, num_frames=self.scheduler.num_frames,
            max_rows=self.scheduler.engine.max_rows, vocab=self.vocab, events=self.device.events,
            exact=self.device.exact,
        )  # fmt: skip

    def run(self, max_turns=20000):
        turns = 0
        while self.step():
            turns += 1
            assert turns < max_turns, f"no end in sight: {self.scheduler.stats()}"
        assert not self.scheduler.has_work

    def check_shapes(self, plan):
        engine, max_pages = self.scheduler.engine, self.scheduler.geometry.num_pages(600)
        if engine.exact:
            assert plan.num_steps <= 1
            assert all(len(row.tokens) <= GRAIN for row in plan.prefill)
            return
        if plan.prefill:
            shape = bucket.prefill_bucket(
                engine, num_rows=len(plan.prefill), num_tokens=max(len(row.tokens) for row in plan.prefill),
                num_pages=max(len(row.pages) for row in plan.prefill), max_pages=max_pages,
            )  # fmt: skip
            assert shape.rows * shape.tokens <= engine.prefill_tokens
        if plan.decode:
            bucket.decode_bucket(
                engine, num_rows=max(row.row for row in plan.decode) + 1, num_steps=plan.num_steps,
                num_pages=max(len(row.pages) for row in plan.decode), max_pages=max_pages,
            )  # fmt: skip

    def check(self):
        """Every request that was not aborted has the plain loop's tokens; nothing is left behind."""
        scheduler = self.scheduler
        for name, request in self.requests.items():
            limit = len(request.prompt) + request.max_tokens
            limit = min(limit, len(request.prompt) + scheduler.max_output(len(request.prompt)))
            expected = plain_loop(
                request.prompt, vocab=self.vocab, stop_ids=request.stop_ids, limit=limit
            )
            assert self.reported[name] == request.output
            if request.finish_reason == "abort":
                assert request.output == expected[: len(request.output)]
                continue
            assert request.output == expected, name
            assert request.finish_reason == (
                "stop" if expected[-1] in request.stop_ids else "length"
            )
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_flights == 0
        scheduler.reset_prefix_cache()
        scheduler.check_invariants()
        assert scheduler.stats()["free_frames"] == scheduler.num_frames - 1

    @property
    def counters(self):
        return self.scheduler.stats()


def tokens_of(rng, count, vocab=50):
    return [rng.randrange(1, vocab) for _ in range(count)]


# --- one behaviour each -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("exact", [False, True])
def test_one_request_gives_the_plain_loops_tokens(length, exact):
    engine = Engine.make(exact=exact)
    engine.add(tokens_of(random.Random(length), length), max_tokens=100, stop_ids=())
    engine.run()
    engine.check()


def test_the_same_prompt_again_skips_all_but_its_tail():
    engine = Engine.make()
    prompt = tokens_of(random.Random(0), 200)
    engine.add(prompt)
    engine.run()
    again = engine.add(prompt)
    engine.run()
    assert again.num_cached_tokens == 192 and engine.counters["cache_hit_tokens"] == 192
    engine.check()


def test_identical_prompts_wait_for_the_first_one():
    engine = Engine.make(prefill_tokens=512)
    prompt = tokens_of(random.Random(0), 100)
    requests = [engine.add(prompt) for _ in range(3)]
    engine.run()
    assert [r.num_cached_tokens for r in requests] == [0, 96, 96]
    assert engine.counters["waits"] == 2
    engine.check()


@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
@pytest.mark.parametrize("cache", ["lru", "off"])
@pytest.mark.parametrize("length", [5, 32, 64, 65, 100, 128, 300])
def test_siblings_compute_their_prompt_once(kind, cache, length):
    engine = Engine.make(geometry=make_geometry(kind=kind), cache=cache)
    prompt = tokens_of(random.Random(0), length)
    requests = engine.add_siblings(4, prompt, max_tokens=70, stop_ids=())
    engine.run()
    assert engine.counters["prefill_tokens"] == length and engine.counters["forks"] == 3
    assert engine.counters["copies"] == (3 if length % 64 and kind != "recurrent" else 0)
    assert [r.num_cached_tokens for r in requests] == [0] * 4
    engine.check()


def test_forks_share_the_first_ones_hit():
    engine = Engine.make()
    prompt = tokens_of(random.Random(0), 200)
    engine.add(prompt)
    engine.run()
    requests = engine.add_siblings(3, prompt)
    engine.run()
    assert [r.num_cached_tokens for r in requests] == [192] * 3
    assert engine.counters["prefill_tokens"] == 208 and engine.counters["cache_hits"] == 1
    engine.check()


def test_siblings_beyond_the_rows_fork_from_the_next_that_has_one():
    engine = Engine.make(max_rows=4)
    engine.add_siblings(7, tokens_of(random.Random(0), 100), max_tokens=50, stop_ids=())
    engine.run()
    assert engine.counters["forks"] == 5 and engine.counters["prefill_tokens"] == 104
    engine.check()


def test_a_row_is_kept_for_a_sibling_while_its_prompt_is_computed():
    engine = Engine.make(max_rows=3)
    rng = random.Random(0)
    siblings = engine.add_siblings(2, tokens_of(rng, 500), max_tokens=50, stop_ids=())
    others = [engine.add(tokens_of(rng, 10), max_tokens=3, stop_ids=()) for _ in range(9)]
    while not siblings[1].output:
        engine.step()
    assert engine.counters["forks"] == 1 and any(not other.output for other in others)
    engine.run()
    engine.check()


def test_siblings_whose_first_one_is_aborted_compute_their_prompt_themselves():
    engine = Engine.make()
    siblings = engine.add_siblings(3, tokens_of(random.Random(0), 300), max_tokens=9, stop_ids=())
    engine.step()
    engine.scheduler.abort(siblings[0].request_id)
    engine.run()
    assert engine.counters["forks"] == 1
    assert all(len(sibling.output) == 9 for sibling in siblings[1:])
    engine.check()


class Anything:
    """A constraint that allows every token, `most` times."""

    def __init__(self, most=10**6):
        self.most = most

    def mask(self, output):
        return np.full(2, 0 if len(output) >= self.most else 0xFFFFFFFF, np.uint32)


def test_a_constrained_row_takes_one_step_and_waits_for_its_result():
    engine = Engine.make()
    rng = random.Random(0)
    free = engine.add(tokens_of(rng, 40), max_tokens=60, stop_ids=())
    bound = engine.add(tokens_of(rng, 90), max_tokens=20, stop_ids=(), constraint=Anything())
    while engine.step():
        flights = [plan for plan, _ in engine.pending]
        rows = [r for p in flights for r in (*p.prefill, *p.decode) if r.request is bound]
        assert len(rows) <= 1 and all(getattr(row, "num_steps", 1) == 1 for row in rows)
    assert len(bound.output) == 20 and len(free.output) == 60
    engine.check()


def test_a_constraint_that_allows_nothing_more_ends_the_request():
    engine = Engine.make()
    request = engine.add([1, 2, 3], max_tokens=50, stop_ids=(), constraint=Anything(7))
    engine.run()
    assert (len(request.output), request.finish_reason) == (7, "stop")


def test_a_constrained_prompt_in_the_making_slows_nobody_down():
    engine = Engine.make(steps_per_dispatch=8)
    rng = random.Random(0)
    engine.add(tokens_of(rng, 10), max_tokens=60, stop_ids=())
    engine.step()
    engine.add(tokens_of(rng, 500), max_tokens=3, stop_ids=(), constraint=Anything())
    engine.run()
    chunks = [plan for plan in engine.plans[1:] if plan.prefill and plan.decode]
    assert len(chunks) > 2 and all(plan.num_steps == 8 for plan in chunks[:3])
    engine.check()


def test_rows_with_stop_strings_take_fewer_steps_at_once():
    engine = Engine.make(steps_per_dispatch=8)
    rng = random.Random(0)
    engine.add(tokens_of(rng, 10), max_tokens=40, stop_ids=())
    engine.add(tokens_of(rng, 10), max_tokens=40, stop_ids=(), stop=("x",))
    engine.run()
    steps = [plan.num_steps for plan in engine.plans if len(plan.decode) == 2]
    assert steps[0] == max(steps) == 4  # from where the prompts end
    engine.check()


def test_a_prompt_with_stop_strings_that_ends_beside_decoding_rows_goes_along_with_them():
    engine = Engine.make(steps_per_dispatch=8)
    rng = random.Random(0)
    engine.add(tokens_of(rng, 10), max_tokens=60, stop_ids=())
    engine.step()
    engine.add(tokens_of(rng, 10), max_tokens=40, stop_ids=(), stop=("x",))
    engine.run()
    steps = [[row.num_steps for row in p.decode] for p in engine.plans if len(p.decode) == 2]
    assert steps[0] == [8, 8] and max(map(max, steps[1:])) == 4
    engine.check()


def test_exact_mode_never_forks():
    engine = Engine.make(exact=True)
    engine.add_siblings(3, tokens_of(random.Random(0), 100))
    engine.run()
    assert engine.counters["forks"] == 0
    engine.check()


def test_a_checkpoint_is_made_where_known_prompts_part():
    engine = Engine.make()
    rng = random.Random(0)
    shared = tokens_of(rng, 80)
    requests = [engine.add(shared + tokens_of(rng, 50)) for _ in range(3)]
    engine.run()
    assert [r.num_cached_tokens for r in requests] == [0, 64, 64]
    engine.check()


def test_a_prompt_that_arrives_while_its_prefix_is_computed_waits_for_it():
    engine = Engine.make()
    rng = random.Random(0)
    prompt = tokens_of(rng, 500)
    engine.add(prompt)
    engine.step()
    late = engine.add(prompt[:400] + tokens_of(rng, 30))
    engine.run()
    assert late.num_cached_tokens == 384
    engine.check()


def test_a_shorter_prompt_on_the_path_gets_its_own_checkpoint():
    engine = Engine.make()
    prompt = tokens_of(random.Random(0), 300)
    engine.add(prompt)
    short = engine.add(prompt[:150])
    engine.run()
    assert short.num_cached_tokens == 128
    engine.check()


def test_a_waiting_request_goes_on_when_the_one_it_waits_for_is_aborted():
    engine = Engine.make()
    prompt = tokens_of(random.Random(0), 500)
    engine.add(prompt)
    engine.step()
    second = engine.add(prompt)
    engine.step()
    assert engine.scheduler.num_waiting == 1
    assert engine.scheduler.abort("r0") and not engine.scheduler.abort("r0")
    engine.run()
    assert second.finish_reason in ("stop", "length")
    engine.check()


def test_a_later_request_overtakes_one_that_waits_but_not_for_ever():
    engine = Engine.make(max_rows=1, max_model_len=2000, num_frames=2000)
    engine.scheduler.admission.patience = 2
    rng = random.Random(0)
    prompt = tokens_of(rng, 40)
    tree = engine.scheduler.memory.tree
    tree.promise("never kept", tree.announce(prompt), 32)
    waiting = engine.add(prompt, max_tokens=1)
    others = [engine.add(tokens_of(rng, 10), max_tokens=1) for _ in range(5)]
    engine.run()
    assert engine.ended == [r.request_id for r in [*others[:2], waiting, *others[2:]]]


def test_a_row_resuming_inside_a_page_copies_it():
    engine = Engine.make(geometry=make_geometry(page_tokens=128))
    rng = random.Random(0)
    shared = tokens_of(rng, 40)
    for _ in range(3):
        engine.add(shared + tokens_of(rng, 20))
        engine.run()
    assert engine.device.events["copies"] == engine.counters["copies"] == 2
    engine.check()


def test_the_first_fold_after_a_prompt_takes_a_new_slot_and_later_ones_do_not():
    engine = Engine.make()
    engine.add(tokens_of(random.Random(0), 100), max_tokens=150, stop_ids=())
    engine.run()
    assert engine.device.events["folds to new"] == 1
    assert engine.device.events["folds in place"] == 3
    engine.check()


def test_a_long_prompts_chunks_write_over_their_own_slot():
    engine = Engine.make()
    engine.add(tokens_of(random.Random(0), 500))
    engine.run()
    assert engine.device.events["chunk over its own slot"] == 3
    assert engine.device.events["chunk to new"] == 1
    engine.check()


def test_short_prompts_share_a_prefill_and_long_ones_fill_it_alone():
    engine = Engine.make()
    rng = random.Random(0)
    for length in (20, 30, 25, 10):
        engine.add(tokens_of(rng, length))
    engine.step()
    assert [len(row.tokens) for row in engine.plans[0].prefill] == [20, 30, 25, 10]
    assert {row.row for row in engine.plans[0].decode} == {0, 1, 2, 3}  # decoding in the same plan
    engine.run()
    engine.check()


def test_preemption_resumes_as_a_prefix_hit():
    engine = Engine.make(num_frames=26, max_rows=2)
    rng = random.Random(0)
    requests = [engine.add(tokens_of(rng, 100), max_tokens=200, stop_ids=()) for _ in range(2)]
    engine.run()
    assert requests[1].num_preemptions > 0 and requests[0].num_preemptions == 0
    assert engine.counters["cache_hits"] > 0
    assert requests[1].num_cached_tokens == 0  # what its first prefill skipped
    engine.check()


def test_a_row_that_is_short_drains_the_flights_before_anyone_is_preempted():
    engine = Engine.make(num_frames=26, max_rows=2)
    rng = random.Random(0)
    for _ in range(2):
        engine.add(tokens_of(rng, 100), max_tokens=200, stop_ids=())
    answers = []
    plan = engine.scheduler.plan

    def watched():
        answers.append(
            (plan(), engine.scheduler.num_flights, engine.scheduler.counters.preemptions)
        )
        return answers[-1][0]

    engine.scheduler.plan = watched
    engine.run()
    assert any(answer is NEED_RESULTS for answer, _, _ in answers)
    first = next(i for i, (_, _, preemptions) in enumerate(answers) if preemptions)
    assert answers[first - 1][0] is NEED_RESULTS


def test_a_request_that_cannot_be_admitted_yet_costs_no_cached_prefix():
    engine = Engine.make(num_frames=34, max_rows=2)
    rng = random.Random(0)
    cached = tokens_of(rng, 200)
    engine.add(cached, max_tokens=2, stop_ids=())
    engine.run()
    engine.add(
        tokens_of(rng, 300), max_tokens=40, stop_ids=()
    )  # 5 pages and a checkpoint, then more
    engine.step()
    engine.add(tokens_of(rng, 550), max_tokens=10, stop_ids=())  # more than is left beside it
    kept = engine.scheduler.stats()["cached_frames"]
    for _ in range(3):
        engine.step()
    stats = engine.scheduler.stats()
    assert stats["waiting"] == 1 and kept > 0
    assert stats["cached_frames"] >= kept and stats["cache_leaf_evictions"] == 0
    engine.run()
    engine.check()


def test_one_request_gets_the_whole_pool_to_its_last_frame():
    geometry = make_geometry(page_tokens=64)
    for frames in (12, 14, 20):
        engine = Engine.make(num_frames=frames, geometry=geometry)
        longest = engine.scheduler.max_output(100)
        request = engine.add(tokens_of(random.Random(0), 100), max_tokens=longest, stop_ids=())
        engine.run()
        assert len(request.output) == longest == (frames - 1 - 3) // 2 * 64 + 1 - 100
        assert request.num_preemptions == 0  # it takes its checkpoint back from the tree instead
        engine.check()


def test_output_without_an_explicit_limit_ends_where_the_pool_does():
    engine = Engine.make(num_frames=12)
    request = engine.add(
        tokens_of(random.Random(0), 100), max_tokens=5000, explicit=False, stop_ids=()
    )
    engine.run()
    assert request.finish_reason == "length" and len(request.output) == 4 * 64 + 1 - 100
    engine.check()


def test_what_can_never_fit_is_refused_with_the_numbers():
    engine = Engine.make(num_frames=12, max_model_len=600)
    engine.add([1, 2], name="a")
    for prompt, max_tokens, message in [
        ([1] * 700, 1, r"prompt of 700 tokens and 1 to generate need 701, the model holds 600"),
        ([1] * 100, 501, r"prompt of 100 tokens and 501 to generate need 601, the model holds 600"),
        (
            [1] * 300,
            1,
            r"prompt of 300 tokens and 1 to generate need 301, the pool holds 257.*raise memory",
        ),
        ([1] * 100, 158, r"need 258, the pool holds 257"),
        ([], 1, r"prompt must hold at least one token, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.add(prompt, max_tokens=max_tokens, name="b")
    with pytest.raises(ValueError, match="request 'a': request_id must be unique"):
        engine.add([3], name="a")
    engine.run()
    assert engine.requests["a"].finish_reason


def test_results_must_come_in_order_and_fit():
    engine = Engine.make()
    request = engine.add(tokens_of(random.Random(0), 40), max_tokens=60, stop_ids=())
    first = engine.scheduler.plan()
    tokens = engine.device.execute(first)
    second = engine.scheduler.plan()
    assert engine.scheduler.plan() is NEED_RESULTS
    with pytest.raises(ValueError, match="not the oldest of 2 in flight"):
        engine.scheduler.receive(second, tokens)
    tokens.decode[0] = tokens.decode[0][:3]
    with pytest.raises(ValueError, match="'r0' took 3 of 8 steps without a stop token"):
        engine.scheduler.receive(first, tokens)
    engine.crash()
    engine.reported["r0"] = list(request.output)
    engine.run()
    engine.check()


def test_a_failed_dispatch_requeues_everyone_from_their_tokens():
    engine = Engine.make()
    rng = random.Random(0)
    for _ in range(6):
        engine.add(tokens_of(rng, 60), max_tokens=60, stop_ids=())
    for _ in range(4):
        engine.step()
    engine.crash()
    assert engine.counters["free_frames"] == 399 and engine.scheduler.num_waiting == 6
    assert engine.counters["restarts"] == 1 and engine.counters["plans"] >= 4
    engine.scheduler.abort("r0")
    engine.run()
    engine.check()


def test_an_abort_with_plans_in_flight_reports_nothing_more_and_frees_everything():
    engine = Engine.make()
    requests = [
        engine.add(tokens_of(random.Random(i), 60), max_tokens=200, stop_ids=()) for i in range(3)
    ]
    for _ in range(5):
        engine.step()
    before = len(requests[1].output)
    assert engine.scheduler.abort("r1", reason="abort")
    engine.run()
    assert len(requests[1].output) == before and requests[1].finish_reason == "abort"
    assert not engine.scheduler.abort("r1") and not engine.scheduler.abort("nobody")
    engine.check()


def test_an_abort_while_a_fold_is_in_flight_leaves_no_wrong_checkpoint():
    engine = Engine.make()
    first = engine.add(tokens_of(random.Random(0), 100), max_tokens=300, stop_ids=())
    while not any(
        row.fold_slot and row.fold_slot == row.read_slot
        for p, _ in engine.pending
        for row in p.decode
    ):
        engine.step()
    engine.scheduler.abort("r0")
    engine.run()
    output = plain_loop(first.prompt, vocab=50, stop_ids=frozenset(), limit=300)
    again = engine.add(first.prompt + output)
    engine.run()
    assert again.num_cached_tokens >= 160
    engine.check()


def test_an_empty_scheduler_has_nothing_to_do():
    engine = Engine.make()
    assert engine.scheduler.plan() is None and not engine.scheduler.has_work
    engine.add([1, 2, 3])
    assert engine.scheduler.has_work
    engine.run()
    assert engine.scheduler.plan() is None


def test_holes_are_closed_by_moving_the_highest_row():
    engine = Engine.make(max_rows=8)
    rng = random.Random(0)
    for index in range(8):
        engine.add(tokens_of(rng, 30), max_tokens=120 if index in (5, 7) else 10, stop_ids=())
    engine.run()
    assert engine.counters["moves"] == engine.device.events["moves"] > 0
    assert max(row.row for row in engine.plans[-1].decode) < 4
    engine.check()


def test_without_a_cache_nothing_is_matched_or_kept():
    engine = Engine.make(cache="off")
    prompt = tokens_of(random.Random(0), 100)
    for _ in range(2):
        assert engine.add(prompt).num_cached_tokens == 0
        engine.run()
    assert engine.counters["free_frames"] == 399 and "cache_hits" not in engine.counters
    engine.check()


def test_resetting_the_cache_leaves_running_requests_alone():
    engine = Engine.make()
    prompt = tokens_of(random.Random(0), 400)
    for _ in range(3):
        engine.add(prompt, max_tokens=60)
    for _ in range(12):
        engine.step()
        engine.scheduler.reset_prefix_cache()
        engine.scheduler.check_invariants()
    engine.run()
    engine.check()


# --- all of it at once --------------------------------------------------------------------------------


def random_traffic(
    seed,
    engine,
    *,
    turns=120,
    abort_rate=0.03,
    crash_rate=0.0,
    num_prefixes=4,
    longest=220,
    arrivals=0.4,
):
    """Prompts that share prefixes in a tree-like way, arriving and aborting at random."""
    rng = random.Random(seed)
    pool = [tokens_of(rng, rng.randint(20, longest // 2)) for _ in range(num_prefixes)]
    for _ in range(turns):
        while rng.random() < arrivals:
            base = rng.choice(pool)
            prompt = base[: rng.randint(1, len(base))] if rng.random() < 0.4 else list(base)
            prompt = (prompt + tokens_of(rng, rng.choice([0, 1, 5, 40, 90])))[:longest]
            options = {
                "max_tokens": rng.choice([1, 2, 8, 30, 100, 120]),
                "stop_ids": rng.choice([(), (0,), (0, 1, 2)]),
            }
            request = engine.add_siblings(rng.choice([1, 1, 1, 1, 1, 2, 4]), prompt, **options)[0]
            if rng.random() < 0.3:
                pool.append(request.prompt)
        if rng.random() < abort_rate and engine.scheduler._sequences:
            engine.scheduler.abort(rng.choice(list(engine.scheduler._sequences)))
            engine.scheduler.check_invariants()
        if rng.random() < crash_rate:
            engine.crash()
        engine.step()
        for request in engine.requests.values():  # a conversation goes on
            if request.finish_reason and rng.random() < 0.02:
                pool.append((request.prompt + request.output)[:longest])
    engine.run()
    engine.check()


@pytest.mark.parametrize(
    ("kind", "page_tokens"),
    [
        ("hybrid", 16),
        ("hybrid", 64),
        ("hybrid", 128),
        ("attention", 16),
        ("attention", 128),
        ("recurrent", 0),
    ],
)
@pytest.mark.parametrize("lag", [0, 1])
def test_random_traffic_in_a_tight_pool(kind, page_tokens, lag):
    geometry = make_geometry(page_tokens=page_tokens, kind=kind)
    alone = geometry.num_pages(340) * geometry.frames_per_page + geometry.state_frames
    num_frames = alone + alone // 3 if page_tokens else 40
    total = {}
    for seed in range(3):
        engine = Engine.make(
            geometry=geometry, num_frames=num_frames, max_model_len=340, lag=lag, vocab=200
        )
        random_traffic(seed, engine, turns=80)
        for name, count in {**engine.counters, **engine.device.events}.items():
            total[name] = total.get(name, 0) + count
    fired = ["cache_hits"]
    fired += ["waits"] if (kind, page_tokens) != ("attention", 128) else []  # room for one prompt
    fired += ["preemptions"] if page_tokens else ["moves"]
    fired += ["copies"] if page_tokens > GRAIN else []
    fired += ["forks", "forks into a page"] if page_tokens else ["forks"]
    fired += ["folds in place", "folds to new"] if kind != "attention" else []
    fired += ["inert rows"] if lag else []
    assert not [name for name in fired if not total.get(name)], total


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("cache", ["off", "lru"])
@pytest.mark.parametrize("steps", [1, 8, 32])
def test_random_traffic_in_every_mode(exact, cache, steps):
    for seed in range(2):
        engine = Engine.make(
            exact=exact, cache=cache, steps_per_dispatch=steps, num_frames=60, max_slots=9, max_rows=5,
            max_model_len=340,
        )  # fmt: skip
        random_traffic(seed, engine, turns=60)


@pytest.mark.slow
def test_a_long_run_of_random_traffic():
    geometry = make_geometry(page_tokens=16)
    engine = Engine.make(geometry=geometry, num_frames=56, max_rows=8, max_model_len=340, vocab=200)
    random_traffic(12, engine, turns=1000, arrivals=0.2, crash_rate=0.01)
    assert engine.counters["preemptions"] > 5 and engine.counters["cache_leaf_evictions"] > 100


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_traffic_in_any_pool_gives_the_plain_loops_tokens(data):
    draw = data.draw
    kind = draw(st.sampled_from(["hybrid", "hybrid", "attention", "recurrent"]))
    geometry = make_geometry(page_tokens=draw(st.sampled_from([16, 64, 128])), kind=kind)
    alone = geometry.num_pages(240) * geometry.frames_per_page + geometry.state_frames
    engine = Engine.make(
        geometry=geometry, max_model_len=240, lag=draw(st.integers(0, 1)),
        num_frames=alone + 1 + draw(st.integers(0, 40)), max_slots=draw(st.integers(2, 12)),
        max_rows=draw(st.integers(1, 5)), exact=draw(st.booleans()),
        cache=draw(st.sampled_from(["lru", "off"])),
        steps_per_dispatch=draw(st.sampled_from([1, 3, 8])),
        prefill_tokens=draw(st.sampled_from([32, 96, 256])),
    )  # fmt: skip
    trunk = tokens_of(random.Random(draw(st.integers(0, 5))), 150)
    actions = st.one_of(
        st.tuples(st.integers(0, 150), st.integers(0, 60), st.integers(1, 30)), st.just("step"),
        st.just("step"), st.just("abort"),
    )  # fmt: skip
    for action in draw(st.lists(actions, max_size=40)):
        if action == "step":
            engine.step()
        elif action == "abort" and engine.scheduler._sequences:
            names = sorted(engine.scheduler._sequences)
            engine.scheduler.abort(names[draw(st.integers(0, len(names) - 1))])
            engine.scheduler.check_invariants()
        elif action != "abort":
            shared, own, max_tokens = action
            tail = tokens_of(random.Random(draw(st.integers(0, 2))), own)
            if shared + own:
                prompt = trunk[:shared] + tail
                engine.add_siblings(draw(st.integers(1, 3)), prompt, max_tokens=max_tokens)
    engine.run()
    engine.check()

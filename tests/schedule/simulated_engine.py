"""The engine's loop around the scheduler and a device that checks every read, and what both are given."""

from collections import Counter, deque
from dataclasses import dataclass, field, replace

from hybrid_jax.config import CacheConfig, EngineConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.geometry import page_groups, sized_geometry
from hybrid_jax.schedule.bucket import shapes_of
from hybrid_jax.schedule.request import Request
from hybrid_jax.schedule.scheduler import Scheduler
from tests.schedule.simulated_device import SimulatedDevice, plain_loop

GRAIN = 32


def make_geometry(
    *, page_tokens=64, kind="hybrid", grain=GRAIN, windows=(), longest_chunk=128, narrow=False
):
    """Small numbers: a page is 2 frames, a checkpoint 3; `kind` leaves out one of them.

    Args:
        windows: of frames of their own in each page, None for no window; nothing for two frames without.
        longest_chunk: as in the engine's settings.
        narrow: the cache keeps checkpoints in one frame.
    """
    pages, state = kind != "recurrent", kind != "attention"
    geometry = sized_geometry(
        frame_words=64, page_tokens=page_tokens if pages else 0, frames_per_page=2 * pages,
        token_words=2 * pages, state_frames=3 * state, grain=grain, narrow_frames=narrow * state,
    )  # fmt: skip
    if not windows:
        return geometry
    counts = Counter(windows)
    groups = page_groups(
        counts, layers=1, page_tokens=page_tokens, longest_chunk=longest_chunk, grain=grain
    )
    return replace(geometry, page_groups=groups)


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
    device_kind: type[SimulatedDevice] = SimulatedDevice

    @classmethod
    def make(
        cls,
        *,
        device_kind=SimulatedDevice,
        num_frames=400,
        max_slots=100,
        max_model_len=600,
        vocab=50,
        lag=1,
        geometry=None,
        keep=None,
        host_frames=0,
        disk=None,
        speeds=None,
        **options,
    ):
        geometry = geometry or make_geometry()
        cache = options.pop("cache", "adaptive")
        cache = CacheConfig(policy=cache) if isinstance(cache, str) else cache
        engine = EngineConfig(**{"max_rows": 4, "prefill_tokens": 128, "cache": cache} | options)
        scheduler = Scheduler(
            geometry,
            engine,
            num_frames=num_frames,
            max_slots=max_slots,
            max_model_len=max_model_len,
            host_frames=host_frames,
            disk=disk,
            speeds=speeds,
        )
        device = device_kind(
            geometry,
            num_frames=num_frames,
            max_rows=engine.max_rows,
            vocab=vocab,
            exact=engine.exact,
            keep=keep,
        )
        return cls(scheduler, device, vocab, lag, device_kind=device_kind)

    def add(
        self, prompt, *, max_tokens=20, explicit=True, stop_ids=(0,), name=None, stop=None,
        prompt_logprobs=None, **more,
    ):  # fmt: skip
        name = name or f"r{len(self.requests)}"
        limit = max_tokens if explicit else None
        params = SamplingParams(
            max_tokens=limit, temperature=0.0, stop=stop, prompt_logprobs=prompt_logprobs
        )
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
        return [self.add(prompt, sibling_group=group, **options) for _ in range(count)]

    def step(self):
        """One turn of the loop; False when nothing is left to do."""
        planned = self.plan()
        if self.pending and (len(self.pending) > self.lag or not planned):
            self.receive()
            return True
        return planned

    def plan(self):
        """Makes the next plan and runs it; False if there is none."""
        plan = self.scheduler.plan()
        self.scheduler.check_invariants()
        if plan:
            self.check_shapes(plan)
            self.plans.append(plan)
            self.device.execute(plan)
            self.pending.append(plan)
        return bool(plan)

    def receive(self):
        """Takes the results of the oldest plan."""
        for progress in self.scheduler.receive(self.pending.popleft()):
            name = progress.request.request_id
            assert name not in self.ended
            assert progress.new_token_ids or progress.request.output.finish_reason == "error"
            self.reported[name] += progress.new_token_ids
            if progress.finished:
                self.ended.append(name)
        self.scheduler.check_invariants()

    def crash(self):
        """A dispatch fails: the device and all results that are not in are lost."""
        self.scheduler.plan()
        self.recover()

    def recover(self):
        """Starts over as the engine does after an exception: what was reported stays, the rest is computed again."""
        live = []
        for name, request in self.requests.items():
            if name not in self.ended and request.output.finish_reason != "abort":
                request.output.go_back(len(self.reported[name]))
                live.append(request)
        self.scheduler = self.scheduler.restarted(live)
        self.scheduler.check_invariants()
        self.pending.clear()
        below = self.device.below  # that is not lost
        self.device = self.device_kind(
            self.scheduler.geometry, num_frames=self.scheduler.num_frames,
            max_rows=self.scheduler.engine.max_rows, vocab=self.vocab, events=self.device.events,
            exact=self.device.exact, keep=self.device.keep,
        )  # fmt: skip
        self.device.below = below

    def run(self, max_turns=20000):
        turns = 0
        while self.step():
            turns += 1
            assert turns < max_turns, f"no end in sight: {self.scheduler.stats()}"
        assert not self.scheduler.has_work

    def check_shapes(self, plan):
        scheduler, engine = self.scheduler, self.scheduler.engine
        max_pages = scheduler.geometry.num_pages(scheduler.max_model_len)
        if engine.exact:
            assert plan.num_steps <= 1
            assert all(len(row.tokens) <= GRAIN for row in plan.prefill)
            return
        if plan.prefill:
            shape = shapes_of(engine).prefill_bucket(
                num_rows=len(plan.prefill), num_tokens=max(len(row.tokens) for row in plan.prefill),
                num_pages=max(len(row.pages) for row in plan.prefill), max_pages=max_pages,
            )  # fmt: skip
            assert shape.rows * shape.tokens <= engine.prefill_tokens
        if plan.decode:
            assert plan.num_steps <= shapes_of(engine).decode_steps
            shapes_of(engine).decode_bucket(
                num_rows=max(row.row for row in plan.decode) + 1,
                num_pages=max(len(row.pages) for row in plan.decode), max_pages=max_pages,
            )  # fmt: skip

    def check(self):
        """Every request that went on to its end has the plain loop's tokens; nothing is left behind."""
        scheduler = self.scheduler
        for name, request in self.requests.items():
            limit = len(request.prompt) + request.max_tokens
            limit = min(limit, len(request.prompt) + scheduler.max_output(len(request.prompt)))
            expected = plain_loop(
                request.prompt, vocab=self.vocab, stop_ids=request.stop_ids, limit=limit
            )
            assert self.reported[name] == request.output.token_ids
            if request.output.finish_reason in ("abort", "error"):
                assert request.output.token_ids == expected[: len(request.output.token_ids)]
                continue
            assert request.output.token_ids == expected, name
            assert request.output.finish_reason == (
                "stop" if expected[-1] in request.stop_ids else "length"
            )
        assert not scheduler.has_work and not scheduler.seats.running
        assert not scheduler.admission.waiting
        while self.step():  # what is still to be narrowed, and held until then
            pass
        scheduler.reset_prefix_cache()
        scheduler.check_invariants()
        assert scheduler.stats()["free_frames"] == scheduler.num_frames - 1

    @property
    def counters(self):
        return self.scheduler.stats()


def tokens_of(rng, count, vocab=50):
    return [rng.randrange(1, vocab) for _ in range(count)]

"""The engine: a scheduler and a runner taking turns, token ids in and token ids out."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybrid_jax.cache.tree.prefix_order import prefix_order
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.costs import model_costs
from hybrid_jax.engine.kernel_choice import choose_kernels
from hybrid_jax.engine.programs.store import ProgramStore
from hybrid_jax.engine.runner import Pending, Runner
from hybrid_jax.engine.this_device import as_device, device_of, held_bytes, this_device
from hybrid_jax.geometry import make_geometry
from hybrid_jax.schedule.request import Request
from hybrid_jax.schedule.scheduler import Scheduler
from hybrid_jax.sizing.room import find_room


@dataclass(kw_only=True)
class StepOutput:
    """What one step brought one request.

    Attributes:
        request: with `output` and `finish_reason` up to date.
        new_token_ids: its new tokens, the stop token included.
        new_logprobs: one entry per new token when asked for.
        finished: no more will come.
    """

    request: Request
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list = field(default_factory=list)
    finished: bool = False


class Engine:
    """Runs requests on one device.

    While the device works on one plan the host makes the next; tokens feed back on the device.

    Args:
        config: the model. params: its weights, in `engine_config.dtype`.
        engine_config: memory, rows, cache policy and the rest.
        store: where compiled programs are kept between processes, or None.

    Raises:
        ValueError: the memory cannot hold one short sequence, or a setting does not fit the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        engine_config: EngineConfig,
        store: ProgramStore | None = None,
    ) -> None:
        self.geometry = make_geometry(config, engine_config)
        held = held_bytes(params)
        self.device = this_device(held=held)
        place = device_of(params)
        kernels = choose_kernels(
            config, self.geometry, engine_config, as_device(place), place=place, store=store
        )
        made_of = kernels.steps == "pallas"
        self.sizes = find_room(config, engine_config, self.device, held=held, kernels=made_of).sizes
        self.config, self.engine_config = config, engine_config
        room = dict(
            num_frames=self.sizes.num_frames,
            max_slots=self.sizes.max_slots,
            max_model_len=self.sizes.max_model_len,
        )
        self.runner = Runner(
            config, params, engine_config, self.geometry, **room, kernels=kernels, store=store
        )
        costs = model_costs(config, self.geometry)
        self.scheduler = Scheduler(self.geometry, engine_config, costs=costs, **room)
        self._pending: deque[Pending] = deque()
        self._live: dict[str, Request] = {}
        self._reported: dict[str, int] = {}
        self._interrupted = False

    @property
    def kernels(self) -> str:
        """What its steps are made of, "xla" or "pallas"."""
        return self.runner.model.kernels

    @property
    def not_triton(self) -> dict[str, str]:
        """Why Triton kernels do not serve, by operation; see `Kernels`."""
        return self.runner.kernels.not_triton

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that model and pool allow."""
        return self.scheduler.max_output(0)

    @property
    def has_work(self) -> bool:
        """A request is unfinished, or results are outstanding."""
        return bool(self._live or self._pending)

    def order(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Places of prompts that come together, in the order in which they are best added."""
        if len(prompts) < 2 or self.engine_config.cache.policy == "off":
            return list(range(len(prompts)))
        return prefix_order([np.asarray(p, np.int32) for p in prompts], self.geometry.grain)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: its id is in use, its prompt is empty, or it can never fit.
        """
        self._recover()
        request.generation = self.runner.begin()
        self._interrupted = True
        try:
            self.scheduler.add(request)
        except ValueError:
            self._interrupted = False
            raise
        self._reported[request.request_id] = 0
        self._live[request.request_id] = request
        self._interrupted = False

    def abort(self, request_id: str) -> None:
        """Ends a request now; it is not reported again. Unknown ids are ignored."""
        self._recover()
        self._interrupted = True
        self.scheduler.abort(request_id)
        self._live.pop(request_id, None)
        self._interrupted = False

    def step(self) -> list[StepOutput]:
        """Plans and dispatches one turn, and settles the oldest one whose results are due.

        An exception on the way (Ctrl-C too) leaves device memory undefined. It is raised to the caller, and
        the next call of the engine starts over: empty memory, an empty prefix tree, every live request
        queued again with the tokens it has. Nothing reported is lost, and nothing is reported twice.
        """
        self._recover()
        self._interrupted = True
        plan = self.scheduler.plan()
        if plan:
            self._pending.append(self.runner.execute(plan))
        if self._pending and (len(self._pending) > 1 or not plan):
            pending = self._pending[0]
            progress = self.scheduler.receive(pending.plan, pending.read())
            self._pending.popleft()
            touched = [entry.request for entry in progress]
        else:
            touched = []
        results = self._results(touched)
        counts = {entry.request.request_id: len(entry.request.output) for entry in results}
        over = {entry.request.request_id for entry in results if entry.finished}
        live = {i: r for i, r in self._live.items() if i not in over} if over else self._live
        keep = vars(self).update
        # One line, so that an exception finds results unreported or gone, never counted and lost.
        return self._reported.update(counts) or keep(_live=live, _interrupted=False) or results

    def _results(self, requests: list[Request]) -> list[StepOutput]:
        """What is new about some requests."""
        results = []
        for request in requests:
            if self._live.get(request.request_id) is not request:
                continue
            known = self._reported[request.request_id]
            finished = request.finish_reason is not None
            if len(request.output) == known and not finished:
                continue
            results.append(
                StepOutput(
                    request=request,
                    new_token_ids=request.output[known:],
                    new_logprobs=request.logprobs[known:],
                    finished=finished,
                )
            )
        return results

    def _recover(self) -> None:
        """Starts over after an interrupted step: what was computing is lost, what was reported is not."""
        if len(self._reported) > len(self._live):
            self._reported = {request_id: self._reported[request_id] for request_id in self._live}
        if not self._interrupted:
            return
        self._pending.clear()
        self.runner.rebuild()
        # Output the interrupted turn appended but never reported is computed again, with the same noise.
        for request_id, request in self._live.items():
            known = self._reported[request_id]
            del request.output[known:], request.logprobs[known:]
            request.finish_reason = request.stop_reason = None
        self.scheduler = self.scheduler.restarted(self._live.values())
        self._interrupted = False

    # --- around it --------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; running requests go on."""
        self._guarded(self.scheduler.reset_prefix_cache)

    def warmup(
        self,
        progress: Callable[[int, int, str], None] | None = None,
        *,
        logprobs: bool = False,
        adjusts: bool = False,
    ) -> int:
        """Compiles every shape a run can meet; returns how many programs there are.

        Args:
            progress: called with (done, total, name of the program) before each compilation and at the end.
            logprobs, adjusts: the programs that report log-probabilities of the output, and that change logits
                before they are sampled from, too. Other programs, those for log-probabilities of prompts
                among them, are compiled when the first request needs them.
        """
        jobs = self.warmup_jobs(logprobs=logprobs, adjusts=adjusts)
        report = progress or (lambda done, total, name: None)
        for done, (name, job) in enumerate(jobs):
            report(done, len(jobs), name)
            job()
        report(len(jobs), len(jobs), "done")
        return len(jobs)

    def warmup_jobs(
        self, *, logprobs: bool = False, adjusts: bool = False
    ) -> list[tuple[str, Callable[[], None]]]:
        """The programs of `warmup`, each by its name and a call that compiles it; turns may come in between."""
        jobs = self.runner.warmup_jobs(logprobs=logprobs, adjusts=adjusts)
        return [(name, functools.partial(self._guarded, job)) for name, job in jobs]

    def ahead_jobs(
        self, *, logprobs: bool = False, adjusts: bool = False
    ) -> dict[str, Callable[[], None]]:
        """As `Runner.ahead_jobs`."""
        self._recover()
        return self.runner.ahead_jobs(logprobs=logprobs, adjusts=adjusts)

    def _guarded(self, job: Callable[[], None]) -> None:
        """Runs what replaces device memory; after an exception on the way the next call starts over."""
        self._recover()
        self._interrupted = True
        job()
        self._interrupted = False

    def watch_compiling(self, listener: Callable[[int, int], None]) -> None:
        """Has `Compiling.listener` called, in the thread that calls `step`."""
        self.runner.compiling.listener = listener

    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far; any thread may ask."""
        return self.runner.compiling.seconds()

    def stats(self) -> dict[str, int | float]:
        """Counters since the start, and present numbers of requests, frames and cached prefixes."""
        return {
            **self.scheduler.stats(),
            "num_traces": self.runner.num_traces,
            "memory_bytes": self.sizes.state_bytes,
        }

    def describe(self) -> str:
        """The engine's memory in one line."""
        geometry, sizes = self.geometry, self.sizes
        return (
            f"{sizes.num_frames} frames of {geometry.frame_bytes} bytes, page {geometry.page_tokens} tokens x "
            f"{geometry.frames_per_page} frames, checkpoint {geometry.state_frames} frames, rings "
            f"{sizes.ring_bytes} bytes, up to {self.max_model_len} tokens a sequence"
        )

    def close(self) -> None:
        """Frees device memory; the engine cannot be used afterwards."""
        self._live.clear()
        self._pending.clear()
        self.runner.close()

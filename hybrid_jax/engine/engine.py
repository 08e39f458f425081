"""The engine: a scheduler and a runner taking turns, token ids in and token ids out."""

from __future__ import annotations

import contextlib
import functools
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hybrid_jax import __version__
from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.cache.tree.prefix_order import prefix_order
from hybrid_jax.cache.tree.span_tree import Watcher
from hybrid_jax.config import Backend, EngineConfig, ModelConfig
from hybrid_jax.config.mesh import MeshShape
from hybrid_jax.config.speculation import drafting_model
from hybrid_jax.costs import model_costs, step_costs
from hybrid_jax.engine import damage
from hybrid_jax.engine.kernel_choice import choose_kernels
from hybrid_jax.engine.loop_trial import LoopFailed
from hybrid_jax.engine.programs.compiling import Count, WarmUp
from hybrid_jax.engine.programs.store import ProgramStore
from hybrid_jax.engine.runner import Pending, Runner
from hybrid_jax.engine.this_device import (
    as_device,
    device_of,
    first_devices,
    held_bytes,
    peak_memory_bytes,
    this_device,
)
from hybrid_jax.engine.tiers.open_disk import open_disk, root_of_engine
from hybrid_jax.engine.tiers.prompt_clock import PromptClock
from hybrid_jax.geometry import Geometry, make_geometry
from hybrid_jax.mesh.hosts import PARTS, Hosts
from hybrid_jax.mesh.joins import divided_form
from hybrid_jax.mesh.shards import Shards
from hybrid_jax.process.own_settings import own_settings
from hybrid_jax.schedule.plan import Plan
from hybrid_jax.schedule.request import NewTokens, Request
from hybrid_jax.schedule.scheduler import Scheduler
from hybrid_jax.schedule.tiers.arrivals import arrive, frames_of, places_in, wanted_frames
from hybrid_jax.schedule.tiers.speeds import Speeds
from hybrid_jax.sizing.room import find_room
from hybrid_jax.tiers.disk import Disk
from hybrid_jax.tiers.form import Form
from hybrid_jax.tiers.hand_over import Receiver
from hybrid_jax.tiers.parcel import Frames
from hybrid_jax.tiers.prefix_file import TOKENS, read_prefix, write_prefix

LOG = logging.getLogger("hybrid_jax.engine")


class Engine:
    """Runs requests on one device.

    While the device works on one plan, the host makes the next. Sampled tokens are fed again on the device. A call of
    several steps returns before they are done (`engine/programs/loops.py`).

    Args:
        config: the model. params: its weights, in `engine_config.dtype`.
        engine_config: memory, rows, cache policy and the rest.
        store: where compiled programs are kept between processes, or None.
        devices: those that the model is divided over if `engine_config.tp` is not 1; None for the first ones.
        side: in place of a tier on disk, the end of what goes to another engine, or comes from it: makes it of the
            engine's geometry and form.
        sharing: engines that share the memory of a host: this one and its replicas.
        hosts: the processes that these devices belong to; None if that is this process alone.

    Attributes:
        shards: these devices; None for one.
        hosts: as given.
        listed: what `warm_ups` returned last, by (logprobs, adjusts).

    Raises:
        ValueError: the memory cannot hold one short sequence, or a setting does not fit the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        engine_config: EngineConfig,
        store: ProgramStore | None = None,
        devices: Sequence[jax.Device] | None = None,
        side: Callable[[Geometry, Form], Disk] | None = None,
        sharing: int = 1,
        hosts: Hosts | None = None,
    ) -> None:
        self.hosts = hosts
        config = drafting_model(config, engine_config.speculation)
        self.config, self.engine_config = config, engine_config
        self.shards = self._divide(devices)
        if self.shards is not None:  # from here on, the model is that of each device
            config, params = self.shards.local, self.shards.place(params)
        self.geometry = make_geometry(config, engine_config)
        held = held_bytes(params)
        self.device = this_device(held=held, shards=engine_config.tp * sharing, hosts=hosts)
        self._place = place = device_of(params) if self.shards is None else self.shards.first
        kernels = choose_kernels(
            config, self.geometry, engine_config, as_device(place), place=place, store=store
        )
        self.sizes = find_room(
            config, engine_config, self.device, held=held, backend=kernels.backend
        ).sizes
        room = dict(
            num_frames=self.sizes.num_frames,
            max_slots=self.sizes.max_slots,
            max_model_len=self.sizes.max_model_len,
        )
        self.form = divided_form(self.config, engine_config, self.geometry)
        if side is not None:
            self.disk: Disk | None = side(self.geometry, self.form)
        else:
            self.disk = open_disk(self.config, self.whole(params), engine_config, self.form, place)
        has_tiers = bool(self.sizes.host_frames) or self.disk is not None
        self.runner = Runner(
            config,
            params,
            engine_config,
            self.geometry,
            **room,
            kernels=kernels,
            store=store,
            shards=self.shards,
            moves_frames=has_tiers,
        )
        if isinstance(self.disk, Receiver):
            self.disk.bring = self.runner.bring
        if hosts is not None:
            hosts.agree("start", self._told_of(params))
        costs = model_costs(config, self.geometry)
        # Steps read checkpoints as rows have them.
        whole = model_costs(config, replace(self.geometry, narrow=None), whole=True)
        of_steps = step_costs(config, engine_config, whole, on_cpu=self.device.is_host)
        speeds = Speeds() if has_tiers and engine_config.cache.loads == "faster" else None
        self.runner.host_frames.speeds = speeds
        self._clock = PromptClock(speeds, costs)
        self.scheduler = Scheduler(
            self.geometry,
            engine_config,
            costs=costs,
            step_costs=of_steps,
            speeds=speeds,
            host_frames=self.sizes.host_frames,
            disk=self.disk,
            **room,
        )
        self._pending: deque[Pending] = deque()
        # Made and not dispatched yet. The host may have given away what it reads; later plans are dispatched after it.
        self._next: Plan | None = None
        self._live: dict[str, Request] = {}
        self._books_open = False
        self._watcher: Watcher | None = None
        self.listed: dict[tuple[bool, bool], list[WarmUp]] = {}

    def _told_of(self, params: Any) -> str:
        """What processes that run a model together must have alike, as checksums and sizes."""
        alike = [leaf for leaf in jax.tree.leaves(params) if leaf.is_fully_replicated]
        crc = 0
        for leaf in alike:  # norms and the like; the rest of the weights is in parts
            crc = zlib.crc32(np.asarray(leaf).tobytes(), crc)
        settings = (
            f"{field.name}={getattr(self.engine_config, field.name)!r}"
            for field in fields(self.engine_config)
        )
        return PARTS.join(
            (
                f"model [{zlib.crc32(repr(self.config).encode()):08x}]",
                f"weights that all have [{crc:08x}]",
                *settings,
                f"{self.sizes.num_frames} frames",
                f"room for {self.sizes.max_model_len} tokens",
                f"hybrid_jax {__version__}",
                f"jax {jax.__version__}",
            )
        )

    def _divide(self, devices: Sequence[jax.Device] | None) -> Shards | None:
        count = self.engine_config.tp
        if count == 1:
            return None
        if devices is None:
            [devices] = first_devices(MeshShape(tp=count))
        return Shards(self.config, devices)

    def own_settings(self) -> contextlib.AbstractContextManager[None]:
        """Jax's settings for the thread that runs this engine: its own, on the device of the weights."""
        return own_settings(jax_default_device=self._place)

    @property
    def backend(self) -> Backend:
        """What its steps are made of."""
        return self.runner.model.backend

    @property
    def not_triton(self) -> dict[str, str]:
        """Why Triton kernels are not used, by operation; see `Kernels`."""
        return self.runner.kernels.not_triton

    @property
    def about_products(self) -> str:
        """Which products of few rows serve on a CPU, in words; "" where there is no choice."""
        return self.runner.kernels.products

    @property
    def about_loops(self) -> str:
        """Where the loop over the steps of a dispatch runs; "" where there is no choice, such as on a CPU."""
        loops = any(kind.steps for kind in self.runner.kinds)
        return self.runner.loops.about if loops and not self.device.is_host else ""

    @property
    def about_disk(self) -> str:
        """What the folder on disk may hold, and holds, in words; "" without one."""
        return "" if self.disk is None else self.disk.about

    @property
    def left_to_xla(self) -> dict[str, str]:
        """Operations that XLA does although kernels do the rest, and why; see `Kernels`."""
        return self.runner.kernels.left_to_xla

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens, that model and pool allow."""
        return self.scheduler.max_output(0)

    @property
    def longest_prompt(self) -> int:
        """The longest prompt, in tokens, of which numbers can be read without generating anything."""
        return self.scheduler.longest_prompt

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or results are outstanding."""
        return bool(self._live or self._pending or self._next)

    @property
    def has_saves(self) -> bool:
        """Whether prefixes wait to be written to the disk, for which a turn may be taken."""
        return self.scheduler.has_saves

    def order(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The order in which prompts that come together are best added, as indices into `prompts`."""
        if len(prompts) < 2 or self.engine_config.cache.policy == "off":
            return list(range(len(prompts)))
        return prefix_order([np.asarray(p, np.int32) for p in prompts], self.geometry.grain)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: its id is in use, its prompt is empty, or it can never fit.
        """
        with self._books(unchanged_by=ValueError):
            self.runner.programs.serving.note_requests(self._live.values())
            request.notes.generation = self.runner.programs.serving.begin(request)
            request.notes.num_reported = len(request.output.token_ids)
            self.scheduler.add(request)
            self._live[request.request_id] = request

    def abort(self, request_id: str) -> None:
        """Ends a request now; it is not reported again. Unknown ids are ignored."""
        with self._books():
            self.scheduler.abort(request_id)
            self._live.pop(request_id, None)

    def step(self) -> list[NewTokens]:
        """Plans and dispatches one turn, and receives the results of the oldest turn if they are due.

        An exception on the way leaves device memory undefined. It is raised to the caller, and the next call of the
        engine starts over with empty memory and an empty prefix tree. Every live request is queued again with the
        tokens it has. Nothing that was reported is lost, and nothing is reported twice.
        """
        with self._books() as reported:
            plan, self._next = self._next or self.scheduler.plan(), None
            if plan:
                self.runner.programs.serving.note_requests(self._live.values())
                missing = self.runner.missing(plan)
                if self._pending and missing:
                    # Nobody should wait for tokens that are there until the plan's programs are compiled.
                    self._next = plan
                    reported += self._receive()
                    return reported
                try:
                    self._dispatch(plan, missing)
                except LoopFailed:
                    self._start_over()
                    return reported
            if self._pending and (len(self._pending) > 1 or not plan):
                reported += self._receive()
            return reported

    def _dispatch(self, plan: Plan, missing: Sequence[tuple]) -> None:
        """Dispatches a plan; `missing` is what the runner says of it.

        Raises:
            HostsDiffer: another process has made another plan.
        """
        if self.hosts is not None:
            self.hosts.agree("plan", self.runner.told_of(plan))
        self._clock.dispatches(plan, compiles=bool(missing))
        self._pending.append(self.runner.execute(plan, missing))

    def _receive(self) -> list[NewTokens]:
        """Receives the results of the oldest turn, and waits for them if they are not there."""
        plan = self._pending.popleft().read()
        self._clock.received(plan)
        return self.scheduler.receive(plan)

    @contextlib.contextmanager
    def _books(
        self, *, unchanged_by: type[Exception] | tuple[()] = ()
    ) -> Iterator[list[NewTokens]]:
        """Goes around every change of requests, plans and device memory. In the middle of a change they do not match.

        After an exception other than `unchanged_by` they are left as they are, and the next change starts over. Entries
        put into the list count as reported if no exception comes.
        """
        self._recover()
        reported: list[NewTokens] = []
        self._books_open = True
        try:
            yield reported
        except unchanged_by:
            self._books_open = False
            raise
        for entry in reported:
            entry.request.notes.num_reported = len(entry.request.output.token_ids)
            if entry.finished:
                del self._live[entry.request.request_id]
        self._books_open = False

    def _recover(self) -> None:
        """Starts over after a change that failed. What was being computed is lost; what was reported is not."""
        if self._books_open:
            LOG.warning("a turn failed: all requests start over from the tokens that were reported")
            self._start_over()
            self._books_open = False

    def _start_over(self) -> None:
        """Starts with empty memory. Every live request is queued again with the tokens that were reported."""
        self._pending.clear()
        self._clock.forget()
        self._next = None
        self.runner.rebuild()
        # Output that the failed turn appended but never reported is computed again, with the same noise.
        for request in self._live.values():
            request.output.go_back(request.notes.num_reported)
        self.scheduler = self.scheduler.restarted(self._live.values())
        self._watch()

    # --- one prefix -------------------------------------------------------------------------------

    @functools.cached_property
    def root(self) -> str:
        """As `root_of_engine`. The first look reads all weights."""
        if self.disk is not None and self.disk.is_disk:
            return self.disk.folder.root
        parts = self.config, self.whole(self.runner.params), self.engine_config, self.form
        return root_of_engine(*parts, self._place)

    def whole(self, params: dict) -> Any:
        """The weights as one device would have them."""
        return params if self.shards is None else self.shards.whole(params)

    def save_prefix(self, file: Path, tokens: Sequence[int]) -> int | None:
        """Writes what the arena has of a prompt to a file; returns its tokens, 0 if that is nothing.

        None means that a plan in flight must be received first, and that it can be asked for again after a turn.

        Raises:
            ValueError: the cache is off, or the model is over several processes. OSError: of the system.
        """
        self._require_prefixes()
        with self._books(unchanged_by=OSError):
            self._dispatch_next()
            tree, geometry = self.scheduler.memory.tree, self.geometry
            assert tree is not None, tree
            prompt = np.asarray(tokens, np.int32)
            narrowing = self.scheduler.memory.narrowing
            if narrowing is not None and narrowing.is_due:
                return None
            if not (hit := tree.match(prompt, least=0).found[ARENA]).hit_len:
                return 0
            length = hit.hit_len
            places = places_in(wanted_frames(geometry, length))
            copies = self.runner.copy_out(frames_of(tree, hit.node, length, places))
            frames = Frames.of(places, [np.asarray(copy) for copy in copies])
            arrays = self.form.read_prefix(length, frames)
            write_prefix(file, self.root, prompt[:length], arrays)
            return length

    def load_prefix(self, file: Path) -> int:
        """Puts what `save_prefix` has written into the arena; returns its tokens.

        Raises:
            ValueError: the cache is off, or the model is over several processes; the file is damaged, or of another
                model; or there is no room.
            OSError: of the system.
        """
        self._require_prefixes()
        geometry = self.geometry
        arrays = read_prefix(file, self.root, self.form).arrays
        tokens = arrays[TOKENS]
        frames = self.form.zeros(places_in(wanted_frames(geometry, len(tokens))))
        self.form.write_prefix(len(tokens), arrays, frames)
        with self._books():
            self._dispatch_next()
            tree = self.scheduler.memory.tree  # not that of before a failure
            assert tree is not None, tree
            arrived = arrive(tree, geometry, tokens, frames)
            if arrived is not None:
                self.runner.write_frames(arrived[1])
        if arrived is None:
            raise ValueError(f"there is no room for the prefix of {file}; raise memory")
        return len(tokens)

    def cached_tokens(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt the arena can resume after."""
        tree = self.scheduler.memory.tree
        if tree is None:
            return 0
        return tree.match(np.asarray(tokens, np.int32), least=0).found[ARENA].hit_len

    def cached_tokens_of(self, file: Path) -> int:
        """`cached_tokens` of the prompt in a file; 0 if the file cannot be loaded."""
        try:
            return self.cached_tokens(
                read_prefix(file, self.root, self.form).arrays[TOKENS].tolist()
            )
        except (ValueError, OSError):
            return 0

    def _require_prefixes(self) -> None:
        if self.scheduler.memory.tree is None:
            raise ValueError("the cache is off; choose a policy for it")
        if self.hosts is not None:
            raise ValueError("a model over several processes cannot save or load a prefix yet")

    def _dispatch_next(self) -> None:
        """Dispatches a plan that was put off, or one that narrows: the tree has what they are still to write."""
        plan, self._next = self._next, None
        narrowing = self.scheduler.memory.narrowing
        if not plan and narrowing is not None and narrowing.is_due:
            plan = self.scheduler.plan() or None
        if plan:
            self._dispatch(plan, self.runner.missing(plan))

    # --- around it --------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; running requests go on."""
        with self._books():
            self.scheduler.reset_prefix_cache()

    def warm_ups(self, *, logprobs: bool = False, adjusts: bool = False) -> list[WarmUp]:
        """Programs that compile every shape a run can meet. Turns may come between their calls.

        Args:
            logprobs, adjusts: also the programs that report log-probabilities of the output, and those that change
                logits before sampling. Other programs, such as those for log-probabilities of prompts, are compiled
                when the first request needs them.
        """
        self._recover()
        programs = self.runner.warm_ups(logprobs=logprobs, adjusts=adjusts)
        found = [p._replace(run=functools.partial(self._compile, p.run)) for p in programs]
        self.listed[logprobs, adjusts] = found
        return found

    def _compile(self, run: Callable[[], object]) -> None:
        """Compiles a program by running it. This replaces device memory."""
        with self._books():
            try:
                run()
            except LoopFailed:
                self._start_over()
                run()

    def watch_cache(self, watcher: Watcher) -> None:
        """Has somebody told where prompts can resume: now, and whenever that changes, in the thread of `step`."""
        self._watcher = watcher
        self._watch()

    def _watch(self) -> None:
        tree = self.scheduler.memory.tree
        if self._watcher is not None and tree is not None:
            tree.watch(self._watcher)

    def expect_everything(self) -> None:
        """Says that requests to come will ask for more than tokens: programs compiled from now on can do everything."""
        self.runner.programs.serving.asks_more = True

    def watch_compiling(self, listener: Callable[[str, Count | None], None]) -> None:
        """Sets `Compiling.listener`, which is called in the thread that calls `step`."""
        self.runner.programs.compiling.listener = listener

    @property
    def keeps_programs(self) -> bool:
        """As `Programs.kept`."""
        return self.runner.programs.kept

    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far; any thread may ask."""
        return self.runner.programs.compiling.seconds()

    def peak_memory_bytes(self) -> int | None:
        """See `this_device.peak_memory_bytes`; any thread may ask."""
        return peak_memory_bytes(self._place)

    def all_logprobs(self, hidden: np.ndarray) -> np.ndarray:
        """As `Runner.all_logprobs`."""
        return self.runner.all_logprobs(hidden)

    def where_damaged(self) -> str:
        """Where to look if the model's numbers are not finite."""
        try:
            return damage.words(self.damaged_weights, self.engine_config.dtype)
        except Exception:  # such as no memory for it; other requests must go on
            return "the weights could not be looked at"

    @functools.cached_property
    def damaged_weights(self) -> list[str]:
        """Names of the weights that are not finite. The first look reads all of them."""
        return damage.not_finite(self.runner.params)

    def stats(self) -> dict[str, int | float]:
        """Counters since the start, and the present numbers of requests, frames and cached prefixes."""
        return {
            **self.scheduler.stats(),
            "num_traces": self.runner.programs.num_traces,
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

    def _write_rest(self) -> None:
        """Takes turns until nothing waits to be written. Requests that still run are given up."""
        if self._books_open:
            return  # a turn failed, and what is in memory is lost
        for request_id in list(self._live):
            self.abort(request_id)
        while self._pending or self._next or self.scheduler.has_work:
            self.step()

    def close(self) -> None:
        """Writes what waits for the disk, and frees device memory; the engine cannot be used afterwards."""
        if self.disk is not None:
            try:
                self._write_rest()
            except Exception as error:
                LOG.warning("not everything was written to the disk: %r", error)
            self.disk.close()
        self._live.clear()
        self._pending.clear()
        self._next = None
        self.runner.close()

"""Starts workers, and makes one `Front` of them."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hybrid_jax.api.completions import Job
from hybrid_jax.api.options import options_of_prefill
from hybrid_jax.api.progress_bar import ProgressOption, progress_of
from hybrid_jax.api.threads.front import Front
from hybrid_jax.api.threads.prefill_side import Forwarding, PrefillSide
from hybrid_jax.api.threads.replicas import Replicas, routers_of
from hybrid_jax.api.workers.link import (
    STARTING,
    Frames,
    Link,
    WorkerLost,
    receive_from_worker,
)
from hybrid_jax.api.workers.messages import Alive, NotStarted, Ready, Start
from hybrid_jax.api.workers.process import start_process
from hybrid_jax.api.workers.worker_loop import WorkerLoop
from hybrid_jax.byte_sizes import counted
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.config.checks import is_integer
from hybrid_jax.config.mesh import read_mesh
from hybrid_jax.tiers.chain import root_of
from hybrid_jax.tiers.hand_over import HandOver

# How many workers a machine may have: more are a mistake, and a processor has no time for them.
LEAST_LIMIT, PER_PROCESSOR = 16, 4
ROOT = root_of("replicas")  # of what is between the sides of a hand-over; all have the same weights


@dataclass(frozen=True)
class Worker:
    """A worker that has made its `LLM`."""

    link: Link
    frames: Frames
    ready: Ready


@dataclass(frozen=True)
class Workers:
    """Workers with the same model; in the place of `Started`.

    Attributes:
        all_: the workers.
        link: starts another one in the place of one that has ended, by its number.
        start: what each was told first.
    """

    all_: Sequence[Worker]
    link: Callable[[int], Link]
    start: Start

    @property
    def config(self) -> ModelConfig:
        """Of the model."""
        return self._first.facts.config

    @property
    def engine_config(self) -> EngineConfig:
        """Of each engine."""
        return self._first.facts.engine_config

    @property
    def weight_bytes(self) -> int:
        """Of one worker."""
        return self._first.weight_bytes

    @property
    def stored_dtype(self) -> str:
        """As in `Started`."""
        return self._first.stored_dtype

    def digest(self) -> str:
        """As in `Started`."""
        return self._first.digest

    @property
    def _first(self) -> Ready:
        """Of the first worker that generates."""
        return next(worker.ready for worker in self.all_ if worker.link.side != "prefill")

    def threads(self, *, record: Callable[[Job], None], quiet: bool) -> Front:
        """What runs calls on them."""
        sides = [worker.link.side for worker in self.all_]
        costs = [worker.ready.costs for worker in self.all_]
        prefill, hand_over, routers = None, None, routers_of(costs, sides)
        if "prefill" in routers:
            forwarding = Forwarding()
            hand_over = HandOver(ROOT, came=forwarding.came, ended=forwarding.ended)
            prefill = PrefillSide(
                hand_over,
                routers["prefill"],
                grain=max(each.grain for each in costs),
                chunk=self.all_[0].ready.facts.engine_config.prefill_tokens,
                forwarding=forwarding,
            )

        def loop_of(replica: int, worker: Worker) -> WorkerLoop:
            loop = WorkerLoop(worker.link, worker.frames, worker.ready, record)
            loop.tell_cache = functools.partial(routers[sides[replica]].tell, replica)
            loop.hand_over = hand_over
            return loop

        def revive(replica: int) -> WorkerLoop:
            return loop_of(replica, self._another(replica))

        loops = [loop_of(replica, worker) for replica, worker in enumerate(self.all_)]
        return Replicas(loops, routers=routers, prefill=prefill, revive=revive)

    def _another(self, number: int) -> Worker:
        """A worker in the place of one that has ended.

        Raises:
            WorkerLost: it did not start, or is not like the others.
        """
        link = self.link(number)
        try:
            [found] = ready_workers([link], self.start, False)
            _check_alike([self.all_[0], found])
            facts = self.all_[number].ready.facts  # of the one before
            room, needed = found.ready.facts.max_model_len, facts.max_model_len
            if room < needed:
                raise WorkerLost(
                    f"{link.about} has room for sequences of {room} tokens, and the others for {needed}"
                )
        except BaseException:
            link.kill()
            raise
        return replace(found, ready=found.ready._replace(facts=facts))


class Links(ABC):
    """Starts processes or the like that can become workers.

    Args:
        replicas: how many, as in `LLM`.
        options: of `LLM`, whose meshes say how they are divided.

    Raises:
        ValueError: the number or a mesh is not what it should be.

    Attributes:
        mesh: how many there are, and the devices of each.
    """

    def __init__(self, replicas: int | str, options: Mapping[str, Any]) -> None:
        count, prefill = _counts(replicas)
        mesh = options.get("mesh")
        if mesh is not None and (not isinstance(mesh, str) or read_mesh(mesh).num_replicas != 1):
            raise ValueError(
                f"LLM: with replicas={count}, mesh says how each of them is divided, like 'tp=2'; got {mesh!r}"
            )
        own = options_of_prefill(options)["mesh"]
        self.mesh = read_mesh(mesh)._replace(
            dp=count - prefill, prefill=prefill, prefill_tp=read_mesh(own).tp
        )

    def devices_of(self, number: int) -> range:
        """The devices of a worker, where all are on one machine."""
        first = sum(self.mesh.counts[:number])
        return range(first, first + self.mesh.counts[number])

    def side(self, number: int) -> Literal["prefill", "decode", ""]:
        """As `Link.side`, of a worker."""
        if not self.mesh.prefill:
            return ""
        return "prefill" if number < self.mesh.prefill else "decode"

    @abstractmethod
    def first(self) -> list[Link]:
        """Starts all. If one does not start, none is left."""

    @abstractmethod
    def another(self, number: int) -> Link:
        """Starts one in the place of one that has ended."""


class Processes(Links):
    """Processes of this machine. The arguments are those of `Links`."""

    def __init__(self, replicas: int | str, options: Mapping[str, Any]) -> None:
        super().__init__(replicas, options)
        processors = os.cpu_count() or 1
        most = max(LEAST_LIMIT, PER_PROCESSOR * processors)
        if self.mesh.num_replicas > most:
            raise ValueError(
                f"LLM: replicas must be at most {most} on this machine, which has {counted(processors, 'processor')}; "
                f"got {self.mesh.num_replicas}"
            )

    def first(self) -> list[Link]:
        """As `Links.first`."""
        found: list[Link] = []
        try:
            for number in range(self.mesh.num_replicas):
                found.append(self.another(number))
        except BaseException:
            kill_all(found)
            raise
        return found

    def another(self, number: int) -> Link:
        """As `Links.another`."""
        link = start_process(number, self.mesh.num_replicas, cards=self.devices_of(number))
        link.side = self.side(number)
        return link


def _counts(replicas: Any) -> tuple[int, int]:
    """How many workers there are, and how many of them only compute prompts.

    Raises:
        ValueError: it is neither a number nor the numbers of both sides.
    """
    if isinstance(replicas, str) and replicas.strip().isdigit():
        replicas = int(replicas)
    if isinstance(replicas, str):
        with suppress(ValueError):
            shape = read_mesh(replicas)
            if shape.prefill and shape.tp == 1:
                return shape.num_replicas, shape.prefill
    if not is_integer(replicas) or replicas < 1:
        raise ValueError(
            f"LLM: replicas must be an integer of at least 1, or like 'prefill=1,decode=2', got {replicas!r}"
        )
    return int(replicas), 0


def kill_all(links: Sequence[Link]) -> None:
    """Ends what is at the other ends."""
    for link in links:
        link.kill()


def start_workers(links: Links, start: Start, progress: ProgressOption) -> Workers:
    """Starts workers, each with the same model and options.

    Args:
        links: starts what they run in.
        start: what each is told first.
        progress: as in `LLM`, of workers that are ready.

    Raises:
        WorkerLost: one has ended while it started. What the `LLM` of a worker raises.
    """
    found = links.first()
    try:
        return Workers(ready_workers(found, start, progress), links.another, start)
    except BaseException:
        kill_all(found)
        raise


def ready_workers(links: Sequence[Link], start: Start, progress: ProgressOption) -> list[Worker]:
    """Has the workers at the other ends make their `LLM`s, all at once, and waits for them.

    Raises:
        WorkerLost: one has ended, or has another model. What the `LLM` of a worker raises.
    """
    both = [(link, Frames(link.about)) for link in links]
    for link, frames in both:
        with suppress(OSError):  # it has ended, which the next look finds
            link.send(frames.pack_one(start._replace(sharing=link.sharing, side=link.side)))
    found: list[Worker] = []
    with progress_of(progress, "starting") as report:
        for link, frames in both:
            report(len(found), len(links))
            found.append(Worker(link, frames, _ready(link, frames)))
    _check_alike(found)
    return _with_same_lengths(found)


def _ready(link: Link, frames: Frames) -> Ready:
    while True:
        try:
            [first] = frames.unpack(receive_from_worker(link, STARTING))
        except TimeoutError as error:
            raise WorkerLost(f"LLM: {link.about} did not start: {error}") from None
        except (EOFError, OSError):
            raise WorkerLost(f"LLM: {link.about} did not start: {link.why_lost()}") from None
        match first:
            case Alive():
                continue
            case Ready():
                return first
            case NotStarted():
                raise first.error
            case _:
                raise WorkerLost(f"LLM: {link.about} did not say that it is ready")


def _check_alike(workers: Sequence[Worker]) -> None:
    """WorkerLost if weights differ, as where a folder of the same name holds another model on another machine."""
    first, *others = workers
    for other in others:
        if other.ready.digest != first.ready.digest:
            raise WorkerLost(
                f"LLM: the weights of {other.link.about} are not those of {first.link.about} (digests "
                f"{other.ready.digest[:8]} and {first.ready.digest[:8]}); give all the same model and dtype"
            )


def _with_same_lengths(workers: Sequence[Worker]) -> list[Worker]:
    """Workers that take the longest sequence that all of them have room for."""
    facts = [worker.ready.facts for worker in workers]
    longest = min(each.max_model_len for each in facts)
    prompt = min(each.longest_prompt for each in facts)
    same = [each._replace(max_model_len=longest, longest_prompt=prompt) for each in facts]
    return [
        replace(worker, ready=worker.ready._replace(facts=own))
        for worker, own in zip(workers, same, strict=True)
    ]


def found_there(model: str | Path | None) -> str | None:
    """A model as another process finds it: a folder by its whole path, and anything else by its name."""
    if model is None:
        return None
    return os.path.abspath(model) if os.path.isdir(model) else os.fspath(model)

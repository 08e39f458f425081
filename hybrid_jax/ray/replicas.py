"""An `LLM` whose engines are in actors of a Ray cluster."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import ray
from ray.exceptions import RayError

from hybrid_jax.api.llm import LLM
from hybrid_jax.api.options import LoadOptions
from hybrid_jax.api.progress_bar import ProgressOption
from hybrid_jax.api.workers.link import Link, WorkerLost
from hybrid_jax.api.workers.starting import Links, kill_all
from hybrid_jax.ray.link import RayLink, SeatActor

LOG = logging.getLogger("hybrid_jax.engine")
KNOCKS = 5.0  # seconds that a cluster has to answer in
PATIENCE = 10.0  # seconds until the caller is told that Ray has no place for an actor yet


def start_llm(
    model: str | Path | None = None,
    *,
    replicas: int | str = 1,
    address: str | None = None,
    actor_options: Mapping[str, Any] | None = None,
    progress: ProgressOption = None,
    **options: Unpack[LoadOptions],
) -> LLM:
    """An `LLM` whose engines are actors of a Ray cluster, each with a whole model.

    Ray chooses the machines. If the cluster has GPUs, each actor gets as many as `mesh` asks for, or one. All that
    `LLM` says of `replicas` holds for them.

    Args:
        model: as in `LLM`. Each machine must have its files, under the same path.
        replicas: how many actors, or the numbers of both sides, as in `LLM`.
        address: of the cluster, as `ray.init` takes it: "auto" for the one that this machine belongs to, "HOST:PORT",
            or "local" for one that is started here. None for what `ray.init()` finds. If this process is connected with
            a cluster already, it is that one.
        actor_options: for `ray.remote`, such as {"num_gpus": 2} or {"scheduling_strategy": "SPREAD"}.
        progress, **options: of `LLM`.

    Raises:
        ValueError: no cluster is there, or as `LLM`.
        WorkerLost: an actor has ended while it started.

    Example:
        >>> from hybrid_jax.ray import start_llm
        >>> with start_llm(replicas=2, address="local", quiet=True) as llm:  # doctest: +SKIP
        ...     outputs = llm.generate(["import ", "def add(a, b):\\n"])
    """
    if not isinstance(address, str | None):
        raise ValueError(
            f"start_llm: address must be 'auto', 'HOST:PORT' or 'local', got {address!r}"
        )
    if not isinstance(actor_options, Mapping | None):
        raise ValueError(
            f'start_llm: actor_options must be a dict, such as {{"num_gpus": 2}}, got {actor_options!r}'
        )
    links = Actors(replicas, options, actor_options or {})
    connect(address)
    return LLM._elsewhere(model, links, progress=progress, **options)


class Actors(Links):
    """Actors of the cluster that this process is connected with.

    Args:
        replicas, options: as in `Links`.
        for_ray: options of the actors.
    """

    def __init__(
        self, replicas: int | str, options: Mapping[str, Any], for_ray: Mapping[str, Any]
    ) -> None:
        super().__init__(replicas, options)
        self._for_ray = for_ray
        self._places: dict[int, tuple[str, int, int]] = {}  # node, number and count there

    def first(self) -> list[Link]:
        """As `Links.first`."""
        found = [self._start(number) for number in range(self.mesh.num_replicas)]
        try:
            _place(found)
            nodes, begun = Counter(link.node for link in found), Counter[str]()
            for link in found:
                self._begin(link, begun[link.node], nodes[link.node])
                begun[link.node] += 1
        except BaseException:
            kill_all(found)
            raise
        return [*found]

    def another(self, number: int) -> Link:
        """As `Links.another`."""
        link = self._start(number)
        try:
            _place([link])
            node, own, count = self._places[number]
            if link.node != node:  # beside those that are there
                count = 1 + sum(where == link.node for where, *_ in self._places.values())
                own = count - 1
            self._begin(link, own, count)
        except BaseException:
            link.kill()
            raise
        return link

    def _begin(self, link: RayLink, number: int, count: int) -> None:
        self._places[link.number] = link.node, number, count
        link.begin(number, count)

    def _start(self, number: int) -> RayLink:
        own = len(self.devices_of(number))
        gpus = {"num_gpus": own} if ray.cluster_resources().get("GPU") else {}
        try:
            actor = SeatActor.options(**{**gpus, **self._for_ray}).remote()
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"start_llm: Ray takes no actor with actor_options={dict(self._for_ray)!r}: {error}"
            ) from error
        link = RayLink(actor, number)
        link.side = self.side(number)
        return link


def _knock(address: str | None) -> None:
    """OSError if nobody answers at HOST:PORT; Ray itself tries for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCKS).close()


def _place(links: Sequence[RayLink]) -> None:
    """Waits until Ray has placed actors; says so if that takes long.

    Raises:
        WorkerLost: one has ended.
    """
    for link in links:
        try:
            if not link.place(PATIENCE):
                LOG.warning(
                    "waiting for Ray to place %s: the cluster has %s in all, and %s are free",
                    link.about,
                    _words(ray.cluster_resources()),
                    _words(ray.available_resources()),
                )
                link.place()
        except RayError as error:
            raise WorkerLost(f"LLM: {link.about} did not start: {error}") from error


def _words(resources: Mapping[str, float]) -> str:
    """CPUs and GPUs of a cluster."""
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"


def connect(address: str | None) -> None:
    """Connects this process with a cluster, unless it is connected already.

    Raises:
        ValueError: none is there.
    """
    if ray.is_initialized():
        return
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"no Ray cluster answers at {address or 'the default address'}: {error}; start one with `ray start "
            "--head`, or give 'local' for one on this machine"
        ) from error

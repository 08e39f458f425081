"""The engine's router over a fleet on virtual time."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from hybrid_jax.cluster.router import ReplicaCosts, Router
from hybrid_jax.cluster.watch import TreeWatcher
from hybrid_jax.sim.prefix_cache.virtual_engine import VirtualEngine
from hybrid_jax.sim.routing.rivals import Replica


class OwnRouting:
    """`Router`, told by the trees of the replicas what they have.

    Args:
        model: what requests cost a replica; None for what `VirtualEngine` has.
    """

    router: Router

    def __init__(self, model: ReplicaCosts | None = None) -> None:
        self._model = model

    def begin(self, engines: Sequence[Replica]) -> None:
        """As in `Routing`."""
        model = self._model
        if model is None:
            assert isinstance(engines[0], VirtualEngine), engines[0]
            model = costs_of(engines[0])
        self.router = Router(len(engines), model)
        for replica, engine in enumerate(engines):
            self.watch(replica, engine)

    def watch(self, replica: int, engine: Replica) -> None:
        """Has an engine's tree tell what it has."""
        tree = engine.tree
        if tree is not None:
            tell = functools.partial(self.router.tell, replica)
            tree.watch(TreeWatcher(tree.grain, needs_slots=tree.needs_slots, tell=tell))

    def choose(self, name: str, prompt: np.ndarray, now: float) -> int:
        """As in `Routing`."""
        return self.router.choose(name, prompt).replica

    def computed(self, name: str) -> None:
        """As in `Routing`."""
        self.router.computed(name)

    def ended(self, name: str, num_tokens: int) -> None:
        """As in `Routing`."""
        self.router.ended(name)


def costs_of(engine: VirtualEngine) -> ReplicaCosts:
    """What requests cost an engine on virtual time."""
    device = engine.device
    return ReplicaCosts(
        costs=engine.costs,
        grain=engine.scheduler.geometry.grain,
        max_rows=engine.engine.max_rows,
        steps=engine.engine.steps_per_dispatch,
        flops_per_byte=device.flops_per_second / device.bytes_per_second,
        flops_per_loaded_byte=(device.flops_per_second / device.host_bytes_per_second,),
    )

"""The engine's router over a fleet on virtual time."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from hybrid_jax.cluster.router import ReplicaCosts, Router
from hybrid_jax.cluster.watch import TreeWatcher
from hybrid_jax.sim.prefix_cache.virtual_engine import VirtualEngine


class OwnRouting:
    """`Router`, told by the trees of the engines what they have."""

    router: Router

    def begin(self, engines: Sequence[VirtualEngine]) -> None:
        """As in `Routing`."""
        first, device = engines[0], engines[0].device
        scheduler = first.scheduler
        geometry = scheduler.geometry
        model = ReplicaCosts(
            costs=first.costs,
            grain=geometry.grain,
            max_rows=first.engine.max_rows,
            steps=first.engine.steps_per_dispatch,
            flops_per_byte=device.flops_per_second / device.bytes_per_second,
            flops_per_loaded_byte=(device.flops_per_second / device.host_bytes_per_second,),
        )
        self.router = Router(len(engines), model)
        for replica, engine in enumerate(engines):
            self.watch(replica, engine)

    def watch(self, replica: int, engine: VirtualEngine) -> None:
        """Has an engine's tree tell what it has."""
        tree = engine.scheduler.memory.tree
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

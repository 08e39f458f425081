"""A tier on disk made of a dictionary, with the methods of `tiers.disk.Disk`; reads take a random while."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hybrid_jax.geometry import Geometry
from hybrid_jax.schedule.tiers.arrivals import places_in, wanted_frames
from hybrid_jax.tiers.chain import Chain, root_of
from hybrid_jax.tiers.disk import DiskCounters
from hybrid_jax.tiers.parcel import Frames


@dataclass
class SimulatedSave:
    name: str
    position: int
    places: list
    ends: tuple = ()

    @property
    def names(self):
        return {self.name}


@dataclass(eq=False)
class SimulatedRead:
    position: int
    frames: Frames
    failed: bool
    num_bytes: int = 1
    seconds: float = 1.0
    left: int = 0
    told: bool = False

    @property
    def done(self):
        self.left -= 1
        return self.left <= 0

    def wait(self, timeout):
        self.left = 0
        return True


@dataclass
class SimulatedDisk:
    geometry: Geometry
    rng: Random = field(default_factory=lambda: Random(0))
    failing: float = 0.0
    slow: int = 4  # looks until a read is done, at most
    writing: bool = True
    is_disk: bool = True
    has_room: bool = True
    counters: DiskCounters = field(default_factory=DiskCounters)
    entries: dict = field(default_factory=dict)

    def early(self, chain, position):
        return False

    def chain(self, tokens):
        return Chain(root_of(), tokens)

    def is_coming(self, chain, position):
        return False

    def find(self, chain, above, most, *, held):
        grain = self.geometry.grain
        for position in range(most // grain * grain, above, -grain):
            if chain.name(position) in self.entries:
                return position
        return 0

    def wants(self, chain, position, named=()):
        name = chain.name(position)
        if name in self.entries or name in named:
            return None
        return SimulatedSave(name, position, places_in(wanted_frames(self.geometry, position)))

    def save(self, save, copies):
        self.counters.saves += 1
        pages, states = copies[: len(save.places)], copies[len(save.places) :]
        assert len(states) == self.geometry.cached_state_frames
        self.entries[save.name] = dict(zip(save.places, pages, strict=True)), states

    def read(self, chain, position, places):
        failed = self.rng.random() < self.failing
        pages, states = self.entries[chain.name(position)]
        if failed:
            del self.entries[chain.name(position)]
        frames = Frames({place: pages[place] for place in places}, states or None)
        return SimulatedRead(position, frames, failed, left=self.rng.randint(0, self.slow))

    def use(self, chain, position):
        pass

    def wait_for_room(self, timeout):
        self.has_room = True

    def stats(self):
        return vars(self.counters)

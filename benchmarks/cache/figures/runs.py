"""Runs of the simulator, each made once in a process, and what a run is about."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.cache.figures.loads import COMMITTED, Load, Traces
from benchmarks.cache.figures.models import PAPER_7B
from hybrid_jax.costs import Costs
from hybrid_jax.sim.model_specs import ModelSpec
from hybrid_jax.sim.prefix_cache.request_order import Result, simulate

GB = 10**9
POLICIES = ("vllm", "sglang", "marconi", "marconi-code", "alpha-code:1", "adaptive", "optimal")
WITHOUT_CAPACITY = ("none", "infinite")


def grain_of(costs: Costs) -> int:
    """Any position can be resumed at where a checkpoint says so; pages of 32 tokens where there is none."""
    return 1 if costs.checkpoint_bytes else 32


@dataclass(frozen=True, kw_only=True)
class Place:
    """A load and the gigabytes that a cache has for it."""

    load: Load
    gigabytes: float


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Every load with every capacity."""

    loads: tuple[Load, ...]
    gigabytes: tuple[float, ...]

    def places(self) -> list[Place]:
        return [Place(load=load, gigabytes=gb) for load in self.loads for gb in self.gigabytes]


def _loads(name: str, sps: tuple[float, ...], arts: tuple[float | None, ...] = (None,)):
    return tuple(Load(name=name, sps=rate, art=art) for art in arts for rate in sps)


RATES = (0.25, 0.5, 1, 2, 5, 10)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the figures run: the paper's loads and capacities as far as it names them.

    Attributes:
        reuse: of Fig. 3a. sweeps: of Fig. 7 to 9, by workload.
        lengths: of Fig. 10. contention: of Fig. 11. layers: of Fig. 12.
        sessions, turns: of Fig. 13a and 13b.
        scale: of all capacities.
    """

    reuse: tuple[Place, ...] = (
        Place(load=COMMITTED["chat"], gigabytes=5),
        Place(load=COMMITTED["chat"], gigabytes=10),
        Place(load=COMMITTED["short"], gigabytes=2),
        Place(load=COMMITTED["agents"], gigabytes=60),
    )
    sweeps: dict[str, Sweep] = field(
        default_factory=lambda: {
            "chat": Sweep(loads=_loads("chat", RATES), gigabytes=(1, 2, 3, 4, 5)),
            "short": Sweep(loads=_loads("short", RATES), gigabytes=(1, 2, 3, 4, 5, 10)),
            "agents": Sweep(
                loads=_loads("agents", (0.5, 2, 5), (5, 10)), gigabytes=(40, 60, 80, 100)
            ),
            "log": Sweep(loads=(COMMITTED["log"],), gigabytes=(50, 100, 200, 400)),
        }
    )
    lengths: Place = Place(load=COMMITTED["agents"], gigabytes=60)
    contention: Sweep = Sweep(loads=(COMMITTED["agents"],), gigabytes=(60, 80, 100, 120, 140))
    layers: Place = Place(load=COMMITTED["agents"], gigabytes=60)
    sessions: Sweep = Sweep(loads=_loads("agents", (0.5, 1, 2), (7.5,)), gigabytes=(100,))
    turns: Sweep = Sweep(loads=_loads("agents", (5,), (5, 7.5, 10)), gigabytes=(100,))
    scale: float = 1.0


class Runs:
    """Results of the simulator by what was asked; none is made twice."""

    def __init__(self, traces: Traces, *, scale: float = 1.0):
        self.traces, self._scale = traces, scale
        self._made: dict[tuple, Result] = {}

    def capacity(self, place: Place) -> int:
        """In bytes."""
        return int(place.gigabytes * self._scale * GB)

    def __call__(self, place: Place, policy: str, model: ModelSpec = PAPER_7B) -> Result:
        capacity = 1 if policy in WITHOUT_CAPACITY else self.capacity(place)
        key = (place.load, model.name, policy, capacity)
        if key not in self._made:
            self._made[key] = simulate(
                self.traces[place.load],
                model.costs,
                policy,
                capacity,
                model_spec=model.name,
                grain=grain_of(model.costs),
                bounds=False,
            )
        return self._made[key]

    def percent(self, place: Place, policy: str, model: ModelSpec = PAPER_7B) -> float:
        """Token hit rate, in percent."""
        return round(100 * self(place, policy, model).token_hit_rate, 2)

    def p95_ms(self, place: Place, policy: str, model: ModelSpec = PAPER_7B) -> float:
        """95th percentile of the time to the first token, in milliseconds."""
        return round(1000 * self(place, policy, model).ttft_s["p95"], 1)

    def rates(self, place: Place, model: ModelSpec = PAPER_7B) -> dict[str, float]:
        """Token hit rate of every policy, in percent."""
        return {policy: self.percent(place, policy, model) for policy in POLICIES}

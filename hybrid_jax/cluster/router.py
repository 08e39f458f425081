"""Which replica gets a request: the one that answers soonest, given what each has cached and what it has to do.

Everything is counted in FLOPs: what a prompt still needs after its hit, what waits before it, and bytes as the FLOPs
that a replica does in the time that they take. No clock is read, so the same calls in the same order choose the same.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybrid_jax.cache.pools.recount import agree
from hybrid_jax.cache.tree.node import ARENA
from hybrid_jax.cache.tree.prefix_order import prefix_order
from hybrid_jax.cluster.marks import Marks
from hybrid_jax.cluster.names import prefix_names
from hybrid_jax.cluster.partition import part
from hybrid_jax.cluster.watch import News
from hybrid_jax.costs import Costs

PROMISED = 15  # in place of a tier: a prompt under way will leave this
TIERS = range(PROMISED)
STRIDE = 8  # a home and a promise are noted at every so many resume points
HOMES = 1 << 18  # that are remembered
BUSY_OVER = 25  # decisions, for each replica, over which it is averaged how often it is busy
MEAN_OVER = 50  # requests over which their work is averaged
MOST_DELAY = 10.0  # the most that a FLOP on a busy replica is thought to delay others, in FLOPs
# Decisions, for each replica, over which the work that it was given is summed, and what this sum weighs.
GIVEN_OVER, GIVEN_WEIGHS = 32, 0.1
REFRESHED = 8  # decisions after which averages are brought up to date
# Prompts for each replica from which on they are parted as a whole. If more than such a share of them is cached, each
# goes where it is.
MANY, CACHED = 4, 0.1
IDLE = 0.5  # share of its rows below which a replica gets requests that wait for rows elsewhere
NEWS_KEPT = 4096  # that wait for the next decision


@dataclass(frozen=True, kw_only=True)
class ReplicaCosts:
    """What requests cost a replica; all replicas are alike.

    Attributes:
        costs: of the model.
        grain: tokens between resume points.
        max_rows: sequences that decode together.
        steps: decode steps that a prompt waits for at most, those of one dispatch.
        flops_per_byte: FLOPs that a device does while it reads a byte.
        flops_per_loaded_byte: the same for a byte that comes from a tier below the arena, by its number.
    """

    costs: Costs
    grain: int
    max_rows: int
    steps: int
    flops_per_byte: float
    flops_per_loaded_byte: tuple[float, ...] = ()


class Decision(NamedTuple):
    """Where a request goes, and why.

    Attributes:
        replica: its number.
        num_tokens, hit_len: of the prompt, and how many of them the replica is thought to skip.
        tier: which has them: the arena, one below, or `PROMISED` for a prompt under way.
        own: FLOPs that are left of the prompt. queued: FLOPs before it.
        home: the replica that prompts with this beginning went to last; None for none.
    """

    replica: int
    num_tokens: int
    hit_len: int
    tier: int
    own: float
    queued: float
    home: int | None

    @property
    def why(self) -> str:
        """In words."""
        where = {ARENA: "had", PROMISED: "was computing"}.get(self.tier, "could load")
        had = "it had nothing of the prompt"
        if self.hit_len:
            had = f"it {where} {self.hit_len} of {self.num_tokens} tokens"
        waited = f"{self.queued / 1e12:.3g} TFLOP waited" if self.queued else "nothing waited"
        said = f"{had}, and {waited} there"
        if self.home is not None and self.home != self.replica:
            said += f"; replica {self.home}, where such prompts went before, had more to do"
        return said


class _Prompt(NamedTuple):
    """A prompt to decide about.

    Attributes:
        tokens: int32[n]. names: of its prefixes, as `prefix_names` gives them. whole: FLOPs of all of it.
    """

    tokens: np.ndarray
    names: list[int]
    whole: float

    @property
    def num_tokens(self) -> int:
        """How many."""
        return len(self.tokens)


class Uneven(NamedTuple):
    """Requests that may be moved: so many, from one replica to another."""

    busy: int
    idle: int
    requests: int


@dataclass(slots=True)
class _Load:
    """What a replica has to do.

    Attributes:
        queued: FLOPs of prompts that are not computed. rows, tokens: of live requests.
        busy: share of the decisions at which prompts waited. given: FLOPs that it got lately. total: and ever.
    """

    queued: float = 0.0
    rows: int = 0
    tokens: int = 0
    busy: float = 0.0
    given: float = 0.0
    total: float = 0.0
    present: bool = True


@dataclass(slots=True)
class _Mean:
    """The mean of the latest values."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, MEAN_OVER)
        self.value += (value - self.value) / self.count


@dataclass(slots=True)
class _Live:
    """A request on a replica.

    Attributes:
        own: FLOPs that are left of its prompt. tokens: of the prompt. promised: names of what it will leave.
        begun: the replica's `total` when it came.
    """

    replica: int
    own: float
    tokens: int
    promised: Sequence[int]
    begun: float


class Router:
    """Chooses a replica for each request, and keeps what that takes. Any thread may call it.

    A request's score on a replica is what it waits for there and what is left of its prompt. Three things are added,
    because others come after it: work on a busy replica delays them (by r / (1 - r) for a replica that is busy a share
    r of the time, as in a queue); what a replica was given lately, a little; and what going elsewhere loses, if prompts
    with this beginning went to one replica before.

    Args:
        count: replicas. model: what requests cost them.

    Attributes:
        marks: what caches have told.
    """

    def __init__(self, count: int, model: ReplicaCosts) -> None:
        self.model, self.marks, self.count = model, Marks(model.grain, count), count
        self._loads = [_Load() for _ in range(count)]
        self._waits = np.zeros(count)  # what a request waits for, before its own work
        self._weighs = np.ones(count)  # what a FLOP of its own counts
        self._decisions, self._num_present = 0, count
        self._requests: dict[str, _Live] = {}
        # How many requests under way will leave each resume point, by replica.
        self._promised: list[Counter[int]] = [Counter() for _ in range(count)]
        # A dict would look for its first entry past all that have gone before.
        self._homes: OrderedDict[int, int] = OrderedDict()
        self._mean_own, self._mean_life = _Mean(), _Mean()
        self._news: deque[tuple[int, News]] = deque()
        self._lock = threading.Lock()

    @property
    def present(self) -> list[int]:
        """The replicas that have not left."""
        return [replica for replica, load in enumerate(self._loads) if load.present]

    @property
    def num_live(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self._requests)

    # --- requests -------------------------------------------------------------------------------

    def choose(self, owner: str, tokens: np.ndarray, *, limit: int | None = None) -> Decision:
        """Sends a request to a replica, and counts it there until `ended`.

        Args:
            owner: its name, unique among live ones.
            tokens: int32[n] its prompt, with its output so far if it comes back from a replica that left.
            limit: the most tokens that may be skipped; None for all but the last.

        Raises:
            ValueError: the name is in use. RuntimeError: no replica is left.
        """
        with self._lock:
            self._check([owner])
            self._read_news()
            prompt = self._prompt(tokens)
            return self._choose(owner, prompt, prompt.num_tokens - 1 if limit is None else limit)

    def _check(self, owners: Sequence[str]) -> None:
        """As `choose` raises."""
        if live := [owner for owner in owners if owner in self._requests]:
            raise ValueError(f"Router: {live[0]!r} is live already; choose another name")
        if not self._num_present:
            raise RuntimeError("Router: no replica is left")

    def choose_all(
        self, prompts: Mapping[str, np.ndarray], *, only: int | None = None
    ) -> dict[str, Decision]:
        """Sends requests that come together. If they are many, each replica gets a part of the tree of their prefixes.

        Args:
            prompts: int32[n] by the names of their owners.
            only: the replica that gets all; None to choose.

        Returns:
            Decisions in the order in which the requests are best added.

        Raises:
            As `choose`.
        """
        owners, given = list(prompts), [self._prompt(tokens) for tokens in prompts.values()]
        chosen: dict[str, Decision] = {}
        with self._lock:
            self._check(owners)
            self._read_news()
            try:
                parts = self._parts(given) if only is None else [(range(len(given)), only)]
                for indices, replica in parts:
                    for index in indices:
                        owner, prompt = owners[index], given[index]
                        chosen[owner] = self._choose(owner, prompt, prompt.num_tokens - 1, replica)
            except BaseException:
                for owner in chosen:
                    self._ended(owner)
                raise
        return chosen

    def _prompt(self, tokens: np.ndarray) -> _Prompt:
        names = prefix_names(tokens, self.model.grain).tolist()
        return _Prompt(tokens, names, self.model.costs.flops(len(tokens)))

    def _parts(self, prompts: Sequence[_Prompt]) -> Iterator[tuple[list[int], int | None]]:
        """Prompts in the order to choose for them, with the replica of each part, if they are parted."""
        free, given = set(self.present), [prompt.tokens for prompt in prompts]
        if len(prompts) < MANY * len(free) or len(free) < 2 or self._share_cached(prompts) > CACHED:
            yield prefix_order(given, self.model.grain), None
            return
        for indices in part(given, len(free), self.model.costs, self.model.grain):
            only = self._best_for([prompts[index] for index in indices], free)
            free.discard(only)
            yield indices, only

    def _share_cached(self, prompts: Sequence[_Prompt]) -> float:
        """The share of the FLOPs of prompts that replicas have cached, each prompt where most of it is."""
        total = sum(prompt.whole for prompt in prompts)
        least = sum(float(self._left(prompt, prompt.num_tokens - 1)[0].min()) for prompt in prompts)
        return 1 - least / total if total else 0.0

    def _best_for(self, prompts: Sequence[_Prompt], free: set[int]) -> int:
        """The one of some replicas that has most of these prompts and least to do."""
        left = self._waits.copy()
        for prompt in prompts:
            left += self._left(prompt, prompt.num_tokens - 1)[0]
        return min(free, key=lambda replica: (left[replica], replica))

    def _choose(self, owner: str, prompt: _Prompt, limit: int, only: int | None = None) -> Decision:
        """Sends a request to the best replica, or to a given one."""
        names = prompt.names
        if self._decisions % REFRESHED == 0:
            self._refresh_all()
        self._decisions += 1
        own, hits, tiers = self._left(prompt, limit)
        score = own * self._weighs
        score += self._waits
        home = self._home(names, hits, score)
        replica = int(score.argmin()) if only is None else only
        decision = Decision(
            replica=replica,
            num_tokens=prompt.num_tokens,
            hit_len=int(hits[replica]),
            tier=int(tiers[replica]),
            own=float(own[replica]),
            queued=self._loads[replica].queued,
            home=home,
        )
        self._send(owner, decision, names)
        return decision

    def _refresh_all(self) -> None:
        """Brings the averages and all that follows from them up to date."""
        over, less = (
            min(1.0, REFRESHED / (BUSY_OVER * self.count)),
            (1 - 1 / (GIVEN_OVER * self.count)) ** REFRESHED,
        )
        for replica, load in enumerate(self._loads):
            load.busy += ((load.queued > 0) - load.busy) * over
            load.given *= less
            self._weighs[replica] = 1 + min(load.busy / (1.0001 - load.busy), MOST_DELAY)
            self._refresh(replica)

    def _refresh(self, replica: int) -> None:
        """Works out anew what a request would wait for on a replica."""
        load, model = self._loads[replica], self.model
        decoded = load.tokens * model.costs.kv_bytes + load.rows * model.costs.checkpoint_bytes
        waits = load.queued + model.steps * model.flops_per_byte * decoded
        waits += GIVEN_WEIGHS * load.given
        # A row is free again after what a replica gets during one request's life, over its rows.
        turn = max(self._mean_own.value, self._mean_life.value / model.max_rows)
        waits += max(0, load.rows + 1 - model.max_rows) * turn
        self._waits[replica] = waits if load.present else math.inf

    def _left(self, prompt: _Prompt, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is left of a prompt on each replica after its best hit: float64[count], int64[count] the hit, and
        int64[count] its tier."""
        costs, per_byte = self.model.costs, self.model.flops_per_loaded_byte
        names, whole = prompt.names, prompt.whole
        own = np.full(self.count, whole)
        hits: np.ndarray = np.zeros(self.count, np.int64)
        tiers: np.ndarray = np.zeros(self.count, np.int64)
        for mark in self.marks.found(names, limit):
            left = whole - costs.flops(mark.length)
            for tier, where in self.marks.each_place(mark.places):
                cost = left
                if ARENA < tier < PROMISED:
                    cost += per_byte[tier - 1] * costs.prefix_bytes(mark.length)
                if isinstance(where, int):
                    better: bool | np.ndarray = cost < own[where]
                    if not better:
                        continue
                else:
                    where = where & (own > cost)
                own[where], hits[where], tiers[where] = cost, mark.length, tier
        return own, hits, tiers

    def _home(self, names: Sequence[int], hits: np.ndarray, score: np.ndarray) -> int | None:
        """The replica that prompts with this beginning went to last. What it would save next time is taken off."""
        homes, costs, grain = self._homes, self.model.costs, self.model.grain
        for index in range(len(names) // STRIDE * STRIDE, 0, -STRIDE):
            home = homes.get(names[index - 1])
            if home is not None:
                more = costs.flops(index * grain) - costs.flops(int(hits[home]))
                score[home] -= max(0.0, more)
                return home
        return None

    def _send(self, owner: str, decision: Decision, names: Sequence[int]) -> None:
        replica, own, homes = decision.replica, decision.own, self._homes
        points = names[STRIDE - 1 :: STRIDE]
        for name in points:
            homes[name] = replica
        while len(homes) > HOMES:
            homes.popitem(last=False)
        promised = self._promised[replica]
        self.marks.add(replica, PROMISED, [name for name in points if not promised[name]])
        promised.update(points)
        load = self._loads[replica]
        self._requests[owner] = _Live(
            replica=replica,
            own=own,
            tokens=decision.num_tokens,
            promised=points,
            begun=load.total,
        )
        load.queued += own
        load.given += own
        load.total += own
        load.rows += 1
        load.tokens += decision.num_tokens
        self._mean_own.add(own)
        self._refresh(replica)

    def computed(self, owner: str) -> None:
        """A request has its first token, so its prompt is computed. Others are ignored."""
        with self._lock:
            live = self._requests.get(owner)
            if live is not None:
                self._computed(live)

    def _computed(self, live: _Live) -> None:
        load = self._loads[live.replica]
        load.queued = max(0.0, load.queued - live.own)
        promised = self._promised[live.replica]
        promised.subtract(live.promised)
        gone = [name for name in live.promised if not promised[name]]
        for name in gone:
            del promised[name]
        self.marks.remove(live.replica, PROMISED, gone)
        live.own, live.promised = 0.0, []
        self._refresh(live.replica)

    def ended(self, owner: str) -> None:
        """A request has ended, or nobody waits for it. Others are ignored."""
        with self._lock:
            self._ended(owner)

    def _ended(self, owner: str) -> None:
        live = self._requests.pop(owner, None)
        if live is None:
            return
        load = self._loads[live.replica]
        load.rows -= 1
        load.tokens -= live.tokens
        self._mean_life.add(load.total - live.begun)
        self._computed(live)
        if not load.rows:
            load.queued = 0.0  # not what rounding left
            self._refresh(live.replica)

    # --- replicas -------------------------------------------------------------------------------

    def tell(self, replica: int, news: News) -> None:
        """The cache of a replica has changed. It is read before the next decision, so nobody waits here."""
        self._news.append((replica, news))
        if len(self._news) > NEWS_KEPT and self._lock.acquire(blocking=False):
            try:
                self._read_news()
            finally:
                self._lock.release()

    def read_news(self) -> None:
        """Has marks know all that was told."""
        with self._lock:
            self._read_news()

    def _read_news(self) -> None:
        while self._news:
            replica, news = self._news.popleft()
            if not self._loads[replica].present:
                continue
            if news.what == "came":
                self.marks.add(replica, news.tier, news.names)
            elif news.what == "went":
                self.marks.remove(replica, news.tier, news.names)
            else:
                self.marks.forget(replica, TIERS)

    def leave(self, replica: int) -> list[str]:
        """A replica is gone; returns whose requests it had, which may be given to `choose` again."""
        with self._lock:
            self._read_news()
            self._num_present -= self._loads[replica].present
            self._loads[replica].present = False
            owners = [name for name, live in self._requests.items() if live.replica == replica]
            for owner in owners:
                self._ended(owner)
            self._refresh(replica)
            self.marks.forget(replica, (*TIERS, PROMISED))
            left = ((name, home) for name, home in self._homes.items() if home != replica)
            self._homes = OrderedDict(left)
            return owners

    def join(self, replica: int) -> None:
        """A replica that left is back, with nothing in its caches."""
        with self._lock:
            self._num_present += not self._loads[replica].present
            self._loads[replica] = _Load()
            self._refresh(replica)

    def uneven(self) -> Uneven | None:
        """Where requests wait for rows while other rows are free; None if that is nowhere.

        It counts a request as one row, so a few more may be under way than it thinks.
        """
        most = self.model.max_rows
        with self._lock:
            rows = {n: load.rows for n, load in enumerate(self._loads) if load.present}
        idle, busy = min(rows, key=rows.__getitem__), max(rows, key=rows.__getitem__)
        if rows[idle] > most * IDLE or rows[busy] <= most:
            return None
        return Uneven(busy, idle, min(most - rows[idle], rows[busy] - most))

    def check_invariants(self) -> None:
        """Sums up the live requests anew; raises AssertionError with both numbers where they differ."""
        with self._lock:
            live = list(self._requests.values())
            for replica, load in enumerate(self._loads):
                own = [one for one in live if one.replica == replica]
                agree(
                    f"router: replica {replica}",
                    rows=(load.rows, len(own)),
                    tokens=(load.tokens, sum(one.tokens for one in own)),
                )
                queued = sum(one.own for one in own)
                near = abs(load.queued - queued) <= 1e-6 * max(queued, self._mean_own.value)
                assert near, (
                    f"router: replica {replica}: queued {load.queued}, live requests {queued}"
                )
                promised = Counter(name for one in own for name in one.promised)
                agree(
                    f"router: what replica {replica} will have",
                    promised=(dict(self._promised[replica]), dict(promised)),
                    marks=(self.marks.of(replica, PROMISED), set(promised)),
                )

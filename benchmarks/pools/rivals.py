"""Memory of other designs than the engine's, in runs where a request keeps what it has until it is preempted."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from benchmarks.pools.engine_frames import ENTRY_BYTES, require_frames
from benchmarks.pools.loads import PoolLoad
from benchmarks.pools.model_sizes import ModelSizes
from benchmarks.pools.published import KV, STATE, Avmp, Counters
from benchmarks.pools.ticks import PoolSizes, TickRun
from hybrid_jax.cache.pools.recount import agree

Parts = tuple[int, ...]  # units of KV, of a state, and of what else a request needs


@dataclass(eq=False)
class Amounts(PoolSizes):
    """KV and a state for each of many requests, where any free unit of a pool serves: only the amounts matter.

    A request takes several parts, which depend on its tokens alone. Parts that shrink are given back only once the
    others have grown. A request that is refused keeps what it has, and nobody loses anything but by `release`.

    Attributes:
        units: of each pool. unit_bytes: the bytes of one unit, in each pool.
        parts: tokens -> units of each part.
        pools: the pool that each part comes from.
        calls: allocate calls of an admission, of a refused one, and for each part that grows; if growth is refused,
            those of one part.
        step_tokens, prefix_tokens, slot_bytes, reserved_bytes: see `PoolSizes`; prefixes end at steps where 0.
        grain: a request folds in place every so many tokens; None where there are no folds.
        most: tokens -> units of each part at the worst moment up to there; None where that is the last one.
        free: units of each pool.
    """

    units: Sequence[int]
    unit_bytes: Sequence[int]
    parts: Callable[[int], Parts]
    _: KW_ONLY
    pools: Sequence[int]
    calls: tuple[int, int, Sequence[int]]
    step_tokens: int
    slot_bytes: int
    reserved_bytes: int
    prefix_tokens: int = 0
    grain: int | None = None
    most: Callable[[int], Parts] | None = None

    def __post_init__(self) -> None:
        self.counters = Counters()
        self.free = list(self.units)
        self.prefix_tokens = self.prefix_tokens or self.step_tokens
        self._tokens: dict[int, int] = {}  # that each request has memory for

    @property
    def used_bytes(self) -> int:
        sizes = zip(self.units, self.free, self.unit_bytes, strict=True)
        return sum((units - free) * size for units, free, size in sizes)

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens could have the empty pool."""
        needs = self._by_pool((self.most or self.parts)(num_tokens))
        return all(need <= have for need, have in zip(needs, self.units, strict=True))

    def admit(self, request: int, num_tokens: int) -> bool:
        """Gives KV for so many tokens and a state, both or nothing."""
        admitted = self._change(request, (0,) * len(self.pools), num_tokens)
        admission, refusal, _ = self.calls
        self.counters.allocate_calls += admission if admitted else refusal
        return admitted

    def grow(self, request: int, num_tokens: int) -> bool:
        """Gives KV for so many tokens in all, and does what else is due up to there."""
        before = self.parts(self._tokens[request])
        grown = zip(before, self.parts(num_tokens), self.calls[2], strict=True)
        calls = [calls for old, new, calls in grown if new > old]
        done = self._change(request, before, num_tokens)
        self.counters.allocate_calls += sum(calls) if done else max(calls, default=0)
        return done

    def release(self, request: int) -> None:
        """Takes back all that a request holds."""
        self._give_back(request)
        del self._tokens[request]

    def holds(self, request: int) -> tuple[int, bool]:
        """Tokens whose KV a request still has, and whether it has its state."""
        tokens = self._tokens.get(request, 0)
        if not tokens or self._held(request) != self.parts(tokens):
            return 0, False
        return -(-tokens // self.step_tokens) * self.step_tokens, True

    def check_invariants(self) -> None:
        held = [self._by_pool(self._held(request)) for request in self._tokens]
        for pool, (units, free) in enumerate(zip(self.units, self.free, strict=True)):
            used = sum(parts[pool] for parts in held)
            assert free >= 0, f"pool {pool}: {free} units free"
            agree(f"pool {pool}", units=(units, free + used))

    def _change(self, request: int, before: Parts, num_tokens: int) -> bool:
        """Gives a request that has some parts those of so many tokens, if there is room for what grows."""
        changes = [new - old for old, new in zip(before, self.parts(num_tokens), strict=True)]
        if not self._has_room(self._by_pool([max(change, 0) for change in changes])):
            return False
        for pool, change in zip(self.pools, changes, strict=True):
            if change:
                self._take(request, pool, change)
        tokens, self._tokens[request] = self._tokens.get(request, 1), num_tokens
        if self.grain is not None:
            folds = (num_tokens - 1) // self.grain - (tokens - 1) // self.grain
            self.counters.folds_in_place += folds
        return True

    def _by_pool(self, parts: Sequence[int]) -> list[int]:
        sums = [0] * len(self.units)
        for pool, part in zip(self.pools, parts, strict=True):
            sums[pool] += part
        return sums

    def _held(self, request: int) -> Parts:
        """The parts that a request really has."""
        return self.parts(self._tokens[request])

    def _has_room(self, needs: Sequence[int]) -> bool:
        """Whether so many units of each pool are free."""
        return all(need <= free for need, free in zip(needs, self.free, strict=True))

    def _take(self, request: int, pool: int, count: int) -> None:
        """Gives a request units of one pool, or takes them back where the count is below 0."""
        self.free[pool] -= count

    def _give_back(self, request: int) -> None:
        """Takes all that a request has."""
        for pool, count in enumerate(self._by_pool(self._held(request))):
            self.free[pool] += count


class QueueRun(TickRun):
    """Requests wait in one line, first come first served. One that does not fit holds up those behind it.

    One is admitted when memory for its prompt and its state is free. A token that begins a new step needs memory
    before it runs. Where there is none, the request admitted last is preempted, which may be the one that asked: it
    gives back all it has, goes to the head of the line, and later begins again with its first token.

    Args:
        load, model: see `TickRun`.
        memory: an allocator, empty.
    """

    def __init__(self, load: PoolLoad, memory: Amounts, model: ModelSizes):
        super().__init__(load, memory, model)
        self.memory = memory
        self.waiting: deque[int] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def turn(self, departing: list[int], growing: list[int], arriving: list[int]) -> None:
        for request in departing:
            tokens, has_state = self.memory.holds(request)
            self.complete(request, intact=has_state and tokens >= self.most_tokens(request))
            self.memory.release(request)
        for request in growing:
            if request in self.since:  # not preempted a moment ago
                self._grow(request)
        for request in arriving:
            if self.memory.fits_alone(self.most_tokens(request)):
                self.waiting.append(request)
            else:
                self.infeasible += 1
        self._admit()

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            admitted = self.memory.admit(request, self.prompts[request])
            if not admitted and self.since:
                return
            self.waiting.popleft()
            if admitted:
                self.start(request, self.prompts[request])
            else:  # nobody else holds anything: what the allocator lost is never to come back
                self.infeasible += 1

    def _grow(self, request: int) -> None:
        num_tokens = self.tick - self.since[request]
        while not self.memory.grow(request, num_tokens):
            youngest = next(reversed(self.since))
            self.preempt(youngest)
            self.memory.release(youngest)
            if self.since:
                self.waiting.appendleft(youngest)
            else:  # it was alone
                self.infeasible += 1
            if youngest == request:
                return
        self.plan_growth(request, num_tokens + self.memory.step_tokens)


def ideal(model: ModelSizes, pool_bytes: int, *, step_tokens: int) -> Amounts:
    """Bytes that flow: nothing is padded, no unit is in the way, only the sum counts."""
    step_bytes, state = step_tokens * model.token_bytes, model.state_bytes
    return Amounts(
        (pool_bytes,),
        (1,),
        lambda tokens: (-(-tokens // step_tokens) * step_bytes, state),
        pools=(0, 0),
        calls=(2, 2, (1, 0)),
        step_tokens=step_tokens,
        slot_bytes=state,
        reserved_bytes=pool_bytes,
    )


# --- equal units ----------------------------------------------------------------------------------


def fixed_dual(model: ModelSizes, pool_bytes: int, state_share: float) -> Amounts:
    """A share of the bytes for states, the rest for KV, layer by layer."""
    layers, state_bytes = model.layers, int(pool_bytes * state_share)
    sizes = layers.page_bytes, layers.state_bytes
    units = (pool_bytes - state_bytes) // sizes[KV], state_bytes // sizes[STATE]
    return Amounts(units, sizes, **_by_layer(model, pool_bytes, sizes[STATE], pools=(KV, STATE)))


def padded_unified(model: ModelSizes, pool_bytes: int) -> Amounts:
    """One pool, every page of a layer as large as a state of a layer."""
    unit = max(model.layers.page_bytes, model.layers.state_bytes)
    return Amounts((pool_bytes // unit,), (unit,), **_by_layer(model, pool_bytes, unit))


def vllm_big_block(model: ModelSizes, pool_bytes: int) -> Amounts:
    """One pool, attention blocks of so many tokens that one takes at least as much as a layer's state.

    Layers are grouped, as many in a group as there are attention layers. A block serves a group, and the state of a
    group of recurrent layers takes one.
    """
    layers = model.layers
    tokens = layers.page_tokens * -(-layers.state_bytes // layers.page_bytes)
    unit, states = tokens * model.token_bytes, -(-layers.num_states // layers.num_pages_each)
    return Amounts(
        (pool_bytes // unit,),
        (unit,),
        lambda num_tokens: (-(-num_tokens // tokens), states),
        pools=(0, 0),
        calls=(1 + states, 1 + states, (1, 0)),
        step_tokens=tokens,
        slot_bytes=states * unit,
        reserved_bytes=pool_bytes,
    )


def _by_layer(
    model: ModelSizes, reserved_bytes: int, state_unit: int, *, pools: tuple[int, int] = (0, 0)
) -> dict:
    """What `Amounts` is told where each layer asks for itself: a page, or one unit for its state."""
    layers = model.layers
    pages, states = layers.num_pages_each, layers.num_states
    return {
        "parts": lambda tokens: (layers.num_pages(tokens) * pages, states),
        "pools": pools,
        "calls": (pages + states, pages + states, (pages, 0)),
        "step_tokens": layers.page_tokens,
        "slot_bytes": states * state_unit,
        "reserved_bytes": reserved_bytes,
    }


class AvmpMemory(Amounts):
    """AVMP where nobody may be evicted: on a shortage one rebalance of each kind that is short, and then a refusal.

    Args:
        model, pool_bytes: sizes.
        state_share: of the bytes, at the start.
        batch: units that a rebalance takes from the other pool; None for none.
    """

    def __init__(
        self, model: ModelSizes, pool_bytes: int, state_share: float, batch: int | None = None
    ):
        self.avmp = avmp = Avmp(model.layers, pool_bytes, state_share, batch=batch)
        sizes = [pool.unit_bytes for pool in avmp.pools]
        told = _by_layer(model, avmp.reserved_bytes, sizes[STATE], pools=(KV, STATE))
        super().__init__([pool.num_units for pool in avmp.pools], sizes, **told)
        self.counters = avmp.counters

    @property
    def used_bytes(self) -> int:
        return self.avmp.used_bytes

    def fits_alone(self, num_tokens: int) -> bool:
        if self.avmp.batch is None:
            return super().fits_alone(num_tokens)
        needs = zip(self.parts(num_tokens), self.unit_bytes, strict=True)
        return sum(units * size for units, size in needs) <= self.avmp.pool_bytes

    def check_invariants(self) -> None:
        self.avmp.check_invariants()

    def _held(self, request: int) -> Parts:
        return tuple(len(pool.held.get(request, ())) for pool in self.avmp.pools)

    def _has_room(self, needs: Sequence[int]) -> bool:
        for kind, pool in enumerate(self.avmp.pools):
            if len(pool.free) < needs[kind]:
                self.avmp.rebalance(kind)
                if len(pool.free) < needs[kind]:
                    return False
        return needs[KV] <= len(self.avmp.pools[KV].free)  # a rebalance may have taken some

    def _take(self, request: int, pool: int, count: int) -> None:
        self.avmp.pools[pool].take(request, count)

    def _give_back(self, request: int) -> None:
        self.avmp.release(request)


# --- rings in frames of the arena -----------------------------------------------------------------

RING_KINDS = ("rings", "records", "raw")


def rings_in_frames(model: ModelSizes, pool_bytes: int, *, kind: str) -> Amounts:
    """Pages, checkpoints and rings from one free list: what that would give. The engine has its rings beside the arena.

    Sink and tables are within the pool too. Records are packed into frames without regard to layers, the least that
    any layout could take. A request has those of its prompt's end from its admission on. Where a page begins as a fold
    is due, the page comes first. Raw records are convolved again at every step; the columns before the first of them
    are the checkpoint's.

    Args:
        model, pool_bytes: sizes; the model's grain is the ring's length.
        kind: "rings" takes a whole ring, from admission to the end. "records" takes the convolution's columns, and
            records as tokens come; the fold gives these back. "raw" takes records of what enters the convolution, as
            tokens come, and no columns.
    """
    geometry = model.frames
    grain, state, frame = geometry.grain, geometry.state_frames, geometry.frame_bytes
    columns = 0 if kind == "raw" else model.column_bytes
    record = model.raw_bytes if kind == "raw" else model.record_bytes

    def ring(num_tokens: int) -> int:
        """Frames of the records since the last fold."""
        records = grain if kind == "rings" else num_tokens - geometry.checkpoint(num_tokens)
        return -(-(columns + records * record) // frame)

    pages = lambda num_tokens: geometry.num_pages(num_tokens) * geometry.frames_per_page

    # A frame is in the table of checkpoints or in that of rings; both have a line for padding.
    longest = ring(grain)
    lines = ENTRY_BYTES * (state + longest)
    num_frames = (pool_bytes - lines) // (frame + 2 * ENTRY_BYTES) - 1
    require_frames(geometry, num_frames, pool_bytes, lines, longest)
    lines += ENTRY_BYTES * state * (num_frames // state) + ENTRY_BYTES * num_frames
    return Amounts(
        (num_frames,),
        (frame,),
        lambda tokens: (pages(tokens), state, ring(tokens)),
        pools=(0, 0, 0),
        calls=(2, 1, (1, 0, 1)),
        step_tokens=min(geometry.page_tokens, grain) if kind == "rings" else 1,
        prefix_tokens=grain,
        slot_bytes=model.slot_bytes,
        reserved_bytes=(num_frames + 1) * frame + lines,
        grain=grain,
        most=lambda tokens: (pages(tokens), state, ring(min(tokens, grain))),
    )


# --- borders that move ----------------------------------------------------------------------------


class Superblocks(Amounts):
    """Blocks of one size, each for one kind while anything is in it; pages and states of single layers inside.

    A new object goes to the block of its kind that was begun first, of those with room.

    Args:
        model, pool_bytes: sizes.
        block_bytes: of one block.
    """

    def __init__(self, model: ModelSizes, pool_bytes: int, block_bytes: int):
        layers = model.layers
        self.per_block = (block_bytes // layers.page_bytes, block_bytes // layers.state_bytes)
        super().__init__(
            (0, 0), (0, 0), **_by_layer(model, pool_bytes, layers.state_bytes, pools=(KV, STATE))
        )
        if self.per_block[STATE]:
            in_block = self.per_block[STATE] * layers.state_bytes
            self.slot_bytes = model.state_bytes * block_bytes // in_block
        self.block_bytes, self.num_blocks = block_bytes, pool_bytes // block_bytes
        self.empty = list(range(self.num_blocks - 1, -1, -1))
        self.used: tuple[Counter[int], ...] = (Counter(), Counter())  # objects in each block in use
        self.held: tuple[dict[int, Counter[int]], ...] = ({}, {})  # of each request

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self.used)) * self.block_bytes

    def fits_alone(self, num_tokens: int) -> bool:
        if not all(self.per_block):
            return False
        needs = zip(self.parts(num_tokens), self.per_block, strict=True)
        return sum(-(-need // each) for need, each in needs) <= self.num_blocks

    def check_invariants(self) -> None:
        counted = tuple(sum(held.values(), Counter()) for held in self.held)
        blocks = sorted([*self.empty, *self.used[KV], *self.used[STATE]])
        agree(
            "superblocks",
            objects=(self.used, counted),
            blocks=(list(range(self.num_blocks)), blocks),
        )

    def _held(self, request: int) -> Parts:
        return tuple(sum(held.get(request, {}).values()) for held in self.held)

    def _has_room(self, needs: Sequence[int]) -> bool:
        kinds = zip(needs, self.used, self.per_block, strict=True)
        spare = lambda used, each: len(used) * each - used.total()
        new = [-(-max(0, need - spare(used, each)) // each) for need, used, each in kinds]
        return sum(new) <= len(self.empty)

    def _take(self, request: int, kind: int, count: int) -> None:
        held = self.held[kind].setdefault(request, Counter())
        used, each = self.used[kind], self.per_block[kind]
        while count:
            block = min((block for block, objects in used.items() if objects < each), default=None)
            if block is None:
                block = self.empty.pop()
            taken = min(count, each - used[block])
            used[block] += taken
            held[block] += taken
            count -= taken

    def _give_back(self, request: int) -> None:
        for used, held in zip(self.used, self.held, strict=True):
            for block, count in held.pop(request).items():
                used[block] -= count
                if not used[block]:
                    del used[block]
                    self.empty.append(block)


class _End:
    """One end of the arena: units in places 0, 1, ... from its border of the arena, with holes between them."""

    def __init__(self, unit_bytes: int):
        self.unit_bytes = unit_bytes
        self.owners: dict[int, int] = {}  # place -> request
        self.held: dict[int, set[int]] = {}
        self.holes: list[int] = []  # a heap; what lies at the top and above it counts no more
        self.top = 0  # places up to the last unit

    @property
    def free_inside(self) -> int:
        """Holes below the top."""
        return self.top - len(self.owners)

    def take(self, request: int, count: int) -> None:
        """Gives a request units: holes first, then places at the top."""
        mine = self.held.setdefault(request, set())
        inside = min(count, self.free_inside)
        places = [heapq.heappop(self.holes) for _ in range(inside)]
        if count > inside:
            self.holes.clear()
            places += range(self.top, self.top + count - inside)
            self.top += count - inside
        self.owners |= dict.fromkeys(places, request)
        mine.update(places)

    def give_back(self, request: int) -> None:
        """All units of a request become holes."""
        for place in self.held.pop(request):
            del self.owners[place]
            heapq.heappush(self.holes, place)
        self._lower()

    def move_last(self) -> None:
        """The last unit goes to the first hole."""
        last = self.top - 1
        owner = self.owners.pop(last)
        place = heapq.heappop(self.holes)
        self.owners[place] = owner
        self.held[owner].remove(last)
        self.held[owner].add(place)
        self._lower()

    def _lower(self) -> None:
        while self.top and self.top - 1 not in self.owners:
            self.top -= 1


class TwoEnded(Amounts):
    """One arena, KV from its start and whole states from its end; what is in the way is moved when it is.

    A kind first fills the holes at its own end, then the gap. Where the gap is too small, units of the other end are
    moved into its holes until it is not, which copies them.

    Args:
        model, pool_bytes: sizes.
    """

    def __init__(self, model: ModelSizes, pool_bytes: int):
        layers = model.layers
        sizes = layers.page_tokens * model.token_bytes, model.state_bytes
        super().__init__(
            (0, 0),
            sizes,
            lambda tokens: (layers.num_pages(tokens), 1),
            pools=(KV, STATE),
            calls=(2, 2, (1, 0)),
            step_tokens=layers.page_tokens,
            slot_bytes=model.state_bytes,
            reserved_bytes=pool_bytes,
        )
        self.ends = tuple(map(_End, sizes))

    @property
    def used_bytes(self) -> int:
        return self._bytes([len(end.owners) for end in self.ends])

    def fits_alone(self, num_tokens: int) -> bool:
        return self._bytes(self.parts(num_tokens)) <= self.reserved_bytes

    def check_invariants(self) -> None:
        assert self._gap() >= 0, f"two_ended: the ends overlap by {-self._gap()} bytes"
        for end in self.ends:
            holes = [place for place in end.holes if place < end.top]
            places = sorted([*end.owners, *holes])
            held = sorted(place for places in end.held.values() for place in places)
            agree(
                "two_ended",
                places=(list(range(end.top)), places),
                units=(sorted(end.owners), held),
            )

    def _bytes(self, units: Sequence[int]) -> int:
        return sum(n * size for n, size in zip(units, self.unit_bytes, strict=True))

    def _gap(self) -> int:
        return self.reserved_bytes - self._bytes([end.top for end in self.ends])

    def _held(self, request: int) -> Parts:
        return tuple(len(end.held.get(request, ())) for end in self.ends)

    def _has_room(self, needs: Sequence[int]) -> bool:
        return self.used_bytes + self._bytes(needs) <= self.reserved_bytes

    def _take(self, request: int, kind: int, count: int) -> None:
        end, other = self.ends[kind], self.ends[1 - kind]
        outside = max(0, count - end.free_inside) * end.unit_bytes
        moved = 0
        while self._gap() < outside:
            other.move_last()
            moved += other.unit_bytes
        self.counters.copied_bytes += moved
        end.take(request, count)

    def _give_back(self, request: int) -> None:
        for end in self.ends:
            end.give_back(request)

"""Two ways to let the border between KV and states move: superblocks, and one arena filled from both ends."""

from __future__ import annotations

import heapq

from hybrid_jax.sim.allocators.honest_memory import HonestCounters
from hybrid_jax.sim.allocators.honest_models import HonestModel
from hybrid_jax.sim.allocators.pools import KV, STATE


class Superblocks:
    """Blocks of one size, each for one kind while anything is in it; pages and states of single layers inside.

    A new object goes to the block of its kind that was begun first, of those with room.

    Args:
        model, pool_bytes: sizes.
        block_bytes: of one block.
    """

    def __init__(self, model: HonestModel, pool_bytes: int, block_bytes: int):
        layers = model.layers
        self.counters = HonestCounters()
        self.step_tokens = self.prefix_tokens = model.layers.page_tokens
        self.slot_bytes, self.reserved_bytes = model.state_bytes, pool_bytes
        self.block_bytes, self.num_blocks = block_bytes, pool_bytes // block_bytes
        self.per_step = (layers.num_pages_each, layers.num_states)
        self.per_block = (block_bytes // layers.page_bytes, block_bytes // layers.state_bytes)
        if self.per_block[STATE]:
            in_block = self.per_block[STATE] * layers.state_bytes
            self.slot_bytes = model.state_bytes * block_bytes // in_block
        self.free = list(range(self.num_blocks - 1, -1, -1))
        self.room: tuple[list[int], list[int]] = ([], [])  # heaps of blocks that may have room
        self.used: dict[int, int] = {}  # objects in each block in use
        self.held: tuple[dict[int, dict[int, int]], ...] = ({}, {})  # request -> block -> objects
        self.spare = [0, 0]  # objects that fit in blocks in use

    @property
    def used_bytes(self) -> int:
        return len(self.used) * self.block_bytes

    def fits_alone(self, num_tokens: int) -> bool:
        needs = self._pages(num_tokens), self.per_step[STATE]
        if not all(self.per_block):
            return False
        blocks = sum(-(-need // each) for need, each in zip(needs, self.per_block, strict=True))
        return blocks <= self.num_blocks

    def admit(self, request: int, num_tokens: int) -> bool:
        needs = self._pages(num_tokens), self.per_step[STATE]
        self.counters.allocate_calls += sum(self.per_step)
        if sum(self._new_blocks(kind, needs[kind]) for kind in (KV, STATE)) > len(self.free):
            return False
        for kind in (KV, STATE):
            self.held[kind][request] = {}
            self._take(request, kind, needs[kind])
        return True

    def grow(self, request: int, num_tokens: int) -> bool:
        more = self._pages(num_tokens) - sum(self.held[KV][request].values())
        self.counters.allocate_calls += self.per_step[KV]
        if self._new_blocks(KV, more) > len(self.free):
            return False
        self._take(request, KV, more)
        return True

    def release(self, request: int) -> None:
        for kind in (KV, STATE):
            for block, count in self.held[kind].pop(request).items():
                self._put_back(kind, block, count)

    def holds(self, request: int) -> tuple[int, bool]:
        pages, states = (sum(held.get(request, {}).values()) for held in self.held)
        return pages // self.per_step[KV] * self.step_tokens, states == self.per_step[STATE]

    def row_bytes(self, num_rows: int) -> int:
        return 0

    def check_invariants(self) -> None:
        """Every block is free or in use, and its objects are those that are held."""
        counted: dict[int, int] = {}
        for kind in (KV, STATE):
            for blocks in self.held[kind].values():
                for block, count in blocks.items():
                    counted[block] = counted.get(block, 0) + count
        if counted != self.used or sorted([*self.free, *counted]) != list(range(self.num_blocks)):
            raise AssertionError(
                f"superblocks: {len(self.free)} free, {len(self.used)} in use, {len(counted)} held, "
                f"of {self.num_blocks}"
            )

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.step_tokens) * self.per_step[KV]

    def _new_blocks(self, kind: int, count: int) -> int:
        return -(-max(0, count - self.spare[kind]) // self.per_block[kind])

    def _take(self, request: int, kind: int, count: int) -> None:
        held, room, each = self.held[kind][request], self.room[kind], self.per_block[kind]
        while count:
            if not room:
                block = self.free.pop()
                self.used[block] = 0
                self.spare[kind] += each
                heapq.heappush(room, block)
            block = room[0]
            taken = min(count, each - self.used[block])
            self.used[block] += taken
            self.spare[kind] -= taken
            held[block] = held.get(block, 0) + taken
            count -= taken
            if self.used[block] == each:
                heapq.heappop(room)

    def _put_back(self, kind: int, block: int, count: int) -> None:
        room, each = self.room[kind], self.per_block[kind]
        if self.used[block] == each:
            heapq.heappush(room, block)
        self.used[block] -= count
        self.spare[kind] += count
        if not self.used[block]:
            del self.used[block]
            room.remove(block)
            heapq.heapify(room)
            self.spare[kind] -= each
            self.free.append(block)


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
        return self.top - len(self.owners)

    def take(self, request: int, count: int) -> None:
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


class TwoEnded:
    """One arena, KV from its start and whole states from its end; what is in the way is moved when it is.

    A kind first fills the holes at its own end, then the gap. Where the gap is too small, units of the other end are
    moved into its holes until it is not, which copies them.

    Args:
        model, pool_bytes: sizes.
    """

    def __init__(self, model: HonestModel, pool_bytes: int):
        self.counters = HonestCounters()
        self.step_tokens = self.prefix_tokens = model.layers.page_tokens
        self.slot_bytes, self.reserved_bytes = model.state_bytes, pool_bytes
        self.ends = (_End(self.step_tokens * model.token_bytes), _End(model.state_bytes))

    @property
    def used_bytes(self) -> int:
        return sum(len(end.owners) * end.unit_bytes for end in self.ends)

    def fits_alone(self, num_tokens: int) -> bool:
        return self._bytes(self._pages(num_tokens), 1) <= self.reserved_bytes

    def admit(self, request: int, num_tokens: int) -> bool:
        pages = self._pages(num_tokens)
        self.counters.allocate_calls += 2
        if self.used_bytes + self._bytes(pages, 1) > self.reserved_bytes:
            return False
        self._take(request, KV, pages)
        self._take(request, STATE, 1)
        return True

    def grow(self, request: int, num_tokens: int) -> bool:
        more = self._pages(num_tokens) - len(self.ends[KV].held[request])
        self.counters.allocate_calls += 1
        if self.used_bytes + self._bytes(more, 0) > self.reserved_bytes:
            return False
        self._take(request, KV, more)
        return True

    def release(self, request: int) -> None:
        for end in self.ends:
            end.give_back(request)

    def holds(self, request: int) -> tuple[int, bool]:
        pages, states = (len(end.held.get(request, ())) for end in self.ends)
        return pages * self.step_tokens, states == 1

    def row_bytes(self, num_rows: int) -> int:
        return 0

    def check_invariants(self) -> None:
        """The ends do not overlap, and each one's places add up."""
        if sum(end.top * end.unit_bytes for end in self.ends) > self.reserved_bytes:
            raise AssertionError(
                f"two_ended: {[end.top * end.unit_bytes for end in self.ends]} bytes overlap, "
                f"of {self.reserved_bytes}"
            )
        for end in self.ends:
            holes = [place for place in end.holes if place < end.top]
            places = sorted([*end.owners, *holes])
            held = sorted(place for places in end.held.values() for place in places)
            if places != list(range(end.top)) or held != sorted(end.owners):
                raise AssertionError(
                    f"two_ended: {len(end.owners)} units, {len(holes)} holes, {len(held)} held, "
                    f"below {end.top}"
                )

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.step_tokens)

    def _bytes(self, pages: int, states: int) -> int:
        return pages * self.ends[KV].unit_bytes + states * self.ends[STATE].unit_bytes

    def _take(self, request: int, kind: int, count: int) -> None:
        """Memory for it is free somewhere, as the caller has checked."""
        end, other = self.ends[kind], self.ends[1 - kind]
        outside = max(0, count - end.free_inside) * end.unit_bytes
        moved = 0
        while self._gap() < outside:
            other.move_last()
            moved += other.unit_bytes
        if moved:
            self.counters.copies += 1
            self.counters.copied_bytes += moved
            self.counters.most_copied_bytes = max(self.counters.most_copied_bytes, moved)
        end.take(request, count)

    def _gap(self) -> int:
        return self.reserved_bytes - sum(end.top * end.unit_bytes for end in self.ends)

"""The disk on virtual time: it keeps what a folder of files keeps, jobs take their time, and traces go through it."""

from __future__ import annotations

import re
from dataclasses import astuple, replace
from random import Random

import numpy as np
import pytest

from hybrid_jax.byte_sizes import at_least
from hybrid_jax.costs import Costs
from hybrid_jax.geometry import sized_geometry
from hybrid_jax.sim.prefix_cache.in_flight import InFlightResult, simulate_in_flight
from hybrid_jax.sim.prefix_cache.timing import DeviceModel
from hybrid_jax.sim.prefix_cache.traces import TraceRequest
from hybrid_jax.sim.prefix_cache.virtual_disk import NOTHING, VirtualDisk
from hybrid_jax.sim.prefix_cache.virtual_engine import FRAME_BYTES, virtual_geometry
from hybrid_jax.tiers import folder as real_folder
from hybrid_jax.tiers.chain import RUN_TOKENS, root_of
from hybrid_jax.tiers.disk import WAITING_BYTES, Disk
from hybrid_jax.tiers.folder import Folder
from tests.sim.chats import COSTS, KINDS, KV, PLENTY, asked, chat, tokens

# A token has a word, a page 64 tokens in one frame, a checkpoint three frames.
SMALL = Costs(flops_per_token=1, flops_per_key=0, kv_bytes=4, checkpoint_bytes=3 * 256)
SMALL_KINDS = {
    "hybrid": SMALL,
    "attention": replace(SMALL, checkpoint_bytes=0),
    "recurrent": replace(SMALL, kv_bytes=0),
}
LIMIT = 20_000  # a dozen prefixes
SLOW = DeviceModel(disk_read_bytes_per_second=KV, disk_write_bytes_per_second=2 * KV)


def small_geometry(costs: Costs):
    pages, state = costs.kv_bytes > 0, costs.checkpoint_bytes > 0
    return sized_geometry(
        frame_words=64, page_tokens=64 * pages, frames_per_page=int(pages), token_words=int(pages),
        state_frames=3 * state, grain=32,
    )  # fmt: skip


# --- beside files -----------------------------------------------------------------------------------


class Both:
    """A folder of files and the virtual one, with one clock."""

    def __init__(self, folder, costs, now):
        geometry = small_geometry(costs)
        about = {"model": "small"}
        self.disk = Disk(Folder(folder, root_of(), limit=LIMIT, about=about), geometry)
        self.virtual = VirtualDisk(geometry, costs, LIMIT, DeviceModel())
        self._now = now

    def set_clock(self, seconds: float) -> None:
        self._now[0] = seconds
        self.virtual.advance(seconds)

    def save(self, prompt: np.ndarray) -> int:
        """Saves a prompt; returns how many runs of pages were new, or -1 if nothing was."""
        frame = np.zeros(64, np.uint32)
        saves = [d.wants(d.chain(prompt), len(prompt)) for d in (self.disk, self.virtual)]
        one, two = saves
        assert (one is None) == (two is None)
        if one is None:
            return -1
        assert (one.ends, one.places, one.names) == (two.ends, two.places, two.names)
        copies = [frame] * (len(one.places) + self.disk.geometry.cached_state_frames)
        self.disk.save(one, copies)
        self.disk.flush()
        self.virtual.save(two, copies)
        [(_, _, job)] = self.virtual._jobs  # at once, for the files' clock stands still
        self.virtual._jobs.clear()
        job()
        return len(one.ends)

    def use(self, prompt: np.ndarray) -> int:
        """Counts what is there of a prompt as just used, as a read does; returns its length."""
        found = [d.find(d.chain(prompt), 0, len(prompt), held=0) for d in (self.disk, self.virtual)]
        assert found[0] == found[1]
        if found[0]:
            for disk in (self.disk, self.virtual):
                disk.touch(disk.chain(prompt), found[0])
        return found[0]

    def compare(self) -> None:
        """Both have the same parts."""
        files, virtual = self.disk.folder, self.virtual.folder
        assert virtual._sizes == files._sizes
        assert set(virtual._stored) == set(virtual._sizes)
        assert virtual.num_bytes == files.num_bytes == sum(files._sizes.values()) <= LIMIT
        counters = self.virtual.counters
        assert astuple(counters) == astuple(self.disk.counters)


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Files are written without a header, and their clock is set by the test."""

    def bytes_of(marks, arrays):
        return sum(array.num_bytes for array in arrays.values())

    def write(file, marks, arrays):
        data = b"".join(array.joined().tobytes() for array in arrays.values())
        file.write_bytes(data)
        return len(data)

    made, now = [], [1e9]
    monkeypatch.setattr(real_folder, "write_part", write)
    monkeypatch.setattr(real_folder, "part_bytes", bytes_of)
    monkeypatch.setattr(real_folder.time, "time", lambda: now[0])

    def make(costs):
        made.append(Both(tmp_path, costs, now))
        made[-1].set_clock(1e9)
        return made[-1]

    yield make
    for each in made:
        each.disk.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", SMALL_KINDS)
def test_it_keeps_the_parts_that_a_folder_of_files_keeps(both, kind, seed):
    """Prompts of some documents come and go; what was not used for longest goes, on both sides alike."""
    rng, sides, seconds = Random(seed), both(SMALL_KINDS[kind]), 1e9
    texts = [tokens(100 * seed + n, 800) for n in range(12)]
    shared = texts[0][:512]
    prompts = [
        np.concatenate((shared[: rng.choice((0, 256, 300, 512))], text))[:800] for text in texts
    ]
    hits, new, kept_runs = 0, 0, 0
    for _ in range(150):
        seconds += rng.choice((0.0, 1e-5, 1.0))
        sides.set_clock(seconds)
        prompt = rng.choice(prompts)[: 32 * rng.randint(1, 25)]
        if rng.random() < 0.5:
            runs = sides.save(prompt)
            new, kept_runs = new + (runs >= 0), kept_runs + (0 <= runs < len(prompt) // RUN_TOKENS)
        else:
            hits += sides.use(prompt) > 0
        sides.compare()
    folder = sides.virtual.folder
    assert hits > 10 and new > 30
    assert sides.virtual.counters.saved_bytes > 1.5 * folder.num_bytes  # some had to go
    assert kept_runs or kind == "recurrent"  # shared parts are written once


# --- jobs take their time ---------------------------------------------------------------------------


def virtual(limit: int = PLENTY, device: DeviceModel = SLOW) -> VirtualDisk:
    """A disk that reads a token's K and V in a second and writes two. A token is 1/16 frame, a checkpoint 32 tokens."""
    return VirtualDisk(virtual_geometry(COSTS, 32), COSTS, limit, device)


def save(disk: VirtualDisk, prompt: np.ndarray) -> None:
    wanted = disk.wants(disk.chain(prompt), len(prompt))
    assert wanted is not None
    disk.save(wanted, [NOTHING] * (len(wanted.places) + 2))


def test_a_prefix_is_there_when_it_is_written_and_saves_wait_for_each_other():
    disk, (one, two) = virtual(), (tokens(0, 64), tokens(1, 64))
    disk.advance(100.0)
    for prompt in (one, two):
        save(disk, prompt)
    found = lambda: [disk.find(disk.chain(p), 0, 64, held=0) for p in (one, two)]
    assert found() == [0, 0] and disk.wants(disk.chain(one), 64) is None  # it is on its way
    for now, there in ((147.9, [0, 0]), (148.0, [64, 0]), (195.9, [64, 0]), (196.0, [64, 64])):
        disk.advance(now)
        assert found() == there, now
    assert disk.written_s == 96.0 and disk.next_s is None
    assert disk.counters.saved_bytes == disk.folder.num_bytes == 2 * 96 * KV


def test_a_writer_with_much_before_it_takes_no_more():
    disk = virtual()
    frames = 0
    for number in range(100):
        assert disk.has_room == (frames * FRAME_BYTES < WAITING_BYTES)
        save(disk, tokens(number, 256))
        frames += 18
    disk.advance(1e6)
    assert disk.has_room and disk.counters.saves == 100


def test_reads_wait_for_each_other_and_read_what_is_wanted():
    disk, prompt = virtual(), tokens(0, 576)
    save(disk, prompt)
    disk.advance(1e4)
    chain, pages = disk.chain(prompt), range(36)
    read = disk.read(chain, 576, [(page, 0) for page in pages])
    rest = disk.read(chain, 576, [(page, 0) for page in pages if page >= 17])
    assert not read.done and not rest.done and not read.wait(60.0)
    disk.advance(1e4 + 608)  # 576 tokens and a checkpoint
    assert read.done and not read.failed and not rest.done
    assert read.num_bytes == 608 * KV
    disk.advance(1e4 + 608 + 352)  # the runs of 256 and of 64 tokens, and the checkpoint
    assert rest.done and rest.num_bytes == 352 * KV
    assert disk.read_s == 608 + 352
    assert set(rest.frames.pages) == {(page, 0) for page in range(17, 36)}


def test_what_goes_while_it_is_read_is_a_miss():
    disk = virtual(limit=400 * KV)
    save(disk, tokens(0, 256))
    disk.advance(1e3)
    read = disk.read(disk.chain(tokens(0, 256)), 256, [(page, 0) for page in range(16)])
    save(disk, tokens(1, 256))  # written in half the time
    disk.advance(2e3)
    assert read.done and read.failed and disk.counters.loads_failed == 1
    assert disk.find(disk.chain(tokens(0, 256)), 0, 256, held=0) == 0


# --- a trace ------------------------------------------------------------------------------------------


def chats(gap: float) -> list[TraceRequest]:
    """Eight conversations of four turns that take turns."""
    trace = [turn for session in range(8) for turn in chat(4, 1000.0, session)]
    trace.sort(key=lambda request: (request.arrival_s, request.session_id))
    return [replace(request, arrival_s=gap * n) for n, request in enumerate(trace)]


def run(
    kind: str, frames: int, *, gap: float = 20.0, policy: str = "lru", **options
) -> InFlightResult:
    capacity = frames * FRAME_BYTES
    return simulate_in_flight(chats(gap), KINDS[kind], policy, capacity, loads="always", **options)


FEW = {"hybrid": 48, "attention": 48, "recurrent": 16}  # frames, for one conversation or two


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_arena_evicts_comes_back_from_disk(kind):
    found, plenty = run(kind, FEW[kind], disk_capacity=PLENTY), run(kind, 1000)
    assert found.token_hit_rate == plenty.token_hit_rate > 0
    assert found.hits["disk"].tokens == found.hit_tokens == found.disk["loaded_tokens"]
    assert found.hits["disk"].requests == found.disk["loads"] == 24
    assert "host" not in found.hits and found.host == {}
    device = DeviceModel()
    assert found.read_s == pytest.approx(device.read_seconds(found.moved_bytes["from_disk"]))
    assert found.written_s >= 0.999 * device.write_seconds(found.moved_bytes["to_disk"]) > 0
    # What is read is also copied. Frames are not smaller than what is in them.
    assert found.copied_s >= 0.999 * device.copy_seconds(sum(found.moved_bytes.values()))


@pytest.mark.parametrize(
    ("kind", "host_frames", "narrow_bytes"),
    [
        ("hybrid", 60, 0),
        ("hybrid", 60, FRAME_BYTES),
        ("attention", 60, 0),
        ("recurrent", 10, 0),
        ("recurrent", 8, FRAME_BYTES),
    ],
)
def test_hits_by_tier_add_up(kind, host_frames, narrow_bytes):
    """The host's memory holds more than the arena and less than all; the disk has the rest."""
    host, frames = host_frames * FRAME_BYTES, FEW[kind] - 2 * bool(narrow_bytes)
    options = {"host_capacity": host, "disk_capacity": PLENTY, "narrow_bytes": narrow_bytes}
    found = run(kind, frames, gap=0.01, policy="adaptive", bounds=True, **options)
    assert list(found.hits) == ["arena", "host", "disk"]
    assert sum(tier.tokens for tier in found.hits.values()) == found.hit_tokens
    assert sum(tier.token_hit_rate for tier in found.hits.values()) == pytest.approx(
        found.token_hit_rate
    )
    assert min(found.hits["host"].tokens, found.hits["disk"].tokens) > 0
    assert 0 < sum(tier.requests for tier in found.hits.values()) <= found.requests
    assert found.moved_bytes == {
        "to_host": found.host["saved_frames"] * FRAME_BYTES,
        "from_host": found.host["loaded_frames"] * FRAME_BYTES,
        "to_disk": found.disk["saved_bytes"],
        "from_disk": found.disk["loaded_bytes"],
    }
    alone = run(kind, frames, gap=0.01, policy="adaptive", narrow_bytes=narrow_bytes)
    assert alone.alone is None and alone.moved_bytes == {}
    for name in ("hit_tokens", "token_hit_rate", "ttft_s", "latency_s"):
        assert getattr(found.alone, name) == getattr(alone, name), name
    assert found.token_hit_rate > alone.token_hit_rate


def test_a_prompt_waits_for_its_read_and_others_do_not():
    """A read takes a second for each token; computing takes next to nothing."""
    first = tokens(0, 300)
    trace = [
        asked("a", 0.0, first, [1]),
        *(
            asked(n, 1000.0 + n, tokens(n, 500), [1]) for n in range(1, 5)
        ),  # the arena forgets the first
        asked("b", 1e5, np.append(first, tokens(9, 20)), [1]),
        asked("c", 1e5, tokens(10, 40), [1]),
    ]
    capacity = 40 * FRAME_BYTES
    options = {"disk_capacity": PLENTY, "device": SLOW}
    found = simulate_in_flight(trace, COSTS, "lru", capacity, loads="always", **options)
    assert found.hits["disk"].tokens == found.hit_tokens == 288
    assert found.read_s == 288 + 32
    assert found.span_s == pytest.approx(1e5 + 320, abs=1.0)
    assert found.ttft_s["p50"] < 1.0
    assert found.ttft_s["mean"] == pytest.approx(320 / 7, abs=1.0)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_sooner_computed_is_not_loaded(tier):
    """A text that comes back 32 times, and once in a while it is loaded all the same."""
    texts, times = [tokens(n, 300) for n in range(4)], 8
    trace = [asked(n, 1000.0 * n, texts[n % 4], [1]) for n in range(4 * (times + 1))]
    slow, fast = 1e9, 1e15
    device = DeviceModel(
        flops_per_second=fast, host_bytes_per_second=slow, disk_read_bytes_per_second=slow
    )
    options = {f"{tier}_capacity": PLENTY, "device": device}
    run = lambda **more: simulate_in_flight(trace, COSTS, "lru", 40 * FRAME_BYTES, **options | more)
    always, faster = run(loads="always"), run()
    told = [
        (getattr(found, tier)["loads"], getattr(found, tier)["loads_slower"])
        for found in (always, faster)
    ]
    # What is not worth reading is not written either.
    assert told == [(4 * times, 0), (2, 4 * times - 2) if tier == "host" else (0, 0)]
    assert faster.disk.get("saves_slower", 1) > faster.disk.get("saves", 0) == 0
    assert faster.ttft_s["mean"] < always.ttft_s["mean"]
    slow_to_compute = run(device=replace(device, flops_per_second=1e9))
    assert slow_to_compute.hit_tokens == always.hit_tokens > 0


# As before there were tiers: (hits, evictions, preemptions, tokens computed, mean seconds to the first token, span).
BEFORE = {
    ("hybrid", "lru", 150): (1536, 57, 0, 7920, 0.01397, 0.16503),
    ("hybrid", "adaptive", 150): (1536, 57, 0, 7920, 0.01397, 0.16503),
    ("attention", "lru", 150): (2048, 16, 1, 7409, 0.012735, 0.168426),
    ("attention", "adaptive", 150): (2688, 83, 1, 6769, 0.01231, 0.164543),
    ("recurrent", "lru", 30): (6144, 49, 0, 3312, 0.004964, 0.110703),
    ("recurrent", "adaptive", 30): (6144, 49, 0, 3312, 0.004964, 0.110703),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "policy", "frames"), BEFORE)
def test_without_tiers_nothing_has_changed(kind, policy, frames):
    found = run(kind, frames, gap=0.002, policy=policy)
    told = (
        *(found.hit_tokens, found.evictions, found.preemptions, found.prefill_tokens),
        *(round(found.ttft_s["mean"], 6), round(found.span_s, 6)),
    )
    assert told == BEFORE[kind, policy, frames]
    assert (found.host, found.disk, found.moved_bytes, found.alone) == ({}, {}, {}, None)
    assert found.copied_s == found.read_s == found.written_s == 0
    assert list(found.hits) == ["arena"] and found.hits["arena"].tokens == found.hit_tokens
    assert found.timing == DeviceModel().describe()


def test_the_device_is_told_with_the_rates_that_count():
    host, disk = (
        run("hybrid", 48, **{name: PLENTY}) for name in ("host_capacity", "disk_capacity")
    )
    assert host.timing.endswith("bytes / 3.225 TB/s, copies at 48 GB/s")
    assert disk.timing.endswith(
        ", copies at 48 GB/s, the disk reads 0.65 GB/s and writes 1.38 GB/s"
    )


# --- mistakes -----------------------------------------------------------------------------------------


def test_a_disk_below_a_checkpoint_and_a_run_of_pages_is_an_error():
    least = (32 + 256) * KV
    told = re.escape(at_least(least, least - 1))
    with pytest.raises(
        ValueError, match=f"disk memory must hold a checkpoint and 256 tokens, {told}$"
    ):
        run("hybrid", 48, disk_capacity=least - 1)
    assert run("hybrid", 48, disk_capacity=least).disk["saves"] > 0


@pytest.mark.parametrize("what", ["host", "disk"])
def test_tiers_without_a_cache_are_an_error(what):
    with pytest.raises(
        ValueError,
        match=f"{what} memory .* got 5000000000 bytes of it with policy 'none'; leave it out",
    ):
        run("hybrid", 48, policy="none", **{f"{what}_capacity": 5 * 10**9})

"""The tier on disk alone: copies go in, frames come out; damage, races, errors of the system and killed processes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from hybrid_jax.schedule.tiers.arrivals import places_in, wanted_frames
from hybrid_jax.tiers import disk as module
from hybrid_jax.tiers import folder as folder_module
from hybrid_jax.tiers import part_file
from hybrid_jax.tiers.chain import root_of
from hybrid_jax.tiers.disk import Disk
from hybrid_jax.tiers.folder import Folder, files_of
from hybrid_jax.tiers.parcel import Frames
from tests.imports import ROOT
from tests.tiers.prefixes import geometry_of, joined, random_prefix, same

KINDS = ("qwen3_next", "mamba2", "windowed", "llama")
LENGTHS = (32, 256, 320, 608)


def open_disk(path: Path, name: str = "qwen3_next", *, limit: int | None = 1 << 30, **settings):
    geometry = geometry_of(name, **settings)
    return Disk(Folder(path, root_of(name), limit=limit, about={}), geometry)


def prompt(seed: int, length: int = 700) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, length).astype(np.int32)


def content(disk: Disk, tokens: np.ndarray, position: int) -> dict:
    """What a model would compute of a prefix: of each token and of each state what its tokens decide."""
    found = random_prefix(disk.geometry, position)
    for name, array in found.items():
        first = position - len(array) if name.startswith("window") else 0
        for index in range(len(array)) if name.startswith(("pages", "scales", "window")) else ():
            array[index] = zlib.crc32(name.encode() + tokens[: first + index + 1].tobytes())
        if name.startswith(("state", "columns")):
            array.reshape(-1)[:] = int(tokens[:position].sum()) % 60_000
    return found


def save(disk: Disk, tokens: np.ndarray, position: int) -> bool:
    """Hands a prefix over, if it is wanted."""
    asked = disk.wants(disk.chain(tokens), position)
    if asked is None:
        return False
    geometry = disk.geometry
    frames = Frames.zeros(geometry, places_in(wanted_frames(geometry, position)))
    disk.form.write_prefix(position, content(disk, tokens, position), frames)
    disk.save(asked, frames.words(asked.places))
    return True


def load(disk: Disk, tokens: np.ndarray, position: int) -> dict | None:
    """The arrays of a prefix as they come from disk; None if they cannot be read."""
    places = places_in(wanted_frames(disk.geometry, position))
    read = disk.read(disk.chain(tokens), position, places)
    assert read.wait(30)
    return None if read.failed else joined(disk.form.read_prefix(position, read.frames))


def find(disk: Disk, tokens: np.ndarray, above: int = 0) -> int:
    return disk.find(disk.chain(tokens), above, len(tokens), held=0)


@pytest.mark.parametrize("name", KINDS)
def test_prefixes_of_several_prompts_come_back(tmp_path, name):
    disk = open_disk(tmp_path, name)
    tokens = [prompt(seed) for seed in range(3)]
    for length in LENGTHS:
        for one in tokens:
            assert save(disk, one, length)
            assert not save(disk, one, length)  # it is being written
    disk.flush()
    assert not save(disk, tokens[0], 320) and disk.counters.saves == 12
    assert disk.counters.saved_bytes == disk.folder.num_bytes
    disk.close()
    again = open_disk(tmp_path, name, page_tokens=16)
    for one in tokens:
        for length in LENGTHS:
            assert find(again, one[: length + 5]) == length
            assert same(load(again, one, length), content(disk, one, length))
        assert find(again, one, above=608) == 0
    assert find(again, prompt(9)) == 0


def test_what_prompts_share_is_written_once(tmp_path):
    disk = open_disk(tmp_path, "llama")
    one = prompt(1)
    other = np.append(one[:520], prompt(2)).astype(np.int32)
    assert save(disk, one, 608)
    disk.flush()
    before = disk.folder.num_bytes
    asked = disk.wants(disk.chain(other), 608)
    assert asked.ends == [608] and min(page for page, _ in asked.places) == 512 // 64
    assert save(disk, other, 608)
    disk.flush()
    assert disk.folder.num_bytes - before < before / 3
    assert same(load(disk, other, 608), content(disk, other, 608))


def test_what_is_read_counts_as_just_used(tmp_path):
    disk = open_disk(tmp_path)
    for seed in range(3):
        save(disk, prompt(seed), 320)
    disk.flush()
    for file in files_of(tmp_path):
        os.utime(file.path, (1000, 1000))
    assert load(disk, prompt(1), 320)
    used = {file.path.name for file in files_of(tmp_path) if file.used > 1000}
    chain = disk.chain(prompt(1))
    ends = module.pages_name(chain, 256), module.pages_name(chain, 320)
    assert used == {*ends, module.checkpoint_name(chain, 320)}


def test_only_the_pages_that_are_wanted_are_read(tmp_path):
    disk = open_disk(tmp_path, "llama")
    tokens = prompt(1)
    save(disk, tokens, 608)
    disk.flush()
    read = disk.read(disk.chain(tokens), 608, [(9, 0)])
    assert read.wait(30) and not read.failed and list(read.frames.pages) == [(9, 0)]
    assert 0 < read.num_bytes < disk.folder.num_bytes / 2
    whole = Frames.zeros(disk.geometry, places_in(wanted_frames(disk.geometry, 608)))
    disk.form.write_prefix(608, content(disk, tokens, 608), whole)
    assert np.array_equal(read.frames.at(9, 0), whole.at(9, 0))


def test_the_time_of_a_read_begins_with_its_first_part(tmp_path, monkeypatch):
    """It is the disk's speed, so what a prefix waits behind others does not count."""
    disk = open_disk(tmp_path)
    for seed in (1, 2):
        save(disk, prompt(seed), 608)
    disk.flush()
    clock, gate, part_of = [0.0], threading.Semaphore(0), disk.folder.read
    monkeypatch.setattr(disk, "_readers", module.Workers("reader", 1))
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])

    def in_a_second(*args):
        assert gate.acquire(timeout=30)
        clock[0] += 1.0
        return part_of(*args)

    monkeypatch.setattr(disk.folder, "read", in_a_second)
    places = places_in(wanted_frames(disk.geometry, 608))
    first, second = (disk.read(disk.chain(prompt(seed)), 608, places) for seed in (1, 2))
    gate.release(8)
    assert first.wait(30) and second.wait(30) and not (first.failed or second.failed)
    assert (first.seconds, second.seconds) == (4.0, 4.0)  # three runs of pages and a checkpoint
    disk.close()


def test_a_prefix_needs_its_pages_too(tmp_path):
    disk = open_disk(tmp_path)
    tokens = prompt(1)
    for length in (256, 608):
        save(disk, tokens, length)
    disk.flush()
    name = module.pages_name(disk.chain(tokens), 512)
    disk.folder.remove(name)
    assert find(disk, tokens) == 256
    assert disk.find(disk.chain(tokens), 256, len(tokens), held=512) == 608
    assert load(disk, tokens, 608) is None and disk.counters.loads_failed == 1


@pytest.mark.parametrize("lost", [256, 512, 608, 0])
def test_what_a_prefix_has_lost_is_written_again(tmp_path, lost):
    """A run of pages, or the checkpoint, was damaged and removed; then the prompt is computed once more."""
    disk = open_disk(tmp_path)
    tokens = prompt(1)
    save(disk, tokens, 608)
    disk.flush()
    before, chain = disk.folder.num_bytes, disk.chain(tokens)
    name = module.pages_name(chain, lost) if lost else module.checkpoint_name(chain, 608)
    disk.folder.remove(name)
    assert find(disk, tokens) == 0
    assert save(disk, tokens, 608) and not save(disk, tokens, 608)
    disk.flush()
    assert not save(disk, tokens, 608)
    assert disk.folder.num_bytes == before and find(disk, tokens) == 608
    assert same(load(disk, tokens, 608), content(disk, tokens, 608))
    disk.close()


def test_without_a_state_or_a_window_any_whole_run_is_enough(tmp_path):
    disk = open_disk(tmp_path, "llama")
    tokens = prompt(1)
    save(disk, tokens, 608)
    disk.flush()
    other = np.append(tokens[:520], prompt(2)).astype(np.int32)
    assert find(disk, other) == 512
    assert same(load(disk, other, 512), content(disk, tokens, 512))
    windowed = open_disk(tmp_path, "windowed")
    save(windowed, tokens, 608)
    windowed.flush()
    assert find(windowed, other) == 0


def damage(file: Path, chosen: random.Random, others: list[Path]) -> None:
    """Something that happens to files."""
    data = bytearray(file.read_bytes())
    match chosen.randrange(7):
        case 0:
            data = data[: chosen.randrange(len(data))]
        case 1 | 2:
            for _ in range(chosen.randrange(1, 4)):
                data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        case 3:
            begin = chosen.randrange(len(data))
            data[begin : begin + 4096] = bytes(len(data[begin : begin + 4096]))
        case 4:
            data = bytearray(chosen.choice(others).read_bytes())
        case 5:
            data += bytes(chosen.randrange(1, 99))
        case 6:
            data = data.replace(b'"version":"1"', b'"version":"7"')
            zeros = data[: part_file._CRC.start] + b"0" * 8 + data[part_file._CRC.stop :]
            data[part_file._CRC] = b"%08x" % part_file.zlib.crc32(zeros)
    file.write_bytes(data)


def test_a_thousand_damaged_files_give_a_miss_or_what_was_there(tmp_path, caplog):
    caplog.set_level(logging.ERROR, "hybrid_jax.disk")
    chosen, missed = random.Random(4), 0
    disk = open_disk(tmp_path / "whole")
    tokens = [prompt(seed) for seed in range(2)]
    for one in tokens:
        for length in LENGTHS:
            save(disk, one, length)
    disk.close()
    files = [file.path for file in files_of(tmp_path / "whole")]
    for number in range(125):
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", folder)
        for file in chosen.sample(files, 8):
            damage(folder / file.relative_to(tmp_path / "whole"), chosen, files)
        again = open_disk(folder, page_tokens=(16, 64)[number % 2])
        for one in tokens:
            found = {}
            while (position := find(again, one)) and not found:
                found = load(again, one, position) or {}
                missed += not found
            if found:
                assert same(found, content(disk, one, position))
        again.close()
        shutil.rmtree(folder)
    assert missed > 100


def test_an_error_of_the_system_ends_writing_and_nothing_else(tmp_path, monkeypatch, caplog):
    disk = open_disk(tmp_path)
    tokens = prompt(1)
    save(disk, tokens, 256)
    disk.flush()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(part_file.os, "replace", full)
    assert save(disk, tokens, 320)
    disk.flush()
    assert not disk.writing and not save(disk, tokens, 608)
    [record] = caplog.records
    assert "nothing more is kept" in record.message and "No space left" in record.message
    assert same(load(disk, tokens, 256), content(disk, tokens, 256))
    disk.close()


class FailedCopy:
    """The copy of a frame by a step that has failed."""

    def __array__(self, *args, **options):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")


def test_copies_that_failed_cost_one_prefix(tmp_path, caplog):
    """A step fails after its copies were handed over; then they raise where they are looked at."""
    caplog.set_level(logging.INFO, "hybrid_jax.disk")
    disk = open_disk(tmp_path)
    asked = disk.wants(disk.chain(prompt(1)), 320)
    disk.save(asked, [FailedCopy()] * len(asked.places))
    disk.flush()
    assert disk.writing and (disk.counters.saves, disk.counters.saves_dropped) == (0, 1)
    [record] = caplog.records
    assert record.levelno == logging.INFO and "prefix of 320 tokens is not" in record.message
    assert "out of memory" in record.message
    for seed in (1, 2):
        assert save(disk, prompt(seed), 320)
        disk.flush()
        assert same(load(disk, prompt(seed), 320), content(disk, prompt(seed), 320))
    disk.close()


@pytest.mark.parametrize("what", ["the folder", "one model"])
def test_a_folder_that_somebody_removes_is_made_again(tmp_path, what, caplog):
    path = tmp_path / "cache"
    disk = open_disk(path)
    save(disk, prompt(1), 320)
    disk.flush()
    shutil.rmtree(path if what == "the folder" else disk.folder._own)
    assert save(disk, prompt(2), 320)
    disk.flush()
    assert disk.writing and not caplog.records
    assert find(disk, prompt(1)) == 0 and find(disk, prompt(2)) == 320
    assert save(disk, prompt(1), 320)
    disk.flush()
    again = open_disk(path)
    assert again.folder.num_files == disk.folder.num_files == 6
    assert again.folder.num_bytes == disk.folder.num_bytes
    for seed in (1, 2):
        assert same(load(again, prompt(seed), 320), content(again, prompt(seed), 320))
    again.close()
    disk.close()


def test_a_folder_that_cannot_be_made_again_ends_writing(tmp_path, caplog):
    disk = open_disk(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").symlink_to(tmp_path / "nowhere")
    assert save(disk, prompt(1), 320)
    disk.flush()
    assert not disk.writing and not save(disk, prompt(2), 320)
    [record] = caplog.records
    assert "nothing more is kept" in record.message and "File exists" in record.message
    assert not (tmp_path / "nowhere").exists()
    disk.close()


def test_a_folder_that_is_removed_all_the_time_costs_no_more_than_misses(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "LOOK_S", 0.0)
    monkeypatch.setattr(folder_module, "LOOKS", 0)
    disk, ended = open_disk(tmp_path / "cache"), threading.Event()

    def remove() -> None:
        while not ended.wait(0.003):
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for seed in range(20):
            for length in LENGTHS:
                save(disk, prompt(seed), length)
            disk.flush()
            if (position := find(disk, prompt(seed))) and (
                found := load(disk, prompt(seed), position)
            ):
                assert same(found, content(disk, prompt(seed), position))
    finally:
        ended.set()
        thread.join()
    assert disk._waiting_bytes == 0 and not disk._names_waiting
    disk.close()


CALLS = {
    "open": (Path, "open"),
    "write": (Path, "open"),
    "rename": (os, "replace"),
    "unlink": (Path, "unlink"),
    "utime": (os, "utime"),
    "scandir": (os, "scandir"),
    "read": (part_file, "_bytes_of"),
}


@pytest.mark.parametrize("nth", [0, 1, 3])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_the_system_refuses_once_costs_no_more_than_a_miss(
    tmp_path, monkeypatch, call, nth, caplog
):
    """On a folder that is always full, and of which somebody has damaged files."""
    caplog.set_level(logging.ERROR, "hybrid_jax.disk")
    monkeypatch.setattr(folder_module, "LOOK_S", 0.0)
    monkeypatch.setattr(folder_module, "LOOKS", 0)
    disk, refused = open_disk(tmp_path, limit=400_000), 0
    save(disk, prompt(0), 608)
    disk.flush()
    calls = itertools.count()
    where, name = CALLS[call]
    real = getattr(where, name)

    def asked(*args, **options):
        nonlocal refused
        if next(calls) != nth:
            return real(*args, **options)
        refused += 1
        if call == "write":
            return FullFile(real(*args, **options))
        raise OSError(28 if call in ("open", "rename") else 13, "refused by the test")

    with monkeypatch.context() as patch:
        patch.setattr(where, name, asked)
        for seed in range(6):
            tokens = prompt(seed)
            for length in LENGTHS:
                save(disk, tokens, length)
            disk.flush()
            if seed % 2 and (files := sorted(disk.folder._own.glob("check*"))):
                with files[0].open("r+b") as file:
                    file.truncate(50)
            for one in (tokens, prompt(0)):
                if (position := find(disk, one)) and (found := load(disk, one, position)):
                    assert same(found, content(disk, one, position))
    disk.flush()
    assert refused == 1 or (nth and call in ("scandir", "unlink"))
    assert disk._waiting_bytes == 0 and not disk._names_waiting
    assert not [*tmp_path.rglob("*.new")]
    disk.folder.scan()
    assert disk.folder.num_bytes == sum(file.num_bytes for file in files_of(tmp_path)) <= 400_000
    again = open_disk(tmp_path)
    for seed in range(6):
        while position := find(again, prompt(seed)):
            if found := load(again, prompt(seed), position):
                assert same(found, content(again, prompt(seed), position))
                break
    disk.close()
    again.close()


class FullFile:
    """A file on a disk that is full: the first write is refused."""

    def __init__(self, opened) -> None:
        self._opened = opened

    def __enter__(self):
        self._opened.__enter__()
        return self

    def __exit__(self, *error):
        return self._opened.__exit__(*error)

    def write(self, data):
        self._opened.write(bytes(data)[:10])
        raise OSError(28, "No space left on device")


def test_a_read_that_is_refused_is_a_miss(tmp_path, monkeypatch, caplog):
    disk = open_disk(tmp_path)
    tokens = prompt(1)
    save(disk, tokens, 256)
    disk.flush()

    def refused(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.Folder, "read", refused)
    assert load(disk, tokens, 256) is None and disk.counters.loads_failed == 1
    assert "computed anew" in caplog.text and "Permission denied" in caplog.text


def test_copies_wait_for_the_writer_up_to_a_bound(tmp_path, monkeypatch):
    disk = open_disk(tmp_path)
    monkeypatch.setattr(module, "WAITING_BYTES", 1)
    gate, write = threading.Event(), disk.folder.write
    monkeypatch.setattr(disk.folder, "write", lambda *args: gate.wait(30) and write(*args))
    assert disk.has_room and save(disk, prompt(1), 256)
    assert not disk.has_room
    disk.wait_for_room(0.01)
    assert not disk.has_room
    gate.set()
    disk.wait_for_room(30)
    assert disk.has_room
    disk.close()


WRITER = """
import sys, random
from pathlib import Path
from tests.tiers.test_disk import open_disk, prompt, save
chosen = random.Random(int(sys.argv[2]))
disk = open_disk(Path(sys.argv[1]), limit=1_000_000)
print("ready", flush=True)
while True:
    tokens = prompt(chosen.randrange(40))
    for length in (32, 256, 320, 608):
        save(disk, tokens, length)
    disk.flush()
"""


def start_writer(folder: Path, seed: int) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", WRITER, str(folder), str(seed)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline()
    return process


def test_processes_that_are_killed_leave_whole_parts(tmp_path):
    """Two at a time, on one folder that is always full, killed at a hundred moments."""
    chosen = random.Random(1)
    for number in range(2):
        writers = [start_writer(tmp_path, 10 * number + k) for k in range(2)]
        try:
            for _ in range(50):
                time.sleep(chosen.random() * 0.02)
                for process in writers:
                    process.send_signal(signal.SIGSTOP)  # as if killed, for what is on disk
                for file in list(files_of(tmp_path)):
                    with contextlib.suppress(
                        FileNotFoundError
                    ):  # it went before the process had stopped
                        part = part_file.read_part(file.path)
                        assert part.marks["name"] == file.path.name
                assert sum(file.num_bytes for file in files_of(tmp_path)) < 4_000_000
                for process in writers:
                    process.send_signal(signal.SIGCONT)
        finally:
            for process in writers:
                process.kill()
                process.communicate()
    disk = open_disk(tmp_path)
    hits = 0
    for seed in range(40):
        while position := find(disk, prompt(seed)):
            found = load(disk, prompt(seed), position)
            if found is not None:
                hits += 1
                assert same(found, content(disk, prompt(seed), position))
                break
    assert hits > 3
    disk.close()

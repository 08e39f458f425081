"""Files of parts: what is written is read, and no damage goes unseen."""

from __future__ import annotations

import io
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import load_file

from hybrid_jax.tiers import part_file
from hybrid_jax.tiers.parcel import Shape
from hybrid_jax.tiers.part_file import Damaged, check_shapes, read_part, write_part
from tests.tiers.prefixes import whole

MARKS = {"kind": "pages", "end": "96"}
ARRAYS = {
    "columns.0": np.arange(15, dtype=np.uint16).reshape(3, 5),  # the next array is not aligned
    "pages.0": np.arange(24, dtype=np.uint32).reshape(4, 6),
    "state.1": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 2, 2),
    "tokens": np.arange(3, dtype=np.int32),
    "nothing": np.zeros((0, 4), np.uint32),
}


@pytest.fixture
def file(tmp_path):
    write_part(tmp_path / "part.safetensors", MARKS, whole(ARRAYS))
    return tmp_path / "part.safetensors"


def test_what_is_written_is_read(file):
    part = read_part(file)
    assert {name: part.marks[name] for name in MARKS} == MARKS
    assert list(part.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        found = part.arrays[name]
        assert found.dtype == array.dtype and np.array_equal(found, array)
    assert list(file.parent.iterdir()) == [file]


def test_the_safetensors_library_reads_it(file):
    found = load_file(file)
    assert all(np.array_equal(found[name], array) for name, array in ARRAYS.items())


def test_no_damage_goes_unseen(file):
    """Every byte changed, in one bit and in all; every length; and bytes at the end."""
    whole = file.read_bytes()
    for place in range(len(whole)):
        for change in (1 << place % 8, 0xFF):
            damaged = bytearray(whole)
            damaged[place] ^= change
            file.write_bytes(damaged)
            with pytest.raises(Damaged):
                read_part(file)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(Damaged):
            read_part(file)
    for more in (b"\0", b"\0" * 64, whole):
        file.write_bytes(whole + more)
        with pytest.raises(Damaged):
            read_part(file)
    file.write_bytes(whole)
    assert read_part(file).marks["end"] == "96"


def with_checksum(data: bytes) -> bytes:
    """A file whose checksum is right, whatever else is wrong with it."""
    zeros = data[: part_file._CRC.start] + b"0" * 8 + data[part_file._CRC.stop :]
    crc = b"%08x" % part_file.zlib.crc32(zeros)
    return data[: part_file._CRC.start] + crc + data[part_file._CRC.stop :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace('"version":"1"', '"version":"2"'),
            "version 2 of the form, and 1",
        ),
        (lambda text: text.replace('"U16"', '"U17"'), "malformed header"),
        (lambda text: text.replace("[3,5]", "[3,6]"), "malformed header"),
        (lambda text: text.replace("[0,30]", "[0,31]"), "malformed header"),
        (lambda text: re.sub(r"\[30,126\]", "[30,-26]", text), "malformed header"),
        (lambda text: text[:-2] + "  ", "malformed header"),
    ],
)
def test_a_right_checksum_of_a_wrong_header(file, change, message):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode()
    changed = change(text.rstrip()).encode()
    assert changed != text.rstrip().encode()
    file.write_bytes(
        with_checksum(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    )
    with pytest.raises(Damaged, match=message):
        read_part(file)


def test_other_files_are_not_parts(tmp_path):
    for number, data in enumerate((b"", b"PK\3\4" * 20, json.dumps({"a": 1}).encode() * 9)):
        file = tmp_path / str(number)
        file.write_bytes(data)
        with pytest.raises(Damaged, match="is not a part of a cache"):
            read_part(file)
    with pytest.raises(IsADirectoryError):
        read_part(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_part(tmp_path / "none")


def test_arrays_must_be_those_of_the_model(file):
    part = read_part(file)
    shapes = {name: Shape(array.dtype.name, array.shape) for name, array in ARRAYS.items()}
    check_shapes(file, part, shapes)
    for wrong in (
        shapes | {"more": Shape("uint32", (1,))},
        {name: shape for name, shape in shapes.items() if name != "tokens"},
        shapes | {"tokens": Shape("int32", (4,))},
        shapes | {"tokens": Shape("uint32", (3,))},
    ):
        with pytest.raises(Damaged, match="has other arrays than the model"):
            check_shapes(file, part, wrong)


def test_a_write_that_fails_leaves_what_was_there(file, monkeypatch):
    before = file.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(part_file.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_part(file, MARKS, whole({"pages.0": np.zeros(9, np.uint32)}))
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


class Unreadable(io.FileIO):
    """A file on a disk that fails after a hundred bytes."""

    def readinto(self, buffer, /):
        if self.tell():
            raise OSError(5, "Input/output error")
        return super().readinto(memoryview(buffer)[:100])


def test_an_error_of_the_disk_is_no_damage(file, monkeypatch):
    monkeypatch.setattr(part_file.Path, "open", lambda path, *mode, **options: Unreadable(path))
    with pytest.raises(OSError, match="Input/output error"):
        read_part(file)


def test_a_system_that_reads_little_at_a_time(file, monkeypatch):
    """Linux reads at most 2 GiB at once."""

    class Slow(io.FileIO):
        def readinto(self, buffer, /):
            return super().readinto(memoryview(buffer)[:100])

    monkeypatch.setattr(part_file.Path, "open", lambda path, *mode, **options: Slow(path))
    found = read_part(file).arrays
    assert all(np.array_equal(found[name], array) for name, array in ARRAYS.items())


def test_many_may_write_one_file_at_once(file):
    """Threads have one process id, as containers on one volume may have."""
    threads, begin = 8, threading.Barrier(8)

    def write_and_read(number: int) -> None:
        own = whole({"pages.0": np.full(5000, number, np.uint32)})
        begin.wait(30)
        for _ in range(40):
            write_part(file, {"number": str(number)}, own)
            part = read_part(file)
            assert (part.arrays["pages.0"] == int(part.marks["number"])).all()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write_and_read, range(threads)))
    assert list(file.parent.iterdir()) == [file]

"""One part in one file: safetensors, with a checksum over every byte of it.

Other programs can read the file, too. The checksum (CRC-32) is the first entry of the header's metadata, so its place
is fixed. It is of the whole file, with zeros in its own place.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hybrid_jax.tiers.parcel import Pieces, Shape

VERSION = 1
NEW = ".new"  # how the names of files end that are being written
_BEGIN = b'{"__metadata__":{"crc32":"'
_CRC = slice(8 + len(_BEGIN), 8 + len(_BEGIN) + 8)
_NAMES = {"uint32": "U32", "uint16": "U16", "float32": "F32", "int32": "I32", "int8": "I8"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Damaged(ValueError):
    """A file is not whole, or is not what its name says."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a file holds.

    Attributes:
        marks: what it is of, such as its root, name and tokens.
        arrays: by name.
    """

    marks: dict[str, str]
    arrays: dict[str, np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Of its arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def write_part(file: Path, marks: Mapping[str, str], arrays: Mapping[str, Pieces]) -> int:
    """Writes a part beside its place and renames it, so that nobody sees half of it; returns its bytes.

    Raises:
        OSError: of the system; then nothing is left there.
    """
    head, data = _signed(marks, arrays)
    with replacing(file) as opened:
        opened.write(head)
        for part in data:
            opened.write(part)
    return len(head) + sum(part.nbytes for part in data)


def part_to_bytes(part: Part) -> bytes:
    """A part as its file would be, for a way to another process."""
    arrays = {
        name: Pieces(array.dtype.name, array.shape, [np.ascontiguousarray(array)])
        for name, array in part.arrays.items()
    }
    head, data = _signed(part.marks, arrays)
    return b"".join([head, *data])


def _signed(
    marks: Mapping[str, str], arrays: Mapping[str, Pieces]
) -> tuple[bytearray, list[memoryview]]:
    """What a file begins with, with its checksum, and what follows."""
    head = _head(marks, arrays)
    data = [part.data for array in arrays.values() for part in array.parts]
    crc = zlib.crc32(head)
    for part in data:
        crc = zlib.crc32(part, crc)
    head[_CRC] = b"%08x" % crc
    return head, data


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A new file beside another, which takes its place once it is written.

    Several may write the same file at once, for the name of each new one is drawn. Process ids would not do: containers
    that share a folder may have the same one.

    Raises:
        OSError: of the system; then the new file is removed.
    """
    beside = file.with_name(f".{file.name}.{secrets.token_hex(8)}{NEW}")
    try:
        with beside.open("wb") as opened:
            yield opened
        os.replace(beside, file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def part_bytes(marks: Mapping[str, str], arrays: Mapping[str, Pieces]) -> int:
    """The bytes of the file that `write_part` would write."""
    return len(_head(marks, arrays)) + sum(array.num_bytes for array in arrays.values())


def _head(marks: Mapping[str, str], arrays: Mapping[str, Pieces]) -> bytearray:
    """All in front of the arrays, with zeros in place of the checksum."""
    table: dict[str, object] = {
        "__metadata__": {"crc32": "0" * 8, "version": str(VERSION), **marks}
    }
    begin = 0
    for name, array in arrays.items():
        end = begin + array.num_bytes
        table[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return bytearray(len(text).to_bytes(8, "little") + text)


def read_part(file: Path) -> Part:
    """Reads a part; its arrays are views of one buffer.

    Raises:
        Damaged: a byte is not as it was written, or the file is another one. OSError: of the system.
    """
    return part_of_bytes(_bytes_of(file), str(file))


def part_of_bytes(data: np.ndarray, file: str) -> Part:
    """A part of the bytes uint8[n] of its file, of which its arrays are views. `file` names it in errors.

    Raises:
        Damaged: as `read_part`.
    """
    head = data[: _CRC.stop].tobytes()
    if head[8 : _CRC.start] != _BEGIN:
        raise Damaged(f"{file} is not a part of a cache, or its beginning is damaged")
    crc = zlib.crc32(data[_CRC.stop :].data, zlib.crc32(head[: _CRC.start] + b"0" * 8))
    if head[_CRC] != b"%08x" % crc:
        raise Damaged(
            f"{file} is damaged: its checksum is {crc:08x}, not {head[_CRC].decode(errors='replace')}"
        )
    # It is as it was written, by this program or by one that makes the same checksum.
    begin = 8 + int.from_bytes(head[:8], "little")
    try:
        table = json.loads(data[8:begin].tobytes())
        marks = table.pop("__metadata__")
        arrays = {name: _array(data[begin:], entry) for name, entry in table.items()}
        version = int(marks["version"])
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{file} has a malformed header: {error!r}") from error
    if version != VERSION:
        raise Damaged(f"{file} has version {version} of the form, and {VERSION} is read")
    return Part(marks=marks, arrays=arrays)


def _bytes_of(file: Path) -> np.ndarray:
    """uint8[bytes of a file]. `np.fromfile` says nothing of an error of the disk."""
    with file.open("rb", buffering=0) as opened:
        data: np.ndarray = np.empty(os.fstat(opened.fileno()).st_size, np.uint8)
        done = 0
        while done < data.size and (more := opened.readinto(data[done:].data)):
            done += more
    return data[:done]


def _array(data: np.ndarray, entry: dict) -> np.ndarray:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= data.size:
        raise ValueError(f"bytes {begin} to {end} of {data.size}")
    dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{shape} of {dtype} in {end - begin} bytes")
    return data[begin:end].view(dtype).reshape(shape)


def shapes_of(part: Part) -> dict[str, Shape]:
    """The arrays that a part has."""
    return {name: Shape(x.dtype.name, x.shape) for name, x in part.arrays.items()}


def check_shapes(file: Path, part: Part, shapes: Mapping[str, Shape]) -> None:
    """Checks that a part has these arrays and no others.

    Raises:
        Damaged: it has not.
    """
    found = shapes_of(part)
    if found != dict(shapes):
        raise Damaged(f"{file} has other arrays than the model: {found}, not {dict(shapes)}")

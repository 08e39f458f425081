"""What XLA hands to a function that its programs call: byte offsets in its structures, and its threads.

They are those of `xla/ffi/api/c_api.h`, which jaxlib comes with.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax

from hybrid_jax.products.cpu.code import Code

# Versions in which the structures are as below. Any other one may have changed them.
KNOWN = ((0, 3), (0, 4), (0, 5))
FRAME = {
    "struct_size": 0,
    "extension": 8,
    "api": 16,
    "context": 24,
    "stage": 32,
    "num_arguments": 56,
    "arguments": 72,
    "num_results": 96,
    "results": 112,
}
FRAME_BYTES = 168  # of all that is read
EXTENSION = {"type": 8, "metadata": 24}
METADATA = {"major": 24, "minor": 28, "traits": 32}
API = {
    "major": 32,
    "minor": 36,
    "error_create": 48,
    "error_destroy": 64,
    "schedule": 136,
    "num_threads": 144,
}
BUFFER = {"dtype": 16, "data": 24, "rank": 32, "dims": 40}
DTYPES = {"s32": 4, "f32": 11, "bf16": 16}
IS_METADATA, EXECUTE, INVALID_ARGUMENT = 1, 3, 3


def version() -> tuple[int, int] | None:
    """The version of the interface in the installed jaxlib; None if its header is not there."""
    try:
        header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    except OSError:
        return None
    found = [re.search(rf"define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR")]
    return None if None in found else tuple(int(match[1]) for match in found if match)  # type: ignore[return-value]  # two


def threads() -> str:
    """`threads(frame)`: how many threads XLA's pool has; 1 if it does not tell."""
    c = Code("define internal i64 @threads(ptr %frame)")
    count = c.set("alloca i64")
    c.store("i64", 1, count)
    _ask(c, "num_threads", [count])
    c.leave(f"i64 {c.load('i64', count)}")
    c.do("unreachable")
    return c.text()


def schedule() -> str:
    """`schedule(frame, task, data)`: has one of XLA's threads call `task` later. Says whether it will."""
    c = Code("define internal i1 @schedule(ptr %frame, ptr %task, ptr %data)")
    failed = _ask(c, "schedule", ["%task", "%data"])
    c.leave(f"i1 {c.set(f'xor i1 {failed}, true')}")
    c.do("unreachable")
    return c.text()


def refuse() -> str:
    """`refuse(frame, message)`: an error for the program's caller."""
    c = Code("define internal ptr @refuse(ptr %frame, ptr %message)")
    given = _arguments(c, ["%message"], size=28)
    c.store("i64", INVALID_ARGUMENT, given, 24)
    create = c.load("ptr", c.load("ptr", "%frame", FRAME["api"]), API["error_create"])
    c.leave(f"ptr {c.set(f'call ptr {create}(ptr {given})')}")
    c.do("unreachable")
    return c.text()


def answer_metadata(c: Code, known: tuple[int, int]) -> None:
    """XLA asks for the version before the first call. An unknown size of its structures is answered by none."""
    extension = c.load("ptr", "%frame", FRAME["extension"])
    with c.when(c.is_("ne", extension, "null", "ptr")):
        kind = c.load("i32", extension, EXTENSION["type"])
        with c.when(c.is_("eq", kind, IS_METADATA, "i32")):
            metadata = c.load("ptr", extension, EXTENSION["metadata"])
            fits = c.is_("uge", c.load("i64", "%frame", FRAME["struct_size"]), FRAME_BYTES)
            c.store("i32", c.select(fits, known[0], -1, "i32"), metadata, METADATA["major"], 4)
            c.store("i32", known[1], metadata, METADATA["minor"], 4)
            c.store("i32", 0, metadata, METADATA["traits"], 4)
            c.leave("ptr null")


def _ask(c: Code, what: str, operands: list[str]) -> str:
    """Calls one of XLA's functions with the frame's context and operands; returns whether it failed."""
    context = c.load("ptr", "%frame", FRAME["context"])
    given = _arguments(c, [context, *operands])
    api = c.load("ptr", "%frame", FRAME["api"])
    error = c.set(f"call ptr {c.load('ptr', api, API[what])}(ptr {given})")
    failed = c.is_("ne", error, "null", "ptr")
    with c.when(failed):
        destroy = c.load("ptr", api, API["error_destroy"])
        c.do(f"call void {destroy}(ptr {_arguments(c, [error])})")
    return failed


def _arguments(c: Code, pointers: list[str], size: int = 0) -> str:
    """A structure of arguments: its size, no extension, pointers, and room for one more."""
    given = c.set(f"alloca [{len(pointers) + 3} x i64], align 8")
    c.store("i64", size or 16 + 8 * len(pointers), given)
    c.store("ptr", "null", given, 8)
    for place, pointer in enumerate(pointers):
        c.store("ptr", pointer, given, 16 + 8 * place)
    return given

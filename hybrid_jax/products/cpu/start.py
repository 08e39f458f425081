"""Whether this process has products of our own: found out once, and kept on disk for the next one."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import platform
import secrets
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import jax

from hybrid_jax.process.ownership import others_may_write
from hybrid_jax.products.cpu.build import Recipe, Unavailable, object_code, recipe, register
from hybrid_jax.products.cpu.calls import ROWS
from hybrid_jax.products.cpu.trial import Undecided, fault_of

LOG = logging.getLogger("hybrid_jax.kernels")
DIGEST_BYTES = 16  # in front of machine code in its file
PASSED = "passed"
# Where the C library has all that the code calls.
SYSTEMS = ("linux", "darwin")
_starting = threading.Lock()  # engines of several threads start at once


@dataclass(frozen=True)
class Own:
    """Products of our own, or why there are none.

    Attributes:
        version: of their code; "" if there are none. about: which ones serve, in words.
    """

    version: str
    about: str


def own_products(folder: Path | None, asked: str | None = None) -> Own:
    """Makes products known to XLA, if this machine can have them.

    Args:
        folder: where machine code and verdicts are kept, or None.
        asked: the name of a variant; None for the best one.
    """
    with _starting:
        return _own_products(folder, asked)


@functools.cache
def _own_products(folder: Path | None, asked: str | None) -> Own:
    try:
        if sys.platform not in SYSTEMS:
            raise Unavailable(f"not made for {platform.system()}")
        made = recipe(asked)
        image = _started(made, _private(folder))
        register(made, image)
    except Unavailable as error:
        return Own("", f"XLA's, for any number of rows: {error}")
    except Exception as error:  # of LLVM or the linker; XLA serves all the same
        LOG.warning("our own products cannot be made, XLA's serve: %s", error)
        return Own("", f"XLA's, for any number of rows: {error}")
    return Own(made.version, f"our own for up to {ROWS} rows, in {made.variant.about}; else XLA's")


def _started(made: Recipe, folder: Path | None) -> bytes:
    """Machine code that has passed its trial."""
    image = _read(folder and folder / f"{made.version}.o")
    if image is None:
        image = object_code(made)
        _write(folder and folder / f"{made.version}.o", image)
    noted = folder and folder / f"{made.version}-{_place(made)}"
    verdict = _read(noted)
    if verdict is None:
        try:
            fault = fault_of(made, image)
        except Undecided as error:
            raise Unavailable(str(error)) from None
        verdict = (fault or PASSED).encode()
        _write(noted, verdict)
        if fault is not None:
            LOG.warning("our own products failed a trial, XLA's serve: %s", fault)
    if verdict.decode() != PASSED:
        raise Unavailable(f"they failed a trial: {verdict.decode()}")
    return image


def _place(made: Recipe) -> str:
    """Digits that change with what a trial was about beside the code: jaxlib, and the processor."""
    lines = [jax.lib.__version__, platform.machine(), platform.processor(), made.compiler]
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("flags", "Features", "model name")):
                lines.append(line)
    text = "\n".join(sorted(set(lines)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# --- files ----------------------------------------------------------------------------------------


def _private(folder: Path | None) -> Path | None:
    """The folder, unless others may write there: they could run code here."""
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except OSError:
        return None
    return None if others_may_write(info) else folder


def _read(path: Path | None) -> bytes | None:
    """A file's content, if it is what was written."""
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return content if digest == _digest(content) else None


def _write(path: Path | None, content: bytes) -> None:
    """Keeps a file, if there is room for it."""
    if path is None:
        return
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        part.write_bytes(_digest(content) + content)
        part.replace(path)
    except OSError as error:
        LOG.info("could not keep %s: %s", path.name, error)
        with contextlib.suppress(OSError):
            part.unlink()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()

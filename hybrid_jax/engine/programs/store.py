"""Compiled programs on disk: a process neither traces nor compiles what an earlier one did.

jax's own cache keeps the compiler's output, but jax must still trace and lower a program to find it there. For a large
model that takes longer than loading. Here a program is found by what it is made from: this package's source, versions
and settings of jax, the device, and the shapes and parameters of the step.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

import pallas_kernels
from hybrid_jax.engine.programs.compile_cache import compiled
from hybrid_jax.process.own_settings import CALLERS, OWN
from hybrid_jax.process.ownership import others_may_write

LOG = logging.getLogger("hybrid_jax.compiling")
COMPILERS = ("jax", "triton", "nvidia-")  # the names of packages begin like this
DRIVER = Path("/proc/driver/nvidia/version")
DIGEST_BYTES = 16  # in front of a program in its file
PASSED = ""  # the verdict of a trial
UNUSED_SECONDS = 90 * 86_400.0  # programs that were not used for so long are deleted


class ProgramStore:
    """Programs in one folder.

    Args:
        folder: made when the first program is saved. device: the device that programs are compiled for.
        devices: all of them, where several run each program.
    """

    def __init__(
        self, folder: Path, device: jax.Device, devices: Sequence[jax.Device] = ()
    ) -> None:
        self._folder, self._target = folder, device
        self._devices = list(devices) or [device]
        numbers = " ".join(str(each.id) for each in self._devices)
        self._device = (
            f"{device.platform} {device.device_kind} {device.client.platform_version} {numbers}"
        )

    def name_of(self, identity: str, arguments: Any) -> str:
        """The name of a program's file.

        Args:
            identity: all that it is made from beside source and arguments. arguments: arrays, or their shapes.
        """
        leaves, tree = jax.tree.flatten(arguments)
        lines = [identity, self._device, _source(), *_settings(), str(tree)]
        lines += [f"{x.shape} {x.dtype} {getattr(x, 'sharding', None)}" for x in leaves]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    def load(self, name: str) -> Any:
        """The program, or None if it is not there or cannot be loaded."""
        path = self._folder / name
        try:
            program = serialize_executable.deserialize_and_load(
                *pickle.loads(_checked(path.read_bytes())),
                backend=self._target.client,
                execution_devices=self._devices,  # else jax takes all there are
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # damaged, or the driver does not take it
            LOG.warning("could not load the program %s and compile it again: %s", name, error)
            return None
        with contextlib.suppress(OSError):  # the folder belongs to somebody else
            os.utime(path)
        return program

    def compiled(self, name: str, lowered: jax.stages.Lowered) -> Any:
        """Compiles a program and keeps it, unless jax had it in its own cache.

        A program that was loaded from there cannot be relied on once it is written out again (on a CPU parts of it are
        missing).
        """
        hits = _hits()
        program = compiled(lowered)
        if _hits() == hits:
            self._save(name, program)
        return program

    def verdict(self, trial: str) -> str | None:
        """What became of a trial with this source, these versions and this device: `PASSED`, None if there
        was none, and else what went wrong."""
        path = self._folder / self.name_of(trial, ())
        try:
            said = path.read_text()
            os.utime(path)
        except OSError:
            return None
        return said

    def note(self, trial: str, verdict: str | None) -> None:
        """Remembers what became of a trial; None forgets it."""
        name = self.name_of(trial, ())
        if verdict is not None:
            self._write(name, verdict.encode)
            return
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()

    def _save(self, name: str, program: Any) -> None:
        def data() -> bytes:
            data = pickle.dumps(serialize_executable.serialize(program))
            return _digest(data) + data

        self._write(name, data)

    def _write(self, name: str, data: Callable[[], bytes]) -> None:
        try:
            content = data()
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = self._folder / f"{name}.{secrets.token_hex(8)}.part"  # containers share pids
            try:
                part.write_bytes(content)
                part.replace(self._folder / name)
            except OSError:
                part.unlink(missing_ok=True)
                raise
            self._tidy()
        except Exception as error:  # no room, or a program that calls back into Python
            LOG.info("could not keep %s: %s", name, error)

    def _tidy(self) -> None:
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another process was first
                if path.stat().st_mtime < time.time() - UNUSED_SECONDS:
                    path.unlink()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _checked(data: bytes) -> bytes:
    """A file's content without its digest, which is checked: code with a changed bit may run and be wrong."""
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if _digest(content) != digest:
        raise ValueError("its content is not what was written")
    return content


def open_store(
    folder: Path | None, device: jax.Device, devices: Sequence[jax.Device] = ()
) -> ProgramStore | None:
    """The store of a GPU's programs, or of several GPUs', beside jax's cache in this folder.

    None if there is no folder or no GPU. Also None if others may write to the folder, because they could run code here.
    """
    if folder is None or device.platform == "cpu":
        return None
    folder = folder / "programs"
    if _others_may_write(folder):
        LOG.warning(
            "others may write to %s, and programs are code: none are kept there; chmod go-w it",
            folder,
        )
        return None
    return ProgramStore(folder, device, devices)


def _others_may_write(folder: Path) -> bool:
    try:
        info = folder.stat()
    except OSError:  # not there yet
        return False
    return others_may_write(info)


@functools.cache
def _counter() -> threading.local:
    """Counts, for each thread, the programs that jax found in its own cache."""
    counts = threading.local()

    def count(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            counts.hits = getattr(counts, "hits", 0) + 1

    jax.monitoring.register_event_listener(count)
    return counts


def _hits() -> int:
    return getattr(_counter(), "hits", 0)


@functools.cache
def _versions() -> tuple[str, ...]:
    """Versions of what compiles a program and of what it calls: jax's packages, Triton's, and CUDA's own libraries."""
    named = ((dist.name.lower().replace("_", "-"), dist) for dist in metadata.distributions())
    found = {f"{name} {dist.version}" for name, dist in named if name.startswith(COMPILERS)}
    return tuple(sorted(found))


@functools.cache
def _driver() -> str:
    """What NVIDIA's driver says about itself. jax knows only the CUDA version that it was built with."""
    try:
        return DRIVER.read_text()
    except OSError:
        return ""


def _settings() -> Iterator[str]:
    yield f"{jax.__version__} XLA_FLAGS={os.environ.get('XLA_FLAGS')}"
    yield from _versions()
    yield _driver()
    for name in sorted(jax.config.values):
        if name in OWN or not name.startswith(CALLERS):
            # Of most settings a thread may have a value of its own; of flags there is one.
            yield f"{name}={getattr(jax.config, name, jax.config.values[name])!r}"


@functools.cache
def _source() -> str:
    """A digest of the source of both packages."""
    digest = hashlib.blake2b(digest_size=16)
    for root in (Path(__file__).resolve().parents[2], Path(pallas_kernels.__path__[0])):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()

"""Where compiled programs are kept between runs: the user's cache folder, unless JAX was told otherwise."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import tempfile
from pathlib import Path

import jax

from hybrid_jax.machine import user_cache_dir
from hybrid_jax.process.own_settings import own_settings

_SETTING = "jax_compilation_cache_dir"
LOG = logging.getLogger("hybrid_jax.compiling")
NOT_KEPT = "compiled programs are not kept for the next process"
LEAST_ROOM = 1 << 20  # bytes: a small program or two
MIN_COMPILE_SECONDS = 0.2  # cheaper programs are compiled again rather than stored
# On an accelerator `engine.programs.store` keeps the programs. It could not keep those that jax's cache has too.
NEVER_SECONDS = 1e9
# Folders that did not take a program. The set belongs to the process, as jax's cache does.
_refused: set[str] = set()


def enable_compile_cache(name: str = "xla", device: jax.Device | None = None) -> Path | None:
    """Turns on JAX's persistent compilation cache, once, in the user's cache folder.

    A setting made through JAX (JAX_COMPILATION_CACHE_DIR, JAX_ENABLE_COMPILATION_CACHE=false, or jax.config) stands.
    The folder is named after the processor, because programs compiled for one processor may not run on another one that
    shares the home folder. There jax also keeps which variants of a product XLA found fastest on a GPU. So a program
    that is compiled again after a restart is the same to the last bit.

    Args:
        name: how the folder's name begins.
        device: what programs are compiled for. For an accelerator, its kind and its driver are part of the name too.

    Returns:
        The folder in use. None if the cache is off, is elsewhere on a network, has no place or no room, or cannot be
        written. The log then says why.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    if current := getattr(jax.config, _SETTING):
        return None if "://" in current else Path(current)
    base = user_cache_dir()
    if base is None:
        LOG.warning("%s: there is no home folder; name one with HOME or XDG_CACHE_HOME", NOT_KEPT)
        return None
    folder = base / f"{name}-jax{jax.__version__}-{_processor(device)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(bytes(LEAST_ROOM))
    except OSError as error:
        LOG.warning("%s: %s: %s", NOT_KEPT, folder, error.strerror)
        return None
    jax.config.update(_SETTING, str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        on_cpu = device is None or device.platform == "cpu"
        least = MIN_COMPILE_SECONDS if on_cpu else NEVER_SECONDS
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    return folder


def keeps_programs() -> bool:
    """Whether jax keeps what is compiled now for the next process."""
    folder = getattr(jax.config, _SETTING)
    return bool(folder and jax.config.jax_enable_compilation_cache) and folder not in _refused


def kept_beside(name: str) -> Path | None:
    """A folder of that name beside the programs that are kept for the next process; None if none are kept."""
    folder = getattr(jax.config, _SETTING)
    if not keeps_programs() or "://" in folder:
        return None
    return Path(folder) / name


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program, or takes it from jax's cache.

    A cache that cannot be read or written costs one line in the log. jax itself would warn at each program, and where
    warnings are errors, the program would be lost.
    """
    folder = getattr(jax.config, _SETTING)
    never = {"jax_persistent_cache_min_compile_time_secs": NEVER_SECONDS}
    try:
        with own_settings(
            jax_raise_persistent_cache_errors=True, **(never if folder in _refused else {})
        ):
            return lowered.compile()
    except Exception as error:
        if folder is None:
            raise
        # Under another key, where no file is. If it was the compiler that failed, it fails again.
        with own_settings(jax_compilation_cache_include_metadata_in_key=True, **never):
            program = lowered.compile()
        if isinstance(error, OSError | Warning):
            _refused.add(folder)
            LOG.warning("%s: %s: %s", NOT_KEPT, folder, getattr(error, "strerror", error))
        else:
            LOG.warning("a program kept in %s cannot be used: %s", folder, error)
        return program


def _processor(device: jax.Device | None) -> str:
    """Eight hex digits that change with the processor's kind and instruction sets, and with the accelerator."""
    lines = {platform.machine(), platform.processor()}
    if device is not None and device.platform != "cpu":
        lines |= {device.device_kind, device.client.platform_version}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("flags", "Features", "model name")):
                lines.add(line)
    return hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=4).hexdigest()

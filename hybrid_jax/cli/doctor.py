"""The command `doctor`: what is installed, what jax sees, where caches lie, and what would go wrong."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from hybrid_jax import __version__
from hybrid_jax.byte_sizes import format_size
from hybrid_jax.cli.exits import JsonOption, write, write_json, write_rows
from hybrid_jax.cli.words import shell_words
from hybrid_jax.machine import (
    Nvidia,
    has_gpu_plugin,
    nvidia_gpu,
    ram_bytes,
    user_cache_dir,
    wants_missing_gpu,
)

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "numpy", "flax", "orbax-checkpoint", "safetensors"),
    *("tokenizers", "jax-triton", "triton", "llvmlite", "llguidance", "optax", "matplotlib"),
)
VARIABLES = re.compile(r"^(HYBRID_JAX_|JAX_|XLA_|CUDA_VISIBLE_DEVICES$|LD_LIBRARY_PATH$|TF_GPU_)")
LITTLE_DISK = 1 << 30


def doctor(as_json: JsonOption = False) -> None:
    """Show versions, devices and caches, and say what would go wrong.

    The exit code is 0 whatever is found.
    """
    found = examine()
    if as_json:
        write_json(found)
        return
    rows = {"hybrid_jax": found["version"], "python": found["python"], "machine": found["machine"]}
    rows["memory"] = "unknown" if found["ram_bytes"] is None else format_size(found["ram_bytes"])
    gpu = found["gpu"]
    rows["gpu"] = (
        "none"
        if gpu is None
        else f"{format_size(gpu['total_bytes'])}, capability {gpu['capability']}"
    )
    rows["jax sees"] = found["devices_error"] or ", ".join(found["devices"])
    rows |= {name: of or "not installed" for name, of in found["packages"].items()}
    folder = found["cache"]
    if folder is not None:
        rows["cache of compiled programs"] = (
            f"{folder['path']}: {format_size(folder['num_bytes'])} in {folder['num_files']} files"
        )
    rows |= found["environment"]
    write_rows(rows)
    write()
    for problem in found["problems"]:
        write(f"problem: {problem}")
    if not found["problems"]:
        write("nothing is wrong")


def examine() -> dict[str, Any]:
    """What `doctor` shows, as JSON has it."""
    gpu = nvidia_gpu()
    packages = {name: _version(name) for name in PACKAGES}
    environment = {
        name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)
    }
    devices, error = _devices()  # which may set a variable
    cache = _cache_folder()
    found = {
        "version": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {platform.platform()}",
        "ram_bytes": ram_bytes(),
        "gpu": None if gpu is None else vars(gpu),
        "devices": devices,
        "devices_error": error,
        "packages": packages,
        "cache": None if cache is None else _folder(cache),
        "environment": environment,
    }
    found["problems"] = list(problems(found, gpu))
    return found


def problems(found: Mapping[str, Any], gpu: Nvidia | None) -> Iterator[str]:
    """What would go wrong, or slower than it need be, each with its remedy."""
    packages, environment = found["packages"], found["environment"]
    if found["devices_error"]:
        yield f"jax cannot start: {found['devices_error']}"
    for name, wanted in _wanted().items():
        if _version(name) is None:
            yield f"{name} is not installed; pip install '{wanted}'"
    sees_gpu = any(not device.startswith("cpu") for device in found["devices"])
    if gpu is not None and not sees_gpu:
        if environment.get("JAX_PLATFORMS", "").startswith("cpu"):
            yield "there is a GPU, but JAX_PLATFORMS=cpu hides it; unset it to use the GPU"
        elif not has_gpu_plugin():
            yield "there is a GPU, but jax has no plugin for it; pip install 'hybrid_jax[cuda12]'"
        else:
            yield "there is a GPU and a plugin, but jax does not see it; the driver may be too old for CUDA 12"
    if gpu is None and (asked := wants_missing_gpu()):
        yield f"JAX_PLATFORMS={asked} asks for a GPU, and there is none; unset it"
    if (
        sees_gpu
        and gpu is not None
        and gpu.capability.startswith("9.")
        and packages["jax-triton"] is None
    ):
        yield (
            "without jax-triton, sampling and long prompts are slower on this card; with Python 3.12, "
            "pip install 'hybrid_jax[cuda12,triton]'"
        )
    if sees_gpu and "/cuda" in environment.get("LD_LIBRARY_PATH", ""):
        yield "LD_LIBRARY_PATH names a CUDA of its own, which may hide the one that jax brings; unset it"
    folder = found["cache"]
    if folder is None and not environment.get("JAX_COMPILATION_CACHE_DIR"):
        yield (
            "there is no home folder for compiled programs, so every process compiles anew; name one with HOME or "
            "XDG_CACHE_HOME"
        )
    if folder is not None and not folder["writable"]:
        yield (
            f"{folder['path']} cannot be written, so every process compiles anew; name another folder with "
            "JAX_COMPILATION_CACHE_DIR"
        )
    elif folder is not None and (folder["free_bytes"] or LITTLE_DISK) < LITTLE_DISK:
        yield f"{folder['path']}: only {format_size(folder['free_bytes'])} are free on its disk"
    if environment.get("JAX_ENABLE_COMPILATION_CACHE", "").lower() in ("0", "false"):
        yield "JAX_ENABLE_COMPILATION_CACHE turns the cache off, so every process compiles anew; unset it"


def _wanted() -> dict[str, str]:
    """What this package itself needs, by name."""
    try:
        lines = requires("hybrid_jax") or []
    except PackageNotFoundError:  # run from its sources
        return {}
    own = [line for line in lines if "extra ==" not in line]
    return {re.split(r"[<>=!;\[ ]", line)[0]: line for line in own}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> tuple[list[str], str | None]:
    """The devices that jax sees, or why it sees none."""
    try:
        import jax

        from hybrid_jax.engine.this_device import first_device

        first_device()  # says what to do where jax finds none
        return [
            f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()
        ], None
    except Exception as error:  # whatever a plugin raises
        return [], " ".join(shell_words(str(error), {}).split())


def _cache_folder() -> Path | None:
    """The folder of compiled programs, as the engine chooses it; None if it is elsewhere on a network or nowhere."""
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not named:
        return user_cache_dir()
    return None if "://" in named else Path(named)


def _folder(path: Path) -> dict[str, Any]:
    """A folder, what is in it, and whether more fits."""
    sizes = []
    for file in path.rglob("*") if path.is_dir() else ():
        with suppress(OSError):  # another process may delete it meanwhile
            if file.is_file():
                sizes.append(file.stat().st_size)
    there = next(folder for folder in (path, *path.absolute().parents) if os.path.exists(folder))
    try:
        disk = os.statvfs(there)
        free: int | None = disk.f_bavail * disk.f_frsize
    except (AttributeError, OSError):
        free = None
    return {
        "path": str(path),
        "num_files": len(sizes),
        "num_bytes": sum(sizes),
        "free_bytes": free,
        "writable": _takes_folders(there),
    }


def _takes_folders(folder: Path) -> bool:
    """Whether a folder can be made in another one. Permissions do not tell: it may be a file, or no real disk."""
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False

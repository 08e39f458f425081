"""What this machine has, as far as that can be found without jax.

psutil knows neither the limits of cgroups nor the most memory that a process has held, which is what is asked for here.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import platformdirs

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]  # a module elsewhere

STATUS = "/proc/self/status"  # what Linux knows about this process
CGROUPS = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")
PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
PINNED_GIB = 64  # XLA's default
NO_LIMIT = 1 << 62  # version 1 says "no limit" with a number close to 2**63


def ram_bytes(*, cgroups: Path = CGROUPS, mount: Path = CGROUP_MOUNT) -> int | None:
    """Bytes of memory that this process may use; None if the system does not tell.

    That is the smallest of: the physical memory, the limits of the process's cgroup and of those above it (set by
    Docker, SLURM and systemd), and the limit of its address space (`ulimit -v`, set by Grid Engine).

    Args:
        cgroups: the file that lists the process's cgroups.
        mount: the folder that holds the cgroups, of version 1 or 2 or both.
    """
    try:
        physical = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, OSError, ValueError):
        physical = []
    return min([*physical, *_cgroup_limits(cgroups, mount), *_address_space()], default=None)


def pinned_bytes() -> int:
    """Bytes of the host's memory that XLA pins for a GPU at most, and from which arrays in it are taken.

    XLA reads the variable when jax first looks for devices, as a whole number of GiB, and passes over anything else:
    GetGpuHostAllocator in xla/pjrt/gpu/gpu_helpers.cc.
    """
    try:
        said = int(os.environ.get(PINNED_LIMIT, ""))
    except ValueError:
        said = PINNED_GIB
    return max(said, 0) << 30


def _address_space() -> Iterator[int]:
    """The limit of the address space, if there is one."""
    if resource is not None:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if 0 < limit < NO_LIMIT:
            yield limit


def _cgroup_limits(cgroups: Path, mount: Path) -> Iterator[int]:
    """The memory limits of a process's cgroups and of all above them."""
    try:
        lines = os.fsdecode(cgroups.read_bytes()).splitlines()
    except OSError:
        return
    names: tuple[str, ...]
    for line in lines:
        # "0::/user.slice" is of version 2, "4:cpu,memory:/docker/1f" of version 1
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            places, names = (mount, mount / "unified"), ("memory.max", "memory.high")
        elif "memory" in controllers.split(","):
            places, names = (mount / "memory", mount / controllers), ("memory.limit_in_bytes",)
        else:
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # a cgroup outside this namespace
            parts = []
        # Inside a container the folder may be missing. Then the container's own cgroup is mounted at the top.
        for depth in range(len(parts) + 1):
            for place, name in product(places, names):
                with suppress(OSError, ValueError):  # no such file, "max"
                    limit = int(place.joinpath(*parts[:depth], name).read_bytes())
                    if 0 < limit < NO_LIMIT:
                        yield limit


@dataclass(frozen=True)
class Nvidia:
    """A GPU as its driver describes it.

    Attributes:
        total_bytes: its memory.
        used_bytes: what all processes together hold of it now.
        capability: its compute capability, such as "9.0".
    """

    total_bytes: int
    used_bytes: int
    capability: str


def nvidia_gpu() -> Nvidia | None:
    """The first NVIDIA GPU that this process may use; None if there is none, or the driver's own tool is missing."""
    fields = "memory.total,memory.used,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip():
        command += ["-i", visible]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        total, used, capability = said.stdout.split("\n")[0].split(",")
        return Nvidia(int(total) << 20, int(used) << 20, capability.strip())  # it counts in MiB
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def cuda_driver() -> tuple[int, int] | None:
    """The newest version of CUDA that NVIDIA's driver can run; None if there is no driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def is_running(pid: int) -> bool:
    """Whether a process of this machine runs; on Windows that is not asked, and the answer is no."""
    if sys.platform == "win32":
        return False  # signal 0 would end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def widens_bfloat16() -> bool:
    """Whether jax's CPU compiler makes float32 copies of all bfloat16 weights in every step, as before jax 0.11."""
    try:
        found = re.match(r"0\.(\d+)", version("jax"))
    except PackageNotFoundError:
        return False
    return found is not None and int(found[1]) < 11


def user_cache_dir() -> Path | None:
    """The folder for files of this package that may be deleted at any time; None if there is no home folder to have it.

    So it is in a container that runs under a number without a name, and without HOME.
    """
    try:
        folder = platformdirs.user_cache_path("hybrid_jax", appauthor=False)
        return None if str(folder).startswith("~") else folder.absolute()
    except (
        KeyError,
        OSError,
        RuntimeError,
    ):  # the last is of platformdirs; OSError if there is no working directory
        return None


def peak_resident_bytes() -> int | None:
    """The most physical memory that this process has held at one time; None if the system does not tell.

    Pages of mapped files count. On Linux this is its record of the process (VmHWM). Elsewhere it comes from getrusage,
    which may include the peak of the program that started this one.
    """
    with suppress(OSError), open(STATUS, "rb") as status:
        for line in status:
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # elsewhere it is in KiB


def give_back_free_memory() -> None:
    """Has the C library return freed memory to the system, if it can (glibc).

    Otherwise it keeps what lies below something that is still in use: after a compilation, some hundred megabytes.
    """
    with suppress(AttributeError, OSError, TypeError):  # another library, another system
        ctypes.CDLL(None).malloc_trim(0)


def has_accelerator() -> bool:
    """Whether jax would most likely run on something other than the CPU.

    If JAX_PLATFORMS is set, that decides. Otherwise there must be an NVIDIA device and jax's plugin for it.
    """
    wanted = _platform()
    if wanted:
        return wanted != "cpu"
    return has_nvidia() and has_gpu_plugin()


def has_gpu_plugin() -> bool:
    """Whether jax's plugin for NVIDIA GPUs is installed."""
    return any(find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))


def wants_missing_gpu() -> str | None:
    """The value of JAX_PLATFORMS if it asks for an NVIDIA GPU and this machine has none; else None."""
    wanted = _platform()
    missing = wanted in ("cuda", "gpu") and not has_nvidia() and nvidia_gpu() is None
    return wanted if missing else None


def _platform() -> str:
    """The first of JAX_PLATFORMS; "" if it is not set."""
    return os.environ.get("JAX_PLATFORMS", "").split(",")[0].strip()


def has_nvidia() -> bool:
    """Whether the driver of an NVIDIA GPU is active here."""
    return bool(glob("/dev/nvidia[0-9]*"))

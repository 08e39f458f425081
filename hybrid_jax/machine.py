"""What this machine has, as far as it can be told without jax."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from glob import glob
from importlib.util import find_spec

try:
    import resource
except ImportError:  # Windows has none
    resource = None

STATUS = "/proc/self/status"  # what Linux knows about this process


def ram_bytes() -> int | None:
    """Bytes of physical memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def peak_resident_bytes() -> int | None:
    """The most physical memory this process has held at one time; None where the system does not say.

    Pages of mapped files count. It is Linux's own record of the process (VmHWM) where there is one: getrusage,
    asked elsewhere, can hold the peak of the program that started this one.
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
    """Returns to the system what the C library keeps of memory that was freed, where it can be asked to (glibc).

    It keeps what lies below something still in use: after a compilation some hundred megabytes.
    """
    with suppress(AttributeError, OSError, TypeError):  # another library, another system
        ctypes.CDLL(None).malloc_trim(0)


def has_accelerator() -> bool:
    """Whether jax would most likely run on something else than the CPU.

    JAX_PLATFORMS decides where it is set; elsewhere it takes an NVIDIA device and jax's plugin for it.
    """
    wanted = os.environ.get("JAX_PLATFORMS", "").split(",")[0].strip()
    if wanted:
        return wanted != "cpu"
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return bool(glob("/dev/nvidia[0-9]*")) and any(find_spec(name) for name in plugins)

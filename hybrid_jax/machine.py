"""What this machine has, as far as it can be told without jax."""

from __future__ import annotations

import os
from glob import glob
from importlib.util import find_spec


def ram_bytes() -> int | None:
    """Bytes of physical memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def has_accelerator() -> bool:
    """Whether jax would most likely run on something else than the CPU.

    JAX_PLATFORMS decides where it is set; elsewhere it takes an NVIDIA device and jax's plugin for it.
    """
    wanted = os.environ.get("JAX_PLATFORMS", "").split(",")[0].strip()
    if wanted:
        return wanted != "cpu"
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return bool(glob("/dev/nvidia[0-9]*")) and any(find_spec(name) for name in plugins)

"""What an error in a trial says about what was tried: Triton kernels, or a loop over steps."""

from __future__ import annotations

import time

import jax
import numpy as np

from hybrid_jax.engine.programs.loops import first_line


def fault_of(error: Exception, device: jax.Device, *, tried: str, remedy: str) -> str | None:
    """The fault in one line; None if the error says nothing about what was tried.

    It says nothing if memory is short, or if no other program can be compiled at the moment, for example because the
    folder for temporary files is full. A verdict of such an error would stay for later processes.

    Args:
        device: where it was tried. tried: what that was. remedy: how to start without it.

    Raises:
        RuntimeError: the device has stopped working. After a bad access, CUDA refuses all further work of a process.
    """
    if "RESOURCE_EXHAUSTED" in str(error):
        return None
    fault = f"{type(error).__name__}: {first_line(error)}"
    try:
        copy_there_and_back(device)
    except Exception as stopped:
        raise RuntimeError(
            f"LLM: the GPU stopped working in a trial of {tried} ({fault}); start again{remedy}"
        ) from stopped
    try:
        compile_something(device)
    except Exception:
        return None
    return fault


def copy_there_and_back(device: jax.Device) -> None:
    """Uses a device without compiling."""
    np.asarray(jax.device_put(np.zeros(1), device))


def compile_something(device: jax.Device) -> None:
    """Compiles a small program that is in no cache, and runs it."""
    unlike_any = time.time_ns() % 2**31
    x = jax.device_put(np.int32(1), device)
    jax.block_until_ready(jax.jit(lambda x: x + np.int32(unlike_any))(x))

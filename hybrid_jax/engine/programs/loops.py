"""Where the loop over the steps of a dispatch runs.

On a CPU the loop is part of the program. On a GPU XLA by itself makes the calling thread wait for the loop's condition
before every step. The call of such a program returns when its last step is done, and the host plans nothing meanwhile.
So there are two forms of these programs:

- *inside*: options of the compiler put the loop, with all its steps, into one command buffer, which needs no host. This
  takes a driver and a toolkit of CUDA 12.3 or later. Before the first dispatch a trial runs it
  (`engine/loop_trial.py`).
- *by the host*: the program has no loop. It is one step, and the host calls it once for each. A call returns at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from hybrid_jax.engine.programs.store import ProgramStore
from hybrid_jax.machine import cuda_driver, is_running

LOG = logging.getLogger("hybrid_jax.kernels")
FLAG = "xla_gpu_enable_command_buffer"
LEAST_CUDA = (12, 3)  # from here on a command buffer can have conditions and loops
# To see whether memory is short, XLA counts an array twice if a program takes and returns it. If the arena is more than
# about half of a GPU's memory, XLA then computes things again to save memory that is not needed. A decode step of 64
# rows gets 16 more launches for each seven layers, products among them.
GPU_OPTIONS: dict[str, str | int] = {"xla_disable_hlo_passes": "rematerialization"}
# All that XLA puts into command buffers by itself, conditions and loops. By default it makes no buffer of few commands,
# and outside its loop a program has few; so the least number is 1.
LOOP_OPTIONS: dict[str, str | int] = {
    **GPU_OPTIONS,
    FLAG: "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}
# With sums over devices in them.
DIVIDED_LOOP_OPTIONS = {**LOOP_OPTIONS, FLAG: f"{LOOP_OPTIONS[FLAG]},COLLECTIVES"}
BEGUN = "begun"  # the first word of the note of a trial that runs, or in which a process has ended
MOST_ENDS = 2  # a process may have been killed by somebody once
ELSEWHERE_SECONDS = 600.0  # a trial of another machine has ended by then


@dataclass(frozen=True)
class Begun:
    """The note of a trial that has begun. It is taken away when the trial ends, unless the process ends with it.

    Attributes:
        ends: processes that have ended in such a trial before. host, pid: the process that tries now. at: seconds since
            1970.
    """

    ends: int
    host: str
    pid: int
    at: float

    @classmethod
    def now(cls, ends: int) -> Begun:
        """That this process begins."""
        return cls(ends, socket.gethostname(), os.getpid(), time.time())

    @classmethod
    def read(cls, note: str | None) -> Begun | None:
        """The note in a store; None if it is another one, or damaged."""
        match (note or "").split():
            case [word, ends, host, pid, at] if word == BEGUN:
                with contextlib.suppress(ValueError):
                    return cls(int(ends), host, int(pid), float(at))
        return None

    def __str__(self) -> str:
        return f"{BEGUN} {self.ends} {self.host} {self.pid} {self.at}"

    @property
    def ended(self) -> int:
        """Processes that have ended in such a trial, with this one if it has."""
        return self.ends + (not self._runs)

    @property
    def _runs(self) -> bool:
        if self.host != socket.gethostname():
            return time.time() - self.at < ELSEWHERE_SECONDS
        return is_running(self.pid)


@dataclass
class Loops:
    """The form of the programs whose dispatches are several steps.

    Attributes:
        inside: the loop is part of the program.
        why_not: why the host starts each step, or None.
        untried: the loop has not passed its trial yet.
    """

    inside: bool = True
    why_not: str | None = None
    untried: bool = False

    def by_the_host(self, why: str) -> None:
        """From now on the host starts each step. This is said once."""
        self.inside, self.untried, self.why_not = False, False, why
        LOG.warning("the host starts each decode step, because a loop %s", why)

    @property
    def about(self) -> str:
        """The form in a few words."""
        if self.inside:
            return "the GPU loops over them" + ", which is not tried yet" * self.untried
        return f"the host starts each step, because a loop {self.why_not}"


def choose_loops(device: jax.Device, store: ProgramStore | None, trial: str) -> Loops:
    """The form for programs on a device.

    Args:
        store: remembers what became of trials, or None. trial: names the trial there.
    """
    loops = Loops()
    if device.platform != "gpu":
        return loops
    known = None if store is None else store.verdict(trial)
    if (begun := Begun.read(known)) is not None:
        tried = f"{MOST_ENDS} processes ended while they tried it"
        known = tried if begun.ended >= MOST_ENDS else None
    why = _why_not(device) or (f"failed a trial: {known}" if known else None)
    if why is None and known is None:  # a loop that has passed was compiled
        why = refused(device)
    if why is not None:
        loops.by_the_host(why)
    loops.untried = why is None and known is None
    return loops


def options_for(
    platform: str, loops: Loops | None, *, divided: bool = False
) -> Mapping[str, str | int] | None:
    """Options of the compiler.

    Args:
        loops: the form, for a program whose dispatches are several steps; None for another.
        divided: several devices divide the model.
    """
    if platform != "gpu":
        return None
    if loops is None or not loops.inside:
        return GPU_OPTIONS
    return DIVIDED_LOOP_OPTIONS if divided else LOOP_OPTIONS


def _why_not(device: jax.Device) -> str | None:
    """Why no loop can be in a command buffer on this device, as far as that is known without compiling one; or None."""
    if FLAG in os.environ.get("XLA_FLAGS", ""):
        return f"is left to XLA_FLAGS, which sets {FLAG}"
    if "rocm" in device.client.platform_version:
        return "needs CUDA, found ROCm"
    for what, found in (("driver", cuda_driver()), ("toolkit", toolkit(device))):
        if found is not None and found < LEAST_CUDA:
            least, version = (".".join(map(str, version)) for version in (LEAST_CUDA, found))
            return f"needs a {what} of CUDA {least}, found {version}"
    return None


def toolkit(device: jax.Device) -> tuple[int, int] | None:
    """The version of CUDA that jax's plugin was built with; None if it does not say."""
    found = re.search(r"cuda (\d+)", device.client.platform_version)
    return (int(found[1]) // 1000, int(found[1]) % 1000 // 10) if found else None


def refused(device: jax.Device) -> str | None:
    """What this jax says against the options, or None."""
    x = jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1, compiler_options=LOOP_OPTIONS).lower(x).compile()
    except Exception as error:
        return f"is refused by this jax: {first_line(error)}"
    return None


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return str(error).strip().partition("\n")[0][:200]

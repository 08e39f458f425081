"""Compiles functions for an NVIDIA H200 on a machine without a GPU, and reports what came out.

XLA's CUDA compiler comes with the plugin packages jax-cuda12-plugin and jax-cuda12-pjrt; no CUDA library and no
driver is needed, only a description of the chip (`h200.txtpb`, from data sheets). Nothing is autotuned here.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from hybrid_jax.engine.programs.compiling import GPU_OPTIONS
from pallas_kernels.triton import for_cuda
from tests.kernels.lowered import lower_for_cuda

TARGET = Path(__file__).with_name("h200.txtpb")
SHARED_MEMORY = 232_448  # bytes one program may have
LAUNCH = re.compile(
    r"\s*\d+: (k\w+)\s*\[[^\]]*\]\s*(\S*)(?:\s+grid: \[([^\]]*)\].*shared_memory: (\d+))?"
)


@dataclass(frozen=True)
class Launch:
    """One entry of the compiled program.

    Attributes:
        kind: "kCustomKernel" for any kernel, "kCopy", "kWhile", ...
        name: of the kernel. grid: its programs. shared_bytes: its shared memory.
    """

    kind: str
    name: str
    grid: tuple[int, ...] = ()
    shared_bytes: int = 0


@dataclass(frozen=True)
class Compiled:
    """What XLA made of a function.

    Attributes:
        launches: in order; those inside a loop follow the loop's entry.
        temp_bytes: memory beside arguments and results. alias_bytes: of arguments that results reuse.
        outer: kinds of what the host starts, in order: a command buffer is one, whatever is in it.
        body: the same of the only loop's body.
    """

    launches: tuple[Launch, ...]
    temp_bytes: int
    alias_bytes: int
    outer: tuple[str, ...] = ()
    body: tuple[str, ...] = ()

    @property
    def kinds(self) -> Counter:
        return Counter(launch.kind for launch in self.launches)

    def named(self, name: str) -> list[Launch]:
        """Launches of one kernel, whose name XLA numbers where its code is not the same each time."""
        return [x for x in self.launches if re.fullmatch(rf"{name}(__?\d+)?", x.name)]


@functools.cache
def sharding() -> SingleDeviceSharding:
    """The chip; raises RuntimeError where the plugin is missing."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology="1x1x1",
        target_config=TARGET.read_text(),
    )
    return SingleDeviceSharding(topology.devices[0])


def on_chip(tree):
    """Shapes of a tree of arrays, specs or anything with shape and dtype, placed on the chip."""
    place = functools.partial(jax.ShapeDtypeStruct, sharding=sharding())
    return jax.tree.map(lambda x: place(x.shape, jax.numpy.dtype(x.dtype)), tree)


def compile_for_h200(function, *specs, donate: tuple[int, ...] = ()) -> Compiled:
    """Compiles a function of arrays; registers that spill or too much shared memory are an error."""
    with for_cuda():  # as an engine does
        lowered = lower_for_cuda(function, *on_chip(specs), donate=donate)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "xla_dump_to": folder,
            "xla_dump_emitter_re": "none",
            "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
            **GPU_OPTIONS,
        }
        memory = lowered.compile(compiler_options=options).memory_analysis()
        (path,) = Path(folder).glob("*thunk_sequence.txt")
        found = [LAUNCH.match(line) for line in path.read_text().splitlines()]
        passed = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        # XLA writes it where it has changed something.
        outer, body = _started("".join(path.read_text() for path in passed))
    launches = tuple(
        Launch(m[1], m[2], tuple(map(int, m[3].split(","))), int(m[4]))
        if m[3]
        else Launch(m[1], m[2])
        for m in found
        if m
    )
    return Compiled(launches, memory.temp_size_in_bytes, memory.alias_size_in_bytes, outer, body)


def _started(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Kinds of what is not inside a command buffer: of the whole program, and of its loop's body."""
    outer, _, body = text.partition("  body:\n")
    return tuple(re.findall(r"^\d+: (k\w+)", outer, re.M)), tuple(
        re.findall(r"^    \d+: (k\w+)", body, re.M)
    )

"""Compiles functions for NVIDIA GPUs on a machine without one, and reports what came out.

XLA's CUDA compiler comes with the plugin packages jax-cuda12-plugin and jax-cuda12-pjrt; no CUDA library and no
driver is needed, only a description of the chip (`chips/`, from data sheets). It includes the versions of driver and
toolkit: without them XLA takes the driver for too old to have loops and foreign kernels in command buffers. Nothing is
autotuned here.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jaxlib.mlir import ir

from hybrid_jax.engine.programs.loops import GPU_OPTIONS
from hybrid_jax.sizing.devices import card
from pallas_kernels.plan import Chip
from pallas_kernels.triton import for_cuda
from tests.kernels.lowered import lower_for_cuda

CHIPS = {path.stem: path for path in sorted(Path(__file__).with_name("chips").iterdir())}
H200 = "h200"
OTHER_CHIPS = tuple(
    name for name in CHIPS if name not in ("h100", H200)
)  # for a program, these two are alike
SHARED_MEMORY = 232_448  # bytes one program may have on an H200
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
        outer: kinds of what the host starts, in order: a command buffer is one, whatever is in it, and a loop is one
            whose steps the host starts.
        host_bytes: of arguments and of results that lie in the host's memory.
        ptx: of each kernel, by name, if asked for.
    """

    launches: tuple[Launch, ...]
    temp_bytes: int
    alias_bytes: int
    outer: tuple[str, ...] = ()
    host_bytes: tuple[int, int] = (0, 0)
    ptx: Mapping[str, str] = field(default_factory=dict)

    @property
    def kinds(self) -> Counter:
        return Counter(launch.kind for launch in self.launches)

    def named(self, name: str) -> list[Launch]:
        """Launches of one kernel, whose name XLA numbers where its code is not the same each time."""
        return [x for x in self.launches if re.fullmatch(rf"{name}(__?\d+)?", x.name)]


def chip_of(name: str) -> Chip:
    """What the engine takes for one of `CHIPS`."""
    return card(name.replace("_", "-")).chip


def architecture(chip: str) -> str:
    """What its machine code is made for, such as "sm_90a"."""
    found = re.search(r"major: (\d+) minor: (\d+)", CHIPS[chip].read_text())
    assert found is not None, f"chips: {chip} has no capability"
    return f"sm_{found[1]}{found[2]}{'a' * (int(found[1]) >= 9)}"


@functools.cache
def sharding(chip: str = H200) -> SingleDeviceSharding:
    """The chip; raises RuntimeError where the plugin is missing."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology="1x1x1",
        target_config=CHIPS[chip].read_text(),
    )
    return SingleDeviceSharding(topology.devices[0])


@functools.cache
def devices(count: int, chip: str = H200) -> tuple[jax.Device, ...]:
    """So many of a chip in one machine."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology=f"1x1x{count}",
        target_config=CHIPS[chip].read_text(),
    )
    return tuple(topology.devices)


def on_chip(tree, chip: str = H200):
    """Shapes of a tree of arrays, specs or anything with shape and dtype, placed on the chip, if they are nowhere."""

    def place(x):
        where = getattr(x, "sharding", None) or sharding(chip)
        return jax.ShapeDtypeStruct(x.shape, jax.numpy.dtype(x.dtype), sharding=where)

    return jax.tree.map(place, tree)


def with_hosts_arguments(function, count: int):
    """The function as jax traces it if its last `count` arguments lie in the host's memory.

    The described chip has no memory of another kind, so this cannot be said by a sharding.
    """
    to_host = functools.partial(jax.device_put, device=jax.memory.Space.Host)

    def with_moved(*args):
        return function(*args[:-count], *map(to_host, args[-count:]))

    return with_moved


def move_arguments(lowered: jax.stages.Lowered, count: int) -> None:
    """Has the last `count` arguments lie in the host's memory, where `with_hosts_arguments` has put them."""
    module, kind = lowered.compiler_ir(), "mhlo.memory_kind"
    with module.context:
        main = next(op for op in module.body.operations if str(op.name) == '"main"')
        every = [ir.DictAttr(attributes) for attributes in main.arg_attrs]
        pinned = ir.StringAttr.get("pinned_host")
        for index in range(len(every) - count, len(every)):
            named = {entry.name: entry.attr for entry in every[index]}
            every[index] = ir.DictAttr.get({**named, kind: pinned})
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(every)
        for op in list(main.regions[0].blocks[0].operations):
            moves = "@annotate_device_placement" in str(op) and '"pinned_host"' in str(op)
            if moves and op.operands[0] in main.arguments:
                op.results[0].replace_all_uses_with(op.operands[0])
                op.erase()


def compile_for_gpu(
    function,
    *specs,
    donate: tuple[int, ...] = (),
    chip: str = H200,
    spills: bool = False,
    options: Mapping = GPU_OPTIONS,
    keep_ptx: bool = False,
    from_host: int = 0,
    on_mesh: bool = False,
) -> Compiled:
    """Compiles a function of arrays. Too much shared memory is an error.

    Args:
        chip: one of `CHIPS`.
        spills: registers may spill; if not, that is an error too.
        options: of the compiler, as an engine gives them. keep_ptx: for `Compiled.ptx`.
        on_mesh: it runs on several of them, on which its arguments are.
        from_host: so many of the last arguments lie in the host's memory; these are single arrays.
    """
    with for_cuda():  # as an engine does
        if from_host:
            function = with_hosts_arguments(function, from_host)
        lowered = lower_for_cuda(function, *on_chip(specs, chip), donate=donate, on_mesh=on_mesh)
        move_arguments(lowered, from_host)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "xla_dump_to": folder,
            "xla_dump_emitter_re": "ptx" if keep_ptx else "none",
            "xla_gpu_fail_ptx_compilation_on_register_spilling": not spills,
            **options,
        }
        memory = lowered.compile(compiler_options=options).memory_analysis()
        (path,) = Path(folder).glob("*thunk_sequence.txt")
        found = [LAUNCH.match(line) for line in path.read_text().splitlines()]
        passed = Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")
        # XLA writes it where it has changed something.
        outer = tuple(re.findall(r"^\d+: (k\w+)", "".join(p.read_text() for p in passed), re.M))
        texts = [file.read_text() for file in Path(folder).glob("*.ptx")]
    ptx = {name: text for text in texts for name in re.findall(r"\.entry (\w+)", text)}
    launches = tuple(
        Launch(m[1], m[2], tuple(map(int, m[3].split(","))), int(m[4]))
        if m[3]
        else Launch(m[1], m[2])
        for m in found
        if m
    )
    return Compiled(
        launches,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        outer,
        (memory.host_argument_size_in_bytes, memory.host_output_size_in_bytes),
        ptx,
    )

"""Machine code of kernels, by the assembler and the disassembler that come with triton."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from pallas_kernels import jax_triton
from pallas_kernels.triton import for_cuda
from tests.aot.chip import GPU_OPTIONS, H200, architecture, lower_for_cuda, on_chip

OPCODE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z]\w*)", re.M)
NO_TOOLS = jax_triton.why_unavailable()
if jax_triton.interpreted():
    NO_TOOLS = "Triton's interpreter does not compile: unset TRITON_INTERPRET"


@dataclass(frozen=True)
class Code:
    """One compiled kernel.

    Attributes:
        registers: of a thread. spilled_bytes: of a thread, stored for want of registers.
        shared_bytes: of a program; 0 for Pallas kernels, whose launch says it (`chip.Launch`).
        opcodes: how often each stands in the code, whether it runs or not.
        ptx: what it was assembled from. text: what came out, in order.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    opcodes: Counter
    ptx: str
    text: str

    @property
    def instructions(self) -> int:
        return self.opcodes.total()

    @property
    def products(self) -> set[str]:
        """Shapes of the products on tensor cores, such as m64n128k16."""
        return set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\w+)\.", self.ptx))


def of_program(
    function: Callable, *specs, donate: tuple[int, ...] = (), chip: str = H200
) -> list[Code]:
    """Of all kernels that Pallas or XLA make for a function of arrays on a chip."""
    with for_cuda():
        lowered = lower_for_cuda(function, *on_chip(specs, chip), donate=donate)
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        lowered.compile(compiler_options={**dump, **GPU_OPTIONS})
        sources = [file.read_text() for file in Path(folder).glob("*ptx*")]
    return [assembled(ptx, chip=chip) for ptx in sources if ".entry" in ptx]


@contextlib.contextmanager
def recorded(*functions) -> Iterator[list[Code]]:
    """A list that fills with every compilation of these `triton.jit` functions, known ones included."""
    from jax_triton import triton_lib

    for function in functions:
        function.__dict__.pop("_jT_kernel_cache", None)
    found: list[Code] = []
    compile_ptx = triton_lib.compile_ttir_to_ptx_inplace

    def compile_and_record(*args):
        result = compile_ptx(*args)
        found.append(assembled(result.binary, result.shared_mem_bytes))
        return result

    with mock.patch.object(triton_lib, "compile_ttir_to_ptx_inplace", compile_and_record):
        yield found


def assembled(ptx: str, shared_bytes: int = 0, chip: str = H200) -> Code:
    """What PTX with one kernel becomes on a chip."""
    import triton

    tools = triton.knobs.nvidia
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        said = _said(tools.ptxas.path, "-v", f"-arch={architecture(chip)}", source, "-o", cubin)
        text = _said(tools.nvdisasm.path, "-c", cubin)
    opcodes = Counter(OPCODE.findall(text))
    del opcodes["NOP"]  # padding
    return Code(
        name=re.search(r"entry function '(\w+)'", said)[1],
        registers=int(re.search(r"Used (\d+) registers", said)[1]),
        spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        shared_bytes=shared_bytes,
        opcodes=opcodes,
        ptx=ptx,
        text=text,
    )


def _said(*command) -> str:
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout + run.stderr

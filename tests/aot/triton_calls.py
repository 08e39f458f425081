"""What becomes of kernels written in Triton: jax-triton compiles them to PTX, and ptxas says what that needs."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

HOPPER = "sm_90a"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        registers: of a thread. spilled_bytes: of a thread, stored for want of registers.
        shared_bytes: of a program. ptx: what the driver of a GPU gets.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str

    @property
    def products(self) -> set[str]:
        """Shapes of the products on tensor cores, such as m64n128k16."""
        return set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\w+)\.", self.ptx))


@contextlib.contextmanager
def recorded(*functions) -> Iterator[list[Kernel]]:
    """A list that fills with every compilation of these `triton.jit` functions, known ones included."""
    from jax_triton import triton_lib

    for function in functions:
        function.__dict__.pop("_jT_kernel_cache", None)
    found: list[Kernel] = []
    compile_ptx = triton_lib.compile_ttir_to_ptx_inplace

    def compile_and_record(*args):
        result = compile_ptx(*args)
        found.append(assemble(result.name, result.binary, result.shared_mem_bytes))
        return result

    with mock.patch.object(triton_lib, "compile_ttir_to_ptx_inplace", compile_and_record):
        yield found


def assemble(name: str, ptx: str, shared_bytes: int) -> Kernel:
    import triton

    ptxas = triton.knobs.nvidia.ptxas.path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", f"-arch={HOPPER}", source, "-o", source.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Kernel(
        name=name,
        registers=int(re.search(r"Used (\d+) registers", said)[1]),
        spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        shared_bytes=shared_bytes,
        ptx=ptx,
    )

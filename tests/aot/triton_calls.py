"""What becomes of kernels written in Triton: jax-triton compiles them to PTX, and ptxas says what that needs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        registers: of a thread. spilled_bytes: of a thread, stored. shared_bytes: of a program.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


@contextmanager
def recorded(monkeypatch) -> Iterator[list[Kernel]]:
    """The kernels that are compiled inside, in order; one that was compiled before is not among them."""
    from jax_triton import triton_lib

    kernels: list[Kernel] = []
    compile_kernel = triton_lib.compile_ttir_inplace

    def record(*args):
        result = compile_kernel(*args)
        kernels.append(assembled(result.name, result.binary, result.shared_mem_bytes))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(triton_lib, "compile_ttir_inplace", record)
        yield kernels


def assembled(name: str, ptx: str, shared_bytes: int) -> Kernel:
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    chip = re.search(r"^\.target (\w+)", ptx, re.M)[1]
    command = [ptxas, "-v", f"-arch={chip}", "-o", "/dev/null", "/dev/stdin"]
    report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores", report)[1]
    return Kernel(
        name, int(re.search(r"Used (\d+) registers", report)[1]), int(spilled), shared_bytes
    )

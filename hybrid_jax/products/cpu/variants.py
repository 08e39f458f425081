"""Which vectors a processor has: a variant of the code for each kind."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to make the code.

    Attributes:
        name: by which it is asked for. about: the same in words.
        machine: what `platform.machine` says, in lower case. needs: features that LLVM must find in the processor.
        cpu, features: as LLVM is told. It uses no more than these, so a variant is the same code on all processors.
        lanes: float32 numbers in a vector.
        pairs: there is an instruction that multiplies pairs of bfloat16 numbers, and sums in float32.
    """

    name: str
    about: str
    machine: tuple[str, ...]
    needs: tuple[str, ...]
    cpu: str
    features: str = ""
    lanes: int
    pairs: bool = False

    @property
    def is_x86(self) -> bool:
        """Whether it is for processors of Intel and AMD."""
        return "x86_64" in self.machine

    @property
    def vector(self) -> str:
        """Float32 numbers in a register, as LLVM writes it."""
        return f"<{self.lanes} x float>"

    @property
    def sums(self) -> int:
        """Vectors of sums that fit in registers, beside what is multiplied."""
        return 8 if self.lanes == 8 else 16

    @property
    def block(self) -> int:
        """Columns that are summed side by side: four vectors, one or two cache lines of weights."""
        return 4 * self.lanes


X86 = ("x86_64", "amd64")
AVX2 = ("avx", "avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# The best first.
VARIANTS = (
    Variant(
        name="avx512_bf16",
        about="AVX-512 with BF16",
        machine=X86,
        needs=(*AVX512, "avx512bf16"),
        cpu="x86-64-v4",
        features="+avx512bf16",
        lanes=16,
        pairs=True,
    ),
    Variant(name="avx512", about="AVX-512", machine=X86, needs=AVX512, cpu="x86-64-v4", lanes=16),
    Variant(name="avx2", about="AVX2", machine=X86, needs=AVX2, cpu="x86-64-v3", lanes=8),
    Variant(
        name="neon", about="NEON", machine=("aarch64", "arm64"), needs=(), cpu="generic", lanes=4
    ),
)


def fitting(features: Mapping[str, bool], machine: str | None = None) -> tuple[Variant, ...]:
    """The variants that a processor runs, the best first.

    Args:
        features: what LLVM finds in it. machine: as `platform.machine` says; None for this one's.
    """
    own = (machine or platform.machine()).lower()
    return tuple(
        variant
        for variant in VARIANTS
        if own in variant.machine and all(features.get(name) for name in variant.needs)
    )

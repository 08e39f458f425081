"""What steps are made of, on which kinds of device: one entry for each way of making them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pallas_kernels.plan import H200, Chip, cause


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What the steps of an engine are made of.

    Attributes:
        name: as `EngineConfig.kernels` asks for it. about: the same in words. made: what steps are, in words.
        platforms: "cpu" or what programs a GPU, where it serves by itself.
        kernels: what runs each operation that `pallas_kernels` has.
        products: the module whose `PRODUCTS` multiply.
        layers: what recurrent layers do, by its name in `engine.mixers.table.LAYER_STEPS`.
        scan, sampling: what scans prompts, and what draws tokens.
        branches: a loop or a branch may follow a value that the step computes. On a GPU it would wait for the host.
        launches: a step is a series of launches. A slice of an array that another operation needs is one more, and so
            is a copy of what is written before all have read it.
        without: operations that XLA does although `kernels` are others, because these cannot do them.
        version: of code that programs call and that is not compiled with them; "" if there is none.
        chip: the GPU that kernels are cut up for; the device's own once it is known.
    """

    name: str
    about: str
    made: str
    platforms: tuple[str, ...]
    kernels: Literal["xla", "pallas"]
    products: str
    layers: str
    scan: Literal["xla", "pallas", "triton"]
    sampling: Literal["xla", "pallas", "triton"]
    branches: bool
    launches: bool
    without: tuple[str, ...] = ()
    version: str = ""
    chip: Chip = H200

    def runs(self, operation: str) -> Literal["xla", "pallas"]:
        """What runs an operation that a kind of part names as its own (`Kind.operation`)."""
        return "xla" if operation in self.without else self.kernels

    @property
    def has_triton(self) -> bool:
        """Whether Triton kernels take a part."""
        return "triton" in (self.scan, self.sampling)


XLA = Backend(
    name="xla",
    about="what XLA compiles",
    made="compiled by XLA",
    platforms=("cpu", "cuda"),
    kernels="xla",
    products="hybrid_jax.products.xla",
    layers="xla",
    scan="xla",
    sampling="xla",
    branches=True,
    launches=False,
)
PALLAS = Backend(
    name="pallas",
    about="Pallas kernels",
    made="made of Pallas kernels",
    platforms=("cuda",),
    kernels="pallas",
    products="hybrid_jax.products.kernels",
    layers="pallas",
    scan="pallas",
    sampling="pallas",
    branches=False,
    launches=True,
)
# Kinds of devices in words.
PLATFORMS = {
    "cpu": "CPUs",
    "cuda": "NVIDIA GPUs",
    "rocm": "AMD GPUs",
    "tpu": "TPUs",
    "METAL": "Apple GPUs",
}
EVERYTHING = "all operations"  # where no kernel can be used, in place of a name of one operation
# What `EngineConfig.kernels` may be: "auto", and the name of each backend.
Kernels = Literal["auto", "xla", "pallas"]
BACKENDS = {backend.name: backend for backend in (XLA, PALLAS)}


def interpreted(kernels: str, platform: str) -> str:
    """What to know of a backend by its name where an interpreter runs its kernels; "" where none does."""
    slow = kernels == PALLAS.name and platform == "cpu"
    return "interpreted on a CPU, many times slower; leave kernels out" if slow else ""


def said_of_others(left_to_xla: Mapping[str, str]) -> str:
    """Which operations XLA does although kernels do the rest, and why, to end a sentence; "" if there is none."""
    said = [f"; XLA does {name}: {cause(why)}" for name, why in sorted(left_to_xla.items())]
    if said and EVERYTHING not in left_to_xla:
        said.append(f"; only {'this is' if len(said) == 1 else 'these are'} slower")
    return "".join(said)

"""What a program becomes when it is lowered for an NVIDIA GPU; needs no GPU and no CUDA package."""

from __future__ import annotations

import contextlib
import re
import warnings

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

HOPPER = AbstractMesh(
    (1,),
    ("gpu",),
    axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice("NVIDIA H200", None, platform="cuda"),
)
TRITON_CALL = re.compile(r"custom_call @__gpu\$xla\.gpu\.triton.*?[{,] name = \"(\w+)\"")


def lower_for_cuda(
    function, *args, donate: tuple[int, ...] = (), on_mesh: bool = False
) -> jax.stages.Lowered:
    """The jitted function lowered for CUDA; from jax 0.11 on that asks for a chip, which the mesh names.

    Args:
        on_mesh: the function has a mesh of its own.
    """
    named = contextlib.nullcontext() if on_mesh else use_abstract_mesh(HOPPER)
    with named, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Triton.*", DeprecationWarning)
        jitted = jax.jit(function, donate_argnums=donate)
        return jitted.trace(*args).lower(lowering_platforms=("cuda",))


def kernels_in(function, *args) -> list[str]:
    """Names of the Pallas kernels that a function calls on an NVIDIA GPU, one per call."""
    return TRITON_CALL.findall(lower_for_cuda(function, *args).as_text())

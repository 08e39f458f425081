"""Kernels written in Triton itself, called through jax-triton (extra `triton`), for what Pallas cannot say.

XLA puts no such call into a command buffer, so none belongs into a layer of a decode step. They compile for a GPU
alone. With TRITON_INTERPRET=1 in the environment Triton's interpreter carries them out on a CPU, slowly, for tests; it
knows bfloat16 in loads, stores and conversions only.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import re
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

import jax
import numpy as np
from jax.interpreters import partial_eval

EXTRA = "with Python 3.12 or newer, pip install 'hybrid_jax[triton]'"
HOPPER = 90  # compute capability that programs are compiled for where there is no GPU


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on the host."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def why_unavailable() -> str | None:
    """Why no Triton kernel can be called here, or None."""
    try:
        triton, called = (importlib.metadata.version(name) for name in ("triton", "jax-triton"))
    except importlib.metadata.PackageNotFoundError as missing:
        return f"needs the package {missing.name}: {EXTRA}"
    return why_versions(triton, called)


def why_versions(triton: str, jax_triton: str) -> str | None:
    """Why these versions cannot be used, or None: jax-triton 0.4 compiles with Triton up to 3.8."""
    if _release(triton) >= (3, 9):
        return f"needs triton below 3.9, found {triton}: pip install 'triton<3.9'"
    if _release(jax_triton) < (0, 4):
        return f"needs jax-triton 0.4 or newer, found {jax_triton}: {EXTRA}"
    return None


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)  # "3.9rc1" and "3.9.0+git1a2b" too
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def load() -> ModuleType:
    """jax-triton. With it, jax knows the call by which compiled programs run Triton kernels, those kept on disk too."""
    import jax_triton

    if jax.__version_info__ >= (0, 12):
        # A jax-triton in which the call has another name is newer, and has a rule of its own for such a jax.
        library = getattr(jax_triton, "triton_lib", None)
        _mend_rule(partial_eval.dce_rules, getattr(library, "triton_kernel_call_p", None))
    return jax_triton


def _mend_rule(rules: dict, primitive: object) -> None:
    """Gives a primitive's rule for leaving out dead code the form that jax 0.12 asks for; the right form stays.

    A rule is told which outputs are used, which inputs live, and the equation. That of jax-triton 0.4.1 knows nothing
    of inputs, so every jit with a kernel in it would fail.
    """
    rule = rules.get(primitive)
    if rule is not None and len(inspect.signature(rule).parameters) == 2:
        rules[primitive] = lambda used, live, equation: rule(used, equation)


def call(
    kernel: Callable,
    *inputs: jax.Array,
    outputs: Sequence[jax.ShapeDtypeStruct] = (),
    in_place: Sequence[int] = (),
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int = 1,
    **constants: object,
) -> tuple[jax.Array, ...]:
    """Calls a `triton.jit` function whose parameters are the inputs, then the outputs, then constants by name.

    Args:
        outputs: shapes and dtypes of arrays that the kernel fills.
        in_place: inputs that the kernel writes too; they are declared once, among the inputs.
        constants: the parameters that are `tl.constexpr`.

    Returns:
        The inputs in place, then the outputs.
    """
    changed = [jax.ShapeDtypeStruct(inputs[i].shape, inputs[i].dtype) for i in in_place]
    if interpreted():
        shapes = [*changed, *outputs]
        carried_out = functools.partial(_interpret, kernel, shapes, in_place, grid, constants)
        return tuple(jax.pure_callback(carried_out, shapes, *inputs))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        made = load().triton_call(
            *inputs,
            kernel=kernel,
            # A kernel's pointers are taken in order from the inputs and these: what is in place has one already.
            out_type=[*outputs, *changed],
            grid=grid,
            num_warps=num_warps,
            num_stages=num_stages,
            input_output_aliases={source: i for i, source in enumerate(in_place, len(outputs))},
            compute_capability=None if jax.default_backend() == "gpu" else HOPPER,
            **constants,
        )
    return (*made[len(outputs) :], *made[: len(outputs)])


def _interpret(
    kernel: Callable,
    shapes: Sequence[jax.ShapeDtypeStruct],
    in_place: Sequence[int],
    grid: tuple[int, ...],
    constants: dict,
    *inputs: np.ndarray,
):
    arrays = [np.array(array) for array in inputs]  # copies: the kernel may write some of them
    made = [np.empty(shape.shape, shape.dtype) for shape in shapes[len(in_place) :]]
    for array in made:  # 3.4e38 and the like: what a kernel leaves out is seen
        array.reshape(-1).view(np.uint8)[...] = 0x7F
    with np.errstate(all="ignore"):  # a GPU does not warn either
        kernel[grid](*(_Tensor(array) for array in (*arrays, *made)), **constants)
    return (*(arrays[i] for i in in_place), *made)


class _Tensor:
    """An array of numpy for Triton's interpreter: as much of a tensor of torch on a CPU as the interpreter asks for.

    It reads and writes the array itself.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype.name  # Triton goes by the name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Tensor:
        return self

    def cpu(self) -> _Tensor:
        return self

    def copy_(self, other: _Tensor) -> None:
        """The interpreter copies back what it worked on, here the array itself."""

    def new_empty(self, size: int, device: str) -> _Tensor:
        return _Tensor(self.array)

    def set_(
        self, storage: _Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

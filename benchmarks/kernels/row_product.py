"""A lone row times a weight, as in a decode step of one sequence.

    python -m benchmarks.kernels.row_product [--smoke] [--cases in_proj] [--out FILE]

Shapes of Nemotron-H-8B and of a small Granite 4. Bound by reading the matrix, so the share of the floor is the share
of the copy's bandwidth. Sides: the kernel, its parts summed; "xla", a plain product accumulated in float32, which XLA
makes a multiplication and a sum; "xla two rows", the row beside a row of zeros, which goes to tensor cores.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.kernels import report
from benchmarks.kernels.harness import Case, Side, Work
from pallas_kernels.row_product import row_product

SHAPES = {
    "in_proj_4096x18560": (4096, 18560),
    "out_4096x4096": (4096, 4096),
    "down_21504x4096": (21504, 4096),
    "granite_out_3072x1536": (3072, 1536),
    "head_4096x131072": (4096, 131072),
}


def draw(inner: int, columns: int, dtype: str, key: jax.Array):
    keys = jax.random.split(key)
    inputs = {
        "x": jax.random.normal(keys[0], (inner,), dtype),
        "weight": jax.random.normal(keys[1], (inner, columns), dtype),
    }
    return (), inputs


def kernel(implementation: str, carry, inputs):
    return row_product(**inputs, implementation=implementation).sum(0), carry


def product(rows: int, carry, inputs):
    x = jnp.pad(inputs["x"][None], ((0, rows - 1), (0, 0)))
    return jnp.dot(x, inputs["weight"], preferred_element_type=jnp.float32)[0], carry


def case_of(name: str, inner: int, columns: int, dtype: str = "bfloat16") -> Case:
    sides = {
        "pallas": functools.partial(kernel, "pallas"),
        "xla": functools.partial(product, 1),
        "xla two rows": functools.partial(product, 2),
    }
    item = jnp.dtype(dtype).itemsize
    return Case(
        operation="row_product",
        name=name,
        draw=functools.partial(draw, inner, columns, dtype),
        truth=functools.partial(kernel, "reference"),
        sides=tuple(Side(name=name, call=call) for name, call in sides.items()),
        peers=(),
        configs={},
        tolerance=2e-2 if dtype == "bfloat16" else 1e-5,
        work=Work(
            bytes=item * inner * (columns + 1) + 4.0 * columns,
            flops=2.0 * inner * columns,
            tokens=1,
        ),
    )


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        return [case_of("smoke_300x70", 300, 70)]
    return [case_of(name, *shape) for name, shape in SHAPES.items()]


if __name__ == "__main__":
    report.main("row_product", __doc__.splitlines()[0], cases)

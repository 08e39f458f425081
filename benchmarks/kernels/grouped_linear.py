"""What experts make of the tokens that visit them: two products, the activation, and the weighted sum.

    python -m benchmarks.kernels.grouped_linear [--smoke] [--cases granite] [--sweep] [--out FILE]

Tokens choose their experts at random, each as likely as the others. Few tokens are bound by reading the weights of the
experts that some token visits, long prompts by the products or by the weights of all experts. Sides: the kernels;
"xla", the CPU's blocks of visits in a loop; "xla ragged", two `lax.ragged_dot`, for few tokens.
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
from pallas_kernels.grouped_linear import ExpertArrays, activate, mix_experts
from pallas_kernels.grouped_linear.api import MATRICES
from pallas_kernels.grouped_linear.kernel import Config, mix_experts_pallas
from pallas_kernels.grouped_linear.reference import mixed
from tests.kernels.cases import grouped_linear as shapes

FEW = 64  # tokens; of more, `ragged_dot` takes far too much memory
# Rows, columns of both matrices together, elements of a step, warps, stages.
SWEEP_FEW = [(16, columns, 64, 4, stages) for columns in (64, 128, 256) for stages in (3, 4, 5)]
SWEEP_MANY = [
    *((128, 256, 64, 8, stages) for stages in (3, 4)),
    *((128, 128, 64, warps, stages) for warps in (4, 8) for stages in (3, 4)),
    *((64, 256, 64, 4, 3), (64, 128, 64, 4, 4)),
]


def draw(shape: shapes.Case, dtype: str, key: jax.Array):
    inputs, (own, *keys) = {}, jax.random.split(key, 8)
    for one, (name, like) in zip(keys, shapes.shapes_of(shape, dtype).items(), strict=False):
        scale = jnp.asarray(shapes.scale_of(name, like.shape), dtype)
        inputs[name] = scale * jax.random.normal(one, like.shape, dtype)
    scores = jax.random.normal(own, (shape.tokens, shape.num_experts))
    best, ids = jax.lax.top_k(scores, shape.top_k)
    return (), inputs | {"ids": ids, "weights": jax.nn.softmax(best)}


def by_name(implementation: str, shape: shapes.Case, carry, inputs):
    arrays = ExpertArrays(**inputs)
    return mix_experts(arrays, kind=shape.kind, implementation=implementation), carry


def configured(up: Config | None, down: Config | None, shape: shapes.Case, carry, inputs):
    arrays = ExpertArrays(**inputs)
    return mix_experts_pallas(arrays, kind=shape.kind, up_config=up, down_config=down), carry


def ragged(shape: shapes.Case, carry, inputs):
    arrays = ExpertArrays(**inputs)
    flat = arrays.ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=shape.num_experts).astype(jnp.int32)
    hidden = jax.lax.ragged_dot(arrays.x[order // shape.top_k], arrays.up, sizes)
    out = jax.lax.ragged_dot(activate(hidden, shape.kind), arrays.down, sizes)
    parts = out[jnp.argsort(order)].reshape(*arrays.ids.shape, -1)
    return mixed(parts, arrays.ids, arrays.weights, shape.num_experts), carry


def sweep(shape: shapes.Case) -> dict:
    """Launch parameters of one product at a time, beside the chosen ones of the other."""
    found = {}
    for rows, columns, inner, warps, stages in SWEEP_FEW if shape.tokens <= FEW else SWEEP_MANY:
        for product, matrices in (("up", MATRICES[shape.kind]), ("down", 1)):
            config = Config(
                rows=rows,
                columns=columns // matrices,
                inner=inner,
                num_warps=warps,
                num_stages=stages,
            )
            up, down = (config, None) if product == "up" else (None, config)
            name = f"{product} {rows}x{columns}x{inner} {warps}w {stages}s"
            found[name] = functools.partial(configured, up, down, shape)
    return found


def work_of(shape: shapes.Case, dtype: str) -> Work:
    """The weights of experts that are visited, as many as are to be expected; tokens read and written once."""
    item, visits = jnp.dtype(dtype).itemsize, shape.tokens * shape.top_k
    visited = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** shape.tokens)
    matrix = shape.width * shape.hidden
    matrices = MATRICES[shape.kind] + 1
    return Work(
        bytes=item * (visited * matrices * matrix + 2 * shape.tokens * shape.width) + 8.0 * visits,
        flops=2.0 * visits * matrices * matrix,
        tokens=shape.tokens,
    )


def case_of(shape: shapes.Case, dtype: str = "bfloat16", truth: str = "xla") -> Case:
    sides = {name: functools.partial(by_name, name, shape) for name in ("pallas", "xla")}
    if shape.tokens <= FEW:
        sides["xla ragged"] = functools.partial(ragged, shape)
    return Case(
        operation="grouped_linear",
        name=shape.name,
        draw=functools.partial(draw, shape, dtype),
        truth=functools.partial(by_name, truth, shape),
        sides=tuple(Side(name=name, call=call) for name, call in sides.items()),
        peers=(),
        configs=sweep(shape),
        tolerance=2e-2 if dtype == "bfloat16" else 1e-5,
        work=work_of(shape, dtype),
    )


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        small = next(shape for shape in shapes.CASES if shape.name == "few_tokens")
        return [case_of(small, "float32", "reference")]
    return [case_of(shape) for shape in shapes.CASES if shape.large]


if __name__ == "__main__":
    report.main("grouped_linear", __doc__.splitlines()[0], cases)

"""New tokens' queries, keys and values: norms and rotation of heads, keys and values into their pages.

    python -m benchmarks.kernels.append_kv [--smoke] [--cases decode] [--sweep] [--out FILE]

Bound by bytes: the projection is read once, queries and records are written once. "xla" makes them one after another
and writes pages by slices, as on a CPU.
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
from pallas_kernels.append_kv import AppendArrays, AppendOptions, append_kv
from pallas_kernels.append_kv.kernel import Config, append_kv_pallas
from tests.kernels.cases import append_kv as shapes

SWEEP = [Config(words=words, num_warps=warps) for words in (512, 1024, 2048) for warps in (2, 4, 8)]


def draw(shape: shapes.Case, dtype: str, key: jax.Array):
    inputs = shapes.make_places(shape)
    for own, (name, like) in zip(
        jax.random.split(key, 4), shapes.shapes_of(shape, dtype).items(), strict=False
    ):
        random = jax.random.bits if name == "arena" else jax.random.normal
        inputs[name] = random(own, like.shape, like.dtype)
    return inputs.pop("arena"), inputs


def options_of(shape: shapes.Case, dtype: str) -> AppendOptions:
    return AppendOptions(
        shape.layout(dtype),
        page_frame=shape.page_frame,
        eps=1e-6,
        dtype=jnp.dtype(dtype),
        num_heads=shape.heads,
    )


def by_name(implementation: str, shape: shapes.Case, dtype: str, arena, inputs):
    arrays = AppendArrays(arena=arena, **inputs)
    return append_kv(arrays, options=options_of(shape, dtype), implementation=implementation)


def configured(config: Config, shape: shapes.Case, dtype: str, arena, inputs):
    arrays = AppendArrays(arena=arena, **inputs)
    return append_kv_pallas(arrays, options=options_of(shape, dtype), config=config)


def case_of(shape: shapes.Case, dtype: str = "bfloat16", truth: str = "xla") -> Case:
    item, tokens = jnp.dtype(dtype).itemsize, shape.rows * shape.tokens
    columns = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    read = 4 * shape.parts if shape.parts else item
    return Case(
        operation="append_kv",
        name=shape.name,
        draw=functools.partial(draw, shape, dtype),
        truth=functools.partial(by_name, truth, shape, dtype),
        sides=tuple(
            Side(name=name, call=functools.partial(by_name, name, shape, dtype))
            for name in ("pallas", "xla")
        ),
        peers=(),
        configs={
            f"{c.words} words {c.num_warps}w": functools.partial(configured, c, shape, dtype)
            for c in SWEEP
        },
        tolerance=2e-2 if dtype == "bfloat16" else 1e-5,
        work=Work(bytes=float(tokens * columns * (read + item)), tokens=tokens),
    )


def cases(*, smoke: bool) -> list[Case]:
    if smoke:
        small = next(shape for shape in shapes.CASES if shape.name == "heads_normed")
        return [case_of(small, "float32", "reference")]
    return [case_of(shape) for shape in shapes.CASES if shape.large]


if __name__ == "__main__":
    report.main("append_kv", __doc__.splitlines()[0], cases)

"""Visiting the experts of a mixture: the layer as it is, against other ways to reach one expert's weights.

    python benchmarks/layers/moe_experts.py [--dtype bfloat16] [--json benchmarks/results/layers/moe_experts.json]

Baseline, `plain`: blocks of 8 to 64 visits, the expert's matrices sliced out of the stack in the loop. Against it `moe`
(`pallas_kernels.grouped_linear.xla`), `switch` (a branch per expert, its weights in arrays of their own), and for few
tokens `gather` (matrices of all visits at once), `dense` (all experts) and `ragged` (`lax.ragged_dot`). The kernels for
GPUs are measured by `benchmarks.kernels.grouped_linear`.
Inside the clock: from routed tokens to what each expert made of them. Each call has other tokens than the one
before, so that weights come from memory. Medians of rounds taken in turns, with 10th and 90th percentiles.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.common import header, quantiles, write_json
from hybrid_jax.config import MoE
from hybrid_jax.layers.mlp import route
from hybrid_jax.products.xla import HIGHEST, linear
from pallas_kernels.grouped_linear import activate
from pallas_kernels.grouped_linear.xla import visit_experts

CASES = {  # width of the model, experts
    "granite_4_tiny": (1536, MoE(num_experts=64, top_k=8, width=512)),
    "nemotron_3_nano_quarter": (
        2688,
        MoE(num_experts=32, top_k=6, width=1856, kind="relu2", routing="sigmoid", scale=2.5),
    ),
    "small": (256, MoE(num_experts=8, top_k=2, width=256)),
}
NUM_INPUTS, CALLS = 8, 3


def blocks(x: jax.Array, ids: jax.Array, spec: MoE, one_expert) -> jax.Array:
    """Visits sorted by expert, in blocks of one expert each."""
    count = ids.size
    size = min(64, max(8, 1 << (2 * count // spec.num_experts).bit_length()))
    order = jnp.argsort(ids.reshape(-1), stable=True)
    padded = jnp.pad(order, (0, size))
    visits = jnp.sum(ids.reshape(-1, 1) == jnp.arange(spec.num_experts), axis=0)
    last = jnp.cumsum(-(-visits // size))
    first_visit, first_block = jnp.cumsum(visits) - visits, last + visits // -size

    def visit(block, parts):
        expert = jnp.searchsorted(last, block, side="right")
        start = first_visit[expert] + (block - first_block[expert]) * size
        tokens = jax.lax.dynamic_slice(padded, (start,), (size,)) // spec.top_k
        out = one_expert(x[tokens], expert).astype(jnp.float32)
        return jax.lax.dynamic_update_slice(parts, out, (start, 0))

    parts = jnp.zeros((count + size, x.shape[1]), jnp.float32)
    parts = jax.lax.fori_loop(0, last[-1], visit, parts)
    return parts[jnp.argsort(order, stable=True)].reshape(*ids.shape, -1)


def plain(params: dict, x: jax.Array, ids: jax.Array, spec: MoE) -> jax.Array:
    def one_expert(x, expert):
        return linear(activate(linear(x, params["up"][expert]), spec.kind), params["down"][expert])

    return blocks(x, ids, spec, one_expert)


def moe(params: dict, x: jax.Array, ids: jax.Array, spec: MoE) -> jax.Array:
    def one_expert(x, expert):
        hidden = activate(jnp.dot(x, params["up"][expert], precision=HIGHEST), spec.kind)
        return jnp.dot(hidden, params["down"][expert], precision=HIGHEST)

    return visit_experts(x, ids, params["up"].shape[0], one_expert)


def switch(params: dict, x: jax.Array, ids: jax.Array, spec: MoE) -> jax.Array:
    def branch(up, down):
        return lambda x: linear(activate(linear(x, up), spec.kind), down)

    branches = [branch(*pair) for pair in zip(params["ups"], params["downs"], strict=True)]
    return blocks(x, ids, spec, lambda x, expert: jax.lax.switch(expert, branches, x))


def gather(params: dict, x: jax.Array, ids: jax.Array, spec: MoE) -> jax.Array:
    hidden = jnp.einsum("sd,skdf->skf", x, params["up"][ids], precision=HIGHEST)
    hidden = activate(hidden, spec.kind)
    out = jnp.einsum("skf,skfd->skd", hidden, params["down"][ids], precision=HIGHEST)
    return out.astype(jnp.float32)


def dense(params: dict, x: jax.Array, ids: jax.Array, spec: MoE) -> jax.Array:
    hidden = activate(jnp.einsum("sd,xdf->sxf", x, params["up"], precision=HIGHEST), spec.kind)
    out = jnp.einsum("sxf,xfd->sxd", hidden, params["down"], precision=HIGHEST)
    return jnp.take_along_axis(out, ids[..., None], axis=1).astype(jnp.float32)


def ragged(params: dict, x: jax.Array, ids: jax.Array, spec: MoE) -> jax.Array:
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(spec.num_experts), axis=0).astype(jnp.int32)
    dot = lambda x, w: jax.lax.ragged_dot(x, w, sizes, precision=HIGHEST)  # noqa: E731
    out = dot(activate(dot(x[order // spec.top_k], params["up"]), spec.kind), params["down"])
    out = out.astype(jnp.float32)[jnp.argsort(order, stable=True)]
    return out.reshape(*ids.shape, -1)


WAYS = {
    "plain": plain,
    "moe": moe,
    "switch": switch,
    "gather": gather,
    "dense": dense,
    "ragged": ragged,
}


def draw(width: int, spec: MoE, dtype: jnp.dtype) -> dict:
    keys = jax.random.split(jax.random.key(0), 3)
    outer = 2 * spec.width if spec.kind == "gated_silu" else spec.width
    shapes = {"router": (width, spec.num_experts)}
    shapes["up"] = (spec.num_experts, width, outer)
    shapes["down"] = (spec.num_experts, spec.width, width)
    params = {
        name: jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-2] ** -0.5, dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {"router_bias": jnp.zeros(spec.num_experts)}


def weights_of(way: str, params: dict, separate: dict) -> dict:
    return separate if way == "switch" else {name: params[name] for name in ("up", "down")}


def measure(case: str, num_tokens: int, dtype: jnp.dtype, params, separate, rounds: int) -> list:
    """One row per way: milliseconds of a call, ratio to `plain`, seconds to compile, temporary bytes."""
    width, spec = CASES[case]
    inputs = []
    for i in range(NUM_INPUTS):
        x = jax.random.normal(jax.random.key(i + 1), (num_tokens, width), dtype)
        inputs.append((x, jax.jit(route, static_argnums=2)(params, x, spec)[0]))
    large = num_tokens > 8 or (num_tokens > 1 and params["up"].nbytes > 1 << 26)
    calls, rows = {}, {}
    for way, visit in WAYS.items():
        if way in ("gather", "dense", "ragged") and large:
            continue  # tens of times slower, and memory to match
        weights = weights_of(way, params, separate)
        step = jax.jit(visit, static_argnums=3)
        start = time.perf_counter()
        compiled = step.lower(weights, *inputs[0], spec).compile()
        seconds = time.perf_counter() - start
        calls[way] = lambda i, run=compiled, weights=weights: run(
            weights, *inputs[i % NUM_INPUTS]
        ).block_until_ready()
        temp = compiled.memory_analysis().temp_size_in_bytes
        rows[way] = {"compile_s": seconds, "temp_mb": temp / 1e6}
    want = np.asarray(calls["plain"](0))
    for way, call in calls.items():
        error = np.linalg.norm(np.asarray(call(0)) - want) / np.linalg.norm(want)
        assert error < (1e-5 if dtype == jnp.float32 else 2e-2), f"{case} {way}: error {error}"
    times: dict[str, list[float]] = {way: [] for way in calls}
    for turn in range(rounds):
        ways = list(calls)
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            calls[way](turn * CALLS + CALLS)
            start = time.perf_counter()
            for i in range(CALLS):
                calls[way](turn * CALLS + i)
            times[way].append((time.perf_counter() - start) / CALLS)
    base = np.array(times["plain"])
    return [
        {"case": case, "tokens": num_tokens, "way": way, **rows[way]}
        | {"ms": quantiles(1e3 * np.array(times[way]))}
        | {"ratio": quantiles(base / np.array(times[way]))}
        for way in calls
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    head = header() | {"dtype": arguments.dtype}
    print(" ".join(f"{name}={value}" for name, value in head.items()))
    print(
        f"{'case':24}{'tokens':>6}  {'way':8}{'ms':>9}{'ratio':>8}  [p10, p90]    temp MB  compile s"
    )
    dtype, report = jnp.dtype(arguments.dtype), []
    for case in arguments.case:
        params = draw(*CASES[case], dtype)
        separate = {f"{name}s": [w + 0 for w in params[name]] for name in ("up", "down")}
        for num_tokens in arguments.tokens:
            for row in measure(case, num_tokens, dtype, params, separate, arguments.rounds):
                report.append(row)
                ratio = row["ratio"]
                print(
                    f"{case:24}{num_tokens:6}  {row['way']:8}{row['ms']['median']:9.3f}"
                    f"{ratio['median']:7.2f}x  [{ratio['p10']:.2f}, {ratio['p90']:.2f}]"
                    f"{row['temp_mb']:10.1f}{row['compile_s']:9.2f}",
                    flush=True,
                )
    write_json(arguments.json, {**head, "rows": report})


if __name__ == "__main__":
    main()

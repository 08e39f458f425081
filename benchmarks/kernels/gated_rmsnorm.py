"""The gated RMS norm of a Mamba-2 mixer, whose gate lies in what in_proj gave.

    python -m benchmarks.kernels.gated_rmsnorm [--smoke] [--cases prefill] [--sweep] [--out FILE]

Peer: mamba_ssm's Triton layernorm_gated, reading the same projection.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.kernels import report
from benchmarks.kernels.harness import Case, Peer, Side, Work, with_arrays
from benchmarks.kernels.peers import need, to_torch
from pallas_kernels import gated_rmsnorm
from pallas_kernels.rmsnorm.kernel import gated_rmsnorm_pallas
from pallas_kernels.rmsnorm.reference import Gated
from tests.kernels.cases import rmsnorm as shapes

EPS = 1e-5
SMOKE = ("blocks_in_a_projection",)
GRANITE, NEMOTRON, QWEN = (
    next(shape for shape in shapes.GATED_CASES if shape.name == name)
    for name in ("granite_4_h_small", "nemotron_h_8b", "qwen3_next")
)
CASES = (
    replace(NEMOTRON, name="decode_nemotron_h_8b_64"),
    replace(GRANITE, name="prefill_granite_4_h_small_1x8192", lead=(1, 8192)),
    replace(GRANITE, name="decode_granite_4_h_small_64", lead=(64, 1)),
    replace(NEMOTRON, name="prefill_nemotron_h_8b_1x8192", lead=(1, 8192)),
    replace(QWEN, name="decode_qwen3_next_64"),
    replace(QWEN, name="prefill_qwen3_next_1x8192", lead=(1, 8192)),
)
SWEEP = (1, 2, 4, 8, 16, 32)  # warps


def draw(shape: shapes.GatedCase, key: jax.Array):
    keys = jax.random.split(key, 3)
    gate = (*shape.lead, shape.size + shape.behind)
    weights = shape.size // shape.groups if shape.shared else shape.size
    sizes = {"y": (*shape.lead, shape.size), "gate": gate, "weight": (weights,)}
    return (), {
        name: jax.random.normal(key, size, jnp.bfloat16)
        for key, (name, size) in zip(keys, sizes.items(), strict=True)
    }


def call(shape: shapes.GatedCase, run, carry, inputs):
    static = {"groups": shape.groups, "norm_before_gate": shape.norm_before_gate}
    return run(**inputs, eps=EPS, **static), carry


def mamba_ssm(shape: shapes.GatedCase, carry, inputs):
    norm = need("mamba_ssm.ops.triton.layernorm_gated").rmsnorm_fn
    y, gate, weight = to_torch(*(inputs[name] for name in ("y", "gate", "weight")))
    z = gate[..., : shape.size]
    size = shape.size // shape.groups
    if shape.shared:
        weight = weight.repeat(shape.groups)
    static = {"group_size": size, "norm_before_gate": shape.norm_before_gate}
    return lambda: norm(y, weight, None, z=z, eps=EPS, **static)


def case_of(shape: shapes.GatedCase) -> Case:
    calls = {
        name: functools.partial(call, shape, functools.partial(gated_rmsnorm, implementation=name))
        for name in ("pallas", "xla", "reference")
    }
    tokens = 1
    for size in shape.lead:
        tokens *= size
    return Case(
        operation="gated_rmsnorm",
        name=shape.name,
        draw=functools.partial(draw, shape),
        truth=calls["reference"],
        sides=tuple(Side(name=name, call=call) for name, call in calls.items()),
        peers=(Peer(name="mamba_ssm rmsnorm", build=functools.partial(mamba_ssm, shape)),),
        configs={
            f"{warps}w": functools.partial(
                call, shape, with_arrays(gated_rmsnorm_pallas, Gated, num_warps=warps)
            )
            for warps in SWEEP
        },
        work=Work(bytes=2.0 * shape.size * (3 * tokens + 1), tokens=tokens),
    )


def cases(*, smoke: bool) -> list[Case]:
    found = [shape for shape in shapes.GATED_CASES if shape.name in SMOKE] if smoke else CASES
    return [case_of(shape) for shape in found]


if __name__ == "__main__":
    report.main("gated_rmsnorm", __doc__.splitlines()[0], cases)

"""The residual sum in front of a block and the block's norm, of an update whole or in parts.

    python -m benchmarks.kernels.residual_rmsnorm [--smoke] [--cases decode] [--sweep] [--out FILE]

Peer: mamba_ssm's Triton layer_norm with its residual, which takes a whole update.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file
from benchmarks.kernels import report
from benchmarks.kernels.harness import Case, Peer, Side, Work, with_arrays
from benchmarks.kernels.peers import need, to_torch
from pallas_kernels import residual_rmsnorm
from pallas_kernels.rmsnorm.kernel import residual_rmsnorm_pallas
from pallas_kernels.rmsnorm.reference import Residual
from tests.kernels.cases import rmsnorm as shapes

EPS = 1e-5
SMOKE = ("one_part",)
DECODE, PROMPT = (
    next(shape for shape in shapes.RESIDUAL_CASES if shape.name == name)
    for name in ("hybrid_7b", "hybrid_7b_prompt")
)
CASES = (
    replace(DECODE, name="decode_hybrid_7b_64_in_8_parts"),
    replace(PROMPT, name="prefill_hybrid_7b_2x2048", masked=False),
    replace(DECODE, name="decode_hybrid_7b_64", parts=0, masked=False),
)
SWEEP = (1, 2, 4, 8, 16, 32)  # warps


def draw(shape: shapes.ResidualCase, key: jax.Array):
    keys, size = jax.random.split(key, 3), (*shape.lead, shape.size)
    update = jax.random.normal(keys[1], (shape.parts, *size) if shape.parts else size)
    return (), {
        "h": jax.random.normal(keys[0], size, jnp.bfloat16),
        "update": update if shape.parts else update.astype(jnp.bfloat16),
        "weight": jax.random.normal(keys[2], (shape.size,), jnp.bfloat16),
        "valid": jnp.ones(shape.lead, bool) if shape.masked else None,
    }


def call(shape: shapes.ResidualCase, run, carry, inputs):
    static = {"multiplier": shape.multiplier, "dtype": jnp.bfloat16}
    return run(**inputs, eps=EPS, **static), carry


def mamba_ssm(shape: shapes.ResidualCase, carry, inputs):
    norm = need("mamba_ssm.ops.triton.layer_norm").rms_norm_fn
    update, h, weight = to_torch(*(inputs[name] for name in ("update", "h", "weight")))

    def run():
        normed, total = norm(update, weight, None, residual=h, prenorm=True, eps=EPS)
        return total, normed

    return run


def case_of(shape: shapes.ResidualCase) -> Case:
    calls = {
        name: functools.partial(
            call, shape, functools.partial(residual_rmsnorm, implementation=name)
        )
        for name in ("pallas", "xla", "reference")
    }
    peer = Peer(name="mamba_ssm rms_norm", build=functools.partial(mamba_ssm, shape))
    tokens, read = math.prod(shape.lead), 4 * shape.parts or 2
    return Case(
        operation="residual_rmsnorm",
        name=shape.name,
        draw=functools.partial(draw, shape),
        truth=calls["reference"],
        sides=tuple(Side(name=name, call=call) for name, call in calls.items()),
        peers=() if shape.parts or shape.masked else (peer,),
        configs={
            f"{warps}w": functools.partial(
                call, shape, with_arrays(residual_rmsnorm_pallas, Residual, num_warps=warps)
            )
            for warps in SWEEP
        },
        work=Work(bytes=float(shape.size * (tokens * (read + 6) + 2)), tokens=tokens),
    )


def cases(*, smoke: bool) -> list[Case]:
    found = [shape for shape in shapes.RESIDUAL_CASES if shape.name in SMOKE] if smoke else CASES
    return [case_of(shape) for shape in found]


if __name__ == "__main__":
    report.main("residual_rmsnorm", __doc__.splitlines()[0], cases)

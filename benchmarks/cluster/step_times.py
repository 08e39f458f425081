"""Decode steps of a divided model by arithmetic: what each device reads, what the sums take, and what is left.

    python benchmarks/cluster/step_times.py [--json benchmarks/results/cluster/step_times.json]

Nothing here is timed. Bytes are those that `costs.step_costs` counts for the model of one device, in bfloat16. The rate
of reads, and what a step takes beyond its reads, are those that benchmarks/results/gpu/hybrid_7b_h200.json measured on
one H200. This rest is taken for each block, and does not shrink with more devices. So it is an estimate, above all for
another model. There is one sum over devices for each block and one for the embeddings, and one gather of logits, all
in bfloat16, as counted in compiled programs (tests/mesh/test_compiled.py, tests/aot/test_mesh.py). What a sum takes was
not measured: two times are assumed, and NVLink's 450 GB/s each way. Of a mixture of experts, the device counts that
reads most: all others wait for it. How many experts that is, is drawn, with rows that visit any experts alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a file

import numpy as np

from benchmarks.common import write_json
from hybrid_jax.config import EngineConfig, ModelConfig
from hybrid_jax.costs import StepCosts, model_costs, step_costs
from hybrid_jax.geometry import make_geometry
from hybrid_jax.mesh.split import shard_config
from hybrid_jax.models.known import load_known

MODELS, DEVICES = ("hybrid_7b", "qwen3_next_80b"), (1, 2, 4, 8)
CONTEXT = {
    1: 1317,
    64: 1347,
}  # tokens of each row, by the number of rows, as measured for one device
MEASURED = Path(__file__).resolve().parents[1] / "results" / "gpu" / "hybrid_7b_h200.json"
MEASURED_BLOCKS = 56
LINK_BYTES_PER_SECOND = 450e9
DRAWS = 400
SUM_S = {"NCCL, 20 us": 20e-6, "one kernel, 6 us": 6e-6}  # assumed, for a small message


@dataclass(frozen=True, kw_only=True)
class Step:
    """A decode step of one device among several. Times are in ms.

    Attributes:
        held_gb: weights that the device holds. weights_ms, states_ms, kv_ms: reading them.
        rest_ms: what a step takes beyond its reads. sums_ms: by how long a sum takes.
        step_ms, speedup: likewise, in all, and over one device.
        fits: whether the weights fit its memory.
    """

    model: str
    devices: int
    rows: int
    held_gb: float
    weights_ms: float
    states_ms: float
    kv_ms: float
    rest_ms: float
    sums_ms: dict[str, float]
    step_ms: dict[str, float]
    speedup: dict[str, float]
    fits: bool


def busiest_experts(num_experts: int, top_k: int, devices: int, rows: int) -> float:
    """How many experts the device visits that visits most, in the mean over draws."""
    rng = np.random.default_rng(0)
    counts = []
    for _ in range(DRAWS):
        visited = np.argpartition(rng.random((rows, num_experts)), top_k - 1, axis=1)[:, :top_k]
        seen = np.zeros(num_experts, bool)
        seen[visited] = True
        counts.append(seen.reshape(devices, -1).sum(axis=1).max())
    return float(np.mean(counts))


def costs_of(config: ModelConfig, engine: EngineConfig) -> StepCosts:
    """Of the steps of one device."""
    model = model_costs(config, make_geometry(config, engine), whole=True)
    return step_costs(config, engine, model, on_cpu=False)


def step(name: str, devices: int, rows: int, one: Step | None) -> Step:
    """A step of one of so many devices; `one` is that of a single device."""
    measured = json.loads(MEASURED.read_text())
    rate = measured["ceilings"]["copy"]
    found = measured["decode"][f"{rows} rows"]["pallas x4"]
    per_step = found["rows"] / found["tokens_per_s"]["median"]
    rest = (per_step - found["floor_s"]) / MEASURED_BLOCKS
    whole, engine = load_known(name), EngineConfig(dtype="bfloat16", max_rows=rows, tp=devices)
    config = shard_config(whole, devices)
    costs = costs_of(config, engine)
    weights = costs.weight_bytes + sum(
        busiest_experts(mixture.num_experts, mixture.top_k, devices, rows) * mixture.expert_bytes
        for mixture in costs_of(whole, replace(engine, tp=1)).mixtures
    )
    held = costs.weight_bytes + sum(m.num_experts * m.expert_bytes for m in costs.mixtures)
    blocks = sum(len(layer.blocks) for layer in whole.layers)
    read = [weights, rows * costs.row_bytes, rows * CONTEXT[rows] * costs.kv_bytes]
    parts = [1e3 * num_bytes / rate for num_bytes in read]
    others = (devices - 1) / devices
    moved = 2 * others * rows * whole.width * 2 / LINK_BYTES_PER_SECOND
    gathered = others * rows * whole.vocab_size * 2 / LINK_BYTES_PER_SECOND
    sums = {
        how: 1e3 * ((blocks + 1) * (seconds + moved) + seconds + gathered) if devices > 1 else 0.0
        for how, seconds in SUM_S.items()
    }
    total = {how: sum(parts) + 1e3 * rest * blocks + of_sums for how, of_sums in sums.items()}
    return Step(
        model=name,
        devices=devices,
        rows=rows,
        held_gb=held / 1e9,
        weights_ms=parts[0],
        states_ms=parts[1],
        kv_ms=parts[2],
        rest_ms=1e3 * rest * blocks,
        sums_ms=sums,
        step_ms=total,
        speedup={how: 1.0 if one is None else one.step_ms[how] / ms for how, ms in total.items()},
        fits=held < 141e9,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[Step] = []
    print("computed, in ms; weights that do not fit one device are marked *")
    for name in MODELS:
        for rows in CONTEXT:
            one: Step | None = None
            for devices in DEVICES:
                made = step(name, devices, rows, one)
                one = one or made
                found.append(made)
                both = ", ".join(
                    f"{how}: sums {made.sums_ms[how]:.2f}, step {made.step_ms[how]:.2f} ({made.speedup[how]:.2f}x)"
                    for how in SUM_S
                )
                size = f"{made.held_gb:6.1f} GB{'' if made.fits else '*'}"
                print(
                    f"{name:15} {devices} x {rows:2} rows, {size}: weights {made.weights_ms:.2f}, states "
                    f"{made.states_ms:.2f}, KV {made.kv_ms:.2f}, rest {made.rest_ms:.2f}; {both}"
                )
    write_json(args.json, {"computed": True, "steps": [asdict(one) for one in found]})


if __name__ == "__main__":
    main()

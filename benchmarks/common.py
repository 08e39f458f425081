"""What the benchmarks share: requests, statistics, and the header of a result file."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from pathlib import Path

import jax
import numpy as np

from hybrid_jax.engine.engine import Engine
from hybrid_jax.engine.request import Request
from hybrid_jax.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parent.parent


def request(name: str, prompt: list[int], max_tokens: int, **sampling) -> Request:
    """A request, greedy unless `sampling` says otherwise, that takes exactly `max_tokens` tokens."""
    sampling = {"temperature": 0.0, **sampling}
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    return Request(request_id=name, prompt=prompt, params=params, seed=0, max_tokens=max_tokens)


def run(engine: Engine, requests: list[Request]) -> None:
    """All requests to their end."""
    for one in requests:
        engine.add(one)
    while engine.has_work:
        engine.step()


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    low, high = np.percentile(values, [10, 90])
    return {"median": statistics.median(values), "p10": float(low), "p90": float(high)}


def header() -> dict[str, str]:
    """Device, versions and commit of a measurement."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    return {
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def write_json(path: Path | None, report: dict) -> None:
    """Writes a report where a path is given."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")

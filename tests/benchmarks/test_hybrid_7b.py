"""The GPU benchmark's smoke run: every section on a tiny hybrid, on the CPU, in a process of its own."""

import json
import math
import os
import subprocess
import sys

import jax
import pytest

from benchmarks.gpu import hybrid_7b
from tests.drawing import left_to_all

SECTIONS = ("decode", "prefill", "ttft", "compile")
ROWS = 2
KV_BYTES = 2 * 2 * 2 * 16 * 2  # of a token: 2 layers, K and V, 2 heads of 16, 2 bytes each


def start(root, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(root / "benchmarks/gpu/hybrid_7b.py"), *arguments]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.fixture(scope="module")
def smoke(root, tmp_path_factory) -> tuple[dict, str]:
    """The report of a smoke run, and what it printed."""
    path = tmp_path_factory.mktemp("hybrid_7b") / "report.json"
    cache = jax.config.jax_compilation_cache_dir
    done = start(root, "--smoke", "--json", str(path), *(("--cache", cache) if cache else ()))
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def sides(report: dict, *sections: str) -> list[dict]:
    return [side for name in sections for case in report[name].values() for side in case.values()]


@pytest.mark.slow
@left_to_all
def test_every_section_is_there_without_errors(smoke):
    report, printed = smoke
    assert {"device", "jax", "python", "commit", "dtype"} <= set(report["header"])
    assert set(report["decode"]["2 rows"]) == {"pallas x4", "xla x4"}
    assert set(report["prefill"]["192 tokens"]) == {"pallas 64", "xla 64"}
    times = {"pallas cold", "pallas hit", "xla cold", "xla hit"}
    assert set(report["ttft"]["330 tokens"]) == times
    cold, cached = (report["compile"]["xla"][name] for name in ("cold", "cached"))
    assert cached["same_tokens"] and cached["programs"].keys() == cold["programs"].keys()
    assert cached["stored_bytes"] == cold["stored_bytes"] > 0  # nothing was compiled again
    assert all("error" not in side for side in sides(report, *SECTIONS))
    assert "0 cases remain" in printed


@pytest.mark.slow
@left_to_all
def test_a_model_with_a_cut_is_measured_beside_the_one_without(root, tmp_path):
    path = tmp_path / "report.json"
    given = ("--smoke", "--kernels", "xla", "--only", "decode", "--cut", "3", "--json", str(path))
    done = start(root, *given)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["decode"]["2 rows"]
    assert set(found) == {"xla x4", "cut 3 xla x4"}
    assert found["cut 3 xla x4"]["flops"] < found["xla x4"]["flops"]


@pytest.mark.slow
@left_to_all
def test_shares_of_the_floor_are_finite_and_positive(smoke):
    report, _ = smoke
    for side in sides(report, "decode", "prefill", "ttft"):
        assert math.isfinite(side["floor_share"]["median"]) and side["floor_share"]["median"] > 0
        assert side["bytes"] == sum(side["parts"].values())
    for side in sides(report, "prefill"):
        assert 0 < side["mfu"]["median"] < math.inf


@pytest.mark.slow
@left_to_all
def test_bytes_of_the_decode_floor_are_those_counted_by_hand(smoke):
    report, _ = smoke
    mamba = 2 * (32 * 196 + 4 * 128 + 128 + 64 + 64 * 32 + 32) + 4 * (3 * 4)
    attention = 2 * (32 * 128 + 64 * 32 + 32)
    mlp = 2 * (2 * 32 * 64 + 32)
    ends = 2 * (32 + 32 * 96) + ROWS * 2 * 32  # last norm and head; a line of the embedding per row
    for side in sides(report, "decode"):
        assert side["parts"] == {
            "weights": 2 * (mamba + attention) + mlp + ends,
            "states": ROWS * 2 * (4 * 4 * 16 * 16),
            "rings": ROWS * 2 * (16 * (2 * 96 + 4 * 4) + 2 * 3 * 128),
            "kv": ROWS * side["context"] * KV_BYTES,
        }


@pytest.mark.slow
@left_to_all
def test_a_hit_skips_nine_tenths_of_the_prompt_and_their_flops(smoke):
    times = smoke[0]["ttft"]["330 tokens"]
    for kernels in ("pallas", "xla"):
        hit, cold = times[f"{kernels} hit"], times[f"{kernels} cold"]
        assert (cold["cached"], hit["cached"]) == (0, 288)
        assert hit["flops"] < 0.2 * cold["flops"]


@pytest.mark.slow
@left_to_all
def test_both_kernels_draw_the_same_first_tokens(smoke):
    first = [side["first_tokens"] for side in sides(smoke[0], "prefill")]
    assert first[0] == first[1]
    assert len(set(first[0])) > 1, f"NaN logits draw one token for every prompt, got {first[0]}"


def test_without_a_gpu_one_line_says_what_to_run(root):
    done = start(root)
    assert done.returncode == 2
    assert done.stderr == "hybrid_7b: needs a GPU, this is cpu; run on one, or give --smoke\n"


def test_a_candidate_that_fails_while_timed_costs_no_other_its_result():
    def breaks(inputs):
        raise RuntimeError("out of memory")

    result = lambda seconds: {"seconds": seconds}
    case = hybrid_7b.Case(section="decode", name="2 rows", sides=[], draw=list)
    found = hybrid_7b.timed(
        case,
        {
            "broken": hybrid_7b.Candidate(call=breaks, result=result),
            "sound": hybrid_7b.Candidate(call=lambda inputs: 1.5, result=result),
        },
        rounds=2,
        trace=None,
    )
    assert found["broken"] == {"error": "RuntimeError: out of memory"}
    assert found["sound"] == {"seconds": [1.5, 1.5], "beside": ["sound"]}

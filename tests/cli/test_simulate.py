"""`hybrid-jax simulate`: its table, its JSON object, its mistakes, and that jax stays out of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from hybrid_jax.byte_sizes import format_size
from hybrid_jax.cli import main as cli
from hybrid_jax.sim.model_specs import names
from hybrid_jax.sim.prefix_cache.caches import NAMES
from hybrid_jax.sim.prefix_cache.in_flight import InFlightResult
from hybrid_jax.sim.prefix_cache.request_order import Result
from tests.cli.said import check_mistake, run_without_jax, table

KEYS = {
    *("policy", "model_spec", "capacity", "requests", "input_tokens", "hit_tokens", "token_hit_rate"),
    *("flops_saved", "flops_saved_rate", "length_bins", "ttft_s", "timing", "evictions"),
    *("used_max", "used_max_over_capacity", "distance_to_optimal", "distance_to_infinite"),
    *("alpha", "seconds"),
}  # fmt: skip


def write_chat(path, sizes):
    """Turns of one chat, a second apart, of so many prompt tokens; each goes on after two tokens of output."""
    lines = []
    for turn, size in enumerate(sizes):
        prompt, output = list(range(size)), [size, size + 1]
        lines.append(
            {"session_id": 0, "turn_id": turn, "ts": turn, "input_tokens": prompt, "output_tokens": output}
        )  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def trace(tmp_path):
    """Three turns of one chat: 4, 8 and 12 tokens are asked for, 0, 6 and 10 of them cached."""
    return write_chat(tmp_path / "chat.jsonl", (4, 8, 12))


@pytest.fixture
def simulate(trace, capsys):
    """Runs the command on the trace; returns (exit code, stdout, stderr)."""

    def run(*arguments, trace=trace):
        with pytest.raises(SystemExit) as exit:
            cli.main(["simulate", "--trace", str(trace), "--no-bounds", *map(str, arguments)])
        captured = capsys.readouterr()
        return exit.value.code, captured.out, captured.err

    return run


def test_the_object_has_a_key_for_everything_that_is_measured(simulate):
    code, out, err = simulate("--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert set(found) == KEYS == {field.name for field in fields(Result)}
    assert set(found["length_bins"][0]) == {"tokens", "requests", "token_hit_rate", "mean_hit_rate"}
    assert set(found["ttft_s"]) == {"p5", "p50", "p95", "mean"}


def test_the_object_holds_the_numbers(simulate):
    _, out, _ = simulate("--json", "--capacity", "1GB", "--model-spec", "jamba_1_5_mini")
    found = json.loads(out)
    assert (found["requests"], found["input_tokens"], found["hit_tokens"]) == (3, 24, 16)
    assert found["token_hit_rate"] == 16 / 24
    assert (found["policy"], found["model_spec"], found["capacity"]) == (
        "adaptive", "jamba_1_5_mini", 10**9,
    )  # fmt: skip
    assert found["used_max"] == 14 * 16384 + 3 * 16056320
    assert found["alpha"] is found["distance_to_optimal"] is found["distance_to_infinite"] is None


def test_a_cut_is_part_of_what_is_simulated(simulate):
    options = ("--model-spec", "nemotron_h_8b", "--cut", 26, "--state-group", 3)
    found = json.loads(simulate("--json", *options)[1])
    assert found["model_spec"] == "nemotron_h_8b, cut 26, state group 3"


def test_options_reach_the_simulation(simulate, tmp_path):
    table = tmp_path / "times.csv"
    table.write_text("tokens,ms\n0,10\n100,1010\n")
    options = ("--grain", 4, "--limit", 2, "--policy", "alpha:0.5", "--ttft-table", table)
    found = json.loads(simulate("--json", *options)[1])
    assert (found["requests"], found["hit_tokens"], found["policy"]) == (2, 4, "alpha:0.5")
    assert found["timing"] == "table times.csv"
    assert found["ttft_s"]["mean"] == pytest.approx(0.05)  # 4 tokens each: 10 + 4 * 10 ms


def test_the_table_tells_the_same_to_people(simulate):
    told = table(simulate("--capacity", "1GB"))
    assert told["token hit rate"] == "66.67 %"
    assert told["requests"] == "3, 24 prompt tokens"
    assert told["time to first token"].endswith("(17.8 ms + FLOPs / 395.6 TFLOP/s)")


def test_bounds_that_were_not_asked_for_are_not_told(simulate):
    _, out, _ = simulate()
    assert "clairvoyant" not in out and "endless" not in out


def test_a_model_may_be_a_file(simulate, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "width = 8\n[[blocks]]\nattention = { num_heads = 2, num_kv_heads = 1, head_dim = 4 }\n"
    )
    found = json.loads(simulate("--json", "--model-spec", path, "--capacity", 320)[1])
    assert (found["model_spec"], found["hit_tokens"], found["used_max"]) == ("mine", 16, 14 * 16)


# --- requests side by side ------------------------------------------------------------------------


@pytest.fixture
def arrive(simulate, tmp_path):
    """Turns of 40, 80 and 120 tokens; 41, 81 and 121 are computed at the end of each."""
    path = write_chat(tmp_path / "long.jsonl", (40, 80, 120))
    return lambda *arguments: simulate("--clock", "arrivals", *arguments, trace=path)


def test_with_arrivals_the_object_has_a_key_for_everything_that_is_measured(arrive):
    code, out, err = arrive("--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert set(found) == {field.name for field in fields(InFlightResult)}
    for times in ("ttft_s", "latency_s"):
        assert set(found[times]) == {"p5", "p50", "p95", "mean"}
    assert (found["policy"], found["requests"], found["infeasible"]) == ("adaptive", 3, 0)
    assert 2 < found["span_s"] < 3  # the last turn arrives at 2


@pytest.mark.parametrize(("options", "hits"), [((), 32 + 64), (("--grain", 16), 32 + 80)])
def test_with_arrivals_resume_points_are_32_tokens_apart_or_as_asked(arrive, options, hits):
    found = json.loads(arrive("--json", *options)[1])
    assert (found["input_tokens"], found["hit_tokens"]) == (240, hits)


def test_with_arrivals_the_table_tells_the_same_to_people(arrive):
    told = table(arrive("--policy", "lru"))
    assert told["policy"] == "lru" and told["requests"] == "3, 240 prompt tokens"
    assert told["token hit rate"] == "40.00 %" and told["never fit"] == "0"
    assert told["waited for another's"] == told["preemptions"] == "0"
    assert told["dispatches of prompts"] == "3"
    assert told["time to last token"].startswith("p5 ")
    assert told["device"].startswith("1 ms + FLOPs / 395.6 TFLOP/s")


def test_with_tiers_the_table_tells_what_each_had(arrive):
    sizes = ("--capacity", "500MB", "--host-memory", "1GB", "--disk-memory", "5GB")
    options = (*sizes, "--loads", "always")
    told, found = table(arrive(*options)), json.loads(arrive("--json", *options)[1])
    assert told["hits in the cache"] == "96 tokens, 40.00 %; 2 requests"
    assert told["in the host's memory"] == told["on disk"] == "0 tokens, 0.00 %; 0 requests"
    assert told["host memory"].startswith("0 saves of 0 B, 0 loads of 0 B")
    saves, written = found["disk"]["saves"], format_size(found["moved_bytes"]["to_disk"])
    assert saves and told["disk memory"].startswith(f"{saves} saves of {written}, 0 loads of 0 B; ")
    assert told["copies"].endswith(" s") and "the disk reads 0.65 GB/s" in told["device"]
    assert "the cache alone" not in told
    alone = table(arrive(*options, "--bounds"))["the cache alone"]
    assert alone.startswith("token hit rate 40.00 %; time to first token p5 ")
    # So short prompts are sooner computed than read from there, so nothing is written.
    assert table(arrive(*sizes))["disk memory"].startswith("0 saves of 0 B, 0 loads of 0 B; ")


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "fifo"), "simulate: no policy 'fifo'; known are none, vllm, sglang, lru, "),
        (("--policy", "alpha:-1"), "alpha must be a number of at least 0, got -1.0"),
        (("--policy", "alpha:x"), "simulate: alpha must be a number of at least 0, got 'x'"),
        (("--capacity", "1MB"), "simulate: --capacity must hold one checkpoint, 25.6 MiB at least, got 976 KiB"),
        (
            ("--capacity", "lots"),
            "--capacity: a size must look like 5GB, 5GiB (capital B, for bytes) or a positive number of "
            "bytes, got 'lots'",
        ),
        (("--model-spec", "gpt_9"), "model spec: no model 'gpt_9'; known are bamba_9b, codestral_mamba_7b, "),
        (("--grain", "0"), "--grain must be at least 1, got 0"),
        (("--limit", "-1"), "--limit must be at least 1, got -1"),
        (("--max-rows", "0"), "--max-rows must be at least 1, got 0"),
        (("--clock", "wall"), "--clock must be order or arrivals, got 'wall'"),
        (("--clock", "arrivals", "--shapes", "odd"), "--shapes must be fine or coarse, got 'odd'"),
        (("--shapes", "coarse"), "--shapes goes with --clock arrivals only, got coarse"),
        (
            ("--clock", "arrivals", "--ttft-table", "times.csv"),
            "--ttft-table goes with --clock order only, got times.csv",
        ),
        (
            ("--clock", "arrivals", "--capacity", "1MB"),
            "simulate: --capacity must hold two checkpoints, 52 MiB at least, got 976 KiB",
        ),
        (
            ("--clock", "arrivals", "--policy", "optimal"),
            "--policy must be one of off, lru, sglang, marconi, marconi-code, adaptive, or alpha:X with "
            "a number X >= 0, got 'optimal'",
        ),
        (("--clock", "arrivals", "--grain", "4"), "--grain must be a power of two between 8 and 64, got 4"),
        (("--ttft-table", "none.csv"), "--ttft-table none.csv: No such file or directory"),
        (("--speed", "3"), "No such option: --speed"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_value(simulate, options, message):
    check_mistake(simulate(*options), message)


def test_a_value_of_another_type_is_one_line_that_names_it(simulate):
    code, out, err = simulate("--grain", "two")
    assert (code, out) == (2, "")
    assert err.startswith("hybrid-jax: Invalid value for '--grain'") and err.count("\n") == 1
    assert "'two'" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": a trace must hold at least one request, got none"),
        (b"{}\n[]\n", ", line 1: must have 'in' (segments), 'input_tokens' (tokens) or "),
        (b"\xff", ": cannot be read as text: it has byte 0xff at byte 0"),
    ],
)
def test_a_bad_trace_is_one_line_that_names_file_and_line(simulate, tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    check_mistake(simulate(trace=path), f"{path}{message}")


@pytest.mark.parametrize("name", ["none.jsonl", "none.jsonl.gz"])
def test_a_missing_trace_is_one_line_that_names_it(simulate, tmp_path, name):
    path = tmp_path / name
    assert simulate(trace=path) == (
        2,
        "",
        f"hybrid-jax: --trace {path}: No such file or directory\n",
    )


def test_a_model_file_that_is_wrong_is_one_line_that_names_the_key(simulate, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("width = 8\nblocks = []\ndepth = 3\n")
    message = "model spec mine: unknown key 'depth'; known are "
    check_mistake(simulate("--model-spec", path), message)


# --- as a program ---------------------------------------------------------------------------------


def test_the_program_simulates_without_jax(trace, root):
    out = run_without_jax(root, ["simulate", "--trace", trace, "--no-bounds", "--json"])
    assert json.loads(out)["hit_tokens"] == 16


def test_the_program_ends_with_2_and_no_traceback_after_a_mistake(root):
    done = subprocess.run(
        [sys.executable, "-m", "hybrid_jax", "simulate", "--trace", "nowhere.jsonl"],
        capture_output=True,
        text=True,
        cwd=root,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hybrid-jax: --trace nowhere.jsonl: No such file or directory\n"


def test_a_policy_that_holds_nothing_takes_any_capacity(simulate):
    code, out, _ = simulate("--bounds", "--policy", "none", "--capacity", "1", "--json")
    told = json.loads(out)
    assert code == 0 and told["distance_to_optimal"] is None
    assert told["distance_to_infinite"] == pytest.approx(16 / 24)


def test_the_help_names_every_policy_and_model(capsys):
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    words = set(re.split(r"[\s,│()]+", capsys.readouterr().out))
    assert {*NAMES, *names()} <= words

"""`hybrid-jax pool-sim`: its table, its JSON object, its mistakes, and that jax stays out of it."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from benchmarks.pools.paper_mode import PaperResult
from benchmarks.pools.ticks import TickResult
from hybrid_jax.cli import main as cli
from tests.cli.said import check_mistake, run_without_jax, table

KEYS = {  # in both modes
    *("mode", "workload", "allocator", "model_spec", "pool_bytes", "seed", "requests", "oom_count"),
    *("completed", "hollow", "rebalance_count", "migrated_bytes", "evictions", "allocate_calls"),
    *("peak_bytes", "cpu_seconds"),
}
PAPER_KEYS = KEYS | {
    *("oom_requests", "intact", "rebalances_refused", "wasted_bytes", "victim_requests"),
    *("self_evictions", "pages_evicted", "reserved_bytes"),
}
HEADER = "workload,seed,request_id,prompt_len,gen_len,arrival_tick"
POOL_FORM = (
    "--pool: a size must look like 5GB, 5GiB (capital B, for bytes) or a positive number of bytes"
)


@pytest.fixture
def pool_sim(capsys):
    """Runs the command in paper mode; returns (exit code, stdout, stderr)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as exit:
            cli.main(["pool-sim", "--mode", "paper", *map(str, arguments)])
        captured = capsys.readouterr()
        return exit.value.code, captured.out, captured.err

    return run


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEADER}\nown,7,0,40,8,0\nown,7,1,16,100,3\nown,9,0,16,1,0\n")
    return path


def without_time(found):
    """The lines of a JSON object, but for the one that no two runs share."""
    lines = found[1].splitlines()
    kept = [line for line in lines if not line.lstrip().startswith('"cpu_seconds"')]
    assert len(kept) == len(lines) - 1
    return kept


CELL = (
    "--workload",
    "mixed_long",
    "--allocator",
    "avmp_dynamic_b128",
    "--pool",
    "1GiB",
    "--seed",
    4,
)


def test_the_object_has_a_key_for_everything_that_is_counted(pool_sim):
    code, out, err = pool_sim("--json", "--model-spec", "mamba2_1b3", *CELL)
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert set(found) == PAPER_KEYS == {field.name for field in fields(PaperResult)}
    counts = {k: found[k] for k in ("oom_count", "completed", "hollow", "rebalances_refused")}
    assert counts == {"oom_count": 94, "completed": 218, "hollow": 216, "rebalances_refused": 94}
    assert (found["allocate_calls"], found["reserved_bytes"]) == (28096, 2 << 30)
    assert 0.9 * 2**30 < found["peak_bytes"] <= 2**30


def test_but_for_the_time_the_object_is_the_same_every_time(pool_sim):
    first, second = (without_time(pool_sim("--json", *CELL)) for _ in "ab")
    assert first == second


def test_the_table_tells_the_same_to_people(pool_sim):
    told = table(pool_sim("--model-spec", "mamba2_1b3", *CELL))
    assert told["failed calls"] == "94 of 28,096"
    assert told["completed"] == "218, as the paper counts" and told["completed intact"] == "2"
    assert told["of those hollow"] == "216; they lost memory while they ran"
    assert told["rebalances"] == "0 done, 0 B; 94 refused; 0 B lost for ever"


def test_requests_may_come_from_a_file(pool_sim, trace):
    options = ("--json", "--trace", trace, "--workload", "own", "--pool", "64MiB")
    found = json.loads(pool_sim(*options)[1])
    # 40 + 8 tokens never begin a fourth page; 16 + 100 begin pages at 17, 33, 49, 65, 81, 97, 113
    assert (found["seed"], found["requests"], found["allocate_calls"]) == (7, 2, 2 * 32 + 7 * 4)
    assert found["completed"] == found["intact"] == 2
    assert json.loads(pool_sim(*options, "--seed", 9)[1])["requests"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mode", "fair"), "--mode must be paper or honest, got 'fair'"),
        (("--workload", "chat"), "pool-sim: no workload 'chat'; known are uniform_short, mixed_long, "),
        (("--allocator", "buddy"), "pool-sim: no allocator 'buddy'; known are padded_unified, fixed_dual_mrXX, "),
        (("--model-spec", "gpt_9"), "pool-sim: no model 'gpt_9' in paper mode; known are jamba_1_5_mini, mamba2_1b3"),
        (("--seed", "-1"), "--seed must be a whole number of at least 0, got -1"),
        (("--seed", "one"), "Invalid value for '--seed'"),
        (("--pool", "8 Gib"), f"{POOL_FORM}, got '8 Gib'"),
        (("--pool", "-4"), f"{POOL_FORM}, got '-4'"),
        (("--pool", "1MiB"), "--pool must hold one request of jamba_1_5_mini, 7.25 MiB at least, got 1 MiB"),
        (("--trace", "none.csv"), "--trace none.csv: No such file or directory"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_value(pool_sim, options, message):
    check_mistake(pool_sim(*options), message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("own,7,1,16,x,3", "mine.csv, line 3: gen_len must be a whole number from 1 to 4194304, got 'x'"),
        ("own,7,1", "mine.csv, line 3: must have 6 columns, got 3"),
        ("other,8,0,1,1,1", "--seed: no seed 8 of own in mine.csv; known are 7"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line_that_names_it(pool_sim, trace, line, message):
    trace.write_text(f"{HEADER}\nown,7,0,40,8,0\n{line}\n")
    code, out, err = pool_sim("--trace", trace, "--workload", "own", "--seed", 8)
    assert (code, out, err) == (2, "", f"hybrid-jax: {message}\n".replace("mine.csv", str(trace)))


@pytest.fixture
def honest(capsys):
    """Runs the command as it is; returns (exit code, stdout, stderr)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as exit:
            cli.main(["pool-sim", *map(str, arguments)])
        captured = capsys.readouterr()
        return exit.value.code, captured.out, captured.err

    return run


SHORT = ("--workload", "uniform_short", "--pool", "1GiB")


def test_honest_mode_is_the_default_and_frames_its_allocator(honest):
    code, out, err = honest("--json", *SHORT)
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert KEYS <= set(found) == {field.name for field in fields(TickResult)}
    assert (found["mode"], found["allocator"], found["seed"]) == ("honest", "frames", 1)
    assert (found["completed"], found["preempted"], found["makespan"]) == (512, 65, 7259)
    assert found["of_ideal"] == 1 and found["hollow"] == found["leaked_bytes"] == 0
    assert (found["oom_count"], found["evictions"]) == (65, 0)
    assert found["peak_bytes"] == found["peak_footprint"] * 2**30


def test_the_honest_object_is_the_same_every_time_but_for_the_time(honest):
    first, second = (
        without_time(honest("--json", "--allocator", "two_ended", *SHORT)) for _ in "ab"
    )
    assert first == second


def test_the_honest_table_tells_the_same_to_people(honest):
    told = table(honest("--allocator", "fixed_dual_mr05", *SHORT))
    assert told["tokens per tick"] == "43.37, 0.8279 of the byte-fluid ideal's"
    assert told["preempted"] == "105 times, 1,998 tokens computed for nothing"
    assert told["of those hollow"] == "0; their memory was gone at the end"


def test_a_file_may_be_run_honestly(honest, trace):
    options = ("--json", "--trace", trace, "--workload", "own", "--pool", "64MiB")
    found = json.loads(honest(*options, "--model-spec", "mamba2_1b3", "--pool", "128MiB")[1])
    # 40 + 8 tokens from 0, 16 + 100 from 3, one after the other or at once: two states fit
    assert (found["completed"], found["makespan"], found["seed"]) == (2, 119, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--allocator", "buddy"), "pool-sim: no allocator 'buddy'; known are frames, frames:N, "),
        (("--allocator", "frames:0"), "pool-sim: no allocator 'frames:0'; known are frames, "),
        (("--allocator", "frames:9999"), "pool-sim: frames: 4294967296 bytes must hold 29 frames"),
        (("--allocator", "superblocks:8TiB"), "pool-sim: superblocks:8TiB: a block must have from 1048576 bytes to "),
        (("--allocator", "superblocks:big"), "pool-sim: superblocks: a size must look like 5GB, "),
        (("--allocator", "fixed_dual:1.5"), "pool-sim: fixed_dual:1.5: the share of states must lie between 0 and 1, "),
        (("--model-spec", "gpt_9"), "pool-sim: no model 'gpt_9'; known are jamba_1_5_mini, mamba2_1b3, bamba_9b, "),
        (("--model-spec", "codestral_mamba_7b"), "pool-sim: codestral_mamba_7b: needs one kind of attention "),
        (
            ("--model-spec", "llama_3_1_8b"),
            "pool-sim: llama_3_1_8b: needs one kind of attention and one of recurrent blocks, got 1 and 0; give one of "
            "jamba_1_5_mini, mamba2_1b3, bamba_9b, falcon_h1_0_5b, ",
        ),
        (("--model-spec", "none.toml"), "model spec: no model 'none.toml'; known are "),
        (("--workload", "chat"), "pool-sim: no workload 'chat'; known are uniform_short, "),
        (("--pool", "8 Gib"), f"{POOL_FORM}, got '8 Gib'"),
        (("--pool", "1MiB"), "--pool must hold one request of jamba_1_5_mini, 7.25 MiB at least, got 1 MiB"),
    ],
)  # fmt: skip
def test_an_honest_mistake_is_one_line_that_names_the_value(honest, options, message):
    check_mistake(honest(*options), message)


def test_a_model_file_with_other_item_sizes_has_no_geometry(honest, tmp_path):
    file = tmp_path / "wide.toml"
    file.write_text(
        "width = 64\nkv_item_bytes = 4\n"
        "[[blocks]]\nattention = { num_heads = 4, num_kv_heads = 2, head_dim = 16 }\n"
        "[[blocks]]\nmamba2 = { num_heads = 4, head_dim = 16, state_size = 16, num_groups = 1 }\n"
    )
    message = (
        f"pool-sim: {file}: only KV and convolutions of 2 bytes and states of 4 have a geometry"
    )
    check_mistake(honest("--model-spec", str(file)), message)


def test_the_program_runs_without_jax(root, trace):
    asked = ["pool-sim", "--mode", "paper", "--json", "--trace", trace, "--workload", "own"]
    assert json.loads(run_without_jax(root, asked))["requests"] == 2

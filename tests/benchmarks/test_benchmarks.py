"""The kernel benchmarks on a CPU: every script's rows, what a wrong side gets, and what happens without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import all as every
from benchmarks.kernels import gated_rmsnorm, harness, paged_attention, peers, report, ssd_scan
from benchmarks.kernels.harness import Case, Ceilings, JaxClock, Peer, Side, Work
from tests.drawing import left_to_all
from tests.kernels.lowered import kernels_in

OPERATIONS = {script.__name__.rsplit(".", 1)[1] for script in every.SCRIPTS}
TIMED = {"us", "ratio", "bytes", "flops", "gb_per_s", "tflop_per_s", "floor_us", "bound", "share"}
CEILINGS = Ceilings(copy=1e12, matmul=1e14)


@pytest.fixture
def settings_restored():
    """A smoke run turns the compiler's optimizations off."""
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def doubling(**changes) -> Case:
    """y = 2 x, and a carry that counts the calls."""

    def draw(key):
        return jnp.zeros((), jnp.int32), jax.random.normal(key, (8,))

    def truth(carry, x):
        return 2 * x, carry + 1

    given = {
        "operation": "double",
        "name": "small",
        "draw": draw,
        "truth": truth,
        "sides": (Side(name="pallas", call=truth),),
        "configs": {},
        "work": Work(bytes=64.0, flops=8.0, tokens=8),
    }
    return Case(**given | changes)


@pytest.mark.slow
@left_to_all
def test_a_smoke_run_of_all_scripts_fills_tables_and_file(tmp_path, capsys, settings_restored):
    out = tmp_path / "kernels.json"
    assert every.main(["--smoke", "--out", str(out)]) == 0
    found, text = json.loads(out.read_text()), capsys.readouterr().out
    (run,) = found["runs"]
    assert {"device", "jax", "commit", "versions", "copy", "matmul"} <= set(run)
    assert {row["operation"] for row in found["rows"]} == OPERATIONS
    for row in found["rows"]:
        assert {"operation", "case", "side", "status", "note", "run", "sweep"} <= set(row)
        if row["side"] in ("pallas", "xla", "reference"):
            assert row["status"] == "ok" and row["error"] <= 1e-2
            assert set(row) >= TIMED and row["us"]["median"] > 0
    sides = {(row["operation"], row["side"]) for row in found["rows"]}
    assert sides >= {(operation, side) for operation in OPERATIONS for side in ("pallas", "xla")}
    assert text.count("| paged_attention | decode_bf16 |") == 1  # the roofline
    assert "torch sdpa flash" in text


def test_a_wrong_side_is_reported_and_not_timed():
    wrong = Side(name="wrong", call=lambda carry, x: (2.1 * x, carry + 1))
    case = doubling(sides=(*doubling().sides, wrong))
    rows = {row["side"]: row for row in harness.measure(case, CEILINGS, rounds=1, smoke=True)}
    assert rows["wrong"]["status"].startswith("disagrees: error 5.00e-02, at most 1e-02")
    assert "us" not in rows["wrong"] and "us" in rows["pallas"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_never_agrees(value):
    assert harness.relative_error([np.array([1.0, value])], [np.array([1.0, 2.0])]) == np.inf


def test_a_wrong_integer_counts_by_its_share():
    got, want = np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])
    assert harness.relative_error((got,), (want,)) == 0.25


def test_a_side_that_raises_is_a_row_and_stops_nothing():
    def raises(carry, x):
        raise NotImplementedError("no such shape")

    case = doubling(sides=(Side(name="broken", call=raises), *doubling().sides))
    broken, pallas = harness.measure(case, CEILINGS, rounds=1, smoke=True)
    assert broken["status"] == "failed: NotImplementedError: no such shape"
    assert pallas["status"] == "ok"


def test_a_missing_peer_says_what_to_install():
    def build(carry, inputs):
        return peers.need("mamba_ssm.ops.triton.ssd_combined")

    case = doubling(peers=(Peer(name="peer", build=build),))
    row = harness.measure(case, CEILINGS, rounds=1, smoke=True)[-1]
    assert row["status"] in (
        "not installed: pip install torch",
        "not installed: pip install mamba-ssm",
    )


def test_triton_files_are_found_behind_a_package_that_wants_its_extension(tmp_path, monkeypatch):
    package = tmp_path / "mamba_ssm"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text("import an_extension_that_is_missing\n")
    (package / "ops" / "kernels.py").write_text("from mamba_ssm.shared import ANSWER\n")
    (package / "shared.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.kernels", "mamba_ssm.shared"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]  # and so it is again after the test
    assert peers.need("mamba_ssm.ops.kernels").ANSWER == 42


def test_a_peer_that_is_there_but_broken_says_why(tmp_path, monkeypatch):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(peers.NotInstalled, match="not usable: undefined symbol: _ZN3c10; pip"):
        peers.need("flash_attn")


def test_a_second_module_missing_behind_a_stand_in_says_so(tmp_path, monkeypatch):
    package = tmp_path / "mamba_ssm"
    package.mkdir()
    (package / "__init__.py").write_text("import an_extension_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    del sys.modules["mamba_ssm"]  # and so it is again after the test
    for name in ("first", "second"):
        with pytest.raises(peers.NotInstalled, match=f"not usable: No module.*mamba_ssm.{name}"):
            peers.need(f"mamba_ssm.{name}")


@pytest.mark.parametrize("programs", [1, 3, 12])
def test_a_chain_makes_every_call_of_every_set(programs, monkeypatch):
    case, keys = doubling(), [jax.random.key(i) for i in range(3)]
    sets = [case.draw(key) for key in keys]
    lines = jax.jit(case.truth).lower(*sets[0]).as_text().count("\n")
    monkeypatch.setattr(harness, "MOST_LINES", {1: 12, 3: 3, 12: 1}[programs] * lines)
    clock = JaxClock(case, case.truth, sets, repeats=4)
    assert clock.calls == 12 and len(clock.order) == {1: 1, 3: 4, 12: 12}[programs]
    assert [int(carry) for carry in jax.tree.leaves(clock.carries)] == [4, 4, 4]
    assert clock() > 0 and 0 < clock.host_share <= 1
    assert [int(carry) for carry in jax.tree.leaves(clock.carries)] == [8, 8, 8]
    np.testing.assert_array_equal(clock.result, 2 * np.asarray(sets[0][1]))


def test_a_side_that_fails_only_while_timed_costs_its_own_row(monkeypatch):
    calls = []

    class Late(JaxClock):
        def __call__(self, _=None):
            calls.append(self)
            if len(calls) == 4:
                raise RuntimeError("out of memory")
            return super().__call__()

    monkeypatch.setattr(harness, "JaxClock", Late)
    case = doubling(sides=(*doubling().sides, Side(name="other", call=lambda c, x: (2 * x, c + 1))))
    rows = {row["side"]: row for row in harness.measure(case, CEILINGS, rounds=3, smoke=True)}
    failed = [name for name, row in rows.items() if row["status"] != "ok"]
    assert len(failed) == 1
    assert rows.pop(failed[0])["status"] == "failed: RuntimeError: out of memory"
    assert "us" in next(iter(rows.values()))


def test_sides_can_be_left_out():
    case = doubling(sides=(*doubling().sides, Side(name="xla wide", call=doubling().truth)))
    rows = harness.measure(case, CEILINGS, rounds=1, smoke=True, without=["wide"])
    assert [row["side"] for row in rows] == ["pallas"]


def test_inputs_that_fit_in_the_cache_are_marked():
    (row,) = harness.measure(doubling(), CEILINGS, rounds=1, smoke=True)
    assert row["in_cache"]
    large = doubling(work=Work(bytes=2 * harness.CACHE_BYTES, tokens=8))
    (row,) = harness.measure(large, CEILINGS, rounds=1, smoke=True)
    assert not row["in_cache"]


def test_sets_exceed_the_cache_and_programs_are_long_enough():
    small, large = Work(bytes=1e6), Work(bytes=1e10)
    sets, repeats = harness.sets_and_repeats(small, CEILINGS, smoke=False)
    assert (sets, repeats) == (harness.MOST_SETS, harness.MOST_CALLS // harness.MOST_SETS)
    assert harness.sets_and_repeats(large, CEILINGS, smoke=False) == (1, 1)
    assert harness.sets_and_repeats(Work(bytes=128e6), CEILINGS, smoke=False) == (4, 1)


def test_the_floor_is_the_larger_of_moving_and_computing():
    assert Work(bytes=1e9, flops=1e9).floor(CEILINGS) == pytest.approx(1e-3)
    assert Work(bytes=1e6, flops=1e12).floor(CEILINGS) == pytest.approx(1e-2)


@pytest.mark.parametrize("script", ["all", "gated_rmsnorm"])
@pytest.mark.parametrize("as_module", [True, False])
def test_without_a_gpu_it_says_what_to_run_and_fails(root, script, as_module):
    where = ["-m", f"benchmarks.kernels.{script}"]
    command = where if as_module else [f"benchmarks/kernels/{script}.py"]
    done = subprocess.run([sys.executable, *command], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"no GPU found; on a machine with one run `python -m benchmarks.kernels.{script}`"
    )
    assert "--smoke" in line


def test_out_of_time_it_prints_how_to_go_on_and_keeps_old_rows(tmp_path, capsys, settings_restored):
    out = tmp_path / "kernels.json"
    common = ["--smoke", "--out", str(out), "--only", "gated_rmsnorm"]
    assert every.main(common) == 0
    rows = json.loads(out.read_text())["rows"]
    assert every.main([*common, "frame_io", "--cases", "copy", "--minutes", "0"]) == 0
    assert json.loads(out.read_text())["rows"] == rows
    text = capsys.readouterr().out
    assert "1 of 1 cases are left; go on with:" in text
    assert f"--smoke --minutes 0.0 --out {out} --only frame_io/copy_3" in text


def test_the_command_that_goes_on_names_no_file_where_none_was_given(capsys, settings_restored):
    flags = ("--smoke", "--rounds", "2", "--minutes", "0", "--without", "flash attn")
    assert every.main([*flags, "--only", "copy"]) == 0
    words = "all --smoke --minutes 0.0 --rounds 2 --without 'flash attn' --only frame_io/copy_3\n"
    assert words in capsys.readouterr().out


def test_left_measures_only_what_the_file_lacks(tmp_path, settings_restored):
    out = tmp_path / "kernels.json"
    common = ["--smoke", "--out", str(out), "--left", "--only", "frame_io/copy_3"]
    assert every.main(common) == 0
    assert every.main([*common, "frame_io/read_3"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {(row["case"], row["run"]) for row in rows} == {("copy_3", 0), ("read_3", 1)}
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.json"]


def test_a_lost_device_ends_the_run_and_the_rest_is_left(
    tmp_path, capsys, monkeypatch, settings_restored
):
    def broken(*given, **more):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(report, "measure", broken)
    monkeypatch.setattr(report, "device_answers", lambda: False)
    out = tmp_path / "kernels.json"
    assert every.main(["--smoke", "--out", str(out), "--only", "frame_io"]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["case"] == "copy_3" and row["status"].endswith("CUDA_ERROR_ILLEGAL_ADDRESS")
    text = capsys.readouterr()
    assert "frame_io/copy_3 left the device in a state of error" in text.err
    assert "--only frame_io/read_3 frame_io/read_5" in text.out


def test_a_whole_name_takes_one_case_and_a_part_of_one_several():
    cases = every.all_cases(smoke=False)
    name = "ssd_window/granite_4_h_small_G1_T1"
    assert [report.full_name(case) for case in report.chosen(cases, [name])] == [name]
    assert len(report.chosen(cases, ["small_G1_T1"])) > 2


def test_a_sweep_lists_configs_by_time(tmp_path, settings_restored):
    out = tmp_path / "sweep.json"
    every.main(["--smoke", "--sweep", "--out", str(out), "--only", "gated_rmsnorm"])
    rows = json.loads(out.read_text())["rows"]
    assert {row["side"] for row in rows} == {f"{warps}w" for warps in gated_rmsnorm.SWEEP}
    times = [row["us"]["median"] for row in rows]
    assert times == sorted(times)


def large_cases() -> list[Case]:
    """The first of each script, and forms of the kernels that those do not reach."""
    firsts = [script.cases(smoke=False)[0] for script in every.SCRIPTS]
    names = ("prefill_32k_bf16", "verify_T5_64x8k_bf16")
    others = [case for case in paged_attention.cases(smoke=False) if case.name in names]
    return [*firsts, *others, every.ssd_window.cases(smoke=False)[2]]


@pytest.mark.parametrize("case", large_cases(), ids=lambda case: f"{case.operation}-{case.name}")
def test_what_is_timed_at_a_real_models_shape_lowers_for_cuda(case):
    carry, inputs = jax.eval_shape(case.draw, jax.random.key(0))
    for side in case.sides:
        if side.name.startswith("pallas"):
            chain = harness.program(side.call, 2)
            assert len(kernels_in(chain, [carry], [inputs])) >= 2


@pytest.mark.parametrize(
    "case",
    [*large_cases(), *every.frame_io.cases(smoke=False)[1:]],
    ids=lambda case: f"{case.operation}-{case.name}",
)
def test_no_call_is_too_long_to_compile(case):
    """A reference that writes 1,024 frames one by one has 29,702 lines: XLA would need minutes for one call."""
    carry, inputs = jax.eval_shape(case.draw, jax.random.key(0))
    for call in {case.truth, *(side.call for side in case.sides if not side.gpu_only)}:
        assert jax.jit(call).lower(carry, inputs).as_text().count("\n") < 8000


def test_configs_of_a_sweep_lower_for_cuda():
    case = ssd_scan.cases(smoke=False)[0]
    carry, inputs = jax.eval_shape(case.draw, jax.random.key(0))
    for call in list(case.configs.values())[::6]:
        assert kernels_in(harness.program(call, 1), [carry], [inputs])


def test_names_of_cases_are_unique():
    for smoke in (True, False):
        names = [(case.operation, case.name) for case in every.all_cases(smoke=smoke)]
        assert len(names) == len(set(names))

"""The anatomy of a decode step: each form runs and leaves the same bits, and the report says what was measured."""

from __future__ import annotations

import copy
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.on_gpu import anatomy, report, steps
from benchmarks.on_gpu.anatomy_tables import step_seconds
from hybrid_jax.engine.programs import loops

RATES = {"copy": 4e12, "read": 5e12}


def calls(first: float, step: float, returned: float) -> dict:
    """Of 1, 4 and 31 steps, in seconds."""
    done = {count: first + (count - 1) * step for count in (1, 4, 31)}
    middle = lambda value: {"median": value, "p10": value, "p90": value}  # noqa: E731
    return {
        str(count): {
            "returned_s": middle(returned),
            "done_s": middle(seconds),
            "in_a_row_s": seconds - 0.001,
        }
        for count, seconds in done.items()
    }


def form(name: str, kernels: dict, **of_calls: float) -> dict:
    """What a form leaves of 64 rows."""
    of = {
        "program": {
            "first_s": 40.0,
            "bytes": 24e9,
            "kernels": "Pallas kernels, sampling by pallas",
        },
        "calls": calls(**of_calls),
        "bits": {"repeats": 100, "different": 1, "first": "aa"},
        "profile": {"steps": 4, "kernels": kernels, "planes": {"/device:GPU:0 / Stream #13": 9}},
    }
    model = {"name": "the 7B hybrid", "context": 1345}
    return {"name": name, "rates": RATES, "model": model, "rows": {"64": of}}


@pytest.fixture
def found() -> dict:
    """A small report, as a card might leave it."""
    kernels = {"ssd_window_1": [48, 9600.0], "ssd_window_2": [48, 9600.0], "gemm": [4, 8000.0]}
    graph = form("the loop in the graph", {}, first=0.009, step=0.008, returned=0.0005)
    outside = form("the loop outside the graph", kernels, first=0.011, step=0.009, returned=0.04)
    graph["rows"]["64"]["trial"] = {"seconds": [0.9, 0.034], "wrong": None}
    header = {"device": "NVIDIA H100", "jax": "0.11.2", "driver": "13.0", "smoke": False}
    return {"header": header, "forms": {"graph": graph, "outside": outside}}


def page(found: dict, tmp_path, capsys) -> str:
    (tmp_path / "anatomy.json").write_text(json.dumps(found))
    assert report.main([str(tmp_path)]) == 0
    return capsys.readouterr().out


def test_a_step_is_the_slope_and_a_dispatch_is_what_is_left():
    step, dispatch = step_seconds(calls(first=0.010, step=0.008, returned=0.001))
    assert step == pytest.approx(0.008) and dispatch == pytest.approx(0.002)


def test_the_report_has_steps_shares_calls_and_what_the_loop_gains(found, tmp_path, capsys):
    text = page(found, tmp_path, capsys)
    assert (
        "NVIDIA H100, jax 0.11.2, driver of CUDA 13.0: the 7B hybrid, 1,345 tokens a row." in text
    )
    assert "A copy moves 4.00 TB/s here" in text and "a sum reads 5.00 TB/s" in text
    # 24 GB in 8 ms are 3 TB/s.
    assert "| the loop in the graph | 8.00 | 75% | 60% | 1.00 | all 100 |" in text
    assert "| the loop outside the graph | 9.00 | 67% | 53% | 2.00 | all 100 |" in text
    row = "| the loop in the graph | 0.50 | 33.00 | 32.00 | 0.50 | 249.00 | 248.00 |"
    assert row in text
    assert (
        "calls of 4 steps in a row take 32.00 ms in place of 37.00 each, 1.16 times as fast" in text
    )
    assert "A call returns after 0.50 ms in place of 40.00." in text
    assert "A step takes 8.00 ms in place of 9.00, a dispatch beside its steps 1.00 ms" in text
    assert "the same bits: the loop in the graph; the loop outside the graph." in text
    assert "trial of the loop passes. It takes 0.034 s; the first one" in text


def test_kernels_of_one_name_are_one_line_of_the_fullest_profile(found, tmp_path, capsys):
    text = page(found, tmp_path, capsys)
    assert "profile of: the loop outside the graph." in text
    assert "| `ssd_window` | 24 | 70.6% | 4800.0 |" in text and "| `gemm` | 1 | 29.4% |" in text
    assert "| all | 25 | 100.0% | 6800.0 |" in text
    assert "| of it not in kernels | | | 2200.0 |" in text
    assert "- the loop in the graph: its profile has no kernels." in text
    assert "/device:GPU:0 / Stream #13 (9)" in text


def test_many_kernels_share_the_last_line(found, tmp_path, capsys):
    kernels = {f"kernel_{chr(97 + number)}": [4, 40.0 - number] for number in range(26)}
    found["forms"]["outside"]["rows"]["64"]["profile"]["kernels"] = kernels
    text = page(found, tmp_path, capsys)
    assert "| `kernel_x` | 1 |" in text and "kernel_y" not in text
    assert "| 2 others | 2 |" in text


def test_what_failed_or_differs_is_said(found, tmp_path, capsys):
    forms = found["forms"]
    forms["outside"]["rows"]["64"]["bits"] = {"repeats": 100, "different": 3, "first": "bb"}
    forms["graph"]["rows"]["64"]["trial"]["wrong"] = "no token came"
    forms["host"] = {"name": "the host starts each step", "rates": RATES, "running": "1 row, bits"}
    forms["host"]["rows"] = {"1": {"program": {"error": "RuntimeError: out of memory"}}}
    text = page(found, tmp_path, capsys)
    assert "| **3 digests in 100** |" in text
    assert (
        "**Bits differ between forms.** Alike are: the loop in the graph | the loop outside" in text
    )
    assert (
        "- failed: the host starts each step, 1 row, program: RuntimeError: out of memory" in text
    )
    assert "- the host starts each step: the process ended during: 1 row, bits" in text
    assert "trial of the loop **fails: no token came**" in text
    assert not anatomy.same_bits(forms)


def test_bits_are_the_same_within_a_form(found):
    """Another form is another program, whose bits may differ: the tables say so, and it is no error."""
    forms = found["forms"]
    assert anatomy.same_bits(forms)
    for change, same in (({"different": 2}, False), ({"first": "bb"}, True)):
        other = copy.deepcopy(forms)
        other["outside"]["rows"]["64"]["bits"] |= change
        assert anatomy.same_bits(other) == same
    forms["outside"]["rows"]["64"]["bits"] = {"error": "RuntimeError"}
    assert anatomy.same_bits(forms)


def test_kernels_are_what_streams_of_a_gpu_ran():
    event = lambda name, us: SimpleNamespace(name=name, duration_ns=1e3 * us)  # noqa: E731
    line = lambda name, *events: SimpleNamespace(name=name, events=events)  # noqa: E731
    gpu = SimpleNamespace(
        name="/device:GPU:0",
        lines=[
            line("Stream #7(Compute)", event("fold", 2.0), event("gemm", 5.0)),
            line("Stream #8(MemcpyD2D)", event("fold", 4.0)),
            line("XLA Ops", event("while", 100.0)),
        ],
    )
    host = SimpleNamespace(name="/host:CPU", lines=[line("Stream of it", event("call", 9.0))])
    found = anatomy.kernels_of([gpu, host])
    assert found["kernels"] == {"fold": [2, 6.0], "gemm": [1, 5.0]}
    assert list(found["kernels"]) == ["fold", "gemm"]
    assert found["planes"]["/device:GPU:0 / XLA Ops"] == 1
    assert anatomy.kernels_of([host]) == {"kernels": {}, "planes": {"/host:CPU / Stream of it": 1}}


@pytest.mark.parametrize(("free", "says"), [(None, 4), (30e9, 4), (29e9, 3), (16e9, 2), (8e9, 1)])
def test_a_card_gets_as_many_layers_as_it_has_memory_for(monkeypatch, free, says):
    monkeypatch.setattr(anatomy, "free_bytes", lambda: free)
    monkeypatch.setattr(anatomy, "make_weights", lambda config, dtype: {})
    config, _, name = anatomy.model(anatomy.Scale(), smoke=False)
    assert len(config.layers) == len(anatomy.hybrid_7b(says).layers)
    assert name == (
        "the 7B hybrid" if says == 4 else f"the 7B hybrid, the first {says} of its 4 periods"
    )


def test_a_card_without_memory_is_refused(monkeypatch):
    monkeypatch.setattr(anatomy, "free_bytes", lambda: 2e9)
    with pytest.raises(
        SystemExit, match=r"rows needs .* GB of the device, 2\.0 GB are free; free some"
    ):
        anatomy.model(anatomy.Scale(), smoke=False)


def test_forms_leave_the_same_bits_and_a_file_of_their_results(tmp_path):
    path = tmp_path / "anatomy.json"
    before = loops.LOOP_OPTIONS
    for name in ("graph", "host"):
        argv = ["--form", name, "--out", str(path), "--repeats", "2", "--smoke"]
        assert anatomy.main(argv) == 0
    assert loops.LOOP_OPTIONS is before
    found = json.loads(path.read_text())
    assert found["header"]["smoke"] and list(found["forms"]) == ["graph", "host"]
    for of in found["forms"].values():
        assert "running" not in of and set(of["rates"]) == {"copy", "read"}
        of = of["rows"]["2"]
        assert list(of["calls"]) == ["1", "2", "4"] and of["bits"]["different"] == 1
        assert of["profile"]["planes"] and not of["profile"]["kernels"]  # a CPU has no kernels
    first, second = (of["rows"]["2"]["bits"]["first"] for of in found["forms"].values())
    assert first == second
    assert found["forms"]["graph"]["rows"]["2"]["trial"]["wrong"] is None

    found["header"]["device"] = "another card"
    path.write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="holds results of .*another card.*; give another --out"):
        anatomy.main(argv)
    path.write_text('{"header": ')
    with pytest.raises(SystemExit, match=r"anatomy\.json is damaged: .*; move it away"):
        anatomy.main(argv)


def test_what_cannot_be_measured_costs_nothing_else(tmp_path, monkeypatch):
    """An error is a result, and the process goes on as long as the device answers."""
    of_file = anatomy.Report(tmp_path / "anatomy.json", "graph", {"device": "a card"})

    def fails() -> None:
        raise RuntimeError("out of memory\nand more")

    assert of_file.measure(64, "program", fails) is None
    assert of_file.measure(64, "bits", lambda: {"different": 1}) == {"different": 1}
    rows = json.loads(of_file.path.read_text())["forms"]["graph"]["rows"]
    assert rows["64"]["program"] == {"error": "RuntimeError: out of memory"} and of_file.failed
    monkeypatch.setattr(anatomy, "device_answers", lambda: False)
    with pytest.raises(SystemExit, match="64 rows, calls left the device in a state of error"):
        of_file.measure(64, "calls", fails)
    assert json.loads(of_file.path.read_text())["forms"]["graph"]["running"] == "64 rows, calls"


def test_rows_that_stop_on_their_way_are_an_error(monkeypatch):
    scale = anatomy.SMOKE
    config, params, _ = anatomy.model(scale, smoke=True)
    made = anatomy.opened(anatomy.FORMS["host"], config, params, 2, scale)
    rows = made.rows(4)
    rows[1].num_tokens = 3
    monkeypatch.setattr(made, "rows", lambda count: rows)
    with pytest.raises(RuntimeError, match="8 tokens should have come, 7 came"):
        made.bits(4)
    made.draw()
    with pytest.raises(RuntimeError, match="8 tokens should have come, 7 came"):
        anatomy.times(made, dataclasses.replace(scale, calls=(4,)))
    made.close()


def test_memory_is_drawn_spread_and_different():
    drawn = np.stack([np.asarray(steps.noise(number, (64, 50))) for number in range(3)])
    assert (np.abs(drawn) <= 1).all() and abs(drawn.mean()) < 0.02
    assert (
        0.31 < drawn.var() < 0.35 and np.abs(np.corrcoef(drawn.reshape(3, -1))[0, 1:]).max() < 0.06
    )


def test_without_a_gpu_nothing_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        anatomy.main(["--form", "graph", "--out", str(tmp_path / "anatomy.json")])
    assert ended.value.code == 2
    assert "needs a GPU, this is cpu; run on one, or give --smoke" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

"""The paper's figures on the first requests of two traces and capacities to match: what they promise, and mistakes."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

from benchmarks.cache import policies
from benchmarks.cache.figures import check, command, plots, published
from benchmarks.cache.figures.loads import COMMITTED, Load, Traces, retimed
from benchmarks.cache.figures.runs import POLICIES, Place, Runs, Setup, Sweep

CHAT, AGENTS = COMMITTED["chat"], COMMITTED["agents"]
TINY = Setup(
    reuse=(Place(load=CHAT, gigabytes=2),),
    sweeps={
        "chat": Sweep(loads=(CHAT, Load(name="chat", sps=5)), gigabytes=(1, 2)),
        "agents": Sweep(loads=(AGENTS,), gigabytes=(40,)),
    },
    lengths=Place(load=AGENTS, gigabytes=60),
    contention=Sweep(loads=(AGENTS,), gigabytes=(60, 100)),
    layers=Place(load=AGENTS, gigabytes=60),
    sessions=Sweep(loads=(Load(name="agents", sps=2, art=7.5),), gigabytes=(100,)),
    turns=Sweep(loads=(AGENTS,), gigabytes=(100,)),
    scale=0.05,
)
RATES, WINS = set(POLICIES), {"marconi win, %", "alpha-code:1 win, %", "adaptive win, %"}
CODE = {f"code {name}" for name in published.CODE}
TIMES = {"load", "GB", "none", *POLICIES}
SPREAD = {"P5", "P25", "P50", "P75", "P95", "mean"}
PAPER = {"paper sglang", "paper marconi", "paper win, %"}
COMPARED = {"load", "GB", "model", "policy", "published, %", "ours, %", "points"}
# Columns that every row of a figure's tables has.
COLUMNS = {
    "3a": [{"load", "GB", "block", "KV reused, %", "states reused, %", "paper KV, %"}],
    "3b": [{"tokens", "blocks of 16, GB", "Transformer, GB", "paper, blocks of 16"}],
    "5": [{"tokens", *(f"{m}, FLOPs per byte" for m in ("Transformer", "Hybrid", "Mamba"))}],
    "7": [{"load", "policy", "paper, x"} | SPREAD, {"load", "GB", "infinite"} | RATES | CODE],
    "8": [{"load", "policy", "worse by 0.5", "paper P95"} | SPREAD],
    "9": [{"load", "policy", "against", "most, %", "then ms", "paper most, %", "paper ms"}, TIMES],
    "10": [
        {"tokens from", "requests", "sglang, %", "marconi", "adaptive", "optimal"},
        {"policy", "hit rate, %", "FLOPs saved, %", "p5, ms", "p50, ms", "p95, ms"},
    ],
    "11": [{"GB"} | RATES | WINS | PAPER | CODE, TIMES],
    "12a": [{"SSM", "attention", "marconi over vllm, x"} | RATES | WINS | PAPER],
    "12b": [{"N", "marconi over vllm, x"} | RATES | WINS | PAPER],
    "13": [{"load", "GB"} | RATES | WINS | PAPER] * 2 + [TIMES],
    "14": [{"tokens", "TFLOPs", "attention, %", "SSM, %", "feed-forward, %"}],
    "table1": [{"layer", "tokens", "GFLOPs", "paper's formula, GFLOPs", "bytes"}],
    "check": [COMPARED | {"within 1 point", "bytes differ because"}] * 2,
}


@pytest.fixture(scope="module")
def traces() -> Traces:
    return Traces(limit=30)


@pytest.fixture(autouse=True)
def few_published_runs(monkeypatch):
    """Of the comparison with the published simulator a few rows are enough."""
    monkeypatch.setattr(check, "SAME_TRACES", {("chat", 5): published.SAME_TRACES["chat", 5]})
    monkeypatch.setattr(check, "EXACT", published.EXACT[:2])


@pytest.fixture(scope="module")
def runs(traces) -> Runs:
    return Runs(traces, scale=TINY.scale)


def test_every_figure_of_the_paper_is_there():
    assert list(command.FIGURES) == list(COLUMNS)


@pytest.mark.parametrize("name", COLUMNS)
def test_the_rows_of_a_figure_have_its_columns(runs, name):
    figure = command.FIGURES[name](runs, TINY)
    assert figure.name == name and figure.paper and figure.ours and figure.differences
    for table, promised in zip(figure.tables, COLUMNS[name], strict=True):
        assert promised <= set(table.columns)
        assert all(list(row) == table.columns for row in table.rows)
    for panel in figure.panels:
        assert not any(label.endswith(", x") for label in panel.series)  # no ratio among rates
        assert all(len(values) == len(panel.x) for values in panel.series.values())
        assert panel.kind in plots.KINDS


@pytest.mark.parametrize("name", ["3a", "8", "12b"])
def test_a_figure_made_twice_is_the_same(runs, traces, name):
    again = command.FIGURES[name](Runs(traces, scale=TINY.scale), TINY)
    assert again == command.FIGURES[name](runs, TINY)


def test_numbers_that_need_no_trace_are_the_papers(runs):
    last = command.FIGURES["3b"](runs, TINY).tables[0].rows[-1]
    assert last["blocks of 16, GB"] == pytest.approx(published.BLOCKS_OF_16_GB, abs=0.05)
    times = last["blocks of 16, GB"] / last["Transformer, GB"]
    assert times == pytest.approx(published.OVER_TRANSFORMER, abs=0.05)
    for row in command.FIGURES["table1"](runs, TINY).tables[0].rows:
        assert row["GFLOPs"] == pytest.approx(row["paper's formula, GFLOPs"], rel=1e-3)
        assert row["bytes"] == row["paper's formula, bytes"]
        if row["FLOPs per byte"] is not None:
            assert row["FLOPs per byte"] == pytest.approx(row["paper, FLOPs per byte"], rel=1e-3)


def test_a_run_writes_rows_a_page_and_charts_and_keeps_figures_of_other_runs(tmp_path, traces):
    pytest.importorskip("matplotlib")
    command.make(["3b"], tmp_path, traces, TINY)
    command.make(["9", "14"], tmp_path, traces, TINY)
    report = json.loads((tmp_path / "figures.json").read_text())
    assert {"device", "jax", "python", "commit"} <= set(report)
    assert list(report["figures"]) == ["3b", "9", "14"]
    assert all({"title", "paper", "tables", "run"} <= set(f) for f in report["figures"].values())
    page = (tmp_path / "README.md").read_text()
    assert "The traces are stand-ins" in page and "![Fig. 3b](fig_3b.png)" in page
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.png")}
    assert set(sizes) == {"fig_3b.png", "fig_9.png", "fig_14.png"}
    assert all(0 < size < 60_000 for size in sizes.values())


def test_without_matplotlib_the_tables_are_written_and_it_says_what_to_install(
    tmp_path, traces, capsys, monkeypatch
):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command.make(["3b"], tmp_path, traces, TINY)
    assert capsys.readouterr().out.startswith("PNG files need matplotlib: pip install -e '.[plot]'")
    assert {path.name for path in tmp_path.iterdir()} == {"figures.json", "README.md"}
    assert "![" not in (tmp_path / "README.md").read_text()


def test_an_unknown_figure_is_one_line_that_names_it_and_the_known_ones(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        policies.main(["--figures", "3a,4", "--out", str(tmp_path)])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f"--figures: no figure '4'; known are all, {', '.join(command.FIGURES)}")
    assert not list(tmp_path.iterdir())


def test_a_trace_folder_that_is_none_is_an_error_with_its_name(capsys):
    with pytest.raises(SystemExit, match="2"):
        policies.main(["--figures", "3b", "--trace-folder", "no/such"])
    assert "--trace-folder: must be a folder, got no/such" in capsys.readouterr().err


# --- loads ----------------------------------------------------------------------------------------


def test_other_rates_move_the_sessions_of_the_committed_trace_and_keep_their_turns(traces):
    fast = traces[Load(name="chat", sps=5)]
    slow = {(r.session_id, r.turn_id): r for r in traces[CHAT]}
    starts = {r.session_id: r.arrival_s for r in reversed(traces[CHAT])}
    order = [round(r.arrival_s, 6) for r in fast]
    assert order == sorted(order)
    for request in fast:
        old, start = slow[request.session_id, request.turn_id], starts[request.session_id]
        assert request.arrival_s == pytest.approx(start / 10 + old.arrival_s - start)
        assert request.prompt is old.prompt


def test_pauses_stretch_from_the_start_of_a_session(traces):
    moved = retimed(traces[AGENTS], pauses=2.0)
    assert len(moved) == len(traces[AGENTS])
    assert max(r.arrival_s for r in moved) > max(r.arrival_s for r in traces[AGENTS])


def test_a_file_of_the_trace_folder_is_preferred_to_a_moved_clock(tmp_path):
    load = Load(name="agents", sps=2, art=7.5)
    line = {"session_id": 1, "turn_id": 0, "ts": 3, "in": [[5, 9]], "out": []}
    assert load.file == "swebench_s1_sps2_art7.5.seg.jsonl.gz"
    with gzip.open(tmp_path / load.file, "wt") as file:
        file.write(json.dumps(line))
    (request,) = Traces(tmp_path)[load]
    assert (request.arrival_s, len(request.prompt)) == (3, 9)

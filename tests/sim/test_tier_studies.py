"""The study of tiers: its cells, its file, and what it says of the target."""

from __future__ import annotations

import json

import pytest

from benchmarks.cache import tier_studies
from benchmarks.cache.tier_studies import CHECKPOINTS, SETUPS, SMALL, main, reached


def test_a_try_runs_every_setup_and_writes_what_it_found(tmp_path, capsys):
    file = tmp_path / "studies.json"
    main(["--smoke", "--json", str(file)])
    found = json.loads(file.read_text())
    cells = {(r["checkpoints"], r["arena"], r["setup"]) for r in found["rows"]}
    arenas = (SMALL, 4 * SMALL)
    assert cells == {(c, a, s) for c in CHECKPOINTS for a in arenas for s in SETUPS}
    for row in found["rows"]:
        arena, capacity = row["arena"], row["capacity"]
        larger, host, disk = SETUPS[row["setup"]]
        assert capacity == {"arena": larger * arena, "host": host * arena, "disk": disk * arena}
        assert sum(row["by_tier"].values()) == pytest.approx(row["token_hit_rate"], abs=3e-5)
        assert ("to_host" in row["moved_bytes"], "to_disk" in row["moved_bytes"]) == (
            host > 0,
            disk > 0,
        )
    assert len(found["reached"]) == 4 and found["reached"] == reached(found["rows"])
    loaded = {
        s: sum(r["disk"]["loads"] for r in found["rows"] if r["setup"] == s)
        for s in list(SETUPS)[2:4]
    }
    few, all_ = loaded.values()
    assert few < all_
    main(["--smoke", "--json", str(file)])  # nothing is left to do
    assert json.loads(file.read_text())["rows"] == found["rows"]
    hit = sum(cell["reached"] for cell in found["reached"])
    assert f"{hit} of 4 cells" in capsys.readouterr().out


def test_a_cell_is_reached_where_the_host_hits_at_least_as_much():
    def row(setup, rate, arena=1):
        return {
            "trace": "t",
            "checkpoints": "int8",
            "arena": arena,
            "setup": setup,
            "token_hit_rate": rate,
        }

    _, host, _, _, larger = SETUPS
    rows = [
        row(host, 0.5),
        row(larger, 0.5),
        row(host, 0.4, 2),
        row(larger, 0.5, 2),
        row(host, 1.0, 3),
    ]
    cells = [(c["arena"], c["reached"]) for c in reached(rows)]
    assert cells == [(1, True), (2, False)]


def test_a_chart_has_all_rows(tmp_path):
    pytest.importorskip("matplotlib")
    main(["--smoke", "--png", str(tmp_path / "studies.png")])
    assert (tmp_path / "studies.png").stat().st_size > 20_000


def test_a_file_of_other_settings_is_a_mistake(tmp_path, capsys):
    file = tmp_path / "studies.json"
    file.write_text('{"model": "another", "rows": []}')
    with pytest.raises(SystemExit):
        main(["--smoke", "--json", str(file)])
    assert "studies.json is of other settings; name a new file" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_a_mistake(capsys):
    with pytest.raises(SystemExit):
        main(["--traces", "/nowhere"])
    assert "--traces must be a folder, got /nowhere" in capsys.readouterr().err


def test_more_traces_come_from_a_folder(tmp_path):
    for name in ("mine.seg.jsonl.gz", "sharegpt_s1_sps1.seg.jsonl.gz", "other.json"):
        (tmp_path / name).touch()
    assert list(tier_studies.traces(tmp_path)) == ["chat", "short", "agents", "log", "mine"]

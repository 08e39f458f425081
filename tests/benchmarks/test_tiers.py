"""The benchmarks of the tiers: their pictures come from reports alone, and both scripts run on a tiny model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import matplotlib.axes
import matplotlib.image
import pytest

from benchmarks.cache import checkpoints, disk, tier_runs, tiers
from benchmarks.common import ROOT
from tests.drawing import left_to_all
from tests.tiny_models import tiny_model

RESULTS = ROOT / "benchmarks/results/cache"
SCRIPTS = {"disk": disk, "tiers": tiers, "checkpoints": checkpoints}


@pytest.fixture
def call(monkeypatch):
    """Runs a script with a command line."""

    def call(script, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
        SCRIPTS[script].main()

    return call


@pytest.fixture
def drawn(monkeypatch):
    """Values and words of the lying bars that are drawn, and where thin lines stand across them."""
    found = {"bars": [], "lines": [], "words": []}
    barh, axvline, text = (
        getattr(matplotlib.axes.Axes, name) for name in ("barh", "axvline", "text")
    )

    def seen_barh(self, places, values, *more, **how):
        found["bars"].append(list(values))
        return barh(self, places, values, *more, **how)

    def seen_line(self, x, **how):
        found["lines"].append(x)
        return axvline(self, x, **how)

    def seen_text(self, x, y, words, **how):
        found["words"].append(words)
        return text(self, x, y, words, **how)

    monkeypatch.setattr(matplotlib.axes.Axes, "barh", seen_barh)
    monkeypatch.setattr(matplotlib.axes.Axes, "axvline", seen_line)
    monkeypatch.setattr(matplotlib.axes.Axes, "text", seen_text)
    return found


def test_the_disks_picture_is_drawn_from_its_numbers(call, drawn, monkeypatch, tmp_path):
    monkeypatch.setattr(disk, "measure", None)  # nothing is measured
    call("disk", "--draw", RESULTS / "disk.json", "--png", tmp_path / "disk.png")
    report = json.loads((RESULTS / "disk.json").read_text())
    assert drawn["lines"] == [0.15, 0.7, 1.05, 1.02]
    first, rates, decode, never = drawn["bars"]
    assert first == pytest.approx(list(report["first_tokens"]["over_cold"].values()))
    assert rates == pytest.approx(list(report["rates"]["share_of_plain"].values()))
    assert decode == pytest.approx([1, report["decode_beside_saves"]["ratio"]])
    assert never == pytest.approx([1, report["never_back"]["ratio"]])
    seconds = report["first_tokens"]["seconds"]["from disk"]["median"]
    assert drawn["words"][2] == f"{first[2]:.3g} ({seconds:.3g} s)"
    read, plain = (
        report["rates"]["bytes_per_s"][n]["median"] / 1e9 for n in ("read", "plain read")
    )
    assert any(f"({read:.2g} of {plain:.2g} GB/s)" in words for words in drawn["words"])
    shape = matplotlib.image.imread(tmp_path / "disk.png").shape
    assert shape == matplotlib.image.imread(RESULTS / "disk.png").shape


def test_the_checkpoints_picture_is_drawn_from_its_numbers(call, drawn, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "measure", None)
    points, errorbar = [], matplotlib.axes.Axes.errorbar

    def seen(self, x, y, *more, **how):
        points.append((how["label"], y))
        return errorbar(self, x, y, *more, **how)

    monkeypatch.setattr(matplotlib.axes.Axes, "errorbar", seen)
    given, out = RESULTS / "checkpoints.json", tmp_path / "checkpoints.png"
    call("checkpoints", "--draw", given, "--png", out)
    report = json.loads(given.read_text())
    cost = lambda model, form: [  # noqa: E731
        depth["nats_a_byte"] for depth in report["formats"][model][form]["by_depth"].values()
    ]
    assert points == [
        (f"{model}, {form}", cost(model, form))
        for form in ("int8", "int4")
        for model in ("bundled", "tiny_gated_delta", "tiny_cut")
    ]
    assert drawn["bars"] == [sorted(size["times_as_many"] for size in report["sizes"].values())]
    assert drawn["lines"] == [3.5] and "at most 0.002" in drawn["words"]
    shape = matplotlib.image.imread(out).shape
    assert shape == matplotlib.image.imread(RESULTS / "checkpoints.png").shape


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draw", "x.json"], "--draw needs --png, the file to draw to"),
        (["--draw", "x.json", "--png", "x.png", "--json", "y.json"], "so leave out --json"),
    ],
)
def test_a_picture_of_nothing_is_refused(call, capsys, script, arguments, message):
    with pytest.raises(SystemExit) as raised:
        call(script, *arguments)
    assert raised.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
@left_to_all
@pytest.mark.parametrize(
    ("script", "share", "tier"),
    [("tiers", "share_of_copy", "from the host"), ("disk", "share_of_plain", "from disk")],
)
def test_a_script_measures_a_tiny_model_and_draws_it(
    call, drawn, monkeypatch, tmp_path, script, share, tier
):
    """With prompts that are short enough for a test."""
    module, tiny = SCRIPTS[script], replace(tiny_model("bamba")[0], max_position=512)
    for where in (module, tier_runs):
        monkeypatch.setattr(where, "SHARED", 256)
    monkeypatch.setattr(module, "nemotron_model", lambda: tiny)
    out, png = tmp_path / "found.json", tmp_path / "found.png"
    call(script, "--smoke", "--json", out, "--png", png)
    report = json.loads(out.read_text())
    assert set(report["rates"][share]) < set(report["rates"]["bytes_per_s"])
    first, decode = report["first_tokens"], report["decode_beside_saves"]
    assert list(first["over_cold"]) == ["cold", "from the arena", tier]
    assert first["over_cold"]["cold"] == 1.0 and first["shared_tokens"] == 256
    alone, beside = (decode["seconds_per_token"][name] for name in ("alone", "beside saves"))
    assert decode["ratio"] == beside["median"] / alone["median"] and decode["frames_per_plan"] > 1
    saves = report["never_back"]["saves"]
    assert (saves > 0) == (script == "disk")  # an arena that is large for this model evicts nothing
    assert drawn["lines"] == [0.15, 0.7, 1.05, 1.02] and png.stat().st_size > 10_000

"""Pictures of what `tiers.py`, `disk.py` and `checkpoints.py` have measured, drawn from their reports alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cache.figures.plots import DPI, OTHERS

BAR, AT_MOST, AT_LEAST = "#8fb4d6", "at most", "at least"
CLEAR = {
    "facecolor": "white",
    "edgecolor": "none",
    "pad": 0.6,
}  # behind words that a line runs through
MARKERS = "os^"  # of each kind of model


class Bar(NamedTuple):
    """A bar with its name, what is written beside it, and its 10th and 90th percentile if it has any."""

    name: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None


def draw_tier(report: dict[str, Any], path: Path) -> None:
    """First tokens, rates, a decode step beside saves, and prompts that never come back, with what was aimed at."""
    canvas = _canvas(9.6, 5.2)
    axes = canvas.subplots(2, 2).flat
    first, decode, never = (
        report[n] for n in ("first_tokens", "decode_beside_saves", "never_back")
    )
    shared = f"first token behind {first['shared_tokens']:,} shared tokens"
    _bars(next(axes), shared, "times cold", _beside(first["seconds"], "cold", "s"), 0.15, AT_MOST)
    _bars(next(axes), "rates", _rate_label(report["rates"]), _rates(report["rates"]), 0.7, AT_LEAST)
    bars = _beside(decode["seconds_per_token"], "alone", "ms")
    _bars(next(axes), "a decoded token of 8 rows", "times alone", bars, 1.05, AT_MOST)
    named = {"without the tier": never["seconds"]["off"], "with it": never["seconds"]["on"]}
    bars = _beside(named, "without the tier", "s")
    _bars(next(axes), "prompts that never come back", "times without", bars, 1.02, AT_MOST)
    _save(canvas, report, path)


def _beside(values: dict[str, dict[str, float]], base: str, unit: str) -> list[Bar]:
    """Seconds as shares of the median of one of them."""
    whole, scale = values[base]["median"], 1000 if unit == "ms" else 1
    return [
        Bar(
            name,
            each["median"] / whole,
            f"{each['median'] / whole:.3g} ({scale * each['median']:.3g} {unit})",
            each["p10"] / whole,
            each["p90"] / whole,
        )
        for name, each in values.items()
    ]


def _rate_label(rates: dict[str, Any]) -> str:
    return "share of plain files'" if "share_of_plain" in rates else "share of a copy's"


def _rates(rates: dict[str, Any]) -> list[Bar]:
    """Each rate as a share of what it is compared with."""
    plain = "share_of_plain" in rates
    bars = []
    for name, share in rates["share_of_plain" if plain else "share_of_copy"].items():
        own, other = (rates["bytes_per_s"][n] for n in (name, f"plain {name}" if plain else "copy"))
        text = f"{share:.2f} ({own['median'] / 1e9:.2g} of {other['median'] / 1e9:.2g} GB/s)"
        low, high = (own[q] / other["median"] for q in ("p10", "p90"))
        bars.append(Bar(name, share, text, low, high))
    return bars


def draw_checkpoints(report: dict[str, Any], path: Path) -> None:
    """What formats cost a byte of text, by the depth of the resume and kind of model, and how many fit."""
    canvas = _canvas(9.6, 6.4)
    left, right = canvas.subplots(1, 2, width_ratios=[1, 1.1])
    models = list(report["formats"])
    for row, (form, fill) in enumerate((("int8", "full"), ("int4", "none"))):
        for column, model in enumerate(models):
            depths = report["formats"][model][form]["by_depth"]
            left.errorbar(
                [place + (column + 0.4 * row - 1.2) * 0.2 for place in range(len(depths))],
                [each["nats_a_byte"] for each in depths.values()],
                [each["standard_error"] for each in depths.values()],
                label=f"{model}, {form}",
                color=OTHERS[column],
                marker=MARKERS[column % len(MARKERS)],
                fillstyle=fill,
                markersize=5,
                linestyle="none",
                linewidth=1,
            )
    left.set_xticks(range(len(depths)), depths)
    left.set_xlabel("tokens before the resume")
    left.set_ylabel("nats a byte more than float32, with standard errors")
    left.set_yscale("symlog", linthresh=1e-4)
    left.axhline(0, color="black", linewidth=0.5)
    left.axhline(0.002, color="black", linewidth=0.8, linestyle="--")
    left.text(0.02, 0.0023, "at most 0.002", transform=left.get_yaxis_transform(), fontsize=7)
    left.set_ylim(-0.006, 0.012)
    left.set_title("what a rounded checkpoint costs", fontsize=10)
    left.legend(fontsize=7, frameon=False, loc="lower center", ncols=2)
    sizes = sorted(report["sizes"].items(), key=lambda item: item[1]["times_as_many"])
    bars = [
        Bar(name, each["times_as_many"], f"{each['times_as_many']:.2f}") for name, each in sizes
    ]
    _bars(right, "int8 checkpoints in the bytes of one", "times as many", bars, 3.5, AT_LEAST)
    _save(canvas, report, path)


def _bars(axis, title: str, label: str, bars: list[Bar], target: float, how: str) -> None:
    """Lying bars, the first on top, with a thin line at what was aimed at."""
    places = range(len(bars))
    axis.barh(
        places, [bar.value for bar in bars], 0.62, color=BAR, edgecolor="black", linewidth=0.5
    )
    most = max(target, *(max(bar.value, bar.high or 0.0) for bar in bars))
    for place, bar in zip(places, bars, strict=True):
        if bar.low is not None:
            axis.plot([bar.low, bar.high], [place, place], color="black", linewidth=1)
        end = max(bar.value, bar.high or 0.0)
        axis.text(end + 0.02 * most, place, bar.text, va="center", fontsize=7, bbox=CLEAR)
    axis.axvline(target, color="black", linewidth=0.8, linestyle="--")
    axis.set_yticks(places, [bar.name for bar in bars], fontsize=8)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xlim(0, 1.6 * most)
    axis.set_xlabel(f"{label} ({how} {target:g}, the dashed line)", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(title, fontsize=10)


def _canvas(width: float, height: float):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(canvas, report: dict[str, Any], path: Path) -> None:
    canvas.suptitle(f"{report['device']}, {report['dtype']}, jax {report['jax']}", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=DPI, pil_kwargs={"optimize": True}, metadata={"Software": None})

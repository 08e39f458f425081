"""Charts as PNG files, with matplotlib where it is installed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cache.figures.figure import Figure, Panel

NEEDS = "PNG files need matplotlib: pip install -e '.[plot]'; the tables are written without them"
COLORS = {
    "none": "#c9c9c9",
    "vllm": "#8c8c8c",
    "sglang": "#4c78a8",
    "marconi": "#1b7f5c",
    "marconi-code": "#7fbf7b",
    "alpha-code:1": "#c8b400",
    "adaptive": "#d1495b",
    "optimal": "#6a4c93",
}
OTHERS = ("#4c78a8", "#f28e2b", "#1b7f5c", "#d1495b", "#6a4c93", "#8c8c8c")
SHAPE, DPI = (7.4, 3.0), 100  # inches of one panel


def why_not() -> str | None:
    """What is missing to draw; None when nothing is."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return NEEDS
    return None


def draw(figure: Figure, path: Path) -> None:
    """Writes the panels of a figure below each other."""
    from matplotlib.figure import Figure as Canvas

    width, height = SHAPE
    canvas = Canvas(figsize=(width, height * len(figure.panels)), layout="constrained")
    axes = canvas.subplots(len(figure.panels), squeeze=False)[:, 0]
    for axis, panel in zip(axes, figure.panels, strict=True):
        KINDS[panel.kind](axis, panel)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.x_label)
        axis.set_ylabel(panel.y_label)
        axis.set_xscale("log") if panel.log_x else None
        axis.set_yscale("log") if panel.log_y else None
        axis.grid(axis="y", linewidth=0.4, color="#dddddd")
        axis.set_axisbelow(True)
        axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    canvas.suptitle(f"{figure.name}: {figure.title}", fontsize=11)
    canvas.savefig(path, dpi=DPI, pil_kwargs={"optimize": True})


def color(label: str, index: int) -> str:
    return COLORS.get(label.removeprefix("paper "), OTHERS[index % len(OTHERS)])


def lines(axis, panel: Panel) -> None:
    for index, (label, values) in enumerate(panel.series.items()):
        axis.plot(panel.x, values, label=label, color=color(label, index), marker="o", markersize=3)


def areas(axis, panel: Panel) -> None:
    axis.stackplot(
        panel.x,
        *panel.series.values(),
        labels=list(panel.series),
        colors=[color(label, index) for index, label in enumerate(panel.series)],
    )


def bars(axis, panel: Panel) -> None:
    """The paper's bars are hollow."""
    wide = 0.85 / len(panel.series)
    for index, (label, values) in enumerate(panel.series.items()):
        places = [group + (index + 0.5) * wide - 0.425 for group in range(len(panel.x))]
        paper = label.startswith("paper")
        axis.bar(
            places,
            [0 if value is None else value for value in values],
            wide,
            label=label,
            color="white" if paper else color(label, index),
            edgecolor=color(label, index),
            linewidth=1.0 if paper else 0.0,
        )
    axis.set_xticks(range(len(panel.x)), panel.x)


def boxes(axis, panel: Panel) -> None:
    """Quartiles, with whiskers at the 5th and 95th percentile."""
    wide = 0.85 / len(panel.series)
    for index, (label, groups) in enumerate(panel.series.items()):
        known = [[value for value in values if value is not None] for values in groups]
        places = [group + (index + 0.5) * wide - 0.425 for group in range(len(panel.x))]
        axis.boxplot(
            known,
            positions=places,
            widths=0.8 * wide,
            whis=(5, 95),
            showfliers=False,
            patch_artist=True,
            boxprops={"facecolor": color(label, index), "linewidth": 0.5},
            medianprops={"color": "black"},
        )
        axis.plot([], [], "s", color=color(label, index), label=label)
    axis.set_xticks(range(len(panel.x)), panel.x)


KINDS = {"lines": lines, "areas": areas, "bars": bars, "boxes": boxes}

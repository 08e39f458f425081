"""The pictures. Colours are those of Okabe and Ito, which colour-blind people can tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_jax.api.outputs import RequestOutput
from hybrid_jax.byte_sizes import format_size
from hybrid_jax.cache.tree.node import DISK, HOSTS_MEMORY, NodeLine
from hybrid_jax.process.extras import needs_extra
from hybrid_jax.viz.watch import Watch

with needs_extra("plot"):
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.gridspec import GridSpec, GridSpecBase
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle

if TYPE_CHECKING:
    from hybrid_jax.api.llm import LLM

BLUE, ORANGE, GREEN, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#BBBBBB"
RUNNING_PAGES, RUNNING_STATES, CACHED_PAGES, CACHED_STATES = BLUE, ORANGE, SKY, "#F5C77E"
LABEL_CHARACTERS = 24
# Of each tier below the arena: how its numbers begin, and how it is drawn. Without colours they differ, too.
LOWER = {HOSTS_MEMORY: "host", DISK: "disk"}
LOOKS: dict[str, dict[str, Any]] = {
    HOSTS_MEMORY: {"facecolor": BLUE, "edgecolor": BLUE},
    DISK: {"facecolor": "#FFF3D6", "edgecolor": "#7A5200", "hatch": "/////"},
}
STRIP = 0.2  # height of the strip of a tier, in lines of the tree
PANEL = 0.4  # height of the panel of a tier, in that of the arena's


def memory(watch: Watch, ax: Axes | None = None) -> Axes:
    """What the arena holds over time: keys and values, and states, cached or of running sequences alone.

    Each tier below it has a panel of its own below, in bytes.

    Args:
        watch: samples of an engine. ax: where to draw; None for new axes.
    """
    _check_watch("memory", watch)
    lower = _lower(watch, "bytes")
    ax = _axes(ax, "frames of the arena", _seconds(watch), panels=len(lower))
    of = {name: np.array(watch.column(name)) for name in ("page_frames", "checkpoint_frames")}
    cached_pages = np.array(watch.column("cached_page_frames"))
    cached_states = np.array(watch.column("cached_frames")) - cached_pages
    # A frame of the cache may be in use by a running sequence as well; it is counted with the cache.
    parts = {
        "keys and values, not cached": (of["page_frames"] - cached_pages, RUNNING_PAGES),
        "states, not cached": (of["checkpoint_frames"] - cached_states, RUNNING_STATES),
        "keys and values, cached": (cached_pages, CACHED_PAGES),
        "states, cached": (cached_states, CACHED_STATES),
    }
    ax.stackplot(
        watch.working_seconds,
        *(values for values, _ in parts.values()),
        labels=list(parts),
        colors=[colour for _, colour in parts.values()],
        step="post",
    )
    ax.axhline(watch.samples[0]["num_frames"], color="black", linewidth=1, linestyle=":")
    ax.set_ylim(0, 1.05 * watch.samples[0]["num_frames"])
    _legend_above(ax, ncols=2)
    _panels(ax, watch, lower)
    return ax


def _panels(ax: Axes, watch: Watch, tiers: dict[str, np.ndarray]) -> None:
    """Gives the lower part of some axes to panels of what each tier below the arena holds, in bytes over time."""
    if not tiers:
        return
    figure, place, spec = ax.figure, ax.get_position(), ax.get_subplotspec()
    heights, (left, right), (low, high) = (
        [1, *[PANEL] * len(tiers)],
        place.intervalx,
        place.intervaly,
    )
    grid: GridSpecBase
    if spec is None:
        grid = GridSpec(
            len(heights), 1, left=left, right=right, bottom=low, top=high, height_ratios=heights
        )
    else:
        grid = spec.subgridspec(len(heights), 1, height_ratios=heights)
    ax.set_subplotspec(grid[0])
    panels = [figure.add_subplot(grid[1 + row], sharex=ax) for row in range(len(tiers))]
    panels[-1].set_xlabel(ax.get_xlabel())
    ax.set_xlabel("")
    for upper in (ax, *panels[:-1]):
        upper.tick_params(labelbottom=False)
    for panel, (tier, values) in zip(panels, tiers.items(), strict=True):
        _area(panel, watch, np.zeros_like(values), values, "", LOOKS[tier])
        panel.step(watch.working_seconds, values, where="post", color="black", linewidth=1)
        most = max(values.max(), 1.0)
        panel.set_ylim(0, 1.15 * most)
        panel.set_yticks([0, most], ["0", format_size(int(most))])
        panel.set_ylabel(tier.removeprefix("the "), fontsize="small")
        panel.spines[["top", "right"]].set_visible(False)


def hit_rate(watch: Watch, ax: Axes | None = None) -> Axes:
    """The share of prompt tokens that came from the prefix cache, of all since the watch began.

    If there are tiers below the arena, the area below the line says which of them had how much of it.

    Args:
        watch: samples of an engine. ax: where to draw; None for new axes.
    """
    _check_watch("hit_rate", watch)
    ax = _axes(ax, "share of prompt tokens", _seconds(watch))
    looked, hit = (
        np.array(watch.column(name)) for name in ("cache_lookup_tokens", "cache_hit_tokens")
    )
    looked, hit = looked - looked[0], hit - hit[0]
    share = lambda tokens: np.divide(tokens, looked, out=np.zeros_like(hit), where=looked > 0)  # noqa: E731
    rate = share(hit)
    ax.step(watch.working_seconds, rate, where="post", color=GREEN, label="from the prefix cache")
    lower = {
        tier: share(values - values[0]) for tier, values in _lower(watch, "hit_tokens").items()
    }
    top = rate - sum(lower.values())
    if lower:
        look = {"facecolor": SKY, "edgecolor": SKY}
        _area(ax, watch, np.zeros_like(top), top, "from the arena", look)
    for tier, values in lower.items():
        _area(ax, watch, top, top + values, f"copied from {tier}", LOOKS[tier])
        top = top + values
    ax.set_ylim(0, 1)
    ax.legend(loc="upper left", frameon=False, fontsize="small")
    return ax


def _area(
    ax: Axes, watch: Watch, low: np.ndarray, high: np.ndarray, label: str, look: dict[str, Any]
) -> None:
    ax.fill_between(watch.working_seconds, low, high, step="post", linewidth=0, label=label, **look)


def acceptance(watch: Watch, ax: Axes | None = None) -> Axes:
    """How often drafts were accepted in each place after a row's own token, since the watch began.

    Args:
        watch: samples of an engine that speculates. ax: where to draw; None for new axes.

    Raises:
        ValueError: the engine does not speculate.
    """
    _check_watch("acceptance", watch)
    if "verifications" not in watch.samples[0]:
        raise ValueError(
            "viz.acceptance: this LLM does not speculate; make one with speculation=..."
        )
    ax = _axes(ax, "accepted share", "place of the draft")
    moved = lambda name: watch.column(name)[-1] - watch.column(name)[0]  # noqa: E731
    places = [name for name in watch.samples[0] if name.startswith("accepted_at_")]
    judged = max(moved("verifications"), 1)
    ax.bar(range(1, len(places) + 1), [moved(name) / judged for name in places], color=BLUE)
    ax.set_xticks(range(1, len(places) + 1))
    ax.set_ylim(0, 1)
    return ax


def tree(llm: LLM, ax: Axes | None = None) -> Axes:
    """The prefix tree: a bar for each span from its first to its last token, children below their parent.

    A black tick stands where a prompt can resume. Grey spans are known, but nothing of them is cached. If there are
    tiers below the arena, each has a strip below the arena's bar, with ticks of its own. What is on its way there is
    an empty strip.

    Args:
        llm: its cache is drawn. ax: where to draw; None for new axes.

    Raises:
        ValueError: the cache is off.
    """
    if not hasattr(llm, "cache"):
        raise TypeError(f"viz.tree: takes an LLM, got {type(llm).__name__}")
    nodes = llm.cache.nodes()
    if nodes is None:
        raise ValueError("viz.tree: the prefix cache of this LLM is off")
    found = {tier.tier for node in nodes for tier in node.below}
    tiers = [tier for tier in LOWER if tier in found]
    ax = _axes(ax, "", "tokens", lines=len(nodes) * (2 if tiers else 1))
    strip = STRIP if tiers else 0.0  # height of the strip of each tier
    for line, node in enumerate(nodes):
        start, end = node.span
        colour, height = SKY if node.cached else GREY, 0.8 - strip * len(tiers)
        if node.cached or not any(not tier.coming for tier in node.below):
            ax.add_patch(Rectangle((start, line - 0.4), end - start, height, color=colour))
        if node.resumes:
            ax.plot([end, end], [line - 0.45, line + height - 0.35], color="black", linewidth=2)
        for place, tier in enumerate(tiers):
            _strip(ax, node, tier, line - 0.4 + height + place * strip, strip)
        ax.text(
            start,
            line - 0.4 + height / 2,
            f" {node.text[:LABEL_CHARACTERS]}",
            va="center",
            fontsize="x-small",
            clip_on=True,
        )
    ax.set_xlim(0, max([node.span[1] for node in nodes], default=1) * 1.02)
    ax.set_ylim(max(len(nodes), 1) - 0.4, -0.6)
    ax.set_yticks([])
    point = Line2D([], [], color="black", linewidth=2, label="resume point")
    cached, known = Patch(color=SKY, label="cached"), Patch(color=GREY, label="known")
    if tiers:
        cached.set_label("in the arena")
    others = [
        Patch(label=f"in {tier}" if tier != DISK else "on disk", **LOOKS[tier]) for tier in tiers
    ]
    if any(tier.coming for node in nodes for tier in node.below):
        others.append(Patch(facecolor="none", edgecolor="black", label="on its way there"))
    _legend_above(ax, ncols=3, handles=[cached, *others, known, point])
    return ax


def _strip(ax: Axes, node: NodeLine, tier: str, top: float, height: float) -> None:
    """What a tier below the arena has of a node."""
    start = node.span[0]
    for found in (found for found in node.below if found.tier == tier):
        look = {"facecolor": "none", "edgecolor": "black"} if found.coming else LOOKS[tier]
        ax.add_patch(Rectangle((start, top), found.end - start, height, linewidth=0.6, **look))
        if found.resumes and not found.coming:
            ax.plot([found.end] * 2, [top, top + height], color="black", linewidth=2)


def requests(outputs: Sequence[RequestOutput], ax: Axes | None = None) -> Axes:
    """When each request waited or read its prompt, and when it wrote: one line each, first come first.

    The time in which the engine compiled is grey. Of each part of a line it is shown first. If some prompts began with
    what tiers below the arena had, each line says behind its end how many tokens came from where.

    Args:
        outputs: what `generate` returned, of one call or of several. ax: where to draw; None for new axes.
    """
    ax = _axes(ax, "request", "seconds", lines=len(outputs))
    ordered = sorted(outputs, key=lambda output: output.metrics.arrival_time)
    start = ordered[0].metrics.arrival_time if ordered else 0.0
    for line, output in enumerate(ordered):
        metrics = output.metrics
        begun = metrics.arrival_time - start
        first = (metrics.first_token_time or metrics.finished_time) - start
        end = metrics.finished_time - start
        before = metrics.first_token_compile_s
        for left, right, compiling, colour in (
            (begun, first, before, ORANGE),
            (first, end, metrics.compile_s - before, BLUE),
        ):
            compiling = min(compiling, right - left)
            ax.barh(line, compiling, left=left, color=GREY, height=0.8)
            ax.barh(line, right - left - compiling, left=left + compiling, color=colour, height=0.8)
        if any(other.metrics.loaded_from for other in ordered):
            _note_origin(ax, end, line, output)
    ax.set_yticks(range(len(ordered)), [output.request_id for output in ordered])
    ax.set_ylim(max(len(ordered), 1) - 0.4, -0.6)
    waits = Patch(color=ORANGE, label="waits, or reads its prompt")
    writes, compiles = Patch(color=BLUE, label="writes"), Patch(color=GREY, label="compiling")
    _legend_above(ax, ncols=3, handles=[waits, writes, compiles])
    return ax


def _note_origin(ax: Axes, x: float, y: float, output: RequestOutput) -> None:
    """Says how many tokens of a prompt came from which tier."""
    metrics = output.metrics
    parts = {
        "arena": metrics.num_cached_tokens - metrics.num_loaded_tokens,
        LOWER.get(metrics.loaded_from, ""): metrics.num_loaded_tokens,
    }
    said = ", ".join(f"{name} {tokens}" for name, tokens in parts.items() if tokens)
    ax.text(x, y, f"  {said or 'nothing'}", va="center", fontsize="x-small")


def _lower(watch: Watch, name: str) -> dict[str, np.ndarray]:
    """A number of each tier below the arena that the engine has, over time."""
    names = {tier: f"{prefix}_{name}" for tier, prefix in LOWER.items()}
    return {
        tier: np.array(watch.column(name))
        for tier, name in names.items()
        if name in watch.samples[0]
    }


def _seconds(watch: Watch) -> str:
    """What the axis of `Watch.working_seconds` says."""
    compiled = watch.seconds[-1] - watch.working_seconds[-1]
    return "seconds" + f", without {compiled:.0f} s of compiling" * (compiled >= 0.5)


def _check_watch(picture: str, given: Any) -> None:
    if not isinstance(given, Watch):
        raise TypeError(
            f"viz.{picture}: takes a Watch, got {type(given).__name__}; make one by `with viz.Watch(llm) as watch:` "
            "around the calls to look at"
        )


def _axes(ax: Axes | None, y: str, x: str, *, lines: int = 0, panels: int = 0) -> Axes:
    """New axes unless there are some, with their labels, high enough for so many lines, or for panels below them."""
    if ax is None:
        height = max(3.0, 1 + 0.16 * lines) + 1.1 * panels
        ax = plt.subplots(figsize=(7, height), layout="constrained")[1]
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _legend_above(ax: Axes, *, ncols: int, handles: list[Any] | None = None) -> None:
    how: dict[str, Any] = {} if handles is None else {"handles": handles}
    how |= {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": ncols}
    ax.legend(**how, frameon=False, fontsize="small")

"""The pictures. Colours are those of Okabe and Ito, which colour-blind people can tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_jax.api.outputs import RequestOutput
from hybrid_jax.process.extras import needs_extra
from hybrid_jax.viz.watch import Watch

with needs_extra("plot"):
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle

if TYPE_CHECKING:
    from hybrid_jax.api.llm import LLM

BLUE, ORANGE, GREEN, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#BBBBBB"
RUNNING_PAGES, RUNNING_STATES, CACHED_PAGES, CACHED_STATES = BLUE, ORANGE, SKY, "#F5C77E"
LABEL_CHARACTERS = 24


def memory(watch: Watch, ax: Axes | None = None) -> Axes:
    """What the arena holds over time: keys and values, and states, cached or of running sequences alone.

    Args:
        watch: samples of an engine. ax: where to draw; None for new axes.
    """
    _check_watch("memory", watch)
    ax = _axes(ax, "frames of the arena", _seconds(watch))
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
    return ax


def hit_rate(watch: Watch, ax: Axes | None = None) -> Axes:
    """The share of prompt tokens that came from the prefix cache, of all since the watch began.

    Args:
        watch: samples of an engine. ax: where to draw; None for new axes.
    """
    _check_watch("hit_rate", watch)
    ax = _axes(ax, "share of prompt tokens", _seconds(watch))
    looked, hit = (
        np.array(watch.column(name)) for name in ("cache_lookup_tokens", "cache_hit_tokens")
    )
    looked, hit = looked - looked[0], hit - hit[0]
    rate = np.divide(hit, looked, out=np.zeros_like(hit), where=looked > 0)
    ax.step(watch.working_seconds, rate, where="post", color=GREEN, label="from the prefix cache")
    ax.set_ylim(0, 1)
    ax.legend(loc="upper left", frameon=False, fontsize="small")
    return ax


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

    A black tick stands where a prompt can resume. Grey spans are known, but nothing of them is cached.

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
    ax = _axes(ax, "", "tokens", lines=len(nodes))
    for line, node in enumerate(nodes):
        start, end = node.span
        colour = SKY if node.cached else GREY
        ax.add_patch(Rectangle((start, line - 0.4), end - start, 0.8, color=colour))
        if node.resumes:
            ax.plot([end, end], [line - 0.45, line + 0.45], color="black", linewidth=2)
        ax.text(
            start,
            line,
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
    _legend_above(ax, ncols=3, handles=[cached, known, point])
    return ax


def requests(outputs: Sequence[RequestOutput], ax: Axes | None = None) -> Axes:
    """When each request waited or read its prompt, and when it wrote: one line each, first come first.

    The time in which the engine compiled is grey. Of each part of a line it is shown first.

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
    ax.set_yticks(range(len(ordered)), [output.request_id for output in ordered])
    ax.set_ylim(max(len(ordered), 1) - 0.4, -0.6)
    waits = Patch(color=ORANGE, label="waits, or reads its prompt")
    writes, compiles = Patch(color=BLUE, label="writes"), Patch(color=GREY, label="compiling")
    _legend_above(ax, ncols=3, handles=[waits, writes, compiles])
    return ax


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


def _axes(ax: Axes | None, y: str, x: str, *, lines: int = 0) -> Axes:
    """New axes unless there are some, with their labels, high enough for so many lines."""
    if ax is None:
        ax = plt.subplots(figsize=(7, max(3.0, 1 + 0.16 * lines)), layout="constrained")[1]
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _legend_above(ax: Axes, *, ncols: int, handles: list[Any] | None = None) -> None:
    how: dict[str, Any] = {} if handles is None else {"handles": handles}
    how |= {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": ncols}
    ax.legend(**how, frameon=False, fontsize="small")

"""Pictures of an engine: they show the numbers that it gave."""

from __future__ import annotations

import importlib
import re
import sys

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

from hybrid_jax import SamplingParams, viz
from hybrid_jax.api.outputs import RequestMetrics, RequestOutput
from hybrid_jax.api.stats import Stats
from tests.llms import HEAD, tiny_llm

matplotlib.use("Agg")
PARAMS = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def watched(bundled):
    bundled.reset_prefix_cache()
    with viz.Watch(bundled, every=0.01) as watch:
        outputs = bundled.generate([HEAD + f"a{k} = " for k in range(6)], PARAMS)
    return watch, outputs


@pytest.mark.parametrize("picture", [viz.memory, viz.hit_rate, viz.acceptance])
def test_a_picture_of_a_watch_takes_nothing_else(picture):
    with pytest.raises(
        TypeError, match=f"viz.{picture.__name__}: takes a Watch, got int; make one"
    ):
        picture(3)
    with pytest.raises(TypeError, match="viz.tree: takes an LLM, got int"):
        viz.tree(3)


def test_memory_is_a_stack_that_fits_the_arena(watched):
    watch, _ = watched
    ax = viz.memory(watch)
    most = watch.samples[0]["num_frames"]
    top = max(collection.get_datalim(ax.transData).y1 for collection in ax.collections)
    used = np.array(watch.column("page_frames")) + np.array(watch.column("checkpoint_frames"))
    assert top == pytest.approx(used.max()) and 0 < top <= most
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        *("keys and values, not cached", "states, not cached"),
        *("keys and values, cached", "states, cached"),
    ]
    ax.figure.canvas.draw()


def test_the_hit_rate_ends_where_the_counters_do(watched):
    watch, outputs = watched
    [line] = viz.hit_rate(watch).get_lines()
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    hit = sum(output.num_cached_tokens for output in outputs)
    assert line.get_ydata()[-1] == pytest.approx(hit / tokens) and hit > 0


def test_requests_are_lines_from_arrival_to_end(watched):
    _, outputs = watched
    ax = viz.requests(outputs)
    assert len(ax.patches) == 4 * len(outputs)
    ends = max(patch.get_x() + patch.get_width() for patch in ax.patches)
    arrived = min(output.metrics.arrival_time for output in outputs)
    assert ends == pytest.approx(max(output.metrics.finished_time for output in outputs) - arrived)


def test_compiling_is_grey_in_lines_and_left_out_of_axes():
    times = {"arrival_time": 3.0, "first_token_time": 9.0, "finished_time": 11.0}
    metrics = RequestMetrics(**times, compile_s=5.5, first_token_compile_s=5.0)
    output = RequestOutput(
        request_id="0", prompt="a", prompt_token_ids=(97,), outputs=(), metrics=metrics
    )
    bars = viz.requests([output]).patches
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [
        *((0.0, 5.0), (5.0, 1.0)),  # of six seconds before the first token
        *((6.0, 0.5), (6.5, 1.5)),
    ]
    assert bars[0].get_facecolor() == bars[2].get_facecolor() != bars[1].get_facecolor()
    watch = viz.Watch(None)
    watch.seconds = [0.0, 4.0, 64.0, 65.0]
    numbers = {"num_frames": 9, "page_frames": 1, "checkpoint_frames": 1, "cached_frames": 0}
    numbers |= {"cached_page_frames": 0, "cache_lookup_tokens": 4, "cache_hit_tokens": 2}
    watch.samples = [Stats(numbers, compile_s=s) for s in (7.0, 7.0, 66.0, 66.0)]
    assert watch.working_seconds == [0.0, 4.0, 5.0, 6.0]
    for picture in (viz.memory, viz.hit_rate):
        ax = picture(watch)
        assert ax.get_xlabel() == "seconds, without 59 s of compiling"
        assert ax.dataLim.x1 == pytest.approx(6.0)


def test_the_tree_has_a_bar_for_each_node(bundled, watched):
    nodes = bundled.cache.nodes()
    fig, mine = plt.subplots()
    ax = viz.tree(bundled, mine)
    assert ax is mine and len(ax.patches) == len(nodes) > 1
    ticks = sum("checkpoint" in node.marks for node in nodes)
    assert len(ax.get_lines()) == ticks > 0
    fig.canvas.draw()


def test_what_cannot_be_drawn_says_why(watched):
    with pytest.raises(ValueError, match="does not speculate; make one with speculation="):
        viz.acceptance(watched[0])
    with tiny_llm(cache="off") as llm, pytest.raises(ValueError, match="prefix cache .* is off"):
        viz.tree(llm)
    with pytest.raises(ValueError, match="every must be above 0 seconds, got 0"):
        viz.Watch(llm, every=0)
    with pytest.raises(
        ValueError, match=re.escape("'hits' is none of the numbers of stats(): req")
    ):
        watched[0].column("hits")


def test_accepted_drafts_are_bars():
    with tiny_llm(speculation="ngram", max_rows=1) as llm:
        with viz.Watch(llm) as watch:
            llm.generate("ab" * 20, SamplingParams(max_tokens=30, temperature=0.0))
        bars = viz.acceptance(watch).patches
        stats = llm.stats()
    assert len(bars) == sum(name.startswith("accepted_at_") for name in stats)
    assert bars[0].get_height() == pytest.approx(
        stats["accepted_at_1"] / max(stats["verifications"], 1)
    )


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.delitem(sys.modules, "hybrid_jax.viz.pictures")
    with pytest.raises(
        ModuleNotFoundError, match=r"is not installed; pip install 'hybrid_jax\[plot\]'$"
    ):
        importlib.import_module("hybrid_jax.viz.pictures")

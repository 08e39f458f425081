"""Pictures of an engine: they show the numbers that it gave."""

from __future__ import annotations

import importlib
import re
import sys
from types import SimpleNamespace

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
    assert ax.figure.axes == [ax]
    ax.figure.canvas.draw()


def test_the_hit_rate_ends_where_the_counters_do(watched):
    watch, outputs = watched
    ax = viz.hit_rate(watch)
    [line] = ax.get_lines()
    assert not ax.collections
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    hit = sum(output.num_cached_tokens for output in outputs)
    assert line.get_ydata()[-1] == pytest.approx(hit / tokens) and hit > 0


def test_requests_are_lines_from_arrival_to_end(watched):
    _, outputs = watched
    ax = viz.requests(outputs)
    assert len(ax.patches) == 4 * len(outputs) and not ax.texts
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


# --- tiers below the arena --------------------------------------------------------------------------


def below(llm, prompts):
    """Each prompt twice, one after the other, and an arena that is empty at last: a watch and its outputs."""
    outputs = []
    with viz.Watch(llm, every=0.01) as watch:
        for ids in prompts * 2:
            outputs += llm.generate([{"prompt_token_ids": ids}], PARAMS)
    return watch, outputs


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    """An engine with the host's memory and a disk below a small arena, and a later one that finds the disk alone."""
    folder = tmp_path_factory.mktemp("tiers")
    prompts = [[(7 * n + k * k) % 250 for k in range(120)] for n in range(8)]
    small = {"max_rows": 1, "max_model_len": 256, "memory": "300KB", "cache_dir": folder}
    with tiny_llm(host_memory="4MiB", **small) as llm:
        both = below(llm, prompts)
        llm._engine.disk.flush()
        llm.generate([{"prompt_token_ids": [9] * 100}], PARAMS)
        llm._engine.scheduler.memory.make_room(
            10**6
        )  # its last prompt goes below, with the next plan
        nodes = llm.cache.nodes()
        # The same ones, for the disk is being written.
        tree = viz.tree(SimpleNamespace(cache=SimpleNamespace(nodes=lambda: nodes)))
    with tiny_llm(**small) as llm:
        llm.generate(
            [{"prompt_token_ids": prompts[-1]}], PARAMS
        )  # what came before a watch is not in it
        assert llm.stats()["disk_hit_tokens"] == 96
        return both, below(llm, prompts), nodes, tree


def test_the_memory_of_each_tier_has_a_panel_in_bytes(tiered):
    (watch, _), (later, _), *_ = tiered
    ax = viz.memory(watch)
    panels = [panel for panel in ax.figure.axes if panel is not ax]
    assert [panel.get_ylabel() for panel in panels] == ["host's memory", "disk"]
    for panel, name in zip(panels, ("host_bytes", "disk_bytes"), strict=True):
        [line], values = panel.get_lines(), watch.column(name)
        assert list(line.get_ydata()) == values and values[-1] > 0
        assert panel.get_yticks()[-1] == max(values)
    assert [a.get_xlabel() for a in (ax, *panels)] == ["", "", viz.hit_rate(watch).get_xlabel()]
    hatches = [panel.collections[0].get_hatch() for panel in panels]
    assert len(set(hatches)) == 2  # without colours they differ as well
    assert [panel.get_ylabel() for panel in viz.memory(later).figure.axes[1:]] == ["disk"]


def test_panels_take_their_room_from_the_axes_that_are_given(tiered):
    (watch, _), *_ = tiered
    fig = plt.figure()
    fig.add_axes((0.0, 0.0, 0.2, 0.2))
    mine = fig.add_axes((0.2, 0.3, 0.7, 0.6))
    assert viz.memory(watch, mine) is mine
    fig.canvas.draw()
    boxes = [a.get_position() for a in fig.axes[1:]]
    assert len(boxes) == 3
    assert boxes[0].y1 == pytest.approx(0.9) and boxes[2].y0 == pytest.approx(0.3)
    assert boxes[0].y0 > boxes[1].y1 > boxes[1].y0 > boxes[2].y1
    left, right = plt.subplots(1, 2)[1]
    before = right.get_position().bounds
    viz.memory(watch, left)
    left.figure.canvas.draw()
    assert right.get_position().bounds == before


def test_the_hit_rate_is_split_by_tier(tiered):
    for (watch, outputs), tiers in zip(
        tiered[:2], (["the host's memory", "the disk"], ["the disk"]), strict=True
    ):
        ax = viz.hit_rate(watch)
        names = ["from the arena", *(f"copied from {tier}" for tier in tiers)]
        assert [area.get_label() for area in ax.collections] == names
        tokens = sum(output.metrics.num_prompt_tokens for output in outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        of = {
            tier: sum(o.metrics.num_loaded_tokens for o in outputs if o.metrics.loaded_from == tier)
            for tier in tiers
        }
        assert sum(of.values()) > 0
        edges = np.cumsum([0, cached - sum(of.values()), *of.values()]) / tokens
        for area, low, high in zip(ax.collections, edges, edges[1:], strict=False):
            points = area.get_paths()[0].vertices
            at_end = points[points[:, 0] == points[:, 0].max()][:, 1]
            assert np.abs(at_end - low).min() < 1e-6 and np.abs(at_end - high).min() < 1e-6
        [line] = ax.get_lines()
        assert line.get_ydata()[-1] == pytest.approx(edges[-1])


def test_requests_say_which_tier_their_prefix_came_from(tiered):
    (_, outputs), (_, later), *_ = tiered
    assert {o.metrics.loaded_from for o in outputs} >= {"", "the host's memory"}
    assert {o.metrics.loaded_from for o in later} >= {"the disk"}
    assert not viz.requests(outputs[:1]).texts  # nothing came from below
    for found, name in ((outputs, "host"), (later, "disk")):
        said = [text.get_text().strip() for text in viz.requests(found).texts]
        wanted = [
            f"{name} {o.metrics.num_loaded_tokens}" if o.metrics.loaded_from else
            f"arena {o.num_cached_tokens}" if o.num_cached_tokens else "nothing"
            for o in found
        ]  # fmt: skip
        assert said == wanted
    metrics = later[0].metrics
    assert metrics.as_dict()["loaded_from"] == "the disk"
    words = f"{metrics.num_cached_tokens} of them from the prefix cache ({metrics.num_loaded_tokens} from the disk); "
    assert words in metrics.in_words()


def test_the_tree_has_a_strip_for_each_tier(tiered):
    *_, nodes, ax = tiered
    strips = [tier for node in nodes for tier in node.below]
    own = [node for node in nodes if node.cached or all(tier.coming for tier in node.below)]
    assert len(ax.patches) == len(strips) + len(own)
    there = [tier for tier in strips if not tier.coming]
    assert {tier.tier for tier in there} == {"the host's memory", "the disk"}
    assert any(tier.coming for tier in strips)
    ticks = sum(tier.resumes for tier in there) + sum(node.resumes for node in nodes)
    assert len(ax.get_lines()) == ticks > 0
    hollow = [patch for patch in ax.patches if patch.get_facecolor()[3] == 0]
    assert len(hollow) == len(strips) - len(there)
    hatched = sum(patch.get_hatch() is not None for patch in ax.patches)
    assert hatched == sum(tier.tier == "the disk" for tier in there)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        *("in the arena", "in the host's memory", "on disk", "on its way there", "known"),
        "resume point",
    ]


# --- what cannot be drawn ---------------------------------------------------------------------------


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

"""Batch runs as programs that are killed, and of the bundled model: nothing lost, nothing doubled."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest

from hybrid_jax import run_batch
from hybrid_jax.api import llm as llm_module
from hybrid_jax.batch import partial_path
from tests.batch.batch_files import (
    COMPLETIONS,
    Stop,
    answers,
    finish,
    line,
    mixed_lines,
    read,
    start,
    stop_at,
    write,
)
from tests.drawing import left_to_all
from tests.llms import HEAD

LONG = os.environ.get("HYBRID_JAX_BATCH_KILLS") == "all"
NUM_LINES = 200


def kill_after_bytes(process, path, size):
    """Kills the program once its partial file has grown to `size` bytes; False when it ended first."""
    while process.poll() is None:
        if path.exists() and path.stat().st_size >= size:
            process.kill()
            process.communicate()
            return True
        time.sleep(0.001)
    code, _, err = finish(process)
    assert code == 0, err
    return False


def kill_often(files, starts, num_kills, size):
    """Kills run after run at random points until one gets through; returns how many were killed."""
    random_, path = random.Random(3), partial_path(files[1])
    for kill in range(num_kills):
        known = path.stat().st_size if path.exists() else 0
        share = (size - known) / (num_kills + 1 - kill)
        point = known + int(share * random_.uniform(0.2, 1.5))
        if not kill_after_bytes(starts(), path, point):
            return kill
        assert not files[1].exists()
    code, _, err = finish(starts())
    assert code == 0, err
    return num_kills


def test_a_batch_killed_again_and_again_loses_and_doubles_nothing(tmp_path):
    files = write(tmp_path / "in.jsonl", mixed_lines(NUM_LINES)), tmp_path / "out.jsonl"
    output = tmp_path / "whole.jsonl"
    code, _, err = finish(start((files[0], output)))
    assert code == 0, err
    killed = kill_often(
        files,
        lambda: start(files, HYBRID_JAX_TEST_PAUSE="0.01"),
        20 if LONG else 4,
        output.stat().st_size,
    )
    assert killed >= (15 if LONG else 3)
    assert answers(files[1]) == answers(output)
    assert len(read(files[1])) == NUM_LINES
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl", "whole.jsonl"]


def test_ctrl_c_says_how_to_go_on(tmp_path):
    files = write(tmp_path / "in.jsonl", mixed_lines(NUM_LINES)), tmp_path / "out.jsonl"
    process = start(files, HYBRID_JAX_TEST_PAUSE="0.05")
    path = partial_path(files[1])
    while process.poll() is None and not (path.exists() and path.stat().st_size > 1000):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == (
        f"hybrid-jax: interrupted; the lines so far are in {path}, the same command goes on from there\n"
    )
    assert 0 < len(read(path)) < NUM_LINES
    _, _, err = finish(start(files))
    assert "from an earlier run" in err
    assert len(read(files[1])) == NUM_LINES


def bundled_lines(count):
    random_ = random.Random(1)
    return [
        line(
            f"id-{index}",
            prompt=HEAD + f"    def method_{index}(self):\n",
            max_tokens=random_.randint(4, 24),
            temperature=random_.choice([0, 0.9]),
            n=random_.choice([1, 1, 2]),
        )
        for index in range(count)
    ]


@left_to_all
def test_the_bundled_model_goes_on_with_the_same_texts(tmp_path, bundled):
    files = write(tmp_path / "in.jsonl", bundled_lines(24)), tmp_path / "out.jsonl"
    bundled.reset_prefix_cache()
    summary = run_batch(files[0], tmp_path / "whole.jsonl", bundled)
    assert summary.hit_rate > 0.5  # the head is computed once
    bundled.reset_prefix_cache()
    with pytest.raises(Stop):
        run_batch(*files, bundled, progress=stop_at(9))
    bundled.reset_prefix_cache()
    resumed = run_batch(*files, bundled)
    assert bundled.stats()["running"] == bundled.stats()["waiting"] == 0
    assert 9 <= resumed.num_resumed < 24
    params = llm_module.SamplingParams(temperature=0.0, max_tokens=24)
    for entry in (json.loads(text) for text in files[0].read_text().splitlines()):
        if entry["body"]["temperature"] == 0 and entry["body"]["n"] == 1:
            break
    [alone] = bundled.generate(entry["body"]["prompt"], params)
    assert answers(files[1]) == answers(tmp_path / "whole.jsonl")
    [found] = [a for a in answers(files[1]) if a["custom_id"] == entry["custom_id"]]
    [choice] = found["response"]["body"]["choices"]
    assert choice["text"] and alone.outputs[0].text.startswith(choice["text"])


@pytest.mark.skipif(not LONG, reason="HYBRID_JAX_BATCH_KILLS=all kills the bundled model 20 times")
def test_the_bundled_model_killed_20_times(tmp_path):
    files = write(tmp_path / "in.jsonl", bundled_lines(NUM_LINES)), tmp_path / "out.jsonl"
    output = tmp_path / "whole.jsonl"
    options = ("--max-rows", "4", "--max-model-len", "512")
    finish(start((files[0], output), *options, module="hybrid_jax"))
    killed = kill_often(
        files, lambda: start(files, *options, module="hybrid_jax"), 20, output.stat().st_size
    )
    assert killed >= 15
    assert answers(files[1]) == answers(output)
    assert [entry["error"] for entry in read(files[1])] == [None] * NUM_LINES
    assert {entry["response"]["body"]["object"] for entry in read(files[1])} == {"text_completion"}
    assert COMPLETIONS in files[0].read_text()

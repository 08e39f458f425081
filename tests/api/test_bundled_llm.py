"""The whole way with the bundled model: text in, text out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.api.stats import MEANINGS
from hybrid_jax.cli import main as cli
from hybrid_jax.sizing import devices
from hybrid_jax.weights.load import OpenModel
from tests.llms import BUNDLED, HEAD

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture
def llm(bundled):
    return bundled


@pytest.fixture(autouse=True)
def empty_cache(llm):
    llm.reset_prefix_cache()


def tokens(outputs):
    return [[c.token_ids for c in output.outputs] for output in outputs]


def test_the_same_prompt_again_hits_up_to_a_grain_before_its_end(llm):
    for extra in (0, 1, 31, 32, 33):
        prompt = HEAD + "x" * extra
        [cold], [warm] = llm.generate(prompt, GREEDY), llm.generate(prompt, GREEDY)
        length, grain = len(prompt), llm.engine_config.grain
        assert warm.num_cached_tokens >= length - 1 - grain
        assert warm.num_cached_tokens == llm.cache.explain(warm.request_id).possible_tokens
        assert tokens([warm]) == tokens([cold])


def test_without_a_temperature_the_bundled_model_is_greedy_as_it_says_itself(llm):
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    assert tokens(llm.generate(HEAD, SamplingParams(max_tokens=24))) == tokens(
        llm.generate(HEAD, greedy)
    )
    assert llm.get_default_sampling_params().greedy


def test_a_batch_with_a_shared_head_computes_the_head_once(llm):
    prompts = [
        HEAD + f"    def method_{name}(self):\n" for name in ("open", "close", "read", "size")
    ]
    outputs = llm.generate(prompts, GREEDY)
    grain = llm.engine_config.grain
    assert outputs[0].num_cached_tokens == 0
    for output in outputs[1:]:
        assert output.num_cached_tokens >= len(HEAD) // grain * grain
    assert tokens(outputs) == [tokens(llm.generate(p, GREEDY))[0] for p in prompts]


def test_streamed_text_equals_generated_text(llm):
    params = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=40, stop=[":", "("])
    [expected] = llm.generate(HEAD, params)
    deltas = list(llm.stream(HEAD, params))
    for completion in expected.outputs:
        mine = [d for d in deltas if d.index == completion.index]
        assert "".join(d.text for d in mine) == completion.text
        assert sum((d.token_ids for d in mine), ()) == completion.token_ids
    assert expected.outputs[0].token_ids != expected.outputs[1].token_ids


def test_the_same_calls_of_a_new_object_give_the_same_text(llm):
    params = SamplingParams(temperature=1.0, max_tokens=12)
    runs = []
    for _ in range(2):
        with LLM(**BUNDLED, seed=11) as fresh:
            runs.append(tokens(fresh.generate([HEAD, "def f("], params)))
    assert runs[0] == runs[1]


def test_an_interrupted_generate_leaves_nothing_wrong(llm):
    prompts = [HEAD + str(index) * index for index in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=60)
    expected = tokens(llm.generate(prompts, params))

    def interrupt(done, total):
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params, progress=interrupt)
        assert tokens(llm.generate(prompts, params)) == expected


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stream_survives_a_turn_that_fails_with_a_call_inside_its_loop(llm, monkeypatch, when):
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=300)
    [expected] = llm.generate(HEAD, params)
    deltas = llm.stream(HEAD, params)
    found = [next(deltas)]
    runner, failed = llm._engine.runner, []
    real = runner.execute

    def failing(plan, missing):
        fails = len(llm._engine._live) == 2 and not failed
        pending = real(plan, missing) if when == "after" or not fails else None
        if fails:
            failed.append(when)
            raise RuntimeError("device lost")
        return pending

    restarts = llm.stats()["restarts"]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute", failing)
        with pytest.raises(RuntimeError, match="device lost"):
            llm.generate("def f(", GREEDY)
        found += deltas
    assert llm.stats()["restarts"] == restarts + 1
    assert sum((d.token_ids for d in found), ()) == expected.outputs[0].token_ids
    assert "".join(d.text for d in found) == expected.outputs[0].text
    assert llm.stats()["running"] == llm.stats()["waiting"] == 0


def test_stats_are_plain_data_and_tell_frames_by_kind(llm):
    llm.generate([HEAD] * 3, GREEDY)
    stats = json.loads(json.dumps(llm.stats()))
    held = stats["page_frames"] + stats["checkpoint_frames"]
    assert held == stats["cached_frames"] == stats["num_frames"] - stats["free_frames"] > 0
    assert 0 < stats["peak_live_frames"] <= stats["num_frames"]
    assert all(isinstance(value, int | float) for value in stats.values())


def test_a_page_lists_every_key_of_stats_with_the_words_of_the_code(llm):
    page = (ROOT / "docs" / "reference" / "stats.md").read_text(encoding="utf-8")
    listed: dict[str, dict[str, str]] = {}
    for line in page.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif row := re.fullmatch(r"\| `(\w+)` \| (.*) \|", line):
            listed.setdefault(heading, {})[row[1]] = row[2]
    assert listed == MEANINGS
    groups_of_others = {
        *("Speculation", "Tier in the host's memory", "Tier on disk"),
        "Prompts that other replicas compute",
    }
    assert sorted(llm.stats()) == sorted(
        key for heading, keys in listed.items() if heading not in groups_of_others for key in keys
    )


def test_a_bad_prompt_costs_the_others_nothing(llm):
    long = {"prompt_token_ids": [97] * 512}
    with pytest.raises(ValueError, match="prompt 1: has 512 tokens .* 512; shorten it"):
        llm.generate([HEAD, long], GREEDY)
    with pytest.raises(ValueError, match="prompt 0: token ids must lie between 0 and 259, got 260"):
        llm.generate({"prompt_token_ids": [260]}, GREEDY)
    assert llm.stats()["running"] == llm.stats()["waiting"] == 0
    assert len(tokens(llm.generate(HEAD, GREEDY))[0][0]) == 24


def test_ctrl_c_ends_the_program_quietly_with_130():
    prompts = [f"def f{i}(x):" for i in range(40)]  # minutes of work for one row
    # A shell's background job ignores Ctrl-C and hands that on; the program under test must not.
    listen = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", listen]
    command += ["-m", "hybrid_jax", "generate", *prompts, "--ignore-eos"]
    command += ["--max-model-len", "4096", "--max-rows", "1"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        process.stdout.read(1)  # it is generating
        # Python drops an interrupt that falls into a callback which may not raise: press again then. Not soon: one
        # that falls into the end of a program that is on its way out kills it.
        deadline = time.monotonic() + 90
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_the_first_example_for_a_shell_shows_something(root, capsys):
    text = (root / "README.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("hybrid-jax generate"))
    with pytest.raises(SystemExit) as exit:
        cli.main(shlex.split(line)[1:])
    assert not exit.value.code
    assert len(set(capsys.readouterr().out.split())) > 2


@pytest.mark.parametrize(
    "options, ram",
    [
        ({}, 2**34),
        ({"max_rows": 2, "memory": "5MiB"}, 2**34),
        ({"max_model_len": 100}, 2**34),
        (
            {"max_rows": 1},
            44 * 2**20,
        ),  # the weights take a third of it, and the default what is left
        ({"max_rows": 1, "dtype": "bfloat16"}, 40 * 2**20),
    ],
)
def test_inspect_says_what_an_llm_takes(capsys, monkeypatch, options, ram):
    monkeypatch.setattr(devices, "ram_bytes", lambda: ram)
    monkeypatch.setattr(devices, "widens_bfloat16", lambda: False)
    given = [str(w) for name, value in options.items() for w in (f"--{name}", value)]
    with pytest.raises(SystemExit):
        cli.main(["inspect", "--json", *(word.replace("_", "-") for word in given)])
    report = json.loads(capsys.readouterr().out)
    with LLM(**options) as llm:
        sizes, fit = llm._engine.sizes, report["fit"]
        assert report["fits"]
        weights = jax.tree.leaves(llm._params)
        assert report["weight_bytes"] == sum(array.nbytes for array in weights)
        assert fit["num_frames"] == sizes.num_frames
        assert fit["num_slots"] == sizes.max_slots
        assert fit["arena_bytes"] == sizes.arena_bytes
        assert fit["ring_bytes"] == sizes.ring_bytes
        assert fit["table_bytes"] == sizes.table_bytes
        assert fit["logits_bytes"] == sizes.logits_bytes
        llm.generate("x", SamplingParams(max_tokens=1, presence_penalty=1.0))
        adjust = jax.tree.leaves(llm._engine.runner.adjust)
        assert fit["adjust_bytes"] == sum(array.nbytes for array in adjust)
        state = jax.tree.leaves(llm._engine.runner.state)
        held = sum(fit[name] for name in ("arena_bytes", "ring_bytes", "table_bytes"))
        assert held == sum(array.nbytes for array in state)
        assert fit["longest_context"] == llm.max_model_len
        assert report["dtype"] == llm.engine_config.dtype


def test_a_model_that_does_not_fit_is_refused_before_a_tensor_is_read(monkeypatch):
    def read(*_, **__):
        raise AssertionError("the weights were read")

    monkeypatch.setattr(OpenModel, "load", read)
    monkeypatch.setattr(devices, "ram_bytes", lambda: 12_000_000)
    monkeypatch.setattr(devices, "widens_bfloat16", lambda: False)
    for given in ({}, {"memory": "10MB"}):
        with pytest.raises(
            ValueError, match=r"weights 15.7 MiB \(float32\) .* has 11.4 MiB; use a smaller"
        ):
            LLM(**given)

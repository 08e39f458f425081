"""Sizes, outputs and the lazy package."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hybrid_jax
from hybrid_jax import machine
from hybrid_jax.api.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from hybrid_jax.byte_sizes import format_size, parse_size


@pytest.mark.parametrize(
    "text, num_bytes",
    [
        (17, 17),
        ("17", 17),
        ("17B", 17),
        ("5GB", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("1kB", 1000),
        (" 2KB ", 2000),
        (".5MiB", 2**19),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_are_read_as_written(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "value",
    ["", "5 gigs", "8 Gib", "8Gb", "8GIb", "-5GB", 0, -1, "0GB", "5e9", "GB", None, 2.5, True, "9" * 5000, "٣GiB"],
)  # fmt: skip
def test_what_is_no_size_is_named(value):
    with pytest.raises(ValueError, match="memory: a size must look like 5GB.*got ") as error:
        parse_size(value, name="memory")
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    "num_bytes, text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3 TiB")]
)
def test_sizes_are_shown_in_powers_of_1024(num_bytes, text):
    assert format_size(num_bytes) == text


def output(**changes):
    token = {7: Logprob(logprob=-0.5, rank=1, decoded_token="a")}
    fields = {
        "index": 0,
        "text": "a" * 100,
        "token_ids": (7,),
        "logprobs": (token,),
        "cumulative_logprob": -0.5,
        "finish_reason": "length",
    }
    return CompletionOutput(**fields | changes)


def test_outputs_print_on_a_line_and_go_to_json():
    metrics = RequestMetrics(
        arrival_time=1.0, first_token_time=3.0, finished_time=3.0, num_prompt_tokens=8
    )
    request = RequestOutput(
        request_id="4",
        prompt=None,
        prompt_token_ids=(1, 2),
        outputs=(output(),),
        metrics=metrics,
        num_cached_tokens=1,
    )
    assert len(repr(request)) < 250
    assert "2 tokens, 1 cached" in repr(request)
    back = json.loads(json.dumps(request.as_dict()))
    assert back["outputs"][0]["logprobs"][0]["7"]["decoded_token"] == "a"
    assert back["metrics"]["prefill_tokens_per_s"] == 4.0
    assert back["metrics"]["decode_tokens_per_s"] is None
    assert back["metrics"]["peak_memory_bytes"] is None


def test_rates_leave_out_what_came_with_the_first_token():
    times = {"arrival_time": 0.0, "first_token_time": 1.0, "finished_time": 3.0}
    metrics = RequestMetrics(**times, num_generation_tokens=28, num_first_tokens=8)
    assert (metrics.decode_tokens_per_s, metrics.tpot_s) == (10.0, 0.1)
    at_once = RequestMetrics(**times, num_generation_tokens=8, num_first_tokens=8)
    assert (at_once.decode_tokens_per_s, at_once.tpot_s) == (None, None)


def test_a_completion_is_finished_once_it_has_a_reason():
    assert output().finished()
    assert not output(finish_reason=None).finished()


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        hybrid_jax.Engine  # noqa: B018
    assert set(hybrid_jax.__all__) <= set(dir(hybrid_jax))


@pytest.mark.parametrize(
    "platforms, devices, plugin, expected",
    [
        ("cpu", ["/dev/nvidia0"], True, False),
        ("cuda,cpu", [], False, True),
        ("", ["/dev/nvidia0"], True, True),
        ("", ["/dev/nvidia0"], False, False),
        ("", [], True, False),
    ],
)
def test_an_accelerator_takes_a_device_and_a_plugin(
    monkeypatch, platforms, devices, plugin, expected
):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(machine, "glob", lambda pattern: devices)
    monkeypatch.setattr(machine, "find_spec", lambda name: plugin or None)
    assert machine.has_accelerator() is expected


def test_the_machine_has_some_memory():
    assert machine.ram_bytes() > 2**28


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others are not asked")
def test_freed_memory_below_something_in_use_goes_back_to_the_system():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    # 96 kB each, too small for mappings of their own
    parts = [np.ones(12_000) for _ in range(1500)]
    last, held = parts[-1], resident()
    del parts
    machine.give_back_free_memory()
    assert held - resident() > 100e6 and last.all()


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: object())
    machine.give_back_free_memory()


STATUS = Path(machine.STATUS)


@pytest.mark.skipif(
    not (STATUS.exists() and "VmHWM:" in STATUS.read_text()),
    reason="this system keeps no VmHWM of each process",
)
def test_the_peak_is_this_program_s_own_and_stays(root):
    mine = b"x" * (256 << 20)  # in the process that starts the other one
    code = (
        "from hybrid_jax.machine import peak_resident_bytes as peak\n"
        "before = peak(); held = b'x' * (64 << 20); del held; print(before, peak())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    before, after = map(int, done.stdout.split())
    assert before < 128 << 20 < len(mine) <= machine.peak_resident_bytes()
    assert after - before > 48 << 20


@pytest.mark.parametrize("platform, expected", [("darwin", 5), ("freebsd", 5 * 1024)])
def test_a_system_without_the_record_is_asked_another_way(monkeypatch, platform, expected):
    monkeypatch.setattr(machine, "STATUS", "/nowhere")
    monkeypatch.setattr(machine.sys, "platform", platform)
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_maxrss=5))
    monkeypatch.setattr(machine, "resource", usage)
    assert machine.peak_resident_bytes() == expected
    monkeypatch.setattr(machine, "resource", None)
    assert machine.peak_resident_bytes() is None

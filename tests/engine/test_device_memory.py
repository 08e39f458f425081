"""Decoding needs its arena once: the peak of a process over 200 steps, with an arena of 1 GiB that is resident.

`test_donation.py` looks at the compiled programs of one model: their state is aliased, nothing of the arena's size is
copied. Here an engine runs them, so that a call that donates nothing shows as well, and a reference that is kept.
Python, jax and compiled programs take some 350 MiB whatever the arena; what is resident without a state is subtracted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.engine.decode_memory import PEAK_SWITCH

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PEAK_SWITCH.exists(), reason=f"needs Linux's {PEAK_SWITCH}"),
]
MOST = 1.10  # peak without the baseline, over the arena; a second arena makes it 2


@pytest.fixture
def decode_memory(root):
    """Runs `decode_memory.py` with some flags in a process of its own; returns its report."""

    def run(*flags: str) -> dict:
        command = [sys.executable, "-m", "tests.engine.decode_memory", *flags]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        if not report["of_the_loop"]:
            pytest.skip(f"this system does not let a process write {PEAK_SWITCH}")
        assert report["arena"] >= 1 << 30 > report["baseline"]
        there = (report["filled"] - report["baseline"]) / report["arena"]
        assert there > 0.98, report  # before the first step; Linux counts in lots
        assert report["steps"] == 200 and report["folds"] >= 10 and report["frames"] >= 10
        return report

    return run


def test_200_decode_steps_hold_one_arena(decode_memory):
    report = decode_memory()
    assert report["ratio"] <= MOST, report
    assert report["moved"] == report["kept"] == 0, report


def test_the_gate_sees_one_step_that_keeps_its_arena(decode_memory):
    report = decode_memory("--undonated")
    assert report["ratio"] > 1.9, report
    assert report["moved"] == report["kept"] == 1, report

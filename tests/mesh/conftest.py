"""Eight devices on a CPU. jax makes them when it is first used, so these tests run in a process of their own."""

from __future__ import annotations

import os
from contextlib import suppress

import jax
import pytest

DEVICES = 8
# On a busy machine a device may wait long for the others.
WAIT = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=1800"
)

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {WAIT}".strip()
with suppress(RuntimeError):  # jax was used before; then the tests that need them say so
    jax.config.update("jax_num_cpu_devices", DEVICES)


@pytest.fixture(scope="session", autouse=True)
def devices():
    found = jax.devices("cpu")
    assert len(found) >= DEVICES, "run tests/mesh alone: jax was used before it could make devices"
    return found[:DEVICES]

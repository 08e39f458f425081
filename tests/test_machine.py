"""What a machine has, told from files as Docker, SLURM and systemd leave them."""

from __future__ import annotations

import os

import pytest

from hybrid_jax import machine
from hybrid_jax.sizing import devices

NO_LIMIT = "9223372036854771712\n"
GIB = 2**30


@pytest.fixture
def ram(monkeypatch, tmp_path):
    """`ram_bytes` on a machine of 16 GiB with this /proc/self/cgroup, and files below /sys/fs/cgroup."""
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 4096 if "SIZE" in name else 4 << 20)

    def ram(listed: str | None, files: dict[str, str]):
        if listed is not None:
            (tmp_path / "listed").write_text(listed)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return machine.ram_bytes(cgroups=tmp_path / "listed", mount=tmp_path / "mount")

    return ram


def test_docker_of_version_1_mounts_the_container_s_own_group_at_the_root(ram):
    listed = "12:cpuset:/docker/1f\n4:cpu,memory:/docker/1f\n1:name=systemd:/docker/1f\n"
    assert ram(listed, {"memory/memory.limit_in_bytes": f"{2 * GIB}\n"}) == 2 * GIB


def test_docker_of_version_2_has_a_namespace_of_its_own(ram):
    assert ram("0::/\n", {"memory.max": f"{3 * GIB}\n"}) == 3 * GIB


def test_a_slurm_job_s_limit_holds_for_its_steps(ram):
    files = {
        "memory.limit_in_bytes": NO_LIMIT,
        "slurm/memory.limit_in_bytes": NO_LIMIT,
        "slurm/uid_1/job_2/memory.limit_in_bytes": f"{4 * GIB}\n",
        "slurm/uid_1/job_2/step_0/memory.limit_in_bytes": f"{5 * GIB}\n",
    }
    listed = "9:memory:/slurm/uid_1/job_2/step_0\n0::/\n"
    assert ram(listed, {f"memory/{name}": text for name, text in files.items()}) == 4 * GIB


@pytest.mark.parametrize("folder", ["", "unified/"])
def test_a_slice_of_systemd_limits_the_services_in_it(ram, folder):
    files = {
        "batch.slice/memory.max": f"{6 * GIB}\n",
        "batch.slice/a:b.service/memory.max": "max\n",
    }
    listed = "0::/batch.slice/a:b.service\n"
    assert ram(listed, {folder + name: text for name, text in files.items()}) == 6 * GIB


@pytest.mark.parametrize(
    "listed, files",
    [
        (None, {}),
        ("", {"memory.max": f"{GIB}\n"}),
        ("0::/a\n", {}),
        ("0::/\n", {"memory.max": "max\n"}),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": NO_LIMIT}),
        ("0::/\n", {"memory.max": f"{64 * GIB}\n"}),  # more than there is
        ("0::/\n", {"memory.max": "\n"}),
        ("0::/\n", {"memory.max": "-1\n"}),
        ("garbage\n\n:::\n0::\0\n", {"memory.max/x": ""}),
        ("3:cpu:/\n", {"memory/memory.limit_in_bytes": f"{GIB}\n"}),
        ("0::/../../up\n", {}),
    ],
)
def test_without_a_limit_that_can_be_read_it_is_what_is_built_in(ram, listed, files):
    assert ram(listed, files) == 16 * GIB


@pytest.mark.parametrize(
    "listed, name",
    [
        ("0::/\n", "memory.high"),  # where the system begins to hold the process up
        ("4:cpu,memory:/job\n", "cpu,memory/job/memory.limit_in_bytes"),
    ],
)
def test_less_common_limits_are_seen(ram, listed, name):
    assert ram(listed, {name: f"{5 * GIB}\n"}) == 5 * GIB


def test_the_address_space_is_a_limit(ram, monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (7 * GIB, -1))
    assert ram(None, {}) == 7 * GIB


def test_a_limit_counts_where_the_system_does_not_say_what_is_built_in(ram, monkeypatch):
    def refuse(name):
        raise ValueError

    monkeypatch.setattr(machine.os, "sysconf", refuse)
    assert ram(None, {}) is None
    assert ram("4:memory:/\n", {"memory/memory.limit_in_bytes": NO_LIMIT}) is None
    assert ram("0::/\n", {"memory.max": f"{GIB}\n"}) == GIB


@pytest.mark.parametrize(
    "installed, widens",
    [("0.10.2", True), ("0.11.0", False), ("0.12.3.dev1", False), ("1.9", False)],
)
def test_jax_before_0_11_widens_bfloat16_weights(monkeypatch, installed, widens):
    monkeypatch.setattr(machine, "version", lambda name: installed)
    assert machine.widens_bfloat16() is widens


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Makes a machine's nvidia-smi do this; None for a machine without one."""

    def driver(script: str | None):
        tool = tmp_path / "nvidia-smi"
        tool.unlink(missing_ok=True)
        if script is not None:
            tool.write_text(f"#!/bin/sh\n{script}\n")
            tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin" if script else str(tmp_path))
        monkeypatch.setattr(devices, "has_nvidia", lambda: script is not None)

    for name in (*devices.SHARE_VARIABLES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return driver


@pytest.mark.parametrize(
    "script, expected",
    [
        (
            "echo 143771, 4, 9.0; echo 81559, 0, 8.0",
            machine.Nvidia(143_771 << 20, 4 << 20, "9.0"),
        ),
        ("echo 'No devices were found'", None),
        ("echo 81559, 0, 8.0; exit 9", None),
        ("echo '[N/A], [N/A], 12.1'", None),  # its memory is the host's
        (None, None),
    ],
)
def test_the_driver_is_asked_for_a_gpu(driver, script, expected):
    driver(script)
    assert machine.nvidia_gpu() == expected


def test_the_gpu_that_this_process_may_use_is_asked_for(driver, monkeypatch):
    driver('case "$*" in *"-i 3") echo 81559, 0, 8.0;; *) echo 143771, 0, 9.0;; esac')
    assert machine.nvidia_gpu().capability == "9.0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")
    assert machine.nvidia_gpu().capability == "8.0"


@pytest.mark.parametrize(
    "script, share",
    [(None, "0.95"), ("echo 100000, 0, 9.0", "0.95"), ("echo 100000, 60000, 9.0", "0.35")],
)
def test_jax_is_asked_for_what_other_processes_leave_of_a_card(driver, script, share, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    driver(script)
    devices.claim_gpu()
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == share
    if script is not None:
        gpu = devices.installed_gpu()
        assert gpu.num_bytes == int(float(share) * gpu.total_bytes)


def test_what_the_user_has_said_of_a_cards_memory_stands(driver, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    driver("echo 100000, 60000, 9.0")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
    devices.claim_gpu()
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    gpu = devices.installed_gpu()
    assert gpu.num_bytes == int(0.4 * gpu.total_bytes)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert devices.installed_gpu().num_bytes == int(0.75 * gpu.total_bytes)


@pytest.mark.parametrize(
    "capability, kernels, hopper",
    [
        ("9.0", True, True),
        ("12.0", True, False),
        ("7.5", False, False),
        ("gfx942", False, False),
        (None, True, False),
    ],
)
def test_a_gpu_runs_kernels_from_ampere_on(capability, kernels, hopper):
    gpu = devices.Device(platform="gpu", capability=capability)
    assert (gpu.runs_kernels, gpu.is_hopper) == (kernels, hopper)
    assert not devices.Device(platform="cpu", capability=capability).runs_kernels

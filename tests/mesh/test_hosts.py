"""A model over several processes (`jax.distributed`): the tokens of one, and one clear error where they differ."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from hybrid_jax.mesh.hosts import KEPT, Hosts, HostsDiffer, hosts_of
from tests.api.host_store import Store
from tests.drawing import left_to_all
from tests.mesh import host_program
from tests.mesh.conftest import WAIT
from tests.mesh.running import answers, make

# --- what processes tell each other -----------------------------------------------------------------


def together(*programs):
    """Runs a program in a thread for each process, and returns what they return or raise."""
    store, found = Store(), [None] * len(programs)

    def run(place):
        hosts = Hosts(range(len(programs)), place, store, "a")
        try:
            found[place] = programs[place](hosts)
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found, store


def test_all_get_the_texts_of_all_in_order_and_old_ones_are_deleted():
    rounds = 5 * KEPT

    def program(hosts):
        return [hosts.exchange("word", f"{hosts.index} {number}") for number in range(rounds)]

    found, store = together(program, program, program)
    expected = [[f"{index} {number}" for index in range(3)] for number in range(rounds)]
    assert found == [expected] * 3
    assert store.most <= 3 * 3 * KEPT


def test_all_learn_who_differs_and_the_least():
    def program(hosts):
        assert hosts.least(5 + hosts.index) == 5
        assert hosts.least(None if hosts.index else 1) is None
        hosts.agree("word", "the same")
        hosts.agree("word", "a" if hosts.index < 2 else "b")

    found, _ = together(program, program, program)
    assert [type(error) for error in found] == [HostsDiffer] * 3
    assert all("process 0 has a, process 2 has b" in str(error) for error in found)


def test_only_the_parts_that_differ_are_named():
    found, _ = together(*(lambda h, n=n: h.agree("start", f"a=1 | b={n} | c=3") for n in (2, 5)))
    assert all("process 0 has b=2, process 1 has b=5; make" in str(error) for error in found)


def test_who_has_come_to_something_else_is_named_too():
    found, _ = together(lambda h: h.agree("plan", "x"), lambda h: h.exchange("calls", "[]"))
    assert all("process 0 has plan x, process 1 has calls []" in str(error) for error in found)


def test_who_waits_learns_that_another_has_ended_or_that_it_is_to_end_itself():
    def waits(hosts):
        hosts.exchange("word", "")
        hosts.exchange("word", "")

    def ends(hosts):
        hosts.exchange("word", "")
        hosts.end()

    def stops(hosts):
        hosts.stops = lambda: True
        hosts.exchange("word", "")

    found, _ = together(waits, ends)
    assert isinstance(found[0], HostsDiffer) and "process 1 has closed" in str(found[0])
    found, _ = together(stops, lambda hosts: None)
    assert isinstance(found[0], InterruptedError)


def test_devices_of_this_process_alone(devices):
    assert hosts_of(devices) is None and hosts_of(None) is None


# --- processes --------------------------------------------------------------------------------------


def of_processes(what, name, *, count=2, devices=4):
    """What so many processes print, each with so many devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = f"{WAIT} --xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-m", host_program.__name__, address, str(count)]
    running = [
        subprocess.Popen(
            [*program, str(index), what, name],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        if what.startswith("one_is"):
            return running[0].communicate(timeout=300)[1], running[0].returncode
        found = [process.communicate(timeout=600) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
            for told in (process.stdout, process.stderr):
                told.close()
    for process, (_, told) in zip(running, found, strict=True):
        assert process.returncode == 0, told
    # Gloo, which carries the sums, prints lines of its own.
    return [json.loads(said.splitlines()[-1]) for said, _ in found]


def as_json(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("name", "count", "devices"),
    [
        ("two_kv", 2, 4),
        pytest.param("mamba2", 2, 2, marks=left_to_all),
        pytest.param("gated_delta", 2, 2, marks=left_to_all),
        pytest.param("experts", 4, 1, marks=left_to_all),
        pytest.param("mtp", 2, 2, marks=left_to_all),
        pytest.param("cut", 2, 2, marks=left_to_all),
    ],
)
def test_tokens_are_those_of_one_device(name, count, devices):
    found = of_processes("of_a_group", name, count=count, devices=devices)
    with make(name) as llm:
        expected = as_json(host_program.asked(llm))
        lookups = llm.stats()["cache_lookups"]
    assert found[0].pop("lookups") == lookups
    for told in found:
        scores = told.pop("scores")
        assert told | {"scores": None} == expected | {"scores": None}
        for one, other in zip(scores, expected["scores"], strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_processes_may_have_models_of_their_own():
    _, found = of_processes("alone", "two_kv", devices=2)
    with make("two_kv") as llm:
        expected = as_json(answers(llm))
    assert found == {"one": expected, "all": expected}


@pytest.mark.parametrize("how", ["one_is_killed", "one_is_stopped"])
@left_to_all
def test_a_process_that_is_gone_or_hangs_ends_the_others(how):
    """jax does that, after what it was told for `heartbeat_timeout_seconds`."""
    told, code = of_processes(how, "two_kv", devices=1)
    assert code not in (0, None), told


def test_processes_that_differ_stop_with_the_difference():
    found = of_processes("errors", "two_kv", devices=2)
    both = {
        "cache_dir": "cache_dir has no form for a model over several processes yet; leave it out, got 'kept'",
        "host_memory": "host_memory has no form for a model over several processes yet",
        "replicas": "a mesh over several processes is one model, as in mesh='tp=4', got 2 replicas",
        "settings": "process 0 has max_rows=3, ",
        "weights": "process 0 has weights that all have [",
        "calls": "process 0 has a call with 2 prompts",
        "later": "process 0 has a call with 2 prompts",
        "plans": "process 0 has prefill",
    }
    for told in found:
        for case, says in both.items():
            assert says in told[case], case
    assert "process 1 has closed this model" in found[0]["closed"]

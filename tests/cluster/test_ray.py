"""Engines in actors of a Ray cluster on this machine: the bundled model, and the engine without one."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import sys
import time

import numpy as np
import pytest
import ray

from hybrid_jax import SamplingParams
from hybrid_jax.api.workers import worker_loop
from hybrid_jax.batch import run_batch
from hybrid_jax.process.extras import MissingExtra
from hybrid_jax.ray import Generate, LLMActor, start_llm
from hybrid_jax.ray.link import RayLink, _InOrder
from tests.batch.batch_files import answers, finish, mixed_lines, start, write
from tests.drawing import left_to_all, spine
from tests.imports import ROOT
from tests.llms import BUNDLED, HEAD

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore:.*os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = [HEAD + f"    def read{n}(self):\n" for n in range(4)] + ["import ", "def add(a, b):\n"]


@pytest.fixture(scope="module")
def cluster():
    """Two CPUs, and actors that find the tests."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def llm(cluster):
    with start_llm(**BUNDLED, replicas=2, quiet=True) as llm:
        yield llm


def texts(outputs):
    return [[one.text for one in output.outputs] for output in outputs]


@pytest.mark.parametrize("seed", range(5))
def test_frames_are_put_in_order(seed):
    order, sent = _InOrder(), [(n, bytes([n])) for n in range(20)]
    shuffled = random.Random(seed).sample(sent, len(sent))
    assert b"".join(b"".join(order.add(*frame)) for frame in shuffled) == bytes(range(20))


@spine
def test_actors_give_what_one_engine_gives(llm, bundled):
    params = SamplingParams(temperature=0.8, max_tokens=8, n=2, stop=["self"])
    for one in (llm, bundled):
        one._intake.num_requests = 0
    assert texts(llm.generate(PROMPTS, params)) == texts(bundled.generate(PROMPTS, params))
    assert "2 in actors of Ray" in llm.describe()
    deltas = list(llm.stream(PROMPTS[:2], GREEDY))
    assert ["".join(d.text for d in deltas if d.prompt_index == n) for n in range(2)] == [
        text for [text] in texts(bundled.generate(PROMPTS[:2], GREEDY))
    ]
    assert llm.score("import ", "os") == bundled.score("import ", "os")
    np.testing.assert_array_equal(llm.embed("import os"), bundled.embed("import os"))


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=left_to_all)])
def test_an_actor_that_is_killed_or_stopped_loses_nothing_and_comes_back(
    llm, bundled, monkeypatch, sent
):
    monkeypatch.setattr(worker_loop, "SILENT", 10)
    params = SamplingParams(temperature=0.0, max_tokens=60)
    expected = texts(bundled.generate(PROMPTS, params))
    stream = llm.stream(PROMPTS, params)
    deltas = [next(stream)]
    about = llm._thread._dispatcher.threads[1]._loop._link.about
    os.kill(int(re.search(r"process (\d+)", about)[1]), sent)
    deltas += stream
    for index, [text] in enumerate(expected):
        assert "".join(d.text for d in deltas if d.prompt_index == index) == text
    deadline = time.monotonic() + 120
    while llm.stats()["replicas"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert texts(llm.generate(PROMPTS, params)) == expected


def test_prompts_computed_apart_go_through_the_object_store(cluster, bundled, monkeypatch):
    """From the actor that has computed them to the one that waits: the caller sees names only, and all is freed."""
    frames, receive = [], RayLink.receive
    monkeypatch.setattr(
        RayLink, "receive", lambda *args: frames.append(receive(*args)) or frames[-1]
    )
    prompts = [f"# {n}\n" + HEAD * 3 for n in range(3)]
    with start_llm(**BUNDLED, replicas="prefill=1,decode=1", quiet=True) as llm:
        found = llm.generate(prompts, GREEDY)
        stats = llm.stats()
        assert stats["handed_over_prefixes"] >= len(prompts) and not stats["handed_over_failed"]
        moved = stats["handed_over_bytes"]
        assert moved > 10 * sum(map(len, frames[2:]))  # the first of each says that it is ready
        links = [thread._loop._link for thread in llm._thread._dispatcher.threads]
        assert all(link._leaving.empty() and not link._come for link in links)
        # The one that computed and has the parts ends while they are read.
        llm.reset_prefix_cache()
        stream = llm.stream([prompt + "import " for prompt in prompts], GREEDY)
        deltas = [next(stream)]
        links[0].kill()
        deltas += stream
        ended = [delta.prompt_index for delta in deltas if delta.finish_reason]
        assert sorted(ended) == list(range(len(prompts)))
        assert texts(llm.generate(prompts, GREEDY)) == texts(found)
    assert texts(found) == texts(bundled.generate(prompts, GREEDY))


def test_the_actor_for_programs(cluster, bundled):
    actor = LLMActor.remote(**BUNDLED)
    calls = [actor.generate.remote(prompt, GREEDY) for prompt in PROMPTS]
    assert [texts(found)[0] for found in ray.get(calls)] == texts(bundled.generate(PROMPTS, GREEDY))
    stream = actor.stream.options(num_returns="streaming").remote(PROMPTS[0], GREEDY)
    text = "".join(ray.get(delta).text for delta in stream)
    assert [[text]] == texts(bundled.generate(PROMPTS[0], GREEDY))
    with pytest.raises(ValueError, match="prompt 0: is empty"):
        ray.get(actor.generate.remote(""))
    assert ray.get(actor.stats.remote())["requests"] == 7
    ray.kill(actor)


def test_a_stage_of_a_data_set(cluster, bundled):
    rows = [{"prompt": prompt, "id": n} for n, prompt in enumerate([*PROMPTS, ""])]
    stage = dict(fn_constructor_kwargs={"sampling_params": GREEDY, **BUNDLED}, batch_size=4)
    found = (
        ray.data.from_items(rows)
        .map_batches(Generate, compute=ray.data.ActorPoolStrategy(size=1), **stage)
        .take_all()
    )
    found.sort(key=lambda row: row["id"])
    expected = [text for [text] in texts(bundled.generate(PROMPTS, GREEDY))]
    assert [row["generated_text"] for row in found] == [*expected, ""]
    assert [row["num_tokens"] for row in found] == [8] * 6 + [0]
    assert [bool(row["error"]) for row in found] == [False] * 6 + [True]


def test_rows_that_are_no_prompts_have_their_reason_and_the_others_are_completed(
    bundled, monkeypatch
):
    monkeypatch.setattr("hybrid_jax.ray.data.LLM", lambda *_, **__: bundled)
    rows = np.array(["import ", None, 5, float("nan"), [], np.array([100, 101]), [1.5]], object)
    found = Generate(sampling_params=GREEDY)({"prompt": rows})
    told = dict(enumerate(found["error"]))
    assert told[0] == told[5] == "" and found["num_tokens"][0] == found["num_tokens"][5] == 8
    for row, value in ((1, "None"), (2, "5"), (3, "nan"), (6, "[1.5]")):
        assert told[row] == f"Generate: a prompt must be a text or token ids, got {value}"
    assert told[4] and not found["num_tokens"][1:5].any()


def test_a_column_that_is_not_there(bundled, monkeypatch):
    monkeypatch.setattr("hybrid_jax.ray.data.LLM", lambda *_, **__: bundled)
    with pytest.raises(ValueError, match=r"no column 'text', only \['id'\]; name it with prompt="):
        Generate(prompt="text")({"id": np.array([1])})


# --- batch files, over the engine without a model --------------------------------------------------


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The input, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("whole")
    files = write(folder / "in.jsonl", mixed_lines(80)), folder / "out.jsonl"
    code, _, err = finish(start(files))
    assert code == 0, err
    return files


def test_a_batch_over_actors(expected, tmp_path):
    files = expected[0], tmp_path / "out.jsonl"
    code, _, err = finish(start(files, "--replicas", "2", "--ray", "local"))
    assert code == 0, err
    assert answers(files[1]) == answers(expected[1])
    assert os.listdir(tmp_path) == ["out.jsonl"]


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [0, -1, 1.5, True])
def test_a_number_of_actors_that_makes_no_sense(replicas):
    with pytest.raises(
        ValueError, match=f"replicas must be an integer of at least 1, or like .*, got {replicas}"
    ):
        start_llm(replicas=replicas)


@pytest.mark.parametrize("mesh", ["dp=2", "prefill=1,decode=1"])
def test_a_mesh_with_replicas_of_its_own(mesh):
    with pytest.raises(ValueError, match=f"how each of them is divided, like 'tp=2'; got '{mesh}'"):
        start_llm(replicas=2, mesh=mesh)


def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_an_address_that_is_none():
    with pytest.raises(ValueError, match="address must be 'auto', 'HOST:PORT' or 'local', got 5"):
        start_llm(address=5)


def test_a_cluster_that_is_not_there(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = f"127.0.0.1:{unused_port()}"
    begun = time.monotonic()
    with pytest.raises(
        ValueError, match=f"no Ray cluster answers at {address}: .*; start one with"
    ):
        start_llm(address=address)
    assert time.monotonic() - begun < 10


def test_ray_is_not_installed(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.split(".")[:2] == ["hybrid_jax", "ray"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    file = write(tmp_path / "in.jsonl", mixed_lines(2))
    with pytest.raises(MissingExtra, match=r"pip install 'hybrid_jax\[ray\]'"):
        run_batch(file, tmp_path / "out.jsonl", ray="auto")


def test_an_llm_that_cannot_start_says_why(cluster):
    with pytest.raises(ValueError, match="LLM: .*memory"):
        start_llm(memory=1000, quiet=True)


@pytest.mark.parametrize(
    "given, says",
    [
        (
            {"bogus": 1},
            "Ray takes no actor with actor_options={'bogus': 1}: Invalid option keyword",
        ),
        ({"num_gpus": "x"}, "Ray takes no actor with actor_options={'num_gpus': 'x'}: The type of"),
        ("num_gpus=1", "start_llm: actor_options must be a dict, such as .*, got 'num_gpus=1'"),
    ],
)
def test_options_that_ray_does_not_take_are_named(cluster, given, says):
    with pytest.raises(ValueError, match=says):
        start_llm(**BUNDLED, actor_options=given, quiet=True)


def test_an_actor_of_another_model_is_refused(cluster, monkeypatch):
    """As where a folder of the same name holds other weights on another machine."""
    from hybrid_jax.api.workers import starting

    ready, found = starting._ready, []

    def other(link, frames):
        answer = ready(link, frames)
        found.append(answer)
        return answer._replace(digest=f"{len(found):08}")

    monkeypatch.setattr(starting, "_ready", other)
    with pytest.raises(RuntimeError, match="the weights of worker 1 .* are not those of worker 0"):
        start_llm(**BUNDLED, replicas=2, quiet=True)


@left_to_all
@pytest.mark.parametrize("seed", range(3))
def test_actors_that_are_killed_at_any_moment(cluster, bundled, seed):
    draw = random.Random(seed)
    params = SamplingParams(temperature=0.9, max_tokens=80)
    bundled._intake.num_requests = 0
    expected = texts(bundled.generate(PROMPTS, params))
    with start_llm(**BUNDLED, replicas=2, quiet=True) as llm:
        for _ in range(3):
            llm._intake.num_requests = 0
            stream, deltas = llm.stream(PROMPTS, params), []
            moment = draw.randrange(60)
            for number, delta in enumerate(stream):
                deltas.append(delta)
                if number == moment:
                    link = llm._thread._dispatcher.threads[draw.randrange(2)]._loop._link
                    ray.kill(link._seat)
            found = ["".join(d.text for d in deltas if d.prompt_index == n) for n in range(6)]
            assert [[text] for text in found] == expected

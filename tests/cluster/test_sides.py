"""Workers that compute prompts for others: the bundled model in processes, and parts on their way."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams, StructuredOutputsParams
from hybrid_jax.api.threads import prefill_side
from hybrid_jax.api.workers.starting import ROOT
from hybrid_jax.tiers.hand_over import HandOver
from hybrid_jax.tiers.parcel import Pieces
from hybrid_jax.tiers.part_file import Damaged, Part, part_of_bytes, part_to_bytes, write_part
from tests.drawing import left_to_all, spine
from tests.llms import BUNDLED, HEAD

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LONG = [HEAD * 3 + f"    def read{n}(self):\n" for n in range(4)]


@pytest.fixture(scope="module")
def workers():
    with LLM(**BUNDLED, replicas="prefill=1,decode=2", quiet=True) as llm:
        yield llm


def tokens(outputs):
    return [[one.token_ids for one in output.outputs] for output in outputs]


@spine
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.9, top_p=0.9, max_tokens=9, n=2),
        SamplingParams(temperature=0.7, seed=3, max_tokens=9, stop=["self"], logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=1),
        SamplingParams(temperature=0.8, max_tokens=9, presence_penalty=0.5),
        SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}x")),
    ],
)
def test_tokens_are_those_of_one_engine(workers, bundled, params):
    for llm in (workers, bundled):
        llm._intake.num_requests = 0
        llm.reset_prefix_cache()
    before = workers.stats()["handed_over_prefixes"]
    found = workers.generate(LONG, params)
    assert tokens(found) == tokens(bundled.generate(LONG, params))
    came = {output.metrics.loaded_from for output in found}
    if params.prompt_logprobs is None:
        assert "another engine" in came and workers.stats()["handed_over_prefixes"] > before
    assert workers._thread._dispatcher.prefill.num_promises == 0


def test_sides_may_differ(bundled):
    """Which is told to each worker; the lengths that all have room for hold for all."""
    own = {"max_rows": 2, "page_tokens": 16, "prefill_tokens": 64, "memory": "12MiB"}
    with LLM(**BUNDLED, replicas="prefill=1,decode=1", prefill_options=own, quiet=True) as llm:
        facts = [thread.facts for thread in llm._thread._dispatcher.threads]
        assert [one.engine_config.max_rows for one in facts] == [2, 4]
        assert facts[0].engine_config.page_tokens == 16 != facts[1].engine_config.page_tokens
        assert llm.engine_config == facts[1].engine_config
        bundled.reset_prefix_cache()
        assert tokens(llm.generate(LONG, GREEDY)) == tokens(bundled.generate(LONG, GREEDY))
        stats = llm.stats()
        assert stats["handed_over_prefixes"] and not stats["handed_over_failed"]


def test_the_next_turn_brings_only_what_is_new(workers, bundled):
    for llm in (workers, bundled):
        llm.reset_prefix_cache()
    [first] = workers.generate(HEAD * 2, GREEDY)
    longer = HEAD * 2 + first.outputs[0].text + HEAD * 2
    before = workers.stats()
    [second] = workers.generate(longer, GREEDY)
    after = workers.stats()
    assert tokens([second]) == tokens(bundled.generate(longer, GREEDY))
    new = len(second.prompt_token_ids) - len(first.prompt_token_ids)
    assert 0 < after["handed_over_tokens"] - before["handed_over_tokens"] <= new + 32
    # The prefill side has kept what it computed.
    assert after["prefill_tokens"] - before["prefill_tokens"] < new + 2 * 32 + 64


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=left_to_all) for n in range(2, 10))]
)
@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_a_side_that_is_killed_loses_and_doubles_nothing(workers, bundled, killed, seed):
    draw = random.Random(f"{killed} {seed}")
    workers.reset_prefix_cache()
    expected = [output.outputs[0].text for output in bundled.generate(LONG, GREEDY)]
    threads = workers._thread._dispatcher.threads
    stream, pieces = workers.stream(LONG, GREEDY), [""] * len(LONG)
    moment = draw.randrange(12)
    if moment == 0:
        ended = kill(threads, killed, draw)
    for number, delta in enumerate(stream, 1):
        pieces[delta.prompt_index] += delta.text
        if number == moment:
            ended = kill(threads, killed, draw)
    assert pieces == expected
    assert workers._thread._dispatcher.prefill.num_promises == 0
    deadline = time.monotonic() + 60
    while len(workers._thread._dispatcher.present) < 3 or ended.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers._thread._dispatcher._starts.clear()  # the next case may kill as often
    assert [output.outputs[0].text for output in workers.generate(LONG, GREEDY)] == expected


def kill(threads, side, draw):
    """Ends a worker of a side, which is started again; returns its process."""
    links = [thread._loop._link for thread in threads]
    process = draw.choice([link for link in links if link.side == side])._process
    process.kill()
    return process


# --- parts on their way --------------------------------------------------------------------


def part():
    arrays = {"keys": np.arange(24, dtype=np.uint16).reshape(2, 12), "x": np.ones(3, np.float32)}
    return Part(marks={"name": "one", "end": "32"}, arrays=arrays)


def test_a_part_travels_as_its_file(tmp_path):
    sent = part_to_bytes(part())
    pieces = {n: Pieces(a.dtype.name, a.shape, [a]) for n, a in part().arrays.items()}
    write_part(tmp_path / "file", part().marks, pieces)
    assert (tmp_path / "file").read_bytes() == sent
    found = part_of_bytes(np.frombuffer(sent, np.uint8), "a part")
    assert {name: array.tolist() for name, array in found.arrays.items()} == {
        name: array.tolist() for name, array in part().arrays.items()
    }
    assert found.marks.items() >= part().marks.items()


class Waiting:
    """A replica that waits for promises, as `Forwarding` sees it."""

    def __init__(self):
        self.parts, self.ends = [], []

    def bring_part(self, name, found):
        self.parts.append(name)

    def end_promise(self, name, state):
        self.ends.append((name, state))


def test_parts_go_again_to_a_replica_that_gave_them_up_and_once_to_one_that_has_them():
    forwarding, to = prefill_side.Forwarding(), Waiting()
    hand_over = HandOver(ROOT, came=forwarding.came, ended=forwarding.ended)
    shared = np.arange(64)
    other, longer = (hand_over.promise(np.r_[shared, np.arange(n)], 64 + n) for n in (64, 96))
    forwarding.begin(hand_over, other, to)  # goes on all the time
    own = [
        part for part in hand_over.known(longer).parts if part not in hand_over.known(other).parts
    ]
    for time_ in range(3):
        if time_:
            hand_over.promise(np.r_[shared, np.arange(96)], 160)
        forwarding.begin(hand_over, longer, to)
        for part in hand_over.known(longer).parts:
            if part not in hand_over.folder:
                hand_over.folder.put(part, prefill_side.Travelling(found=b"x"))
        hand_over.end(longer, "there")
        forwarding.end(longer, to)
        hand_over.take_back(longer)
    assert own and all(to.parts.count(part) == 3 for part in own)
    kept = [part for part in to.parts if part not in own]
    assert len(kept) == len(set(kept))
    assert to.ends == [(longer, "there")] * 3
    forwarding.end(other, to)
    assert not forwarding._parts and not forwarding._to


@pytest.mark.parametrize("place", [9, 60, -1])
def test_a_part_that_was_changed_on_the_way_is_refused(place):
    sent = bytearray(part_to_bytes(part()))
    sent[place] ^= 1
    with pytest.raises(Damaged, match="a part"):
        part_of_bytes(np.frombuffer(bytes(sent), np.uint8), "a part")


def test_damaged_and_late_parts_cost_time_and_no_token(workers, bundled, monkeypatch):
    expected = tokens(bundled.generate(LONG, GREEDY))
    send = prefill_side.Forwarding._send

    def spoilt(self, to, name, part):
        file = bytearray(part.found)
        file[-1] ^= 1
        send(self, to, name, prefill_side.Travelling(found=bytes(file)))

    for change in (spoilt, lambda *_: None):
        workers.reset_prefix_cache()
        before = workers.stats()["handed_over_failed"]
        monkeypatch.setattr(prefill_side.Forwarding, "_send", change)
        assert tokens(workers.generate(LONG, GREEDY)) == expected
        assert workers.stats()["handed_over_failed"] > before
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(
            ({"replicas": given}, f"an integer of at least 1, or like 'prefill=1,.*, got '{given}'")
            for given in ("prefill=1", "prefill=1,decode=0", "prefill=1,decode=1,tp=2", "dp=2", "")
        ),
        ({"replicas": "prefill=1,decode=1", "cache": "off"}, "leave cache='off' out"),
        ({"replicas": 2, "prefill_options": {"max_rows": 2}}, "and there are none; add mesh="),
        ({"replicas": "prefill=1,decode=1", "cache_dir": "x"}, "cache_dir does not go with"),
    ],
)
def test_sides_that_cannot_be(options, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        LLM(**options, quiet=True)

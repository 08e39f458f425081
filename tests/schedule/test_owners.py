"""Each value of a `Request` or a `Sequence` is written by the modules that own it, and by no other."""

from __future__ import annotations

import ast
import contextlib
import random
import sys
from collections import defaultdict
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from unittest import mock

import pytest

import hybrid_jax
from hybrid_jax.config import SpeculationConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.schedule.request import Course, EngineNotes, Hit, Output, Request
from hybrid_jax.schedule.sequence import Announced, HeldMemory, InFlight, Queued, Sequence
from tests.drawing import spine
from tests.schedule.damaged_devices import DAMAGED, DamagedDevice, SpoilingDevice
from tests.schedule.simulated_engine import Engine, make_geometry, tokens_of
from tests.schedule.traffic import random_traffic

VALUES = {
    Output: {"request", "sequence", "scheduler"},
    Hit: {"admission"},
    Course: {"scheduler"},
    EngineNotes: set(),
    HeldMemory: {"memory"},
    Announced: {"memory"},
    Queued: {"admission"},
    InFlight: {"sequence", "scheduler"},
}
OF_SEQUENCE = {
    "request": set(),
    "arrival": set(),
    "limit": set(),
    "tokens": {"sequence"},
    "prompt": {"sequence"},
    "phase": {"sequence", "admission", "turn", "scheduler"},
    "position": {"sequence", "turn"},
    "real_position": {"sequence"},
    "row": {"sequence", "admission"},
    "held": {"memory"},
    "announced": {"memory"},
    "queued": {"sequence"},
    "in_flight": {"sequence"},
    "known": {"history"},
    "accepted_drafts": {"pace"},
}


@contextlib.contextmanager
def writers():
    """Notes, by (class, field), which modules of the schedule write the field after an object is made."""
    found = defaultdict(set)

    def write(value, name, new):
        caller = sys._getframe(1)
        if caller.f_code.co_name not in ("__init__", "__post_init__"):
            room, _, module = caller.f_globals["__name__"].rpartition(".")
            found[type(value), name].add(module if room == "hybrid_jax.schedule" else room)
        object.__setattr__(value, name, new)

    with contextlib.ExitStack() as stack:
        for kind in (*VALUES, Sequence):
            stack.enter_context(mock.patch.object(kind, "__setattr__", write))
        yield found


class JudgingDevice(SpoilingDevice):
    """Judges drafts, now and then with numbers that are not finite."""

    spoils = random.Random(1)

    def _decode(self, plan):
        super()._decode(plan)
        for row in plan.decode:
            row.verified = [(3, 1)] * bool(row.new_tokens)


def traffic(seed, device, **options):
    """Short memory, stop strings, windows, crashes, prompts that are read, and numbers that are not finite."""
    rng = random.Random(seed)
    keep = lambda planned: rng.randrange(1, planned + 1)
    engine = Engine.make(
        geometry=make_geometry(windows=(None, 50)), num_frames=60, max_model_len=340,
        keep=keep if options else None, **options,
    )  # fmt: skip
    random_traffic(seed, engine, turns=60, abort_rate=0.1, crash_rate=0.03, stop="x")
    engine.device.__class__ = device
    engine.add(tokens_of(rng, 40), prompt_logprobs=0, pooling="mean", max_tokens=1)
    for last in (1, DAMAGED, 2):
        engine.add([*tokens_of(rng, 40), last], max_tokens=60, stop_ids=())
    engine.run()


@spine
def test_values_are_written_by_those_who_own_them():
    with writers() as found:
        traffic(0, DamagedDevice)
        drafts = SpeculationConfig(num_tokens=3, adaptive=False)
        traffic(1, JudgingDevice, speculation=drafts)
    for kind, owners in VALUES.items():
        by_field = {field.name: found[kind, field.name] for field in fields(kind)}
        assert set().union(*by_field.values()) == owners, (kind.__name__, by_field)
    assert {name: found[Sequence, name] for name in OF_SEQUENCE} == OF_SEQUENCE
    assert OF_SEQUENCE.keys() == {field.name for field in fields(Sequence)}


def test_the_engines_notes_are_written_in_its_room_alone():
    package, found = Path(hybrid_jax.__file__).parent, defaultdict(set)
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                if node.value.attr == "notes" and isinstance(node.ctx, ast.Store):
                    found[path.relative_to(package).as_posix()].add(node.attr)
    assert found == {
        "engine/engine.py": {"generation", "num_reported"},
        "engine/pack.py": {"sampling"},
    }


def test_what_was_asked_cannot_be_changed():
    request = Request(request_id="a", prompt=[1], params=SamplingParams(), seed=0)
    for field in fields(Request):
        with pytest.raises(FrozenInstanceError):
            setattr(request, field.name, None)


def test_two_requests_share_no_value():
    first, second = (
        Request(request_id=n, prompt=[1], params=SamplingParams(), seed=0) for n in "ab"
    )
    for name in ("output", "hit", "course", "notes"):
        assert getattr(first, name) is not getattr(second, name)

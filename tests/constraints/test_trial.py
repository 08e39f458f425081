"""What a grammar does to native code, it does to another process; the verdict is kept, and other requests go on."""

from __future__ import annotations

import ast
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tokenizers

from hybrid_jax import StructuredOutputsParams
from hybrid_jax.constraints import grammar as grammar_module
from hybrid_jax.constraints import trial as trial_module
from hybrid_jax.constraints import trial_worker
from hybrid_jax.constraints.bounds import Bounds
from hybrid_jax.constraints.grammar import Grammars
from hybrid_jax.constraints.kept import GRAMMARS_KEPT
from hybrid_jax.constraints.trial import Worker
from hybrid_jax.text.tokenizer import Tokenizer
from tests.constraints.vocabularies import make_tokenizer, tokens_of
from tests.llms import byte_tokenizer

SELDOM = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")


def form(**given):
    return StructuredOutputsParams(**given)


@pytest.fixture
def worker(monkeypatch):
    """A worker of this test alone, which counts the grammars that it is asked about."""
    worker = Worker()
    worker.asked = []
    real = worker.ask
    monkeypatch.setattr(
        worker, "ask", lambda *given: (worker.asked.append(given[1]), real(*given))[1]
    )
    monkeypatch.setattr(trial_module, "_worker", worker)
    yield worker
    worker.stop()


@pytest.fixture
def unbounded(monkeypatch):
    """Forms of any size reach the worker, as those would that the bounds do not foresee."""
    endless = Bounds(**dict.fromkeys(Bounds.__dataclass_fields__, 10**9))
    monkeypatch.setattr(grammar_module, "TRIED", endless)
    monkeypatch.setattr("hybrid_jax.constraints.bounds.LARGEST", 10**30)


def grammars(tokenizer=None):
    tokenizer = tokenizer or byte_tokenizer()
    return Grammars(tokenizer, tokenizer.vocab_size)


def first_tokens(state):
    words, _, failure = state.allowed()
    assert failure is None
    return bytes(tokens_of(words).tolist())


def refusal(grammars, **given):
    with pytest.raises(ValueError) as raised:
        grammars.state(form(**given))
    assert "\n" not in str(raised.value)
    return str(raised.value)


CHAIN = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(5000)} | {"d5000": {}}


@SELDOM
@pytest.mark.parametrize(
    "given",
    [
        {"json": {"$ref": "#/$defs/d0", "$defs": CHAIN}},
        {
            "grammar": "\n".join(
                ["start: r0", *(f"r{i}: r{i + 1}" for i in range(9000)), 'r9000: "a"']
            )
        },
    ],
    ids=["chain", "rules"],
)
def test_what_ends_the_library_is_refused_and_the_next_form_is_followed(worker, unbounded, given):
    tried = grammars()
    assert first_tokens(tried.state(form(regex="b+"))) == b"b"
    message = "ends llguidance's process with SIGSEGV, as when too much is nested in it; nest less"
    assert message in refusal(tried, **given)
    assert first_tokens(tried.state(form(regex="c+"))) == b"c"
    num_asked = len(worker.asked)
    assert message in refusal(tried, **given)
    assert len(worker.asked) == num_asked  # the verdict was kept


@SELDOM
def test_what_takes_too_long_is_refused(worker, unbounded, monkeypatch):
    monkeypatch.setattr(trial_module, "SECONDS", 1)
    many = "start: " + "|".join(f'"w{i}"' for i in range(50_000))
    assert "compiling it takes more than 1 seconds" in refusal(grammars(), grammar=many)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited on Linux")
def test_what_takes_too_much_memory_is_refused(worker, monkeypatch):
    monkeypatch.setattr(trial_module, "MEMORY_BYTES", 32 << 20)
    many = [f"{i} and more" for i in range(60_000)]
    message = "compiling it takes more than 32 MiB, or fails inside llguidance"
    assert message in refusal(grammars(), choice=many)


def test_what_no_walk_comes_through_is_refused(worker):
    message = refusal(grammars(), regex="(x?){5000}x{5000}")
    assert "too large for llguidance: too many expressions; lower its counts" in message


def test_a_form_that_is_too_costly_on_one_way_stops_there_alone(worker):
    tried = grammars()
    wide = "\nwide: " + "|".join(f"r{i}" for i in range(2100))
    many = "".join(f'\nr{i}: "b" "{i}"' for i in range(2100))
    costly = form(grammar='start: "a"+ | "c" wide' + wide + many)
    state, other = tried.state(costly), tried.state(costly)
    state.advance(b"c")
    words, may_end, failure = state.allowed()
    assert not words.any() and not may_end and "items; max is 2000" in failure
    other.advance(b"a")
    assert first_tokens(other) == b"a"


def test_a_wrong_form_is_refused_in_words_that_say_what_to_do(worker):
    message = refusal(grammars(), regex="a$b")
    assert message.startswith(
        "structured_outputs.regex 'a$b' cannot be followed: ^ or $ stands in the middle of an expression"
    )


def test_a_known_form_is_not_tried_again(worker):
    tried = grammars()
    for _ in range(3):
        tried.state(form(regex="a+"))
    assert len(worker.asked) == 1
    for n in range(GRAMMARS_KEPT):
        tried.state(form(regex=f"b{{{n + 1}}}"))
    num_asked = len(worker.asked)
    tried.state(form(regex="a+"))  # compiled once more, but not tried
    assert len(worker.asked) == num_asked


def test_who_asks_for_a_known_form_does_not_wait_for_a_new_one(worker, monkeypatch):
    tried = grammars()
    tried.state(form(regex="a+"))
    waiting, go_on = threading.Event(), threading.Event()
    real = worker.ask

    def slow(*given):
        waiting.set()
        assert go_on.wait(60)
        return real(*given)

    monkeypatch.setattr(worker, "ask", slow)
    states = []
    thread = threading.Thread(target=lambda: states.append(tried.state(form(regex="b+"))))
    thread.start()
    assert waiting.wait(60)
    assert first_tokens(tried.state(form(regex="a+"))) == b"a" and not states
    go_on.set()
    thread.join()
    assert first_tokens(states[0]) == b"b"


def test_a_foreseen_form_is_tried_in_the_background(worker):
    tried = grammars()
    for regex in ("a+", "a$b", "b+", "a+"):
        tried.foresee(form(regex=regex))
    deadline = time.monotonic() + 60
    while tried._looks_ahead and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first_tokens(tried.state(form(regex="a+"))) == b"a"
    assert first_tokens(tried.state(form(regex="b+"))) == b"b"
    assert "^ or $ stands in" in refusal(tried, regex="a$b")
    assert len(worker.asked) == 3


def test_two_vocabularies_share_a_process(worker):
    one, other = grammars(), grammars(make_tokenizer(()))
    one.state(form(regex="a+"))
    first = worker._process
    for n in range(1, 4):
        assert first_tokens(one.state(form(regex=f"b{{{n}}}"))) == b"b"
        assert tokens_of(other.state(form(regex=f"a{{{n}}}")).allowed()[0]).tolist() == [0]
    assert worker._process is first
    one.close()
    assert first.poll() is None
    other.close()
    assert first.poll() is not None and worker._process is None
    assert first_tokens(other.state(form(regex="0"))) == bytes([2])


def test_a_process_that_was_ended_from_outside_is_replaced(worker):
    tried = grammars()
    tried.state(form(regex="a+"))
    worker._process.kill()
    worker._process.wait()
    assert first_tokens(tried.state(form(regex="b+"))) == b"b"


@SELDOM
def test_a_process_that_is_ended_at_work_is_asked_again(worker, monkeypatch):
    tried = grammars()
    tried.state(form(regex="a+"))
    real, ended = trial_module.read_frame, []

    def end_once(stream):
        if not ended:
            ended.append(True)
            worker._process.send_signal(signal.SIGTERM)
            worker._process.wait()
        return real(stream)

    with monkeypatch.context() as patch:
        patch.setattr(trial_module, "read_frame", end_once)
        patch.setattr(trial_module, "write_frame", lambda *given: None)
        assert worker._asked(next(iter(worker._users)), b"")[1] == "SIGTERM"
    assert first_tokens(tried.state(form(regex="b+"))) == b"b"


def test_an_interrupt_while_a_form_is_tried_leaves_the_next_one_right(worker, monkeypatch):
    tried = grammars()
    tried.state(form(regex="a+"))

    def interrupt(stream):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trial_module, "read_frame", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tried.state(form(regex="a$b"))
    assert first_tokens(tried.state(form(regex="b+"))) == b"b"
    assert "^ or $ stands in" in refusal(tried, regex="a$b")


@pytest.mark.parametrize("program", [None, "", "/opt/editor/editor", "/nowhere/python3"])
def test_without_a_process_forms_must_be_smaller(worker, monkeypatch, caplog, program):
    monkeypatch.setattr(sys, "executable", program)
    tried = grammars()
    with caplog.at_level(logging.WARNING, "hybrid_jax.requests"):
        assert first_tokens(tried.state(form(regex="a{1,9}"))) == b"a"
        message = "the count in '{10001}' is 10001, the limit is 10000 where no other process can try it; lower it"
        assert message in refusal(tried, regex="a{10001}")
    assert len(caplog.records) == 1 and "compiled without a trial" in caplog.text


def test_a_process_that_cannot_start_is_like_none(worker, monkeypatch):
    monkeypatch.setattr(trial_module.trial_worker, "__file__", "/nowhere/trial_worker.py")
    assert first_tokens(grammars().state(form(regex="a+"))) == b"a"


def test_the_process_loads_neither_this_package_nor_jax():
    tree = ast.parse(Path(trial_worker.__file__).read_text())
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "llguidance"}


@SELDOM
def test_the_process_gets_no_interrupt_of_the_terminal(worker):
    grammars().state(form(regex="a+"))
    assert os.getsid(worker._process.pid) != os.getsid(0)


PROGRAM = """
import os, sys, time
from pathlib import Path
import hybrid_jax
from hybrid_jax import StructuredOutputsParams
from hybrid_jax.constraints import trial
from hybrid_jax.constraints.grammar import Grammars
from hybrid_jax.text.tokenizer import Tokenizer
tokenizer = Tokenizer.from_directory(Path(hybrid_jax.__file__).parent / "bundled")
Grammars(tokenizer, 512).state(StructuredOutputsParams(regex="a+"))
print(trial._worker._process.pid, "jax" in sys.modules, flush=True)
"""


def is_there(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


WAIT = "sys.stdin.read()"
FORK = "pid = os.fork()\nif pid:\n    print(pid, flush=True)\ntime.sleep(300)"


@SELDOM
@pytest.mark.parametrize(
    "end", ["", WAIT, FORK], ids=["ends", "is killed", "is killed, its fork lives"]
)
def test_the_process_ends_with_its_program(end):
    """The program has no main guard, and must run once all the same."""
    command = [sys.executable, "-c", PROGRAM + end]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as program:
        pid, has_jax = program.stdout.readline().split()
        fork = int(program.stdout.readline()) if end == FORK else None
        if end:
            assert is_there(int(pid))
            program.kill()
        program.wait()
        deadline = time.monotonic() + 60
        while is_there(int(pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_there(int(pid)) and has_jax == "False"
        if fork is not None:
            os.kill(fork, signal.SIGKILL)
        assert program.stdout.read() == ""


@SELDOM
def test_a_program_on_stdin_runs_once():
    done = subprocess.run([sys.executable, "-"], input=PROGRAM, text=True, capture_output=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1


def test_drawn_tokens_are_those_of_the_mask():
    draw, tokens = random.Random(0), {3, 255, 256, 700}
    mask = sum(1 << token for token in tokens)
    assert {trial_worker.drawn(mask, draw) for _ in range(400)} == tokens
    assert trial_worker.drawn(1, draw) == 0


def test_a_tokenizer_with_a_huge_id_is_refused():
    backend = json.loads(byte_tokenizer().backend.to_str())
    backend["model"]["vocab"]["<far>"] = 9_000_000
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(backend)))
    message = "llguidance cannot use this model's tokenizer.json: it has the id 9000000, the limit is 4194304"
    assert message in refusal(Grammars(tokenizer, 256), regex="a+")

"""What is kept of forms has bounds, costs nothing when it is asked for again, and needs no stack of the caller's."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading

import pytest

from hybrid_jax import StructuredOutputsParams
from hybrid_jax.constraints import grammar as grammar_module
from hybrid_jax.constraints import kept as kept_module
from hybrid_jax.constraints.grammar import LIMITS, Grammars
from hybrid_jax.constraints.kept import Kept, Recent, Shelf, digest_of
from hybrid_jax.constraints.stack import STACK_BYTES, with_large_stack
from tests.llms import byte_tokenizer


def form(**given):
    return StructuredOutputsParams(**given)


def grammars():
    return Grammars(byte_tokenizer(), 256)


FORMS = [form(regex="a" * n) for n in range(1, 70)]


def test_grammars_are_kept_up_to_a_number_of_bytes(monkeypatch):
    monkeypatch.setattr(kept_module, "KEPT_BYTES", 100)
    shelf = Shelf()
    kept = [Kept(None, 0, size) for size in (60, 30, 20, 101)]
    for wanted, one in zip(FORMS, kept[:3], strict=False):
        shelf.put(wanted, one)
    assert [shelf.get(wanted) for wanted in FORMS[:3]] == [None, *kept[1:3]]
    shelf.put(FORMS[3], kept[3])  # alone it may have more
    assert [shelf.get(wanted) for wanted in FORMS[:4]] == [None, None, None, kept[3]]
    shelf.drop(FORMS[3], kept[0])
    assert shelf.get(FORMS[3]) is kept[3]
    shelf.drop(FORMS[3], kept[3])
    assert len(shelf) == 0


def test_what_texts_add_to_a_grammar_counts(monkeypatch):
    monkeypatch.setattr(kept_module, "KEPT_BYTES", 10 * kept_module.BYTES_PER_TOKEN)
    shelf, one, other = Shelf(), Kept(None, 0, 0), Kept(None, 0, 0)
    shelf.put(FORMS[0], one)
    shelf.put(FORMS[1], other)
    one.num_tokens, other.num_tokens = 5, 6
    assert shelf.get(FORMS[1]) is None  # more than half
    assert shelf.get(FORMS[0]) is one
    other.num_tokens = 5
    shelf.put(FORMS[1], other)
    assert len(shelf) == 2
    one.source_bytes = 1
    assert shelf.get(FORMS[1]) is other and len(shelf) == 1


COUNTED = r"(.{0,303}a){0,30}b"


@pytest.mark.parametrize(
    "given, is_counted",
    [
        ({"regex": COUNTED}, True),
        ({"json": {"items": {"pattern": f"^{COUNTED}$"}}}, True),
        ({"json": {"patternProperties": {COUNTED: {}}}}, True),
        ({"grammar": f"start: /{COUNTED}/"}, True),
        ({"grammar": f'start: %json {{"pattern": {json.dumps(COUNTED)}}}'}, True),
        ({"regex": "(a{1,20}b){0,30}"}, False),
        ({"json": {"type": "string", "maxLength": 5000}}, False),
        ({"choice": ["(a{0,999}){9}"]}, False),
        ({"json_object": True}, False),
    ],
    ids=str,
)
def test_a_form_that_counts_what_is_counted_grows_faster(given, is_counted):
    per_token = grammars().state(form(**given))._kept.token_bytes
    expected = kept_module.BYTES_PER_TOKEN_COUNTED if is_counted else kept_module.BYTES_PER_TOKEN
    assert per_token == expected


GROWTH = """
import random
from hybrid_jax import StructuredOutputsParams
from hybrid_jax.constraints.grammar import Grammars
from tests.llms import byte_tokenizer

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

rng, known = random.Random(1), Grammars(byte_tokenizer(), 256)
wanted = StructuredOutputsParams(regex=%r)
state = known.state(wanted)
before = resident()
for _ in range(80):
    for byte in bytes(rng.choice(b"axxx") for _ in range(50)):
        state.allowed()
        state.advance([byte])
    state.restart()
print((resident() - before) // state._kept.num_tokens, state._kept.token_bytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory in use is read on Linux")
def test_what_tokens_add_to_such_a_form_is_estimated_right():
    command = [sys.executable, "-c", GROWTH % COUNTED]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    per_token, estimate = map(int, done.stdout.split())
    assert kept_module.BYTES_PER_TOKEN < per_token <= estimate


def test_grammars_that_were_used_last_are_kept():
    shelf = Shelf()
    for wanted in FORMS[:64]:
        shelf.put(wanted, Kept(None, 0, 0))
    assert shelf.get(FORMS[0]) is not None
    shelf.put(FORMS[64], Kept(None, 0, 0))
    assert shelf.get(FORMS[0]) is not None and shelf.get(FORMS[1]) is None and len(shelf) == 64


def test_large_forms_take_the_place_of_those_before(monkeypatch):
    known = grammars()
    sizes = []
    for number in range(3):
        known.state(form(choice=[f"{number} and {n}" for n in range(300)]))
        sizes.append(sum(kept.source_bytes for kept in known._shelf._grammars.values()))
        monkeypatch.setattr(kept_module, "KEPT_BYTES", 5 * sizes[0] // 2)
    assert sizes[1] == 2 * sizes[0] == sizes[2] and len(known._shelf) == 2


def test_digests_are_of_the_whole_form():
    others = [
        form(regex="ab"),
        form(choice=["ab"]),
        form(choice=["a", "b"]),
        form(choice=["a', 'b"]),
        form(grammar="ab"),
        form(json={}),
        form(json_object=True),
    ]
    assert len({digest_of(wanted) for wanted in others}) == len(others)
    assert digest_of(form(json={})) == digest_of(form(json="{}"))


def test_what_was_noted_last_is_known():
    recent = Recent(2)
    assert [recent.note(key, key) for key in (b"a", b"b", b"a", b"c")] == [True, True, False, True]
    assert [recent.get(key) for key in (b"a", b"b", b"c")] == [b"a", None, b"c"]


BAD = [
    {"regex": "(?=a)"},
    {"regex": "a$b"},
    {"regex": "a{100001}"},
    {"json": {"not": {}}},
    {"grammar": "start: x"},
    {"grammar": 'start: "'},
]


@pytest.mark.parametrize("given", BAD, ids=str)
def test_a_refused_form_is_not_looked_at_again(given, monkeypatch):
    known = grammars()
    with pytest.raises(ValueError) as first:
        known.state(form(**given))
    assert known.has(form(**given)) and not known.has(form(regex="b"))
    monkeypatch.setattr(grammar_module, "check_bounds", None)  # a call would fail
    with pytest.raises(ValueError) as second:
        known.state(form(**given))
    assert str(first.value) == str(second.value)


def test_neither_refused_nor_foreseen_forms_are_kept_themselves():
    known = grammars()
    for number in range(3):
        wanted = form(choice=[f"{number}" * 100, "(", "(" * (number + 1)])
        known.foresee(wanted)
        known.foresee(wanted)
        with pytest.raises(ValueError):
            known.state(form(regex="(" * (number + 1)))
    for recent in (known._foreseen, known._refused):
        assert [len(key) for key in recent._known] == [32] * 3
    gc.collect()
    assert len(known._shelf) == 0 and len(known._turns) == 0


def follow(state, text):
    """The failure, or None, after the bytes of a text."""
    for byte in text:
        words, _, failure = state.allowed()
        if failure is not None:
            return failure
        assert words[byte // 32] >> byte % 32 & 1
        state.advance([byte])
    return state.allowed()[2]


def test_texts_that_fill_a_lexer_do_not_end_others(monkeypatch):
    """Copies of a compiled grammar share the states of its lexer, of which there may be so many."""
    monkeypatch.setitem(LIMITS, "max_lexer_states", 1500)
    known, wanted = grammars(), form(regex="(a|b)*a(a|b){20}")
    texts = [
        f"{n:010b}".replace("0", "a").replace("1", "b").encode() * 10 for n in range(0, 1000, 9)
    ]
    alone = [follow(grammars().state(wanted), text) for text in texts[:3]]
    assert alone == [None] * 3
    states = [known.state(wanted) for _ in texts]
    first = states[0]._kept
    for state, text in zip(states, texts, strict=True):
        assert follow(state, text) is None
    assert known._shelf.get(wanted) is not first
    assert states[0].allowed()[2] is None
    states[0].restart()
    assert follow(states[0], texts[0]) is None


def test_a_text_that_fills_a_lexer_alone_fails(monkeypatch):
    monkeypatch.setitem(LIMITS, "max_lexer_states", 300)
    known, wanted = grammars(), form(regex="(a|b)*a(a|b){20}")
    text = b"".join(f"{n:b}".replace("0", "a").replace("1", "b").encode() for n in range(500))
    for _ in range(2):
        assert "too many states: 300" in follow(known.state(wanted), text)


NESTED = {
    "references": {
        "json": {
            "$ref": "#/$defs/0",
            "$defs": {
                str(i): {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(195)
            }
            | {"195": {"type": "null"}},
        }
    },
    "rules": {
        "grammar": "start: r0\n"
        + "".join(f'r{i}: "b"? r{i + 1}\n' for i in range(195))
        + 'r195: "a"'
    },
    "brackets": {"regex": "(" * 118 + "a" + ")*" * 118},
}
PROGRAM = """
import json, sys, threading
from hybrid_jax import StructuredOutputsParams
from hybrid_jax.constraints.grammar import Grammars
from tests.llms import byte_tokenizer

def follow(forms):
    known = Grammars(byte_tokenizer(), 256)
    for given in forms:
        wanted = StructuredOutputsParams(**given)
        known.foresee(wanted)
        state = known.state(wanted)
        for _ in range(200):
            words, may_end, failure = state.allowed()
            token = next((t for t in range(256) if words[t // 32] >> t % 32 & 1), None)
            if token is None:
                break
            state.advance([token])
        assert failure is None, failure

threading.stack_size(256 << 10)
thread = threading.Thread(target=follow, args=[json.load(sys.stdin)])
thread.start()
thread.join()
print("followed", threading.stack_size())
"""


def test_threads_with_small_stacks_compile_what_is_nested():
    command = [sys.executable, "-c", PROGRAM]
    given = json.dumps([*NESTED.values()])
    done = subprocess.run(command, input=given, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["followed", str(256 << 10)]


def test_a_call_with_a_large_stack_returns_and_raises():
    before = threading.stack_size(1 << 20)
    try:
        assert with_large_stack(lambda: threading.current_thread().name) == "hybrid_jax form"
        with pytest.raises(KeyError, match="why"):
            with_large_stack(lambda: {}["why"])
        assert threading.stack_size() == 1 << 20
    finally:
        threading.stack_size(before)
    assert STACK_BYTES >= 4 * (2 << 20)


def test_without_a_thread_the_form_waits_for_another_call(monkeypatch):
    known = grammars()

    def nothing(function):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(grammar_module, "with_large_stack", nothing)
        with pytest.raises(ValueError, match="no thread can be started to compile a form"):
            known.state(form(regex="a"))
    assert known.state(form(regex="a")).allowed()[2] is None

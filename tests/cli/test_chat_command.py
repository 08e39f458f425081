"""`hybrid-jax chat` over the scripted engine: messages in, answers out, and what a slash asks for."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from hybrid_jax import LLM
from hybrid_jax.cli import chat as chat_module
from hybrid_jax.cli import exits
from hybrid_jax.cli import main as cli
from tests.api.fake_engine import SCRIPT, FakeEngine
from tests.llms import TEMPLATE


@pytest.fixture
def talk(fake_model, tmp_path, monkeypatch, capsys):
    """Types lines into `chat`; returns (exit code, stdout, stderr) and the texts of the prompts it made."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    prompts = []
    add = FakeEngine.add
    monkeypatch.setattr(
        FakeEngine, "add", lambda s, r: (prompts.append(bytes(r.prompt).decode()), add(s, r))
    )

    def run(*lines, options=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        prompts.clear()
        command = ["chat", "--model", fake_model, "--chat-template", template, "--max-tokens", 3]
        with pytest.raises(SystemExit) as exit:
            cli.main([str(word) for word in (*command, *options)])
        said = capsys.readouterr()
        return (exit.value.code, said.out, said.err), list(prompts)

    return run


ANSWER = SCRIPT[:3]


def test_a_conversation_grows_by_messages_and_answers(talk):
    result, prompts = talk("hi", "", "and?", options=("--system", "S"))
    assert result == (0, f"{ANSWER}\n{ANSWER}\n", "")
    first = "<system>S<user>hi"
    assert prompts == [first, f"{first}<assistant>{ANSWER}<user>and?"]


def test_reset_begins_with_the_system_again(talk):
    (code, _, err), prompts = talk("hi", "/reset", "new", options=("--system", "S"))
    assert (code, err) == (0, "a new conversation\n")
    assert prompts[-1] == "<system>S<user>new"


def test_a_message_of_several_lines(talk):
    _, prompts = talk('"""one', "two", 'three"""', '"""four"""')
    assert prompts[0] == "<user>one\ntwo\nthree"
    assert prompts[1].endswith("<user>four")


def test_quit_leaves_before_what_follows(talk):
    (code, out, _), prompts = talk("hi", "/quit", "unheard")
    assert (code, out, len(prompts)) == (0, f"{ANSWER}\n", 1)


def test_a_saved_conversation_goes_on(talk, tmp_path):
    file = tmp_path / "talk.json"
    (_, _, err), _ = talk("hi", f"/save {file}")
    assert err == f"2 messages saved to {file}\n"
    saved = json.loads(file.read_text())["messages"]
    assert saved == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ANSWER},
    ]
    (_, _, err), prompts = talk(f"/load {file}", "more")
    assert err == f"2 messages from {file}\n"
    assert prompts == [f"<user>hi<assistant>{ANSWER}<user>more"]


def test_a_mark_in_a_saved_conversation_counts(talk, tmp_path, monkeypatch):
    file, points, add = tmp_path / "talk.json", [], FakeEngine.add
    monkeypatch.setattr(
        FakeEngine, "add", lambda s, r: (points.append(r.cache_breakpoints), add(s, r))
    )
    messages = [
        {"role": "user", "content": "hi", "cache": True},
        {"role": "assistant", "content": "yo"},
    ]
    file.write_text(json.dumps({"messages": messages}))
    _, prompts = talk(f"/load {file}", "more")
    assert prompts == ["<user>hi<assistant>yo<user>more"]
    assert points == [(len("<user>hi<assistant>"),)]


def test_stats_say_what_the_last_answer_cost(talk):
    (_, _, err), _ = talk("/stats", "hi", "/stats")
    none, numbers, cache = err.splitlines()
    assert none == "there is no finished answer"
    assert re.match(
        r"8 tokens of prompt, 0 of them from the prefix cache; 3 new ones, the first after \d+ ms",
        numbers,
    )
    assert cache.startswith("request 0: 0 of 8 prompt tokens came from the prefix cache")


@pytest.mark.parametrize(
    "line, said",
    [
        ("/dance", "there is no command /dance; /help lists them"),
        ("/save", "/save needs the name of a file"),
        ("/save /no/such/place/x", "/no/such/place/x: No such file or directory"),
        ("/load /no/such/file", "/no/such/file: No such file or directory"),
        ("/load WRONG", "WRONG holds no conversation that /save wrote: "),
        ("/load EMPTY", "EMPTY holds no conversation that /save wrote: "),
        ("/load NULL", "NULL holds no conversation that /save wrote: "),
    ],
)
def test_a_wrong_command_is_a_line_and_the_conversation_goes_on(talk, tmp_path, line, said):
    for name, content in (
        ("WRONG", '{"messages": [{"role": 3}]}'),
        ("EMPTY", "{}"),
        ("NULL", '{"messages": null}'),
    ):
        (tmp_path / name).write_text(content)
        line = line.replace(name, str(tmp_path / name))
        said = said.replace(name, str(tmp_path / name))
    (code, out, err), prompts = talk(line, "hi")
    assert err.startswith(said) and err.count("\n") == 1
    assert (code, out, prompts) == (0, f"{ANSWER}\n", ["<user>hi"])


def test_help_lists_every_command(talk):
    (_, _, err), _ = talk("/help")
    assert all(name in err for name in chat_module.HELP)


def test_a_conversation_that_is_too_long_loses_only_the_last_message(talk):
    (code, out, err), prompts = talk("hi", "x" * 300, "and?")
    assert err.startswith(
        "the conversation no longer fits the longest sequence of 200 tokens; /reset"
    )
    assert (code, out) == (1, f"{ANSWER}\n{ANSWER}\n")  # a message got no answer
    assert prompts[-1] == f"<user>hi<assistant>{ANSWER}<user>and?"


class Watched:
    """A stream that notes whether it was closed."""

    def __init__(self, deltas):
        self.deltas, self.closed = deltas, False

    def __iter__(self):
        return self.deltas

    def close(self):
        self.closed = True
        self.deltas.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(talk, monkeypatch):
    stream, write, streams, written = LLM.stream, chat_module.write, [], []

    def watched(self, *arguments, **options):
        streams.append(Watched(stream(self, *arguments, **options)))
        return streams[-1]

    def interrupted(text="", **options):
        write(text, **options)
        if text:
            written.append(text)
            if len(written) == 1:  # Ctrl-C while the first piece is being shown
                raise KeyboardInterrupt

    monkeypatch.setattr("hybrid_jax.api.llm.LLM.stream", watched)
    monkeypatch.setattr(chat_module, "write", interrupted)
    (code, out, err), prompts = talk("hi", "/stats", "and?")
    assert (code, err) == (
        0,
        "stopped\nthe last answer was stopped; an answer that ends by itself has numbers\n",
    )
    assert streams[0].closed
    assert prompts[1] == f"<user>hi<assistant>{written[0]}<user>and?"
    assert out == f"{written[0]}\n{ANSWER}\n"


def test_an_answer_is_no_longer_than_there_is_room(talk, monkeypatch):
    asked, stream = [], LLM.stream

    def noted(self, prompt, params):
        asked.append(params.max_tokens)
        return stream(self, prompt, params)

    monkeypatch.setattr("hybrid_jax.api.llm.LLM.stream", noted)
    (code, out, err), _ = talk("hi", options=["--max-tokens", "5000"])
    assert (code, err) == (0, "") and asked == [200 - len("<user>hi")]


def test_on_a_terminal_a_model_moves_no_cursor(monkeypatch):
    written = "a\x1b[2Jb\tc\n\x9bd\u00e9"
    assert exits.for_terminal(written) == written
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert exits.for_terminal(written) == "a\ufffd[2Jb\tc\n\ufffdd\u00e9"


def test_between_fences_a_slash_begins_no_command(talk):
    (code, out, err), prompts = talk('"""/reset', 'me"""')
    assert (code, out, err) == (0, f"{ANSWER}\n", "") and prompts == ["<user>/reset\nme"]


def test_an_engine_that_fails_ends_the_answer_and_not_the_program(talk, monkeypatch):
    def fails(self, *arguments, **options):
        raise RuntimeError("the device is gone")
        yield

    stream = LLM.stream
    calls = iter((fails, stream))
    monkeypatch.setattr(
        "hybrid_jax.api.llm.LLM.stream",
        lambda *given, **options: next(calls)(*given, **options),
    )
    (code, out, err), prompts = talk("hi", "again")
    assert (code, err) == (1, "no answer: the device is gone\n")
    assert prompts == ["<user>again"] and out.endswith(f"{ANSWER}\n")

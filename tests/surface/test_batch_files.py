"""Whole batch files: odd bytes, wrong paths, full disks, bounded memory, and 2,000 lines of nonsense."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys

import pytest

from hybrid_jax import cli, run_batch
from hybrid_jax import llm as llm_module
from hybrid_jax.batch import lines as lines_module
from hybrid_jax.batch import partial_path
from hybrid_jax.batch import run as run_module
from hybrid_jax.batch.fields import ELSEWHERE, FIELDS
from hybrid_jax.completions import Job
from hybrid_jax.feed import Ticket
from tests.surface.batch_files import (
    CHAT,
    COMPLETIONS,
    SeededEngine,
    answers,
    line,
    mixed_lines,
    read,
    write,
)
from tests.surface.fake_engine import FakeEngine


@pytest.fixture
def files(tmp_path):
    """Paths of an input with one line, and of an output."""
    folder = tmp_path / "batch"
    folder.mkdir()
    return write(folder / "in.jsonl", [line()]), folder / "out.jsonl"


@pytest.fixture
def command(fake_model, files, capsys):
    """Runs run-batch on the two files, or others; returns (exit code, stdout, stderr)."""

    def command(*arguments, input=files[0], output=files[1]):
        given = ["run-batch", "-i", input, "-o", output, "--model", fake_model, *arguments]
        with pytest.raises(SystemExit) as exit:
            cli.main([str(argument) for argument in given])
        captured = capsys.readouterr()
        return exit.value.code, captured.out, captured.err

    return command


def ids(path):
    return [entry["custom_id"] for entry in read(path)]


# --- bytes ----------------------------------------------------------------------------------------


def test_marks_line_ends_and_blank_lines_do_not_matter(llm, files):
    source, output = files
    one, two, three = (json.dumps(line(name)).encode() for name in ("a", "b", "c"))
    source.write_bytes(b"\xef\xbb\xbf" + one + b"\r\n\n  \t\r\n" + two + b"\n" + three)
    summary = run_batch(source, output, llm)
    assert ids(output) == ["a", "b", "c"]
    assert (summary.num_lines, summary.num_errors) == (3, 0)


def test_bytes_that_are_no_utf8_cost_one_line(llm, files):
    source, output = files
    good = json.dumps(line("a")).encode()
    source.write_bytes(good.replace(b'"ab"', b'"\xffb"') + b"\n" + good + b"\n\x00\n")
    run_batch(source, output, llm)
    first, second, third = read(output)
    at = good.index(b'"ab"') + 1
    assert first["error"]["message"] == f"line 1: not UTF-8: invalid start byte at byte {at}"
    assert first["custom_id"] is third["custom_id"] is None
    assert (second["custom_id"], second["error"]) == ("a", None)
    assert third["error"]["code"] == "invalid_json_line"


def test_error_lines_name_the_line_of_the_file(llm, files):
    source, output = files
    source.write_text("\n\n{}\n")
    run_batch(source, output, llm)
    assert read(output)[0]["error"]["message"].startswith("line 3: has no custom_id")


def test_lines_of_10_mb_are_answered(llm, files):
    source, output = files
    write(source, [line("a", metadata={"k": "x" * 10_000_000}), line("b", prompt=[97] * 2_500_000)])
    run_batch(source, output, llm)
    first, second = read(output)
    assert first["error"] is None
    assert "has 2500000 tokens and needs room for one more" in second["error"]["message"]


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_line_longer_than_the_limit_is_skipped_without_being_held(llm, files, monkeypatch, end):
    source, output = files
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1000)
    fits = json.dumps(line("b", user="u"))
    fits = fits.replace('"u"', '"' + "u" * (1001 - len(fits)) + '"')
    assert len(fits) == 1000
    source.write_text("[" * 5000 + "\n" + fits + "\r\n" + fits.replace("u", "uu", 1) + end)
    run_batch(source, output, llm)
    assert [entry["error"] and entry["error"]["code"] for entry in read(output)] == [
        "line_too_long",
        None,
        "line_too_long",
    ]
    assert ids(output) == [None, "b", None]


# --- paths ----------------------------------------------------------------------------------------


def test_the_command_writes_the_file_and_says_so_on_stderr(command, files):
    code, out, err = command()
    assert (code, out) == (0, "")
    assert err.startswith(f"hybrid-jax: {files[1]}: 1 lines, 0 errors; 9 new tokens, ")
    assert sorted(os.listdir(files[1].parent)) == ["in.jsonl", "out.jsonl"]


def test_the_command_prints_one_object(command, files):
    write(files[0], [line("a"), line("a"), line("b")])
    code, out, _ = command("--json")
    summary = json.loads(out)
    assert (code, summary["num_lines"], summary["num_errors"]) == (0, 3, 1)
    assert (summary["prompt_tokens"], summary["completion_tokens"]) == (4, 18)
    assert summary["hit_rate"] == 0
    assert not summary["already_finished"]
    assert summary["peak_memory_bytes"] > 2**20


def test_a_finished_output_is_left_as_it_is(command, files, monkeypatch):
    command()
    before = files[1].read_bytes(), os.stat(files[1]).st_mtime_ns
    monkeypatch.setattr(llm_module, "load_model", None)  # not even the model is loaded
    code, out, err = command("--json")
    assert code == 0
    assert json.loads(out)["already_finished"]
    assert err == (
        f"hybrid-jax: {files[1]} is finished already and was left as it is; delete it to run again\n"
    )
    assert (files[1].read_bytes(), os.stat(files[1]).st_mtime_ns) == before


def test_an_empty_output_is_no_finished_one(command, files):
    files[1].touch()
    assert command()[0] == 0
    assert ids(files[1]) == ["a"]


def test_an_llm_made_for_the_run_may_say_what_it_is(fake_model, files, capsys):
    run_batch(*files, fake_model)
    assert capsys.readouterr().err == ""
    run_batch(files[0], files[1].with_name("other.jsonl"), fake_model, quiet=False)
    assert "sequences up to 200 tokens" in capsys.readouterr().err


def test_options_reach_the_engine(command, files, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        FakeEngine, "add", lambda self, request: seen.append((self.engine_config, request))
    )
    monkeypatch.setattr(FakeEngine, "has_work", False)
    template = tmp_path / "template.jinja"
    template.write_text("[{{ messages[0].content }}]")
    write(files[0], [line("a", CHAT)])
    command("--seed", 5, "--max-rows", 3, "--cache", "off", "--exact", "--chat-template", template)
    [(config, request)] = seen
    assert (config.seed, config.max_rows, config.cache.policy, config.exact) == (5, 3, "off", True)
    assert bytes(request.prompt) == b"[ab]"


@pytest.mark.parametrize("name", ["out.jsonl", "in.jsonl", "link.jsonl", "hard.jsonl"])
def test_the_input_is_never_overwritten(command, files, name):
    source, output = files
    other = output.with_name(name)
    if name.startswith("link"):
        other.symlink_to(source)
    elif name.startswith("hard"):
        os.link(source, other)
    before = source.read_bytes()
    code, _, err = command(output=other)
    assert source.read_bytes() == before
    if name == "out.jsonl":
        assert code == 0
        return
    assert code == 2
    assert f"{source} is the input and would be overwritten" in err
    assert err.count("\n") == 1
    assert not partial_path(other).exists()


def test_the_input_is_no_partial_output(command, files):
    source, output = files
    before = source.read_bytes()
    os.rename(source, partial_path(output))
    code, _, err = command(input=partial_path(output))
    assert code == 2
    assert f"would be overwritten as {partial_path(output).name}" in err
    assert partial_path(output).read_bytes() == before


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "holds no requests, one JSON object a line"),
        (b"\xef\xbb\xbf\n\r\n  \n", "holds no requests"),
        ("{}".encode("utf-16"), "is UTF-16 or UTF-32 text; save it as UTF-8"),
        (None, "No such file or directory"),
    ],
)
def test_an_input_that_is_none_is_one_clear_error(command, files, content, message):
    source, output = files
    if content is None:
        source.unlink()
    else:
        source.write_bytes(content)
    code, out, err = command()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert str(source) in err
    assert content is None or source.read_bytes() == content
    assert [path.name for path in output.parent.iterdir()] == (
        [] if content is None else ["in.jsonl"]
    )


@pytest.mark.parametrize(
    "given, message",
    [
        ({"output": "/nowhere/out.jsonl"}, "No such file or directory: /nowhere/out.jsonl.partial"),
        ({"output": "/tmp"}, "the output must be a regular file, got /tmp"),
        ({"output": "/dev/full"}, "the output must be a regular file, got /dev/full"),
        ({"output": "/proc/out.jsonl"}, "/proc/out.jsonl.partial"),
        ({"input": "/tmp"}, "the input must be a regular file"),
        ({"input": "/dev/null"}, "the input must be a regular file"),
    ],
)
def test_a_wrong_path_is_a_callers_mistake(command, files, given, message):
    code, out, err = command(**given)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not files[1].exists()


def test_a_template_that_is_no_utf8_is_named(command, files, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_bytes(b"ab\xff")
    code, out, err = command("--chat-template", template)
    assert (code, out) == (2, "")
    assert err == (
        f"hybrid-jax: --chat-template {template}: is not valid UTF-8, it has byte 0xff at byte 2; "
        "save it as UTF-8\n"
    )
    assert [path.name for path in files[0].parent.iterdir()] == ["in.jsonl"]


def test_a_wrong_option_leaves_nothing_behind(command, files):
    code, _, err = command("--memory", "lots")
    assert (code, err.count("\n")) == (2, 1)
    assert [path.name for path in files[0].parent.iterdir()] == ["in.jsonl"]


def test_an_output_of_another_input_is_refused(command, files):
    files[1].write_text("{}\n{}\n")
    code, _, err = command()
    assert code == 2
    assert f"{files[1]} is there and has 2 lines, {files[0]} has 1; delete it" in err
    assert files[1].read_text() == "{}\n{}\n"


def program(*arguments, **environment):
    """The command line as a real program over the scripted engine."""
    return subprocess.run(
        [sys.executable, "-m", "tests.surface.batch_program", *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_a_full_disk_is_one_line_and_the_next_run_goes_on(files):
    source, output = files
    write(source, mixed_lines(60))
    arguments = ("run-batch", "-i", source, "-o", output)
    done = program(*arguments, HYBRID_JAX_TEST_FILE_LIMIT="20000")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"hybrid-jax: run-batch: File too large: {partial_path(output)}")
    assert done.stderr.count("\n") == 1
    assert "lines written before are kept, the same command goes on from there" in done.stderr
    assert os.stat(partial_path(output)).st_size == 20_000
    done = program(*arguments, "--json")
    assert done.returncode == 0
    assert 10 < json.loads(done.stdout)["num_resumed"] < 60
    whole = output.with_name("whole.jsonl")
    program("run-batch", "-i", source, "-o", whole)
    assert answers(output) == answers(whole)


def test_an_input_that_changes_meanwhile_is_noticed(command, files, monkeypatch):
    source, output = files
    write(source, [line(f"{index}", n=8) for index in range(50)])
    step = FakeEngine.step

    def appending(self):
        if self.num_steps == 1:
            with open(source, "a") as file:
                file.write(json.dumps(line("new")) + "\n")
        return step(self)

    monkeypatch.setattr(FakeEngine, "step", appending)
    code, _, err = command()
    assert (code, err.count("\n")) == (1, 1)
    assert f"{source} was changed while it was read" in err
    assert not output.exists()


# --- much of it -----------------------------------------------------------------------------------


def nonsense(random_):
    """One line that is not blank: an object with anything anywhere, or bytes of any kind."""
    values = [None, True, 0, -1, 3, 300, 1.5, 1e308, 10**30, "", "ab", "x" * 300, "\ud800", [], {}]
    values += [["a", 1], [[]], [[97]], {"type": "text"}, {"1": 2}, [None], [255], {"role": 1}]
    if random_.random() < 0.1:
        text = bytes(random_.randrange(256) for _ in range(random_.randint(1, 40)))
        return text.replace(b"\n", b"").replace(b"\r", b"").strip() or b"?"
    url = random_.choice([CHAT, COMPLETIONS])
    entry = line(random_.choice(["a", *(f"id-{random_.random()}" for _ in range(3))]), url)
    entry["body"]["max_tokens"] = random_.randint(1, 6)
    names = [*FIELDS, *ELSEWHERE[url], "strange", "prompt"]
    for _ in range(random_.choice([0, 0, 1, 1, 2])):
        entry["body"][random_.choice(names)] = random_.choice(values)
    if random_.random() < 0.1:
        entry[random_.choice([*entry, "strange"])] = random_.choice(values)
    text = json.dumps(entry, ensure_ascii=random_.random() < 0.5).encode(errors="replace")
    if random_.random() < 0.1:
        at = random_.randrange(len(text))
        text = text[:at] + random_.choice([b"", b"\xff", b'"', b"}", b"\\u"]) + text[at + 1 :]
    return text


def test_2000_lines_of_nonsense_get_a_line_each(make_llm, monkeypatch, files):
    monkeypatch.setattr(llm_module, "Engine", SeededEngine)
    source, output = files
    random_ = random.Random(5)
    source.write_bytes(b"\n".join(nonsense(random_) for _ in range(2000)))
    summary = run_batch(source, output, make_llm())
    found = read(output)
    assert len(found) == summary.num_lines == 2000
    codes = [entry["response"]["status_code"] for entry in found]
    assert set(codes) == {200, 400}  # and no mistake of ours
    assert summary.num_errors == codes.count(400)
    assert 400 < summary.num_errors < 1700
    kinds = {entry["error"]["code"] for entry in found if entry["error"]}
    assert kinds >= {
        *("invalid_json_line", "invalid_value", "missing_required_parameter", "invalid_url"),
        *("invalid_method", "duplicate_custom_id", "unknown_parameter", "unsupported_parameter"),
        "context_length_exceeded",
    }
    for given, entry in zip(source.read_bytes().split(b"\n"), found, strict=True):
        if entry["error"] is None:
            assert json.loads(given)["custom_id"] == entry["custom_id"]
            assert all(choice["finish_reason"] for choice in entry["response"]["body"]["choices"])


class Watched(SeededEngine):
    """Notes how much is held at each step."""

    most_requests = most_jobs = 0

    def step(self):
        Watched.most_requests = max(Watched.most_requests, len(self.requests))
        if self.num_steps % 50 == 0:
            jobs = sum(isinstance(thing, Job) for thing in gc.get_objects())
            Watched.most_jobs = max(Watched.most_jobs, jobs)
        return super().step()


@pytest.mark.parametrize("slow_first", [False, True])
def test_what_is_held_does_not_grow_with_the_file(make_llm, monkeypatch, files, slow_first):
    monkeypatch.setattr(llm_module, "Engine", Watched)
    monkeypatch.setattr(run_module, "MAX_HELD_LINES", 100)
    Watched.most_requests = Watched.most_jobs = 0
    source, output = files
    lines = [line(f"{index}", max_tokens=2) for index in range(3000)]
    lines[0]["body"]["max_tokens"] = 150 if slow_first else 2
    write(source, lines)
    llm, held = make_llm(max_rows=4, steps_per_dispatch=1), []
    append = run_module.PartialOutput.append

    def watching(self, lines):
        held.append(len(lines))
        append(self, lines)

    monkeypatch.setattr(run_module.PartialOutput, "append", watching)
    run_batch(source, output, llm)
    assert ids(output) == [f"{index}" for index in range(3000)]
    assert Watched.most_requests == 4 * run_module.LIVE_PER_ROW
    assert Watched.most_jobs <= 4 * run_module.LIVE_PER_ROW + 1  # one was answered just now
    assert max(held) <= 100
    assert (max(held) == 100) == slow_first  # answers waited for the first line, up to the limit


def test_every_choice_counts_and_each_is_looked_at_a_few_times_only(make_llm, monkeypatch, files):
    monkeypatch.setattr(llm_module, "Engine", Watched)
    Watched.most_requests = 0
    source, output = files
    write(source, [line(f"{index}", n=3, max_tokens=2) for index in range(600)])
    looks, count = [], Ticket.num_unfinished.fget
    monkeypatch.setattr(
        Ticket, "num_unfinished", property(lambda t: (looks.append(t), count(t))[1])
    )
    run_batch(source, output, make_llm(max_rows=16, steps_per_dispatch=1))
    most = 16 * run_module.LIVE_PER_ROW
    assert most <= Watched.most_requests < most + 3
    assert len(looks) <= 20 * 600  # in two passes a turn; one for each line would make it 43


def test_the_engine_does_not_wait_for_a_file_of_mistakes(make_llm, monkeypatch, files):
    source, output = files
    write(source, [line("long", max_tokens=150)])
    with open(source, "a") as file:
        file.write("{}\n" * 3000)
    events, step, start = [], FakeEngine.step, run_module.Run._start
    monkeypatch.setattr(FakeEngine, "step", lambda e: (events.append("step"), step(e))[1])
    monkeypatch.setattr(run_module.Run, "_start", lambda *a: (events.append("line"), start(*a))[1])
    run_batch(source, output, make_llm(max_rows=2, steps_per_dispatch=1))
    between = "".join(event[0] for event in events).split("s")
    assert max(map(len, between[:-1])) == 2 * run_module.LIVE_PER_ROW


def test_held_bytes_are_bounded_too(make_llm, monkeypatch, files):
    source, output = files
    monkeypatch.setattr(run_module, "MAX_HELD_BYTES", 10_000)
    sizes, append = [], run_module.PartialOutput.append

    def watching(self, lines):
        sizes.append(sum(map(len, lines)))
        append(self, lines)

    monkeypatch.setattr(run_module.PartialOutput, "append", watching)
    lines = [line(f"{index}", max_tokens=1) for index in range(300)]
    lines[0]["body"]["max_tokens"] = 190
    write(source, lines)
    run_batch(source, output, make_llm(max_rows=2, steps_per_dispatch=1))
    assert len(ids(output)) == 300
    assert 10_000 < max(sizes) < 10_000 + 20 * 500


def test_progress_is_told_as_lines_are_written(llm, files):
    source, output = files
    write(source, [line(f"{index}", max_tokens=1 + 9 * (index == 7)) for index in range(40)])
    told = []
    run_batch(source, output, llm, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (40, 40)
    assert told == sorted(set(told))
    assert {total for _, total in told} == {40}


def test_the_bar_shows_rates_and_hits(llm, files, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    source, output = files
    write(source, [line("a"), line("b", prompt="x" * 100), line("c", prompt="x" * 100)])
    run_batch(source, output, llm, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    for part in ("3/3", "tokens/s", "cached", "left"):
        assert part in captured.err

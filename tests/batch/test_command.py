"""The command run-batch: what it says, the options it takes, wrong paths, full disks."""

from __future__ import annotations

import json
import os
import time

import pytest

from hybrid_jax import LLM, run_batch
from hybrid_jax.api import starting
from hybrid_jax.batch import partial_path
from hybrid_jax.batch.run import READ_LINES
from hybrid_jax.cli import main as cli
from tests.api.fake_engine import FakeEngine
from tests.batch.batch_files import (
    CHAT,
    answers,
    finish,
    ids,
    line,
    mixed_lines,
    read,
    start,
    write,
)


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


def test_the_command_writes_the_file_and_says_so_on_stderr(command, files):
    code, out, err = command()
    assert (code, out) == (0, "")
    assert err.startswith(f"hybrid-jax: {files[1]}: 1 lines, 0 errors; 9 new tokens, ")
    assert sorted(os.listdir(files[1].parent)) == ["in.jsonl", "out.jsonl"]


class CompilingEngine(FakeEngine):
    """Compiles for five seconds before its first step, by a clock that goes on by as much."""

    clock = [0.0]

    def step(self):
        if not self.compiled:
            self.compiled = 5.0
            self.clock[0] += 5.0
        return super().step()


def test_the_summary_says_how_long_compiling_took_and_the_rate_leaves_it_out(
    make_llm, files, monkeypatch
):
    monkeypatch.setattr(starting, "Engine", CompilingEngine)
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + CompilingEngine.clock[0])
    llm = make_llm(quiet=True)
    summary = run_batch(*files, llm)
    assert summary.compile_s == 5.0 == llm.compile_s == summary.as_dict()["compile_s"]
    assert summary.seconds > 5
    assert summary.tokens_per_s > 9 / 5
    assert "/s without compiling; 5." in str(summary) and "s, 5.0 s of them compiling;" in str(
        summary
    )
    files[1].unlink()
    again = run_batch(*files, llm)
    assert again.compile_s == 0 and "compiling" not in str(again)


@pytest.mark.parametrize(
    "asks",
    [
        {"logprobs": 2},
        {"presence_penalty": 0.5},
        {"logit_bias": {"65": 2.0}},
        {"bad_words": ["x"]},
        None,
    ],
)
def test_the_engine_knows_beforehand_if_a_line_asks_for_more_than_tokens(
    make_llm, files, monkeypatch, asks
):
    """Also where that line runs last."""
    monkeypatch.setattr(starting, "Engine", FakeEngine)
    known_at = []
    monkeypatch.setattr(
        FakeEngine, "expect_everything", lambda engine: known_at.append(len(engine.added))
    )
    lines = [line(f"{n}", prompt=chr(65 + n // 10) * 40 + str(n % 10)) for n in range(90)]
    write(files[0], [*lines, line("last", prompt="~", **(asks or {}))])
    run_batch(*files, make_llm(quiet=True, max_rows=1))
    assert known_at == ([] if asks is None else [0])


def test_the_command_prints_one_object(command, files):
    write(files[0], [line("a"), line("a"), line("b"), {}])
    code, out, _ = command("--json")
    summary = json.loads(out)
    assert (code, summary["num_lines"], summary["num_errors"]) == (0, 4, 2)
    assert (summary["num_requests"], summary["default_temperature"]) == (3, 1.0)
    assert (summary["prompt_tokens"], summary["completion_tokens"]) == (4, 18)
    assert summary["hit_rate"] == 0
    assert not summary["already_finished"]
    assert summary["peak_memory_bytes"] > 2**20


def test_a_finished_output_is_left_as_it_is(command, files, monkeypatch):
    command()
    before = files[1].read_bytes(), os.stat(files[1]).st_mtime_ns
    monkeypatch.setattr(starting, "open_with_drafter", None)  # not even the model is loaded
    code, out, err = command("--json")
    assert code == 0
    assert json.loads(out)["already_finished"]
    assert err == (
        f"hybrid-jax: {files[1]} is finished already, 1 lines, 0 errors, and was left as it is; delete it "
        "to run again\n"
    )
    assert (files[1].read_bytes(), os.stat(files[1]).st_mtime_ns) == before


WRONG = [{"custom_id": "x"}, line("a", url="/v1/nowhere")]


@pytest.mark.parametrize(
    "lines, options, expected",
    [
        ([line("a"), "{"], [], 0),
        ([line("a"), "{"], ["--fail-on-error"], 1),
        ([line("a")], ["--fail-on-error"], 0),
        (WRONG, [], 0),  # requests, each with a mistake
        (WRONG, ["--fail-on-error"], 1),
        (WRONG, ["--max-errors", "1"], 1),  # no line is left that a stop would spare
        (WRONG, ["--max-errors", "2"], 0),
        (["{", "[1]", {"model_type": "llama"}, {"custom_id": 3}], [], 1),
    ],
)
def test_the_exit_code_is_the_same_when_the_output_is_finished(
    command, files, lines, options, expected
):
    text = [entry if isinstance(entry, str) else json.dumps(entry) for entry in lines]
    files[0].write_text("\n".join(text))
    first, again = command(*options), command(*options)
    assert (first[0], again[0]) == (expected, expected)
    assert first[2].count("\n") == again[2].count("\n") == 1
    said = "every line got an error, the first one: " in first[2]
    assert said == (lines is WRONG)
    assert len(read(files[1])) == len(lines)


def test_a_file_without_requests_is_told_what_a_request_looks_like(command, files):
    files[0].write_text('{"model_type": "llama"}\n[1]\n')
    code, out, err = command("--json")
    assert (code, json.loads(out)["num_requests"]) == (1, 0)
    assert err == (
        f"hybrid-jax: run-batch: {files[0]} holds no requests: none of its 2 lines has a custom_id that "
        'can be read. A request looks like {"custom_id": "a", "method": "POST", "url": "/v1/completions", '
        f'"body": {{"prompt": "Hello"}}}}; {files[1]} says what is wrong with each line\n'
    )
    assert [answer["error"]["code"] for answer in read(files[1])] == [
        "missing_required_parameter",
        "invalid_json_line",
    ]
    files[0].write_text(err[err.index("{") : err.index("; ")])
    files[1].unlink()
    assert command("--fail-on-error")[0] == 0  # what it looks like is one


def test_a_finished_output_is_counted_again(files, llm):
    write(files[0], [line("a"), line("a"), {}])
    done = run_batch(*files, llm)
    again = run_batch(*files, llm)
    counts = "num_lines num_requests num_errors prompt_tokens completion_tokens".split()
    assert [getattr(again, name) for name in counts] == [getattr(done, name) for name in counts]
    assert (again.num_requests, again.num_errors, again.already_finished) == (2, 2, True)
    assert (done.default_temperature, again.default_temperature) == (1.0, None)


def test_the_summary_says_the_temperature_of_lines_that_give_none(command, fake_model):
    (fake_model / "generation_config.json").write_text('{"temperature": 0.25}')
    assert command()[2].endswith("; temperature 0.25 where a line gives none\n")


@pytest.mark.parametrize("spoiled", ["{}", '{"custom_id": "b", "response": null, "error": null}'])
def test_a_line_in_the_middle_of_a_finished_output_is_checked(command, files, spoiled):
    write(files[0], [line("a"), line("b"), line("c")])
    command()
    lines = files[1].read_text().splitlines()
    files[1].write_text("\n".join([lines[0], spoiled, lines[2], ""]))
    code, _, err = command()
    assert (code, f"line 2 of {files[1]} is not the answer to request 2" in err) == (2, True)


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
        ({"output": "/nowhere/out.jsonl"}, "there is no directory /nowhere; make it first"),
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
        f"hybrid-jax: --chat-template {template}: is not valid UTF-8, it has byte 0xff at character 2; "
        "convert it first\n"
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
    assert f"{files[1]} exists and has 2 lines, {files[0]} has 1; delete it" in err
    assert files[1].read_text() == "{}\n{}\n"


def test_a_full_disk_is_one_line_and_the_next_run_goes_on(files):
    source, output = files
    write(source, mixed_lines(60))
    code, out, err = finish(start(files, HYBRID_JAX_TEST_FILE_LIMIT="20000"))
    assert (code, out) == (1, "")
    *warned, last = err.splitlines()  # compiled programs are not kept either
    assert last.startswith(f"hybrid-jax: run-batch: File too large: {partial_path(output)}")
    assert "lines written before are kept, the same command goes on from there" in last
    assert all(line.startswith("hybrid-jax: compiled programs are not kept") for line in warned)
    assert os.stat(partial_path(output)).st_size == 20_000
    code, out, _ = finish(start(files, "--json"))
    assert code == 0
    assert 10 < json.loads(out)["num_resumed"] < 60
    whole = output.with_name("whole.jsonl")
    finish(start((source, whole)))
    assert answers(output) == answers(whole)


def test_an_input_that_changes_meanwhile_is_noticed(command, files, monkeypatch):
    source, output = files
    write(source, [line(f"{index}") for index in range(2 * READ_LINES)])
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


def test_an_llm_of_its_own_takes_no_options(llm, tmp_path):
    with pytest.raises(ValueError, match="the LLM exists already, so max_rows comes too late"):
        run_batch(tmp_path / "in", tmp_path / "out", llm, max_rows=3)
    assert isinstance(llm, LLM)

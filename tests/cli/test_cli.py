"""The command line in process, over the scripted engine; once as a real program."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import jax
import pytest
import typer

from hybrid_jax import LLM, SamplingParams, machine
from hybrid_jax.cli import main as cli
from hybrid_jax.cli.exits import write_json
from hybrid_jax.inspection import report as inspecting
from hybrid_jax.models.known import known
from hybrid_jax.sizing import devices
from hybrid_jax.sizing.devices import cards
from tests.api.fake_engine import FakeEngine
from tests.drawing import EVERYTHING

BAMBA = {
    "model_type": "bamba",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def run(fake_model, run_command):
    """Runs a command beside a model that needs no weights."""
    return run_command


@pytest.fixture
def generate(run, fake_model):
    return lambda *arguments: run("generate", "--model", fake_model, *arguments)


# --- generate -------------------------------------------------------------------------------------


def test_one_prompt_streams_its_text_alone(generate):
    assert generate("ab", "--max-tokens", 9) == (0, "The quick\n", "")


@pytest.mark.parametrize("rows", [1, 8])
def test_several_prompts_come_out_in_order(generate, rows):
    code, out, _ = generate("ab", "cd", "--max-tokens", 9, "--max-rows", rows)
    assert (code, out) == (0, "--- 1 of 2 ---\nThe quick\n--- 2 of 2 ---\nThe quick\n")


def test_options_reach_the_sampler(generate, monkeypatch):
    seen = []
    monkeypatch.setattr(FakeEngine, "add", lambda self, request: seen.append(request))
    monkeypatch.setattr(FakeEngine, "has_work", False)
    options = {"max-tokens": 9, "temperature": 0.5, "top-k": 3, "top-p": 0.75, "seed": 4}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    generate("ab", *words, "--stop", "x", "--stop", "y", "--ignore-eos")
    [request] = seen
    params = request.params
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 3, 0.75)
    assert (params.stop, params.ignore_eos, params.max_tokens) == (("x", "y"), True, 9)
    assert request.stop_ids == frozenset()


def test_a_schema_and_a_regex_reach_the_sampler(generate, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(FakeEngine, "add", lambda self, request: seen.append(request))
    monkeypatch.setattr(FakeEngine, "has_work", False)
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    generate("ab", "--json-schema", schema)
    generate("ab", "--regex", "a+")
    forms = [request.params.structured_outputs for request in seen]
    assert [(form.kind, form.value) for form in forms] == [
        ("json", '{"type": "integer"}'),
        ("regex", "a+"),
    ]
    assert all(request.constraint is not None for request in seen)
    code, out, err = generate("ab", "--json-schema", schema, "--regex", "a+")
    assert (code, out) == (2, "") and "--json-schema and --regex exclude each other; leave" in err
    schema.write_bytes(b"\xff")
    code, out, err = generate("ab", "--json-schema", schema)
    assert (code, out) == (2, "") and "is not valid UTF-8, it has byte 0xff at character 0" in err
    schema.write_text("[")
    code, out, err = generate("ab", "--json-schema", schema)
    assert (code, out) == (2, "") and "schema.json: must be a JSON schema (Expecting value" in err


def test_the_seed_changes_the_requests_seed(generate, monkeypatch):
    seeds = []
    add = FakeEngine.add
    monkeypatch.setattr(FakeEngine, "add", lambda s, r: (seeds.append(r.seed), add(s, r)))
    for seed in (1, 1, 2):
        generate("ab", "--max-tokens", 1, "--seed", seed)
    assert seeds[0] == seeds[1] != seeds[2]


def test_json_is_one_object_on_stdout(generate):
    code, out, err = generate("ab", "--max-tokens", 4, "--json", "--n", 2)
    result = json.loads(out)
    assert (code, err) == (0, "")
    [output] = result["outputs"]
    assert [c["text"] for c in output["outputs"]] == ["The ", "quic"]
    assert output["metrics"]["num_generation_tokens"] == 8
    assert result["stats"]["requests"] == 1
    assert result["temperature"] == 1
    assert json.loads(generate("ab", "--temperature", 0.5, "--json")[1])["temperature"] == 0.5


def test_stats_go_to_stderr(generate):
    code, out, err = generate("ab", "--max-tokens", 9, "--stats")
    assert (code, out) == (0, "The quick\n")
    assert "ttft ms" in err
    assert re.search(r"^  engine_steps +2", err, re.M) and "Other" in err
    assert "temperature: 1\n" in err


def test_the_models_own_temperature_is_shown(generate, fake_model):
    (fake_model / "generation_config.json").write_text('{"do_sample": false}')
    _, out, err = generate("ab", "--max-tokens", 9, "--stats", "--json")
    assert json.loads(out)["temperature"] == 0
    assert "temperature: 0\n" in err


# --- how long a text gets -------------------------------------------------------------------------

STOPPED = "hybrid-jax: note: stopped at 256 new tokens; --max-tokens N allows more\n"


@pytest.fixture
def long_model(fake_model, monkeypatch):
    """A model for sequences of 300 tokens."""
    monkeypatch.setattr(FakeEngine, "max_len", 300)
    return fake_model


@pytest.mark.parametrize("options", [[], ["--json"], ["--n", 2], ["--stats"]])
def test_a_text_stops_at_256_tokens_and_one_line_says_so(run, long_model, options):
    code, out, err = run("generate", "--model", long_model, "ab", "c" * 44, *options)
    assert code == 0
    assert err.count(STOPPED) == 1 and err.endswith(STOPPED)
    assert err == STOPPED or "--stats" in options
    text = (FakeEngine.script.decode() * 7)[:256]
    assert text in out and (FakeEngine.script.decode() * 7)[:257] not in out


@pytest.mark.parametrize(
    "prompt_len, options, num_tokens",
    [
        (2, ["--max-tokens", 270], 270),
        (2, ["--max-tokens", 256], 256),
        (44, [], 256),  # just as many as fit
        (100, [], 200),
        (299, [], 1),
        (2, ["--stop", "lazy"], 39),
    ],
)
def test_nothing_is_said_where_the_default_cut_nothing_off(
    run, long_model, prompt_len, options, num_tokens
):
    given = ("generate", "--model", long_model, "--json", "x" * prompt_len, *options)
    code, out, err = run(*given)
    [completion] = json.loads(out)["outputs"][0]["outputs"]
    assert (code, err, len(completion["token_ids"])) == (0, "", num_tokens)


def test_each_prompt_gets_what_fits_behind_it(run, long_model):
    _, out, err = run("generate", "--model", long_model, "--json", "ab", "x" * 290)
    lengths = [len(found["outputs"][0]["token_ids"]) for found in json.loads(out)["outputs"]]
    assert (lengths, err) == ([256, 10], STOPPED)


def test_the_models_own_limit_comes_before_the_default(run, long_model):
    (long_model / "generation_config.json").write_text('{"max_new_tokens": 280}')
    for prompt_len, num_tokens in ((2, 280), (50, 250)):
        _, out, err = run("generate", "--model", long_model, "--json", "x" * prompt_len)
        [completion] = json.loads(out)["outputs"][0]["outputs"]
        assert (len(completion["token_ids"]), err) == (num_tokens, "")


def test_the_library_goes_on_to_the_longest_sequence(long_model):
    [output] = LLM(long_model, quiet=True).generate("ab")
    assert len(output.outputs[0].token_ids) == 298


def test_a_dash_reads_stdin(generate, monkeypatch):
    monkeypatch.setattr("sys.stdin", type("Stdin", (), {"read": lambda self: "from stdin"})())
    _, out, _ = generate("-", "--json", "--max-tokens", 1)
    assert json.loads(out)["outputs"][0]["prompt"] == "from stdin"


# --- exits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["generate", ""], "prompt 0: is empty"),
        (["generate", "x" * 300], "prompt 0: has 300 tokens"),
        (["generate", "ab", "--temperature", "-1"], "temperature must be 0 or a number"),
        (["generate", "ab", "--memory", "lots"], "memory: a size must look like 5GB"),
        (["generate", "ab", "--cache", "best"], "cache must be one of off, lru,"),
        (["generate", "ab", "--dtype", "int4"], "dtype must be"),
        (["generate", "ab", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["generate", "ab", "--colour", "red"], "No such option: --colour"),
        (["generate"], "Missing argument 'PROMPT...'"),
        (["dance"], "No such command 'dance'"),
        (["generate", "ab", "--temperature", "abc"], "Invalid value for '--temperature': "),
        (["generate", "ab", "--temperature", "abc"], "'abc'"),
        (["generate", "ab", "--max-tokens", 0], "--max-tokens must be an integer of at least 1, "),
        (
            ["generate", "ab", "--seed", -1],
            "--seed must be an integer between 0 and 9223372036854775807, got -1",
        ),
        (
            ["generate", "ab", "--memory", "1000TB"],
            "does not fit: weights 17.1 KiB (float32) + memory 909 TiB",
        ),
        (["generate", "a\udcffb"], "prompt 0: is not valid UTF-8, it has byte 0xff at character 1"),
        (["generate", "ab", "--regex", "(a"], "regex '(a' cannot be followed: unclosed group"),
        (["generate", "ab", "--regex", ""], "--regex must be made of non-empty text, got"),
        (
            ["generate", "ab", "--json-schema", "/nowhere"],
            "--json-schema /nowhere: No such file or directory",
        ),
        (["inspect", "/nowhere"], "/nowhere is not a model directory"),
        (["inspect", "org/name"], "nothing is downloaded: `hf download org/name"),
        (["inspect", "--dtype", "int4"], "--dtype must be auto, float32 or bfloat16, got 'int4'"),
        (
            ["inspect", "--memory", "1MB"],
            "--memory must hold the rings and logits of 8 rows and one short",
        ),
        (
            ["inspect", "--device", "h200", "--host-memory", "900GiB"],
            "--host-memory of 900 GiB does not fit: with copies on their way it takes 916 GiB",
        ),
    ],
)
def test_a_callers_mistake_is_one_line_and_code_2(run, fake_model, arguments, message):
    if arguments[0] == "generate":
        arguments = [*arguments, "--model", fake_model]
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("hybrid-jax: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["inspect", "generate"])
def test_a_file_that_may_not_be_read_is_a_callers_mistake(run, fake_model, monkeypatch, command):
    def refuse(self, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    (fake_model / "generation_config.json").write_text("{}")
    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    arguments = [fake_model] if command == "inspect" else ["ab", "--model", fake_model]
    code, out, err = run(command, *arguments)
    assert (code, out) == (2, "")
    file = fake_model / "generation_config.json"
    assert err == f"hybrid-jax: {file} cannot be read: Permission denied\n"


def test_a_model_without_a_tokenizer_or_a_template_is_told_in_words_of_the_command(
    generate, fake_model
):
    code, _, err = generate("ab", "--chat")
    assert (code, err) == (
        2,
        f"hybrid-jax: generate: --chat: {fake_model} has no chat template; give one with --chat-template FILE, or "
        "continue plain text with `hybrid-jax generate`\n",
    )
    (fake_model / "tokenizer.json").unlink()
    code, _, err = generate("ab")
    assert (code, "has no tokenizer.json, so it takes no text; put one beside" in err) == (2, True)


def test_equal_completions_are_noted_once(generate):
    code, out, err = generate("ab", "--n", 2, "--temperature", 0, "--max-tokens", 1)
    assert (code, err.count("\n")) == (0, 1)
    assert "note: at temperature 0 the completions of a prompt are all the same" in err
    assert generate("ab", "--n", 2, "--max-tokens", 1)[2] == ""


def test_the_version_has_two_spellings_and_json(run):
    assert run("--version") == run("version") == (0, "0.1.0\n", "")
    code, out, _ = run("version", "--json")
    assert (code, json.loads(out)["version"]) == (0, "0.1.0")


def test_stdin_that_is_no_utf8_is_named(fake_model):
    command = [sys.executable, "-c", "import hybrid_jax.cli.main as c; c.main(['generate', '-'])"]
    done = subprocess.run(command, input=b"ok\xff", capture_output=True)
    assert done.returncode == 2
    message = (
        b"hybrid-jax: prompt 0: is not valid UTF-8, it has byte 0xff at character 2; convert it"
    )
    assert done.stderr.startswith(message)


def test_a_closed_stdin_is_named():
    command = f"{sys.executable} -m hybrid_jax generate - <&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    message = "hybrid-jax: generate: stdin is closed, but a prompt should be read from it\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize(
    "arguments, redirect, message",
    [
        ("version", ">&-", "hybrid-jax: stdout is closed\n"),
        ("generate ab", ">&-", "hybrid-jax: stdout is closed\n"),
        ("version", "> /dev/full", "hybrid-jax: cannot write to stdout: No space left on device\n"),
        ("inspect", "> /dev/full", "hybrid-jax: cannot write to stdout: No space left on device\n"),
        ("inspect --json", "2>&- > /dev/full", ""),
        ("--help", ">&-", "hybrid-jax: stdout is closed\n"),
        ("--help", "> /dev/full", "hybrid-jax: cannot write to stdout: No space left on device\n"),
        ("chat --help", "2> /dev/full > /dev/full", ""),
    ],
)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_stdout_that_takes_nothing_is_named(arguments, redirect, message):
    command = f"{sys.executable} -m hybrid_jax {arguments} {redirect}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


@pytest.mark.parametrize(
    "arguments, names",
    [
        ("--help", sum(cli.NAMES.values(), [])),
        ("generate --help", ["--model", "--max-tokens", "--stats"]),
        ("version", []),
    ],
)
def test_commands_run_without_docstrings_and_assertions(arguments, names):
    command = [sys.executable, "-OO", "-m", "hybrid_jax", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(names) <= set(re.findall(r"^  (\S+)", done.stdout, re.M))


def test_a_mistake_is_exit_code_2_where_stderr_takes_nothing():
    command = f"{sys.executable} -m hybrid_jax inspect nowhere 2> /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")


def test_json_keeps_characters_that_stdout_cannot_show(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    write_json({"text": "5 \N{EURO SIGN}"})
    assert json.loads(raw.getvalue()) == {"text": "5 \N{EURO SIGN}"}


def test_a_device_that_is_full_is_a_callers_mistake(generate, monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr("hybrid_jax.api.starting.Engine", refuse)
    code, _, err = generate("ab")
    assert (code, "no room for arena, rings and tables; lower --memory or --max-rows" in err) == (
        2,
        True,
    )


def test_a_mistake_of_ours_shows_its_traceback_and_code_1(generate, monkeypatch):
    monkeypatch.setattr(FakeEngine, "step", lambda self: json.loads("{"))  # a library's ValueError
    code, _, err = generate("ab")
    assert code == 1
    assert "Traceback" in err
    assert "JSONDecodeError" in err


def test_ctrl_c_is_quiet(generate, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeEngine, "step", interrupt)
    code, out, err = generate("ab")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_a_closed_pipe_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hybrid_jax", "version"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# --- inspect --------------------------------------------------------------------------------------


@pytest.fixture
def bamba(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BAMBA))
    return tmp_path


def test_inspect_reads_a_config_without_weights(run, bamba):
    code, out, err = run("inspect", bamba, "--memory", "20GiB", "--dtype", "bfloat16", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["layers"] == {"Mamba2": 29, "MLP": 32, "Attention": 3}
    assert abs(report["parameters"] - 9.78e9) < 0.02e9
    kept = 29 * 3 * 128  # A_log, D and dt_bias stay float32
    assert report["weight_bytes"] == 2 * report["parameters"] + 2 * kept
    assert report["kv_bytes_per_token"] == 3 * 2 * 8 * 128 * 2
    states = 29 * 128 * 64 * 128 * 4
    assert states < report["checkpoint_bytes"] < 1.03 * states
    assert report["fit"]["memory"] == 20 * 2**30
    rows = {int(length): count for length, count in report["fit"]["rows"].items()}
    for length, count in rows.items():
        need = count * (length * report["kv_bytes_per_token"] + report["checkpoint_bytes"])
        assert 0.7 * 20 * 2**30 < need < 20 * 2**30 or count < 4
    assert list(rows.values()) == sorted(rows.values(), reverse=True)


def test_inspect_for_people(run, bamba):
    code, out, _ = run("inspect", bamba, "--dtype", "bfloat16")
    assert code == 0
    assert (
        "bfloat16, stored as bfloat16 (auto: float32 on a CPU, elsewhere as stored, and bfloat16 for float16)"
        in out
    )
    assert "checkpoint" in out
    assert "12 KiB a token" in out
    assert "A prompt can resume where a checkpoint stands" in out
    assert "8 rows of up to 4,096 tokens; less where that is more than 1/4 of a host's RAM" in out


def test_inspect_takes_the_dtype_that_generate_would(run, bamba, monkeypatch):
    dtypes = []
    for accelerator in (False, True):
        monkeypatch.setattr(inspecting, "has_accelerator", lambda answer=accelerator: answer)
        dtypes.append(json.loads(run("inspect", bamba, "--json")[1])["dtype"])
    assert dtypes == ["float32", "bfloat16"]


def test_a_small_machine_bounds_the_default(run, bamba, monkeypatch):
    a_host(monkeypatch, 64 * 2**30)
    report = json.loads(run("inspect", bamba, "--max-rows", 64, "--json")[1])
    assert report["fits"]
    # the quarter of the RAM is more than half of what 36.4 GiB of weights leave
    assert 13 * 2**30 < report["fit"]["memory"] <= 14 * 2**30 < report["default_memory"]


def a_host(monkeypatch, ram, *, widens=False):
    """A machine without an accelerator."""
    monkeypatch.setattr(devices, "ram_bytes", lambda: ram)
    monkeypatch.setattr(devices, "widens_bfloat16", lambda: widens)
    monkeypatch.setattr(inspecting, "has_accelerator", lambda: False)


def test_inspect_says_that_a_model_does_not_fit_and_how_it_would(run, bamba, monkeypatch):
    a_host(monkeypatch, 24 * 2**30)
    code, out, err = run("inspect", bamba)
    assert (code, err) == (0, "")
    [line] = [line for line in out.splitlines() if line.startswith("this machine")]
    assert re.search(
        r"does not fit; weights 36.4 GiB \(float32\) \+ memory at least .* for 8 rows \+ temporaries .* "
        r"= 3[78].* GiB, of 24 GiB; use --dtype bfloat16 \(18.2 GiB of weights\)$",
        line,
    )
    report = json.loads(run("inspect", bamba, "--json")[1])
    assert (report["fits"], report["machine_bytes"]) == (False, 24 * 2**30)
    assert report["remedy"] == "use --dtype bfloat16 (18.2 GiB of weights)"
    assert report["fit"]["memory"] == report["default_memory"]
    advised = json.loads(run("inspect", bamba, "--dtype", "bfloat16", "--json")[1])
    assert (advised["fits"], advised["remedy"]) == (True, None)
    assert advised["needed_bytes"] <= 24 * 2**30


def test_bfloat16_is_no_remedy_where_its_weights_are_widened(run, bamba, monkeypatch):
    a_host(monkeypatch, 24 * 2**30, widens=True)
    report = json.loads(run("inspect", bamba, "--json")[1])
    assert report["remedy"].startswith("use a smaller model or a machine with at least 37.4 GiB")
    report = json.loads(run("inspect", bamba, "--dtype", "bfloat16", "--json")[1])
    assert not report["fits"] and report["temporary_bytes"] > 36 * 2**30


def test_inspect_answers_for_settings_that_are_too_large(run, bamba, monkeypatch):
    a_host(monkeypatch, 64 * 2**30)
    for given, option in [
        (("--max-rows", 10**9), "--max-rows"),
        (("--memory", "60GiB"), "--memory"),
    ]:
        code, out, _ = run("inspect", bamba, *given, "--json")
        report = json.loads(out)
        assert (code, report["fits"]) == (0, False)
        advice = re.fullmatch(rf"use (?:--dtype .* or )?at most {option} (\S+)", report["remedy"])[
            1
        ]
        better = json.loads(run("inspect", bamba, option, advice, "--json")[1])
        assert better["fits"]


def test_the_memory_of_a_gpu_is_asked_of_its_driver(run, bamba, monkeypatch):
    monkeypatch.setattr(inspecting, "has_accelerator", lambda: True)
    monkeypatch.setattr(devices, "nvidia_gpu", lambda: None)
    report = json.loads(run("inspect", bamba, "--json")[1])
    assert (report["fits"], report["machine_bytes"], report["remedy"]) == (None, None, None)
    assert report["shares"] == []
    assert "this GPU         its memory is not known here; weights 18.2" in run("inspect", bamba)[1]
    monkeypatch.setattr(devices, "nvidia_gpu", lambda: machine.Nvidia(143_771 << 20, 0, "9.0"))
    report = json.loads(run("inspect", bamba, "--json")[1])
    assert report["fits"] and report["machine_bytes"] == int(0.95 * (143_771 << 20))
    assert "this GPU         fits; weights 18.2" in run("inspect", bamba)[1]


CARD_MODELS = sorted(known())[:: 1 if EVERYTHING else 3]
SOME_CARDS = sorted(cards(), key=cards().__getitem__)[:: 1 if EVERYTHING else 5]  # small to large


@pytest.mark.parametrize("name", CARD_MODELS)
def test_what_fits_a_card_adds_up_to_its_bytes(run, name):
    for card in SOME_CARDS:
        code, out, _ = run("inspect", name, "--device", card, "--json")
        report = json.loads(out)
        assert code == 0 and (report["platform"], report["device"]) == ("gpu", card)
        assert bool(report["shares"]) == report["fits"] or not report["fits"]
        for share in report["shares"]:
            sizes = [value for key, value in share.items() if key.endswith("_bytes")]
            assert sum(sizes) == cards()[card][0] and min(sizes) >= 0
            assert share["rows"] == report["fit"]["rows"][str(share["tokens"])]
    text = run("inspect", name, "--device", "h200")[1]
    table = text.partition("where memory goes:\n")[2].splitlines()
    shares = json.loads(run("inspect", name, "--device", "h200", "--json")[1])["shares"]
    if not shares:  # it does not fit
        assert table == []
        return
    assert len(table) == 1 + len(shares)
    assert table[0].split()[:2] == ["tokens", "rows"] and table[1].endswith("140 GiB")


@pytest.mark.parametrize("asked", [("--max-rows", "1000000"), ("--memory", "900GiB")])
@pytest.mark.parametrize("name", CARD_MODELS)
def test_what_is_advised_for_a_card_fits_it(run, name, asked):
    for card in SOME_CARDS:
        command = ("inspect", name, "--device", card, "--json")
        report = json.loads(run(*command, *asked)[1])
        assert report["fits"] is False
        advice = report["remedy"].partition("use ")[2].replace("at most ", "")
        for change in advice.split(" or ") if advice.startswith("--") else ():
            changed = [word for word in change.split() if word != "and"]
            rest = () if asked[0] in changed else asked
            again = json.loads(run(*command, *rest, *changed)[1])
            assert again["fits"], (card, change, again["needs"])


def test_a_card_whose_kernels_cannot_read_fp8_is_refused_by_name(run):
    code, out, err = run("inspect", "hybrid_7b", "--device", "a100", "--kv-cache-dtype", "fp8")
    assert (code, out) == (2, "") and err == (
        "hybrid-jax: --kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or more (Ada, Hopper, "
        "Blackwell), found 8.0 (a100); leave it out, or take --kernels xla, which is slower\n"
    )
    assert (
        run(*"inspect hybrid_7b --device a100 --kv-cache-dtype fp8 --kernels xla".split())[0] == 0
    )
    command = ("inspect", "hybrid_7b", "--device", "l40s")
    code, out, _ = run(*command, "--kv-cache-dtype", "fp8")
    assert code == 0 and "\nkernels          Pallas\n" in out


def test_a_gpu_that_is_not_there_is_no_answer(run, bamba, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(machine, "glob", lambda pattern: [])
    monkeypatch.setattr(machine, "nvidia_gpu", lambda: None)
    code, _, err = run("inspect", bamba)
    assert code == 2 and err == (
        "hybrid-jax: JAX_PLATFORMS=cuda asks for a GPU, and this machine has none; name a card, as in "
        "--device h100, or unset it\n"
    )
    assert run("inspect", bamba, "--device", "h100")[0] == 0
    monkeypatch.setattr(machine, "nvidia_gpu", lambda: machine.Nvidia(143_771 << 20, 0, "9.0"))
    assert run("inspect", bamba)[0] == 0


def test_a_device_that_is_in_no_list_is_told_by_its_memory(run, bamba):
    total, *_ = cards()["h100"]
    by_size = json.loads(run("inspect", bamba, "--device-memory", total, "--json")[1])
    by_name = json.loads(run("inspect", bamba, "--device", "h100", "--json")[1])
    assert by_size["device"] == "GPU" and by_size["shares"] == by_name["shares"]
    assert by_size["total_bytes"] == total and by_size["platform"] == "gpu"
    larger = json.loads(
        run("inspect", bamba, "--device", "h100", "--device-memory", "94GB", "--json")[1]
    )
    assert (larger["device"], larger["total_bytes"]) == ("h100", 94 * 10**9)
    code, out, _ = run("inspect", bamba, "--device-memory", "8GB")
    assert code == 0 and out.startswith("GPU             does not fit; weights 18.2 GiB")
    host = json.loads(
        run("inspect", bamba, "--device", "cpu", "--device-memory", "64GiB", "--json")[1]
    )
    assert (host["platform"], host["machine_bytes"], host["total_bytes"]) == ("cpu", 2**36, None)
    older = run("inspect", bamba, "--device-memory", "32GB", "--capability", "7.0", "--json")[1]
    assert (json.loads(older)["kernels"], json.loads(older)["capability"]) == ("xla", "7.0")
    code, _, err = run("inspect", bamba, "--device-memory", "24")
    assert code == 2 and "--device-memory: 24 are 24 B, which no device has" in err
    code, _, err = run("inspect", bamba, "--device-memory", "24Gb")
    assert code == 2 and "--device-memory: a size must look like 5GB" in err and "'24Gb'" in err


def test_a_card_s_name_may_have_large_letters(run, bamba):
    assert run("inspect", bamba, "--device", "H100") == run("inspect", bamba, "--device", "h100")


@pytest.mark.parametrize("grain", ["0", "-1", "12"])
def test_a_wrong_grain_is_named_for_a_card_too(run, bamba, grain):
    code, _, err = run("inspect", bamba, "--device", "h100", "--grain", grain)
    assert code == 2 and "--grain must be a power of two between 8 and 64" in err


def test_a_card_that_nobody_knows_is_refused_with_those_that_are_known(run, bamba):
    code, _, err = run("inspect", bamba, "--device", "k80")
    assert code == 2 and err == (
        f"hybrid-jax: --device must be cpu or one of the known cards, {', '.join(sorted(cards()))}; got 'k80'; "
        "for another NVIDIA GPU give --device-memory 24GB, or what it has\n"
    )


def test_more_memory_than_a_card_has_does_not_fit(run, bamba):
    code, out, _ = run("inspect", bamba, "--device", "h100", "--memory", "100GiB")
    assert code == 0
    (line,) = (line for line in out.splitlines() if line.startswith("h100"))
    assert out.startswith(line)
    assert "does not fit; weights 18.2 GiB (bfloat16) + memory 100 GiB" in line
    assert "of 75.1 GiB (95% of the card's 79.1 GiB; the rest is for CUDA); use at most" in line
    assert not re.search("^(budget|most rows|longest context)", out, re.M)  # of what cannot be
    more = run("inspect", bamba, "--device", "h100", "--memory", "900TiB")[1]
    assert "memory 900 TiB for 256 rows" in more
    pages = (out, run("inspect", bamba, "--device", "h100")[1])
    assert len({re.search("^default memory +(.*)$", page, re.M)[1] for page in pages}) == 1


def test_pages_longer_than_the_longest_sequence_are_refused(run, bamba):
    code, _, err = run("inspect", bamba, "--device", "h100", "--page-tokens", 1 << 20)
    assert code == 2 and err == (
        "hybrid-jax: --page-tokens must be at most the model's longest sequence, 262144 tokens, got 1048576\n"
    )
    assert "--memory: a size must look like" in run("inspect", bamba, "--memory", "")[2]


def test_generate_refuses_in_the_words_of_the_command_line(run, fake_model, monkeypatch):
    monkeypatch.setattr(devices, "ram_bytes", lambda: 2**30)
    code, _, err = run("generate", "ab", "--memory", "2GiB", "--model", fake_model)
    assert code == 2
    assert re.search(r"and this machine has 1 GiB; use at most --memory \d+MiB\n", err)


def test_inspect_runs_as_a_program_without_jax(bamba):
    script = (
        "import sys, hybrid_jax.cli.main as c\n"
        "try: c.main(['inspect', sys.argv[1]])\n"
        "finally: print('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, bamba], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n")
    module = subprocess.run(
        [sys.executable, "-m", "hybrid_jax", "version"], capture_output=True, text=True, check=True
    )
    assert module.stdout.strip() == "0.1.0"


def test_inspect_refuses_a_cut_after_the_last_layer(run):
    code, _, err = run("inspect", "nemotron_h_8b", "--device", "h200", "--cut", 52)
    assert code == 2 and "--cut must be below the number of layers, 52, got 52" in err


def test_inspect_shows_what_groups_after_a_cut_take(run):
    command = ("inspect", "nemotron_h_8b", "--device", "h200", "--cut", 26)
    found = json.loads(run(*command, "--json")[1])
    assert (found["cut"], found["kv_group"], found["state_group"], found["num_layers"]) == (
        26,
        1,
        1,
        52,
    )
    token, checkpoint = found["kv_bytes_per_token"], found["checkpoint_bytes"]
    assert found["groups"]["kv_group"] == {"1": token, "2": token * 3 // 4}
    states = found["groups"]["state_group"]
    assert states["1"] == checkpoint and list(states) == ["1", "2", "3", "4", "6", "12"]
    assert states["12"] == pytest.approx(checkpoint * 13 / 24, rel=0.01)
    shown = run(*command)[1]
    assert re.search(
        r"^cut +after layer 26 of 52; saves 43% of the FLOPs of a prompt of 4,096 tokens$",
        shown,
        re.M,
    )
    assert re.search(r"^KV by kv_group +1: 16 KiB, 2: 12 KiB$", shown, re.M)
    grouped = json.loads(run(*command, "--kv-group", 2, "--state-group", 12, "--json")[1])
    assert grouped["kv_bytes_per_token"] == token * 3 // 4
    assert grouped["checkpoint_bytes"] == states["12"]
    dense = run("inspect", "llama_3_1_8b_swiftkv", "--device", "h200")[1]
    assert "KV by kv_group" in dense and "checkpoint by" not in dense


def test_inspect_halves_keys_and_values_by_fp8(run):
    command = ("inspect", "llama_3_1_8b", "--device", "h200", "--json")
    wide, narrow = (
        json.loads(run(*command, "--kv-cache-dtype", name)[1]) for name in ("auto", "fp8")
    )
    assert (wide["kv_dtype"], narrow["kv_dtype"]) == ("bfloat16", "float8_e4m3fn")
    assert narrow["kv_bytes_per_token"] / wide["kv_bytes_per_token"] == (128 + 4) / 256
    assert narrow["fit"]["longest_context"] >= wide["fit"]["longest_context"]


def test_train_tiny_passes_its_options_on(run, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(
        "hybrid_jax.train.train_tiny", lambda out, **given: calls.append((out, given)) or {"ok": 1}
    )
    code, out, _ = run("train-tiny", tmp_path, "--steps", 3, "--no-resume", "--json")
    assert (code, json.loads(out)) == (0, {"ok": 1})
    [(folder, given)] = calls
    assert folder == tmp_path
    assert given == {
        "steps": 3,
        "minutes": None,
        "seed": 0,
        "resume": False,
        "batch": 2,
        "context": 2048,
        "config": None,
        "sources": None,
        "progress": False,
    }


def test_train_tiny_without_optax_says_how_to_get_it(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optax", None)
    monkeypatch.delitem(sys.modules, "hybrid_jax.train.loop", raising=False)
    code, _, err = run("train-tiny", tmp_path)
    assert code == 2
    assert "optax is not installed; pip install 'hybrid_jax[train]'" in err


def test_distill_passes_its_options_on(run, monkeypatch, tmp_path):
    calls = []
    far = {"perplexity_ratio": 1.5, "kl": 0.25, "agreement": 0.75}
    record = {"held_out": {"untrained": far, "trained": far | {"kl": 0.125}}}
    monkeypatch.setattr(
        "hybrid_jax.train.distill", lambda *where, **given: calls.append((where, given)) or record
    )
    wanted = ("distill", "--cut", 4, "--state-group", 3, "--out", tmp_path, "--data", "texts")
    more = ("--data", "more")
    code, out, err = run(*wanted, *more, "--loss", "lm", "--minutes", 2)
    assert code == 0
    [(where, given)] = calls
    assert where == (tmp_path, None)
    assert given == {
        "cut": 4,
        "kv_group": 1,
        "state_group": 3,
        "loss": "lm",
        "all_later": False,
        "exit_head": False,
        "steps": None,
        "minutes": 2.0,
        "seed": 0,
        "resume": True,
        "batch": 2,
        "context": 1024,
        "sources": [Path("texts"), Path("more")],
        "progress": True,
        "learning_rate": 0.001,
    }
    first, second = out.splitlines()
    assert first.startswith("untrained: perplexity 1.5000 of the model without a cut, KL 0.2500")
    assert second.startswith("trained:") and "KL 0.1250" in second and "75.0%" in second
    assert f"hybrid-jax generate --model {tmp_path}" in err
    code, out, _ = run(*wanted, "--json")
    assert (code, json.loads(out)) == (0, record)


def test_distill_shows_a_table_of_cuts(run, monkeypatch):
    calls = []
    far = {"flops_saved": 0.5, "perplexity_ratio": 1.25, "kl": 0.25, "agreement": 0.75}
    found = {
        "layers": 3,
        "tokens": 8192,
        "flops_saved_at": 4096,
        "cuts": [{"cut": 1, "sim_score": 0.9} | far, {"cut": 2, "sim_score": None} | far],
        "refused": {"3": "with_cut: no such form"},
    }
    monkeypatch.setattr(
        "hybrid_jax.train.cut_table", lambda model, **given: calls.append((model, given)) or found
    )
    code, out, err = run("distill", "--table", "--model", "M", "--kv-group", 2)
    assert code == 0 and err == "hybrid-jax: no cut 3: no such form\n"
    lines = [line.split() for line in out.splitlines()]
    assert lines[1] == ["1", "50.0%", "0.900", "x1.2500", "0.2500", "75.0%"]
    assert lines[2][2] == "-" and "8,192 held-out" in out
    code, out, _ = run("distill", "--table", "--cut", 2, "--json")
    assert (code, json.loads(out)) == (0, found)
    groups = {"kv_group": 2, "state_group": 1}
    assert calls[0] == ("M", {"cuts": None, "sources": None} | groups)
    assert calls[1] == (None, {"cuts": [2], "sources": None, "kv_group": 1, "state_group": 1})


# --- help -----------------------------------------------------------------------------------------


def test_help_lists_commands_under_headings_with_whole_sentences(run):
    code, out, err = run("--help")
    assert (code, err) == (0, "") and "..." not in out.partition("Use a model:")[2]
    listed = [
        line.split()[0] for line in out.splitlines() if re.match(r"  [a-z]+(-[a-z]+)?  ", line)
    ]
    assert sorted(listed) == sorted(COMMANDS)
    assert out.index("Use a model:") < out.index("Study caches")


COMMANDS = typer.main.get_command(cli.app).commands


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_no_word_of_python(run, command):
    code, out, _ = run(command, "--help")
    options = out.partition("Options:")[2]
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert not re.search(r"<\w+>|list\[|\bNone\b|default: \(", options), options


def test_generate_takes_what_sampling_params_takes():
    params = {param.name for param in COMMANDS["generate"].params}
    params |= {"structured_outputs", "skip_special_tokens"}  # --json-schema and others; --keep-...
    not_for_a_shell = {"detokenize", "output_kind"}
    assert {field.name for field in fields(SamplingParams)} - not_for_a_shell <= params

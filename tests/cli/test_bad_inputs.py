"""What commands say of bad inputs: one line in words of the shell, and the exit code that tells whose mistake it is."""

from __future__ import annotations

import json
import os
import re
import shlex

import pytest
import typer

from hybrid_jax.cli import main as cli
from hybrid_jax.cli.words import flags_of, shell_words
from tests.batch.batch_files import CHAT, line

FILES = {
    "text": b"just words\n",
    "binary": bytes(range(256)),
    "latin": b'{"type": "caf\xe9"}\n',
    "list": b"[1, 2]\n",
    "object": b'{"model_type": "gpt9"}\n',
    "empty": b"",
    "utf16": "{}".encode("utf-16"),
    "trace": b'{"session_id": 0, "turn_id": 0, "ts": 0, "input_tokens": [5], "output_tokens": [6]}',
    "requests": json.dumps(line("a", CHAT)).encode(),
    "type": b'{"type": "colour"}',
    "not": b'{"not": {}}',
    "broken.jinja": b"{% if %}",
    "x.toml": b"= x",
    "x.gz": b"no archive",
}
COMMANDS = typer.main.get_command(cli.app).commands
# Names that only Python code has for what a command calls --like-this.
IDENTIFIERS = {
    name
    for command in COMMANDS.values()
    for name in (param.name for param in command.params)
    if "_" in name
}
PYTHON = re.compile(
    r"\bNone\b|\(\)|=\.\.\.|\bTraceback\b|\bcodec\b|\b\w+='|\bb'|\b(?:True|False)\b"
    r"|\b(?:SamplingParams|EngineConfig|CacheConfig|StructuredOutputsParams|LLM|\w+Error)\b"
    rf"|\b(?:{'|'.join(sorted(IDENTIFIERS))})\b"
)
GENERATE, BATCH = "generate ab --model MODEL", "run-batch -i IN/requests -o IN/out --model MODEL"

# A command line, in which IN is a directory with `FILES` and MODEL one with a model, and what it is answered.
MISTAKES = [
    # commands and options that do not exist, or lack something
    ("dance", "No such command 'dance'"),
    ("Generate ab", "No such command 'Generate'"),
    ("--colour", "No such option: --colour"),
    ("version x", "Got unexpected extra argument"),
    ("generate", "Missing argument 'PROMPT...'"),
    ("generate ab --max-token", "No such option: --max-token; did you mean --max-tokens?"),
    (
        "generate ab --gpu-memory-utilization 0.9",
        "No such option: --gpu-memory-utilization; did you mean --memory (bytes, or a size like '8GiB')?",
    ),
    ("generate ab --temp 1", "No such option: --temp; did you mean --temperature?"),
    ("chat --lora-path D", "No such option: --lora-path; LoRA is not built yet; leave it out"),
    ("generate ab --enforce-eager", "No such option: --enforce-eager; every step is compiled, and kept"),
    ("generate ab --shapes fine", "No such option: --shapes; only the Python interface has it; leave it out"),
    ("inspect --temp 1", "No such option: --temp; see hybrid-jax inspect --help"),
    (f"{GENERATE} --logprobs 3", "--logprobs and --prompt-logprobs are shown by --json only; add it"),
    (f"{GENERATE} --system S", "--system and --chat-template are for conversations; add --chat"),
    (f"{GENERATE} --logit-bias 97", '--logit-bias must be ID=NUMBER, such as 97=-5, got "97"'),
    (f"{GENERATE} --logit-bias 97=much", '--logit-bias must be ID=NUMBER, such as 97=-5, got "97=m'),
    (f"{GENERATE} --regex a --choice b", "--regex and --choice exclude each other; leave one out"),
    (f"{GENERATE} --min-p 2", "--min-p must be a number between 0 and 1, got 2.0"),
    (f"{GENERATE} --repetition-penalty 0", "--repetition-penalty must be"),
    (f"{GENERATE} --stop-token-id 5000", "prompt 0: "),
    (f"{GENERATE} --tokenizer IN", "--tokenizer: IN has no tokenizer.json; name its directory"),
    (f"{GENERATE} --grammar IN/nothing", "--grammar IN/nothing: No such file or directory"),
    ("bench --prompt-tokens 1", "bench: --prompt-tokens must be at least 2, got 1"),
    ("bench --model IN/nothing", "IN/nothing does not exist"),
    ("convert MODEL", "Missing argument 'OUT'"),
    ("convert IN/nothing OUT", "IN/nothing does not exist"),
    ("doctor now", "Got unexpected extra argument"),
    ("chat --model MODEL", "chat: MODEL has no chat template; give one with --chat-template FILE"),
    ("chat --model IN/nothing", "IN/nothing does not exist"),
    ("chat --model MODEL --chat-template IN/broken.jinja", "--chat-template IN/broken.jinja: is not"),
    (f"{BATCH} --max-errors -1", "--max-errors must be at least 0, got -1"),
    ("generate ab --max-tokens", "Option '--max-tokens' requires an argument"),
    (
        "generate ab --max-tokens many",
        "Invalid value for '--max-tokens': must be an integer, got 'many'",
    ),
    ("run-batch", "Missing option '--input'"),
    ("run-batch -i IN/requests", "Missing option '--output'"),
    ("simulate", "Missing option '--trace'"),
    ("train-tiny", "Missing argument 'OUT_DIR'"),
    ("inspect a b", "Got unexpected extra argument"),
    # generate: the model
    ("generate ab --model /nowhere", "/nowhere does not exist; give a model directory"),
    ("generate ab --model org/name", "org/name does not exist; give a model directory; nothing is"),
    ("generate ab --model ''", "a model is the path of a directory, got ''"),
    ("generate ab --model IN/text", "IN/text is a file, not a directory"),
    ("generate ab --model IN", "generate: IN has no tokenizer.json, so it takes no text"),
    # generate: numbers and names
    (f"{GENERATE} --max-tokens 0", "--max-tokens must be an integer of at least 1, got 0"),
    (f"{GENERATE} --max-tokens -5", "--max-tokens must be an integer of at least 1, got -5"),
    (
        f"{GENERATE} --max-tokens 1000",
        "prompt 0: 2 tokens and --max-tokens 1000 exceed the longest sequence of 200; lower --max-tokens to 198",
    ),
    (f"{GENERATE} --temperature -1", "--temperature must be 0 or a number between"),
    (f"{GENERATE} --temperature nan", "--temperature must be 0 or a number between"),
    (f"{GENERATE} --top-k -3", "--top-k must be an integer between -1 and 2147483647, got -3"),
    (f"{GENERATE} --top-p 0", "--top-p must be a number above 0 and at most 1, got 0.0"),
    (f"{GENERATE} --n 0", "--n must be an integer between 1 and 1024, got 0"),
    (f"{GENERATE} --stop ''", "--stop must be non-empty strings, got ''"),
    (f"{GENERATE} --seed -1", "--seed must be an integer between 0 and 9223372036854775807, got -1"),
    (f"{GENERATE} --max-rows 0", "--max-rows must be positive, got 0"),
    (f"{GENERATE} --max-model-len 1", "--max-model-len must be at least 2, a prompt's token and"),
    (f"{GENERATE} --max-model-len 201", "--max-model-len must be at most the model's 200, got 201"),
    (f"{GENERATE} --memory lots", "--memory: a size must look like 5GB, 5GiB"),
    (f"{GENERATE} --memory 0", "--memory: a size must look like 5GB, 5GiB"),
    (f"{GENERATE} --memory 1000TB", "this model does not fit: weights 17.1 KiB (float32) + memory"),
    (f"{GENERATE} --dtype int4", "--dtype must be auto, float32 or bfloat16, got 'int4'"),
    (
        f"{GENERATE} --cache best",
        "--cache must be one of off, lru, sglang, marconi, marconi-code, adaptive, or alpha:X with a number X >= 0, "
        "got 'best'",
    ),
    # generate: prompts and forms
    ("generate '' --model MODEL", "prompt 0: is empty; a prompt needs at least one token"),
    (
        f"generate ab {'x' * 300} --model MODEL",
        "prompt 1: has 300 tokens and needs room for one more, but the longest sequence is 200; shorten it",
    ),
    ("generate a\udcff --model MODEL", "prompt 0: is not valid UTF-8, it has byte 0xff"),
    (f"{GENERATE} --chat", "generate: --chat: MODEL has no chat template; give one with --chat-template FILE"),
    (f"{GENERATE} --regex '('", "prompt 0: --regex '(' cannot be followed"),
    (f"{GENERATE} --regex ''", "--regex must be made of non-empty text, got ''"),
    (f"{GENERATE} --regex a --json-schema IN/type", "--json-schema and --regex exclude each other"),
    (f"{GENERATE} --json-schema /nowhere", "--json-schema /nowhere: No such file or directory"),
    (f"{GENERATE} --json-schema IN", "--json-schema IN: Is a directory"),
    (f"{GENERATE} --json-schema IN/latin", "--json-schema IN/latin: is not valid UTF-8, it has by"),
    (f"{GENERATE} --json-schema IN/text", "--json-schema IN/text: must be a JSON schema"),
    (f"{GENERATE} --json-schema IN/list", "--json-schema IN/list: must be a JSON schema, an object"),
    (f"{GENERATE} --json-schema IN/empty", "--json-schema IN/empty: must be a JSON schema"),
    (f"{GENERATE} --json-schema IN/type", "prompt 0: --json-schema '{\"type\": \"colour\"}' cannot"),
    (f"{GENERATE} --json-schema IN/not", "prompt 0: --json-schema '{\"not\": {}}' cannot be fol"),
    # run-batch
    ("run-batch -i /nowhere -o IN/out --model MODEL", "-i /nowhere: No such file or directory"),
    ("run-batch -i IN -o IN/out --model MODEL", "run-batch: the input must be a regular file"),
    ("run-batch -i IN/empty -o IN/out --model MODEL", "run-batch: IN/empty holds no requests"),
    ("run-batch -i IN/utf16 -o IN/out --model MODEL", "run-batch: IN/utf16 is UTF-16 or UTF-32"),
    ("run-batch -i IN/requests -o IN --model MODEL", "run-batch: the output must be a regular"),
    ("run-batch -i IN/requests -o /nowhere/o --model MODEL", "run-batch: /nowhere/o cannot be written: there"),
    ("run-batch -i IN/requests -o IN/requests --model MODEL", "run-batch: IN/requests is the in"),
    ("run-batch -i IN/requests -o IN/text --model MODEL", "run-batch: line 1 of IN/text is not"),
    ("run-batch -i IN/requests -o IN/out --model /nowhere", "/nowhere does not exist; give a mod"),
    (f"{BATCH} --chat-template /nowhere", "--chat-template /nowhere: No such file or directory"),
    (f"{BATCH} --chat-template IN", "--chat-template IN: Is a directory"),
    (f"{BATCH} --chat-template IN/binary", "--chat-template IN/binary: is not valid UTF-8, it has"),
    (f"{BATCH} --chat-template IN/empty", "--chat-template IN/empty: is empty; give a Jinja templ"),
    (f"{BATCH} --chat-template IN/broken.jinja", "--chat-template IN/broken.jinja: is not a Jinja"),
    (f"{BATCH} --seed -1", "--seed must be an integer between 0 and 9223372036854775807, got -1"),
    (f"{BATCH} --cache no", "--cache must be one of off, lru,"),
    (f"{BATCH} --max-rows many", "Invalid value for '--max-rows'"),
    # inspect
    ("inspect /nowhere", "/nowhere is not a model directory: it does not exist"),
    ("inspect IN", "IN is not a model directory: it has no config.json"),
    ("inspect IN/text", "IN/text is not valid JSON"),
    ("inspect IN/binary", "IN/binary must be plain UTF-8 text, it is UTF-16 or no text; save"),
    ("inspect IN/list", "IN/list must hold an object, got list"),
    ("inspect IN/object", "IN/object: model_type 'gpt9' is not supported; give a model of bamba, "),
    ("inspect --dtype int8", "--dtype must be auto, float32 or bfloat16, got 'int8'"),
    ("inspect --grain 5", "--grain must be a power of two between 8 and 64, got 5"),
    ("inspect --page-tokens 3", "--page-tokens must be a power of two of at least 16, got 3"),
    ("inspect --max-rows 0", "--max-rows must be positive, got 0"),
    ("inspect --memory 1MB", "--memory must hold the rings and logits of 8 rows"),
    # simulate
    ("simulate --trace /nowhere", "--trace /nowhere: No such file or directory"),
    ("simulate --trace IN", "--trace IN: Is a directory"),
    ("simulate --trace IN/binary", "IN/binary: cannot be read as text: it has byte 0x80 at byte 128, which"),
    ("simulate --trace IN/text", "IN/text, line 1: must be one JSON object"),
    ("simulate --trace IN/list", "IN/list, line 1: must be one JSON object, got list"),
    (
        "simulate --trace IN/empty --policy foo",
        "simulate: no policy 'foo'; known are none, vllm, sglang, lru, marconi, marconi-code, seglen, adaptive, ",
    ),
    ("simulate --trace IN/empty --clock arrivals --policy foo", "--policy must be one of off, lru, "),
    ("simulate --trace IN/empty", "IN/empty: a trace must hold at least one request, got none"),
    ("simulate --trace IN/x.gz", "IN/x.gz: cannot be read as text"),
    ("simulate --trace IN/empty --model-spec x", "model spec: no model 'x'; known are bamba_9b"),
    ("simulate --trace IN/empty --model-spec IN/x.toml", "model spec x.toml: Invalid statement"),
    ("simulate --trace IN/empty --capacity x", "--capacity: a size must look like 5GB"),
    ("simulate --trace IN/empty --clock wall", "--clock must be order or arrivals, got 'wall'"),
    ("simulate --trace IN/empty --grain 0", "--grain must be at least 1, got 0"),
    ("simulate --trace IN/empty --max-rows 8", "--max-rows goes with --clock arrivals only, got 8"),
    ("simulate --trace IN/empty --checkpoints x", "--checkpoints must be float32 or int8, got 'x'"),
    (
        "simulate --trace IN/empty --checkpoints int8",
        "--checkpoints int8 needs a model whose recurrent layers are known one by one, got paper_7b",
    ),
    ("generate x --mesh 2", "--mesh must be like 'tp=4', 'dp=2', 'dp=2,tp=2' or 'prefill=1,decode=2', got '2'"),
    ("generate x --mesh tp=2", "tp=2 cannot divide this model: num_heads of Attention layers must be a multiple of"),
    ("generate x --mesh dp=2", "--mesh needs 2 devices (dp=2), and jax has 1 from "),
    ("inspect --mesh tp=0", "--mesh must be like 'tp=4', 'dp=2', 'dp=2,tp=2' or 'prefill=1,decode=2', got 'tp=0'"),
    ("inspect hybrid_7b --device h200 --mesh tp=64", "num_heads of "),
    ("generate x --checkpoints int4", "--checkpoints must be float32 or int8, got 'int4'"),
    ("inspect --checkpoints int4", "--checkpoints must be float32 or int8, got 'int4'"),
    (
        "generate x --checkpoints int8 --exact",
        "--exact does not go with --checkpoints int8, whose states are rounded; leave one out",
    ),
    ("simulate --trace IN/empty --loads x", "--loads must be faster or always, got 'x'"),
    (
        "simulate --trace IN/empty --loads always",
        "--loads goes with --host-memory or --disk-memory only, got always",
    ),
    (
        "simulate --trace IN/empty --host-memory 8GB",
        "--host-memory goes with --clock arrivals only, because the engine's plans move what it holds, got 8GB; add",
    ),
    (
        "simulate --trace IN/empty --disk-memory 8GB",
        "--disk-memory goes with --clock arrivals only, because the engine's plans move what it holds, got 8GB; add",
    ),
    (
        "simulate --trace IN/trace --clock arrivals --disk-memory 8Gb",
        "--disk-memory: a size must look like 5GB, 5GiB (capital B, for bytes) or a positive number",
    ),
    (
        "simulate --trace IN/trace --clock arrivals --disk-memory 1MB",
        "simulate: disk memory must hold a checkpoint and 256 tokens, 41.6 MiB at least, got 976 KiB",
    ),
    (
        "simulate --trace IN/trace --clock arrivals --host-memory 1MB",
        "simulate: host memory must hold two checkpoints, 52 MiB at least, got 976 KiB",
    ),
    (
        "simulate --trace IN/trace --clock arrivals --policy none --disk-memory 8GB",
        "simulate: disk memory keeps what is cached, got 8000000000 bytes of it with policy 'none'; leave",
    ),
    ("simulate --trace IN/empty --ttft-table IN/text", "text: needs two rows at least, got 0"),
    ("simulate --trace IN/empty --cut 4", "model spec: a cut and its groups need a model whose layers"),
    ("simulate --trace IN/empty --kv-group 2", "model spec: a cut and its groups need a model"),
    (
        "simulate --trace IN/empty --kv-group 2 --model-spec nemotron_h_8b",
        "--kv-group and --state-group need a cut, as in --cut 4",
    ),
    ("inspect nemotron_h_8b --cut 60", "--cut must be at least 1 and below the number of layers, 52"),
    ("inspect --state-group 2", "--kv-group and --state-group need a cut"),
    ("inspect --kv-cache-dtype int8", "--kv-cache-dtype must be auto or fp8, got 'int8'"),
    ("inspect llama_3_1_8b_swiftkv --cut 4", "the model has a cut after layer 16 already"),
    # cache
    ("cache", "Missing argument 'ACTION'"),
    ("cache show", "Missing argument 'FOLDER'"),
    ("cache drop IN", "cache: ACTION must be show, prune or verify, got 'drop'"),
    ("cache show /nowhere", "cache: /nowhere does not exist"),
    ("cache show IN/text", "IN/text is a file; give a folder"),
    ("cache show IN", "IN has other files in it, and no hybrid_jax_cache.json; give an empty or a new folder"),
    ("cache show IN --to 5GB", "--to goes with prune only, got 5GB"),
    ("cache prune IN --remove", "--remove goes with verify only"),
    ("generate ab --cache-dir ''", "--cache-dir must be the path of a folder, got ''"),
    ("generate ab --disk-memory 5GB", "--disk-memory must be left out without --cache-dir, got 5000000000"),
    # pool-sim
    ("pool-sim --mode x", "--mode must be paper or honest, got 'x'"),
    ("pool-sim --pool 1KB", "--pool must hold one request of jamba_1_5_mini"),
    ("pool-sim --allocator x", "pool-sim: no allocator 'x'; known are frames"),
    ("pool-sim --workload x", "pool-sim: no workload 'x'; known are uniform_short"),
    ("pool-sim --model-spec IN/text", "pool-sim: no model 'IN/text'; known are jamba_1_5_mini"),
    ("pool-sim --trace IN/text", "IN/text, line 1: columns must be workload,seed,"),
    # train-tiny
    ("train-tiny IN/out --steps 0", "--steps must be positive, got 0"),
    ("train-tiny IN/out --minutes nan", "--minutes must be positive, got nan"),
    ("train-tiny IN/out --seed -1", "--seed must be in [0, 2**32), got -1"),
    ("train-tiny IN/out --context 1", "--context must be between 16 and 32768, got 1"),
    ("train-tiny IN/out --source /nowhere", "a source must be a directory, got '/nowhere'"),
    ("train-tiny IN/text --source IN", "cannot write to IN/text: File exists; give another"),
    # distill
    ("distill --out IN/out", "--cut is missing; --table shows what each cut would"),
    ("distill --cut 4", "--out is missing; --table shows what each cut would"),
    ("distill --table --out IN/out", "--table trains nothing, so it takes no --out"),
    ("distill --table --steps 4 --out IN/out", "--table trains nothing, so it takes no --out and no --steps"),
    ("distill --cut 0 --out IN/out", "--cut must be at least 1 and below the number of layers, 8, got 0"),
    ("distill --cut 8 --out IN/out", "--cut must be below the number of layers, 8, got 8"),
    ("distill --cut 4 --state-group 2 --out IN/out", "--state-group must divide the number of recurrent"),
    ("distill --cut 4 --loss x --out IN/out", "--loss must be 'kl' or 'lm', got 'x'"),
    ("distill --cut 4 --steps 0 --out IN/out", "--steps must be positive, got 0"),
    ("distill --cut 4 --model /nowhere --out IN/out", "/nowhere does not exist; give a model directory"),
    ("distill --cut 4 --data /nowhere --out IN/out", "a source must be a directory, got '/nowhere'"),
    ("distill --cut 4 --out IN/text", "cannot write to IN/text: File exists; give another"),
    ("distill --table --cut 9", "--cut must be at least 1 and below the number of layers, 8, got 9"),
]  # fmt: skip
# Files of lines that are no requests: the output says so of each line, and docs/how_to/batch.md gives the code.
NO_REQUESTS = ["text", "list", "object", "latin", "binary"]


@pytest.fixture
def run(fake_model, tmp_path, capsys):
    """Runs a command line with IN and MODEL in it; returns (exit code, stdout, stderr), with these names again."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    places = {"IN": str(folder), "MODEL": str(fake_model)}

    def run(command):
        for name, path in places.items():
            command = re.sub(rf"\b{name}\b", lambda _, path=path: path, command)
        with pytest.raises(SystemExit) as exit:
            cli.main(shlex.split(command))
        out, err = capsys.readouterr()
        for name, path in places.items():
            err = err.replace(path, name)
        return exit.value.code, out, err

    return run


def check_line(err, message, *, of_a_file=()):
    """One line of the shell's words that begins with the message."""
    assert err.startswith(f"hybrid-jax: {message}"), err
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert set(PYTHON.findall(err)) <= set(of_a_file), err


def test_there_are_enough_of_them():
    commands = {mistake.split()[0] for mistake, _ in MISTAKES}
    assert len(MISTAKES) >= 45 and commands >= set(COMMANDS)


@pytest.mark.parametrize("command, message", MISTAKES)
def test_a_mistake_is_one_line_in_words_of_the_shell(run, command, message):
    code, out, err = run(command)
    assert (code, out) == (2, "")
    check_line(err, message)


@pytest.mark.parametrize("name", NO_REQUESTS)
def test_a_file_without_requests_is_one_line_and_code_1(run, tmp_path, name):
    code, out, err = run(f"run-batch -i IN/{name} -o IN/out --model MODEL")
    assert (code, out) == (1, "")
    check_line(err, f"run-batch: IN/{name} holds no requests: none of its ")
    assert os.stat(tmp_path / "in" / "out").st_size


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", "MODEL/generation_config.json is not valid JSON"),
        (b"[1]", "MODEL/generation_config.json must hold an object, got list"),
        (b"\xff", "MODEL/generation_config.json must be plain UTF-8 text, byte 0 is 0xff"),
        (b'{"temperature": "hot"}', "MODEL/generation_config.json: temperature must be 0 or a numb"),
        (b'{"min_p": 2}', "MODEL/generation_config.json: min_p must be a number between 0 and 1, got 2.0"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_models_file_names_the_file_and_its_field(run, fake_model, content, message):
    (fake_model / "generation_config.json").write_bytes(content)
    code, out, err = run(GENERATE)
    assert (code, out) == (2, "")
    check_line(err, message, of_a_file={"min_p"})


# --- the words themselves -------------------------------------------------------------------------

GENERATES = flags_of(cli.app, ["generate", "ab"])
TRAINS = flags_of(cli.app, ["train-tiny", "out"])


@pytest.mark.parametrize(
    "flags, message, said",
    [
        (
            GENERATES,
            "LLM: the device's memory has no room for the weights; use dtype='bfloat16' or a smaller model",
            "the device's memory has no room for the weights; use --dtype bfloat16 or a smaller model",
        ),
        (
            GENERATES,
            'LLM: needs 9 GiB, has 8 GiB; use dtype="bfloat16", lower memory or lower max_rows',
            "needs 9 GiB, has 8 GiB; use --dtype bfloat16, lower --memory or lower --max-rows",
        ),
        (
            GENERATES,
            "LLM: exact=True needs memory; lower max_model_len, max_rows or memory to 5 GiB",
            "--exact needs memory; lower --max-model-len, --max-rows or --memory to 5 GiB",
        ),
        (
            GENERATES,
            "SamplingParams: seed must be None or an integer, or None, or a CacheConfig",
            "--seed must be an integer",
        ),
        (  # a value, a path, a word that is no option here, and words of several meanings
            GENERATES,
            "prompt 0: got 'max_rows' of /max_rows/max_rows.json, page_tokens and the model's memory",
            "prompt 0: got 'max_rows' of /max_rows/max_rows.json, page_tokens and the model's memory",
        ),
        (
            TRAINS,
            "load_state: state.npz was made with seed 1; use another directory or resume=False",
            "state.npz was made with seed 1; use another directory or --no-resume",
        ),
        (flags_of(cli.app, ["dance"]), "LLM: lower max_rows", "lower max_rows"),
    ],
)
def test_a_message_of_the_library_in_words_of_the_shell(flags, message, said):
    assert shell_words(message, flags) == said

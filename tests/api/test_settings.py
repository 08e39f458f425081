"""The first example in processes that are set up in other ways: the same tokens, and no word that nobody asked for.

Each setting is a process of its own. They take turns, so that all of them run every few commits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams
from tests.tiny_models import redrawn, tiny_model

EXAMPLE = """\
import json, os, sys
{first}
from hybrid_jax import LLM, SamplingParams
{before}
def example():
    llm = LLM(max_rows=1, max_model_len=256{options})
{after}
    outs = llm.generate("import ", SamplingParams(max_tokens=6, temperature=0.0){call})
    with open(os.environ["ANSWER"], "w") as file:
        json.dump([list(out.outputs[0].token_ids) for out in outs], file)
if __name__ == "__main__":
{run}
{last}
"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is different about a process.

    Attributes:
        env: variables; None takes one away. python: options of Python.
        shell: what a shell does before it starts Python; where: how it redirects the streams of Python.
        first: code in front of all. before: code before the LLM is made. after: code before it generates.
        run: how the example is called. last: code at the end.
        options, call: more arguments of `LLM` and `generate`.
        says: what its stderr must hold. code: with which it ends.
    """

    env: dict[str, str | None] = field(default_factory=dict)
    python: tuple[str, ...] = ()
    shell: str = ""
    where: str = ""
    first: str = ""
    before: str = ""
    after: str = ""
    run: str = "example()"
    last: str = ""
    options: str = ""
    call: str = ""
    says: str = ""
    code: int = 0


def variables(**env: str | None) -> Setting:
    return Setting(env=env)


def update(name: str, value: object) -> str:
    return f"import jax; jax.config.update({name!r}, {value!r})"


def streams(made: str, **more: Any) -> Setting:
    """The standard streams are what the code calls `stream`."""
    return Setting(first=f"{made}\nsys.stdout = sys.stderr = stream", **more)


# Every setting of jax that the package has values of its own for, at another value.
OTHERS = """\
import enum, jax
from hybrid_jax.process.own_settings import OWN
def others(names):
    from jax._src import config
    for name in names:
        if name not in config.config_states or name not in jax.config.meta:
            continue
        _, _, more = jax.config.meta[name]
        own = jax.config.values[name]
        values = list(more.get("enum_values", more.get("enum_class", ())))
        if isinstance(own, bool):
            values = [not own]
        elif isinstance(own, int | float) and not isinstance(own, enum.Enum):
            values = [own + 1]
        other = [value for value in values if value not in (own, OWN[name])]
        if other:
            jax.config.update(name, other[-1])
"""
RUDE = """\
class Rude:
    def write(self, *text):
        raise OSError(5, "Input/output error")
    flush = isatty = fileno = write
    def __getattr__(self, name):
        raise AttributeError(name)
stream = Rude()
"""
# As many programs have it that keep a copy of what they print.
TEE = """\
class Tee:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        return self.stream.write(text)
    def flush(self):
        self.stream.flush()
stream = Tee(sys.stderr)
"""
TERMINAL = """\
class Terminal:
    encoding = "ascii"
    def isatty(self=None):
        return True
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")
    def flush(self):
        raise BrokenPipeError(32, "Broken pipe")
stream = Terminal()
"""
NAMELESS = """\
import jax, hybrid_jax.api.starting
os.environ.pop("HOME", None)
os.environ.pop("XDG_CACHE_HOME", None)
os.setgroups([])
os.setgid(54321)
os.setuid(54321)
"""
UNFLUSHED = 120  # how Python itself ends if it cannot flush stdout
NO_HOME = {"XDG_CACHE_HOME": None, "JAX_COMPILATION_CACHE_DIR": None}
JAX = {
    "x64": Setting(env={"JAX_ENABLE_X64": "1"}),
    "x64_of_the_process": Setting(before=update("jax_enable_x64", True)),
    "x64_later": Setting(after=update("jax_enable_x64", True)),
    "x64_around": Setting(before="import jax", run="with jax.enable_x64(True):\n    example()"),
    "x64_around_a_call": Setting(after="import jax; jax.enable_x64(True).__enter__()"),
    "debug_nans": variables(JAX_DEBUG_NANS="1"),
    "debug_infs": variables(JAX_DEBUG_INFS="1"),
    "debug_infs_later": Setting(after=update("jax_debug_infs", True)),
    "disable_jit": variables(JAX_DISABLE_JIT="1"),
    "disable_jit_later": Setting(after=update("jax_disable_jit", True)),
    "rank_promotion": variables(JAX_NUMPY_RANK_PROMOTION="raise"),
    "dtype_promotion": variables(JAX_NUMPY_DTYPE_PROMOTION="strict"),
    "matmul_precision": variables(JAX_DEFAULT_MATMUL_PRECISION="bfloat16"),
    "transfer_guard": variables(JAX_TRANSFER_GUARD="disallow_explicit"),
    "transfer_guard_around": Setting(
        before="import jax", run="with jax.transfer_guard('disallow_explicit'):\n    example()"
    ),
    "another_generator": variables(JAX_DEFAULT_PRNG_IMPL="rbg", JAX_ENABLE_CUSTOM_PRNG="1"),
    "another_threefry": variables(JAX_THREEFRY_PARTITIONABLE="0", JAX_RANDOM_SEED_OFFSET="3"),
    "no_legacy_keys": variables(JAX_LEGACY_PRNG_KEY="error", JAX_DEBUG_KEY_REUSE="1"),
    "checks": variables(JAX_ENABLE_CHECKS="1", JAX_CHECK_TRACER_LEAKS="1"),
    "checks_of_errors": variables(JAX_ERROR_CHECKING_BEHAVIOR_OOB="raise"),
    "no_tracing_later": Setting(after=update("jax_no_tracing", True)),
    "garbage_guard": variables(JAX_ARRAY_GARBAGE_COLLECTION_GUARD="fatal"),
    "another_device": Setting(
        env={"JAX_NUM_CPU_DEVICES": "2"},
        before="import jax; jax.config.update('jax_default_device', jax.devices()[1])",
    ),
    "another_device_around": Setting(
        env={"JAX_NUM_CPU_DEVICES": "2"},
        before="import jax",
        run="with jax.default_device(jax.devices()[1]):\n    example()",
    ),
    "another_device_later": Setting(
        env={"JAX_NUM_CPU_DEVICES": "2"},
        after="import jax; jax.config.update('jax_default_device', jax.devices()[1])",
    ),
    "a_mesh": Setting(before="import jax; jax.set_mesh(jax.make_mesh((1,), ('x',)))"),
    "a_mesh_around": Setting(
        python=("-W", "ignore"),  # an old way, says jax
        before="import jax",
        run="with jax.make_mesh((1,), ('x',)):\n    example()",
    ),
    "a_mesh_of_two": Setting(
        env={"JAX_NUM_CPU_DEVICES": "2"},
        before="import jax; jax.set_mesh(jax.make_mesh((2,), ('x',)))",
    ),
    "profile_guided": variables(JAX_ENABLE_PGLE="1", JAX_PGLE_PROFILING_RUNS="1"),
    "little_optimization": variables(JAX_OPTIMIZATION_LEVEL="O0", JAX_MEMORY_FITTING_LEVEL="O0"),
    "no_optimization": Setting(
        env={"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        before="import logging; logging.basicConfig()",
        says="jax_disable_most_optimizations is set",
    ),
    "old_partitioner": variables(JAX_USE_SHARDY_PARTITIONER="0"),
    "logs": variables(JAX_LOG_COMPILES="1", JAX_EXPLAIN_CACHE_MISSES="1"),
    "no_async_dispatch": variables(JAX_CPU_ENABLE_ASYNC_DISPATCH="0"),
    "checked_cache": variables(JAX_COMPILATION_CACHE_CHECK_CONTENTS="1"),
    "small_cache": variables(JAX_COMPILATION_CACHE_MAX_SIZE="1000"),
    "all_other_values": Setting(before=f"{OTHERS}\nothers(OWN)"),
    "all_other_values_later": Setting(before=OTHERS, after="others(OWN)"),
}
STREAMS = {
    "stderr_is_a_tee": streams(TEE),
    "streams_are_none": streams("stream = None"),
    "streams_are_closed": streams("import io; stream = io.StringIO(); stream.close()"),
    "streams_are_rude": streams(RUDE, code=UNFLUSHED),
    "streams_are_text": streams("import io; stream = io.StringIO()"),
    "terminal_went_away": streams(
        TERMINAL, code=UNFLUSHED, options=", progress=True", call=", progress=True"
    ),
    "rude_and_a_bar": streams(
        RUDE, code=UNFLUSHED, options=", progress=True", call=", use_tqdm=True"
    ),
    "no_descriptors": Setting(where="<&- >&- 2>&-"),
    "full_disk": Setting(where=">/dev/full 2>/dev/full", options=", progress=True"),
    "ascii": variables(PYTHONIOENCODING="ascii"),
    "broken_logging": Setting(
        before=f"{RUDE}\nimport logging; logging.basicConfig(level=0, stream=stream)"
        "; logging.raiseExceptions = False"
    ),
    "no_logging": Setting(before="import logging; logging.disable(100)"),
    "another_print": Setting(before="import builtins; builtins.print = None"),
}
PROCESS = {
    "no_home": variables(HOME=None, **NO_HOME),
    "home_that_is_a_device": variables(HOME="/dev/null", **NO_HOME),
    "cache_that_cannot_be_made": variables(XDG_CACHE_HOME="/proc/self/none"),
    "cache_of_another_folder": variables(XDG_CACHE_HOME="some/cache"),
    "full_cache": Setting(env=NO_HOME | {"HOME": "fresh"}, shell="ulimit -f 64"),
    "cache_that_fills_up": Setting(
        env=NO_HOME | {"HOME": "fresh"},
        before="import logging; logging.basicConfig(format='%(message)s')",
        after="import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (65536, -1))",
        says="compiled programs are not kept",
    ),
    "raises_when_the_cache_is_full": Setting(
        env=NO_HOME | {"HOME": "fresh", "JAX_RAISE_PERSISTENT_CACHE_ERRORS": "1"},
        python=("-W", "error"),
        after="import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (65536, -1))",
    ),
    "no_temporary_folder": variables(TMPDIR="/none"),
    "no_working_folder": Setting(shell="mkdir gone; cd gone; rmdir ../gone"),
    "closed_umask": Setting(shell="umask 777; >$ANSWER; chmod 666 $ANSWER"),
    "few_files": Setting(shell="ulimit -n 48"),
    "small_stack": Setting(before="import threading; threading.stack_size(512 * 1024)"),
    "optimized": Setting(python=("-OO",)),
    "isolated": Setting(python=("-I",)),
    "warnings_are_errors": Setting(python=("-W", "error")),
    "warnings_are_errors_later": Setting(after="import warnings; warnings.simplefilter('error')"),
    "developing": Setting(python=("-X", "dev")),
    "c_locale": Setting(python=("-X", "utf8=0"), env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}),
    "latin_1": Setting(python=("-X", "utf8=0"), env={"LC_ALL": "en_US.ISO-8859-1"}),
    "turkish": variables(LC_ALL="tr_TR.UTF-8"),
    "dumb_terminal": variables(TERM="dumb", NO_COLOR="1", COLUMNS="1", LINES="0"),
    "colours": variables(FORCE_COLOR="1", PY_COLORS="1"),
    "time_zone": variables(TZ="no/where"),
    "one_processor": variables(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"),
    "numpy_raises": Setting(before="import numpy; numpy.seterr(all='raise')"),
    "numpy_prints": Setting(before="import numpy; numpy.set_printoptions(legacy='1.13')"),
    "decimals": Setting(before="import decimal; decimal.getcontext().prec = 1"),
    "another_thread": Setting(
        run="import threading\nthread = threading.Thread(target=example)\nthread.start()\nthread.join()"
    ),
    "an_event_loop": Setting(
        run="import asyncio\nasync def main():\n    example()\nasyncio.run(main())"
    ),
    "a_spawned_process": Setting(
        run="import multiprocessing\nprocess = multiprocessing.get_context('spawn').Process(target=example)\n"
        "process.start()\nprocess.join()"
    ),
    "signals": Setting(
        before="import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15, 1)]"
    ),
    "shallow_recursion": Setting(before="sys.setrecursionlimit(400)"),
    "no_garbage_collection": Setting(before="import gc; gc.disable(); gc.freeze()"),
    "garbage_always": Setting(after="import gc; gc.set_threshold(10)"),
    "traced": Setting(after="import threading; threading.settrace(lambda *_: None)"),
    "traced_memory": Setting(python=("-X", "tracemalloc")),
    "no_arguments": Setting(first="sys.argv = []"),
    "an_exit_that_fails": Setting(
        last="import atexit; atexit.register(lambda: os.read(10_000, 1))",
        says="Bad file descriptor",
    ),
    "random_state": Setting(
        before="import random, numpy\nrandom.seed(1); numpy.random.seed(1)\n"
        "wanted = random.getstate(), numpy.random.get_state()[1].tolist()",
        last="assert wanted == (random.getstate(), numpy.random.get_state()[1].tolist())",
    ),
}
NAMED = JAX | STREAMS | PROCESS


def started(setting: Setting, folder: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Runs the example in a process of that setting, in an empty folder."""
    answer, program = folder / "answer.json", folder / "program.py"
    indented = {"after": setting.after, "run": setting.run}
    code = EXAMPLE.format(
        first=setting.first,
        before=setting.before,
        options=setting.options,
        call=setting.call,
        last=setting.last,
        **{name: textwrap.indent(text, "    ") for name, text in indented.items()},
    )
    program.write_text(code, encoding="utf-8")
    env = os.environ | {"ANSWER": str(answer)} | setting.env
    env = {name: value for name, value in env.items() if value is not None}
    if env.get("HOME") == "fresh":
        env["HOME"] = str(folder)
    script = f'{setting.shell or ":"}\nexec "$@" {setting.where}'
    command = ["sh", "-c", script, "sh", sys.executable, *setting.python, str(program)]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, errors="replace", timeout=600
    )
    return done, answer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The tokens of the example where nothing is set."""
    done, answer = started(Setting(), tmp_path_factory.mktemp("plain"))
    assert done.returncode == 0, done.stderr
    return json.loads(answer.read_text())


@pytest.mark.parametrize("name", NAMED)
def test_the_first_example_says_the_same_under(name, plain, tmp_path):
    setting = NAMED[name]
    done, answer = started(setting, tmp_path)
    assert done.returncode == setting.code, done.stderr
    assert json.loads(answer.read_text()) == plain
    assert setting.says in done.stderr
    if name not in ("logs", "an_exit_that_fails"):
        assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr


def test_a_prompt_of_the_command_line_is_utf_8_in_every_locale():
    options = ("--stop", "ü", "--max-tokens", "2", "--max-rows", "1", "--max-model-len", "256")
    command = [sys.executable, "-m", "hybrid_jax", "generate", "größe", *options, "--json"]
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(command, env=os.environ | locale, capture_output=True)
    said = done.stderr.splitlines()  # on a busy machine, that it compiles
    assert done.returncode == 0 and all(line.startswith(b"compiling ") for line in said), said
    [output] = json.loads(done.stdout.decode("ascii"))["outputs"]
    assert output["prompt_token_ids"] == list("größe".encode())


def test_weights_of_64_bits_are_taken_in_32():
    config = replace(tiny_model("bamba")[0], max_position=256)
    params = redrawn(config, seed=0)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jax.numpy.asarray(leaf, np.float64), params)
    tokens = []
    for given in (params, wide, jax.tree.map(np.asarray, wide)):
        with LLM.from_params(config, given, max_rows=1, quiet=True) as llm:
            [output] = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0))
            tokens.append(output.outputs[0].token_ids)
    assert tokens == [tokens[0]] * 3

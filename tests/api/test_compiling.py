"""Compiling is named: on a terminal and in a notebook while it lasts, in the metrics afterwards, nowhere else."""

from __future__ import annotations

import io
import itertools
import re
import sys
import threading
import time

import jax
import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams
from hybrid_jax.api import llm as llm_module
from hybrid_jax.api import progress_bar
from hybrid_jax.api.progress_bar import progress_of, show_compiling
from hybrid_jax.api.threads.questions import all_logprobs
from hybrid_jax.engine.programs.compiling import Compiling, Needed, Program, signature_of
from hybrid_jax.engine.programs.programs import Programs
from tests.api.fake_engine import GREEDY, SCRIPT, FakeEngine, texts
from tests.tiny_models import tiny_model


def test_what_still_runs_is_no_compiling(monkeypatch):
    """The steps before are waited for before the clock starts, not while it runs."""
    clock = Compiling()
    program, seen = Program(lambda x: x + 1, (), clock, "cpu"), []
    monkeypatch.setattr(jax, "block_until_ready", lambda args: seen.append(clock.seconds()))
    clock.listener = lambda what, count: seen.append(count and count())
    assert program(np.int32(1)) == 2
    assert seen == [0.0, (1, 1), None]


def test_a_program_let_go_is_compiled_at_the_next_call():
    program = Program(lambda x: x + 1, (), Compiling(), "cpu")
    assert program(np.int32(1)) == 2 and program.compiled
    program._run = None
    assert not program.compiled
    assert program(np.int32(1)) == 2 and program.compiled


class Terminal(io.StringIO):
    """A stderr that somebody looks at."""

    def isatty(self):
        return True

    def on_screen(self):
        """What can be read there at the end, and all that could be read before."""
        lines = [text.rstrip() for text in self.getvalue().split("\r")]
        return lines[-1], [text for text in lines if text]


@pytest.fixture
def look(monkeypatch):
    """Puts a terminal in place of stderr, when called: pytest puts its own there before a test begins."""

    def look():
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return look


def of(number, total):
    """A count that does not change."""
    return lambda: (number, total)


class CompilingEngine(FakeEngine):
    """Compiles at the given steps, for as many seconds."""

    when = {1: 2.5, 3: 4.0}

    def step(self):
        if seconds := self.when.get(self.num_steps + 1):
            self.listener("writing tokens", of(len(self.compiled_at), 9))
            self.compiled_at.append(seconds)
            self.compiled = sum(self.compiled_at)
            self.clock[0] += seconds
            self.listener("", None)
        return super().step()

    compiled_at: list
    clock: list


@pytest.fixture
def compiling(make_llm, monkeypatch):
    """An LLM whose engine compiles before the first and the third step."""
    monkeypatch.setattr("hybrid_jax.api.starting.Engine", CompilingEngine)
    clock, real = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + clock[0])
    monkeypatch.setattr(CompilingEngine, "compiled_at", [0.0], raising=False)
    monkeypatch.setattr(CompilingEngine, "clock", clock, raising=False)
    return make_llm(steps_per_dispatch=4)


def test_rates_leave_compiling_out_and_metrics_name_it(compiling):
    metrics = compiling.generate("ab", SamplingParams(max_tokens=16))[0].metrics
    assert (metrics.compile_s, metrics.first_token_compile_s) == (6.5, 2.5)
    waited = metrics.first_token_time - metrics.arrival_time
    assert waited > 2.5 and metrics.ttft_s == waited - 2.5
    spent = metrics.finished_time - metrics.first_token_time - 4.0
    assert spent > 0 and metrics.decode_tokens_per_s == pytest.approx(12 / spent)
    assert metrics.as_dict()["compile_s"] == 6.5
    again = compiling.generate("ab", SamplingParams(max_tokens=16))[0].metrics
    assert (again.compile_s, again.first_token_compile_s) == (0, 0)
    assert 0 < again.ttft_s <= again.total_s


def words(number, total=9):
    return f"compiling the program for writing tokens, {number} of {total}: 0 s; kept for next time"


@pytest.fixture
def no_bars(monkeypatch):
    """Calls whose bars would come at once have none."""
    monkeypatch.setattr(
        llm_module, "progress_of", lambda how, what, **more: progress_of(False, what)
    )


def test_a_terminal_shows_what_is_compiled_and_nothing_stays_there(compiling, look, no_bars):
    terminal = look()
    assert texts(compiling.generate("ab", GREEDY)) == [SCRIPT[:12]]
    assert terminal.on_screen() == ("", [words(1), words(2)])


def test_seconds_go_on_while_a_program_is_compiled(look, monkeypatch):
    terminal = look()
    monkeypatch.setattr(progress_bar, "EVERY", 0.01)
    clock = itertools.count(7)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(clock))
    show_compiling("vectors", of(1, 1))
    while len(terminal.on_screen()[1]) < 4:
        time.sleep(0.01)
    show_compiling("", None)
    last, seen = terminal.on_screen()
    assert last == "" and len(set(seen)) == len(seen)
    assert seen[1] == "compiling the program for vectors: 2 s; kept for next time"


def test_what_is_not_kept_is_not_said_to_be(compiling, look, no_bars):
    terminal = look()
    compiling._engine.keeps_programs = False
    compiling.generate("ab", GREEDY)
    assert terminal.on_screen()[1] == [
        words(n).removesuffix("; kept for next time") for n in (1, 2)
    ]


def test_a_stream_is_not_disturbed_once_it_shows_text(compiling, look):
    terminal = look()
    compiling._engine.pause = 0.02
    assert "".join(d.text for d in compiling.stream("ab", GREEDY)) == SCRIPT[:12]
    assert terminal.on_screen() == ("", [words(1)])


def test_a_quiet_llm_is_quiet(make_llm, look, monkeypatch, compiling):
    terminal = look()
    quiet = make_llm(steps_per_dispatch=4, quiet=True)
    quiet._engine.compiled_at = [0.0]
    assert texts(quiet.generate("ab", GREEDY)) == [SCRIPT[:12]]
    assert terminal.getvalue() == ""
    with progress_bar.as_a_command():  # whose lines are no surprise
        quiet._engine.compiled_at, quiet._engine.num_steps = [0.0], 0
        list(quiet.stream("cd", GREEDY))
    assert words(1) in terminal.getvalue()
    quiet._engine.num_steps = 0
    quiet.generate("ef", GREEDY, progress=True)
    assert "generating" in terminal.getvalue()


def test_a_bar_says_it_itself(compiling, look, monkeypatch):
    terminal = look()
    said, show = [], progress_bar.show_compiling

    def watched(*compiled, **options):
        show(*compiled, **options)
        [bar] = progress_bar._bars
        table, *lines = bar.get_renderables()
        said.append([bar.tasks[0].description, *map(str, lines)])

    monkeypatch.setattr("hybrid_jax.api.threads.loop.show_compiling", watched)
    compiling.generate("ab", GREEDY, progress=True)
    assert said == [
        ["generating", words(1)],
        ["generating"],
        ["generating", words(2)],
        ["generating"],
    ]
    assert "\rcompiling" not in terminal.getvalue()
    assert not progress_bar._bars


def test_a_bar_that_would_come_later_comes_when_something_is_compiled(compiling, look):
    terminal = look()
    compiling.generate("ab", GREEDY)
    assert "generating" in terminal.getvalue() and "\rcompiling" not in terminal.getvalue()
    assert not progress_bar._bars and not progress_bar._waiting


def test_the_words_are_taken_back_where_they_were_said(look, monkeypatch):
    terminal = look()
    monkeypatch.setattr(progress_bar, "EVERY", 1000.0)
    show_compiling("writing tokens", of(1, 9))
    with progress_of(True, "loading"):
        show_compiling("", None)
        [bar] = progress_bar._bars
        assert terminal.getvalue().startswith(f"\r{words(1)}")
        assert f"\r{'':<{len(words(1))}}\r" in terminal.getvalue()
        show_compiling("writing tokens", of(2, 9))
        assert len(list(bar.get_renderables())) == 2
        with progress_of(True, "generating") as _:
            assert len(list(bar.get_renderables())) == 1  # the newer bar says it
            show_compiling("", None)
        assert len(list(bar.get_renderables())) == 1


def test_a_notebook_has_one_output_that_is_cleared(compiling, monkeypatch):
    shown = []

    class Handle:
        def update(self, html):
            shown.append(html.data)

    def display(html, *, display_id):
        shown.append(html.data)
        return Handle()

    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("IPython.display.display", display)
    list(compiling.stream("ab", GREEDY))
    assert shown[0] == f"<small>{words(1)}</small>" and shown[-1] == ""
    shown.clear()
    compiling._engine.num_steps = 0
    compiling.generate("cd", GREEDY)
    assert "generating" in shown[0] and shown[-1] == "" and stream.getvalue() == ""


def counted(compiling):
    """The counts that a listener is told from now on, each as it is then."""
    counts = []
    compiling.listener = lambda what, count: count and counts.append(count())
    return counts


def test_the_count_ends_with_what_is_counted():
    compiling = Compiling()
    counts = counted(compiling)
    with compiling.counting(lambda program: of(21, 40)):
        Program(lambda x: x + 1, (), compiling, "cpu")(np.int32(1))
    Program(lambda x: x + 1, (), compiling, "cpu")(np.int32(1))
    assert counts == [(21, 40), (1, 1)]


def test_programs_compiled_beside_are_counted_once_and_at_once():
    """The number goes on while one program is compiled, and no program is counted twice."""
    compiling = Compiling()
    one, two, three = (Program(lambda x: x + 1, (), compiling, "cpu") for _ in range(3))
    reader = Program(lambda x: x + 1, (), compiling, "cpu")
    programs = {("a",): one, ("b",): two, ("c",): three}
    missing = lambda: [key for key, program in programs.items() if not program.compiled]  # noqa: E731
    counts, seen = counted(compiling), []
    with compiling.counting(Needed(missing, programs).count_with):
        count = compiling.count_with(one)
        seen.append(count())
        two.compile_ahead(*signature_of((np.int32(1),)))
        seen.append(count())
        for program in (one, three, reader):
            program(np.int32(1))
    assert seen == [(1, 3), (2, 3)]
    assert counts == [(2, 3), (3, 3), (4, 4)]


def test_what_is_no_longer_needed_is_not_counted():
    compiling, programs = Compiling(), {}
    needed = [("large",), ("small",)]
    counts = Needed(lambda: needed, programs)
    program = programs[("large",)] = Program(lambda x: x + 1, (), compiling, "cpu")
    assert counts.count_with(program)() == (1, 2)
    program(np.int32(1))
    needed = [("other",)]  # which the large one made the better choice
    programs[("other",)] = Program(lambda x: x + 1, (), compiling, "cpu")
    assert counts.count_with(programs[("other",)])() == (2, 2)


def test_a_warm_up_counts_on_when_other_calls_compile_between():
    config, params = tiny_model("bamba")
    with LLM.from_params(config, params, quiet=True, max_rows=1, max_model_len=64) as llm:
        runner = llm._engine.runner
        counts = counted(runner.programs.compiling)
        programs = runner.warm_ups()[:3]
        for program in reversed(programs):
            program.run()
            llm._thread.ask(all_logprobs, np.zeros((1, config.width)))
    total = len(runner.warm_ups())
    assert [count for count in counts if count != (1, 1)] == [(n, total) for n in (1, 2, 3)]


def test_short_work_prints_nothing_where_nobody_looks(compiling, capfd):
    compiling._engine.compiled_at = [0.0]
    compiling.generate("ab", GREEDY)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_that_goes_away_harms_nobody(compiling, look, monkeypatch):
    terminal = look()

    def write(text):
        raise OSError("no such terminal")

    monkeypatch.setattr(terminal, "write", write)
    assert texts(compiling.generate("ab", GREEDY)) == [SCRIPT[:12]]


def test_a_real_engine_counts_the_programs_a_call_needs(look, monkeypatch, no_bars):
    terminal = look()
    monkeypatch.setattr(Programs, "compile_beside", lambda *given: None)  # without a word
    config, params = tiny_model("bamba")
    shapes = {"max_rows": 2, "prefill_tokens": 32, "max_model_len": 96}
    monkeypatch.setattr(progress_bar, "EVERY", 1000.0)
    with LLM.from_params(config, params, **shapes) as llm:
        terminal.seek(0), terminal.truncate()  # the description
        call = {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=50, temperature=0.0)
        metrics = llm.generate(*call)[0].metrics
        _, seen = terminal.on_screen()
        counts = [
            re.fullmatch(r"compiling the program for (.+), (\d) of 3: 0 s; .*", text)
            for text in seen
        ]
        assert [(c[1], int(c[2])) for c in counts] == [
            *(("small changes", 1), ("reading prompts", 2), ("writing tokens", 3)),
        ]
        assert metrics.compile_s == llm._engine.compile_seconds() > metrics.ttft_s > 0
        assert llm.generate(*call)[0].metrics.compile_s == 0
        assert len(terminal.on_screen()[1]) == len(seen)
        llm.warmup(threads=1, progress=False)  # more threads would compile without a word
        assert len(terminal.on_screen()[1]) == llm._engine.stats()["num_traces"]


def test_what_a_plan_needs_is_compiled_side_by_side(monkeypatch):
    config, params = tiny_model("bamba")
    shapes = {"max_rows": 2, "prefill_tokens": 32, "max_model_len": 96}
    both, made = threading.Barrier(2, timeout=60), Program._made

    def together(self, shapes):
        if self._name.startswith(("PrefillBucket", "DecodeBucket")):
            both.wait()  # broken, and so an error, if only one of them is being compiled
        return made(self, shapes)

    monkeypatch.setattr(Program, "_made", together)
    with LLM.from_params(config, params, quiet=True, **shapes) as llm:
        prompt = {"prompt_token_ids": [1, 2, 3]}
        [output] = llm.generate(prompt, SamplingParams(max_tokens=50, temperature=0.0))
        assert len(output.outputs[0].token_ids) == 50
        assert llm.stats()["num_traces"] == 3  # and a line of the slot table


def test_a_failure_beside_is_tried_again_and_raised_where_it_is_needed(monkeypatch):
    config, params = tiny_model("bamba")
    made, failed = Program._made, []

    def failing(self, shapes):
        if self._name.startswith("DecodeBucket"):
            failed.append(threading.current_thread().name)
            raise RuntimeError("no compiler today")
        return made(self, shapes)

    monkeypatch.setattr(Program, "_made", failing)
    with LLM.from_params(config, params, quiet=True, max_rows=2, max_model_len=96) as llm:
        with pytest.raises(RuntimeError, match="no compiler today"):
            llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=4))
    assert failed == ["hybrid_jax-compile-background_0", "hybrid_jax"]


def test_a_bar_is_for_those_who_look_unless_the_caller_says_more(compiling, monkeypatch):
    wanted, progress_of = [], llm_module.progress_of
    monkeypatch.setattr(
        llm_module,
        "progress_of",
        lambda how, what, **more: (wanted.append(how), progress_of(how, what))[1],
    )
    told = lambda done, total: None  # noqa: E731
    for options in (
        {},
        {"use_tqdm": True},
        {"progress": False},
        {"progress": told, "use_tqdm": True},
    ):
        compiling.generate("ab", GREEDY, **options)
    assert wanted == [None, True, False, told]

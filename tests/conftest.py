"""Settings of every test: CPU, strict dtypes, compiled programs kept between runs, fixtures all rooms use."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from hybrid_jax.engine.programs.compile_cache import enable_compile_cache
from hybrid_jax.engine.programs.compiling import Program
from hybrid_jax.process.own_settings import OWN
from tests.drawing import EVERYTHING, FEW_CASES, covering, idle_words, marked
from tests.imports import ROOT

# Most of a run goes into compiling. With HYBRID_JAX_COMPILE=quickly LLVM does not optimize, and fusions get an older,
# simpler code generator, which only jax 0.10 has: 4 to 6 times as fast. Newer versions of jax compile as ever, because
# without that generator a row's last bits depend on its neighbours. Child processes compile in the same way.
if os.environ.get("HYBRID_JAX_COMPILE") == "quickly" and jax.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 "
        "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
    ).strip()

# An implicit float32 + bfloat16 is an error. Rank promotion stays allowed: biases and norm weights
# [D] broadcast over [B, T, D] on purpose.
jax.config.update("jax_numpy_dtype_promotion", "strict")
OWN["jax_numpy_dtype_promotion"] = "strict"
enable_compile_cache("xla-tests")

# A busy machine is no failure, and a run of the tests says the same each time.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

pytest_plugins = ["tests.left_behind", "tests.llms", "tests.chosen"]
# Every compiled program takes a few memory maps, of which Linux allows a process 65,530 by default; the compiler
# crashes at the next one.
MAPS, MOST_MAPS, CHECK_EVERY = Path("/proc/self/maps"), 25_000, 10
FINISHED = itertools.count(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `tests.drawing` says, unless all tests are asked for."""
    whole = not any("::" in argument for argument in config.args)
    if EVERYTHING and whole and (idle := idle_words(items)):  # other draws have fewer cases
        raise pytest.UsageError(f"marks whose words begin no case: {', '.join(idle)}")
    for item in items:  # for `-m spine`: a mark with words is for some cases
        item.own_markers = [
            mark
            for mark in item.own_markers
            if mark.name not in ("spine", "left_to_all") or marked(item, mark.name)
        ]
    if EVERYTHING:
        return
    left = {item for item in items if marked(item, "left_to_all")}
    of_a_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if is_in(item, FEW_CASES) and hasattr(item, "callspec") and item not in left:
            of_a_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in of_a_test.values():
        taken = covering([parameters(case) for case in cases])
        few = {case for place, case in enumerate(cases) if place in taken or marked(case, "spine")}
        left |= set(cases) - few
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def is_in(item: pytest.Item, places: tuple[str, ...]) -> bool:
    """Whether a test stands in one of these files or folders below tests/."""
    return any(ROOT / "tests" / name in (item.path, *item.path.parents) for name in places)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def parameters(case: pytest.Item) -> list[tuple[int, ...]]:
    """Which value each `parametrize` gave to a case; names that one `parametrize` gives together are one."""
    given = case.callspec.params
    names = [mark.args[0] for mark in case.iter_markers("parametrize")]
    split = [x.replace(" ", "").split(",") if isinstance(x, str) else x for x in names]
    return [tuple(id(given[name]) for name in together) for together in split]


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Lets go of all compiled programs when there are too many; those still needed come from the cache."""
    if next(FINISHED) % CHECK_EVERY == 0 and MAPS.exists():
        with MAPS.open("rb") as maps:
            if sum(1 for _ in maps) > MOST_MAPS:
                jax.clear_caches()
                for program in [x for x in gc.get_objects() if isinstance(x, Program)]:
                    program._run = None


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's top folder."""
    return ROOT


@pytest.fixture(autouse=True)
def ctrl_c():
    """Ctrl-C interrupts, also where the tests run in the background: shells have it ignored there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_compile_cache():
    """Compiles from scratch inside the test: for those that inspect the compiler's own reports."""
    old = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # jax asks for the setting once
    jax.clear_caches()
    yield
    jax.config.update("jax_enable_compilation_cache", old)
    reset_cache()
    jax.clear_caches()

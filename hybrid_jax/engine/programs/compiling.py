"""Compiling as it happens: how long it takes, which any thread may ask, and a message to those who wait."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from hybrid_jax.engine.programs.compile_cache import compiled
from hybrid_jax.engine.programs.store import ProgramStore
from hybrid_jax.machine import give_back_free_memory
from hybrid_jax.process.ending import pool_of_threads
from hybrid_jax.process.own_settings import own_settings
from pallas_kernels.triton import for_cuda

LOG = logging.getLogger("hybrid_jax.compiling")

# What programs do, by their functions, for those who wait.
DOING = {
    "prefill": "reading prompts",
    "decode": "writing tokens",
    "verify": "judging drafts",
    "fork": "several completions of a prompt",
    "exact": "prompts and tokens",
    "prompt_logprobs": "log-probabilities of prompts",
    "pooled_hidden": "vectors",
    "all_hidden": "hidden states of prompts",
    "all_logprobs": "log-probabilities of all tokens",
}


# Tells (number, total): the total of programs that a turn or a warm-up needs, and the number of those done, and one.
# Any thread may ask, again and again: other threads compile some of these programs.
Count = Callable[[], tuple[int, int]]


def alone(program: Program) -> Count:
    """The count of a program that no turn and no warm-up needs."""
    return lambda: (1, 1)


class Compiling:
    """Which program is being compiled, and how long all compiling has taken.

    One thread compiles. Others may call `seconds`.

    Attributes:
        listener: called with (what, count) before a program is compiled and with ("", None) after it, or None. What
            says what the program does.
        count_with: makes the count of the turn or the warm-up that runs now, of which the given program comes next.
    """

    def __init__(self) -> None:
        self.listener: Callable[[str, Count | None], None] | None = None
        self.count_with: Callable[[Program], Count] = alone
        # Seconds so far, and when the program that is being compiled was begun. It is one tuple, so that another thread
        # reads both values of the same moment.
        self._clock: tuple[float, float | None] = (0.0, None)

    def seconds(self) -> float:
        """Seconds of compiling since the start, a program that is being compiled included."""
        total, since = self._clock
        return total if since is None else total + time.perf_counter() - since

    @contextlib.contextmanager
    def next_program(self, program: Program, what: str) -> Iterator[None]:
        """Runs the clock, and tells the listener, while a program that does `what` is compiled inside."""
        if self.listener is not None:
            self.listener(what, self.count_with(program))
        self._clock = (self._clock[0], time.perf_counter())
        try:
            yield
        finally:
            self._clock = (self.seconds(), None)
            if self.listener is not None:
                self.listener("", None)
            give_back_free_memory()  # memory that the compiler has freed

    @contextlib.contextmanager
    def counting(self, count_with: Callable[[Program], Count]) -> Iterator[None]:
        """Counts what is compiled inside."""
        self.count_with = count_with
        try:
            yield
        finally:
            self.count_with = alone


class Needed:
    """The programs that a turn needs. Each is counted once, whichever thread compiles it.

    Args:
        missing: keys of the programs that are not compiled, as far as is known now.
        programs: those that were made, by key; the runner's own dict.
    """

    def __init__(
        self,
        missing: Callable[[], Iterable[tuple]],
        programs: Mapping[tuple, Program],
    ) -> None:
        self._missing, self._programs = missing, programs
        self._keys: dict[tuple, None] = {}
        self._unforeseen: dict[Program, None] = {}

    def count_with(self, program: Program) -> Count:
        """The count, with a program that comes next and may not have been foreseen. For the engine's own thread."""
        # What was foreseen may no longer be needed, because another program serves.
        done = {key: None for key in self._keys if _is_compiled(self._programs.get(key))}
        self._keys = done | dict.fromkeys(self._missing())
        if not any(self._programs.get(key) is program for key in self._keys):
            self._unforeseen[program] = None
        keys, others = tuple(self._keys), tuple(self._unforeseen)
        total = len(keys) + len(others)

        def count() -> tuple[int, int]:
            found = [self._programs.get(key) for key in keys] + list(others)
            done = sum(map(_is_compiled, found))
            return min(done + 1, total), total

        return count


def _is_compiled(program: Program | None) -> bool:
    return program is not None and program.compiled


class Program:
    """A jitted function for arguments of one shape. It is compiled before its first call, under the clock, or loaded.

    Args:
        function: a function of arrays. donated: the arguments whose memory it takes. name: its name in the log.
        compiling: keeps the clock. platform: the platform that it is compiled for.
        store: where programs are kept, or None. identity: what this program is made from (`ProgramStore.name_of`).
        device: where arrays are that are on no device on purpose; None for jax's first. options: of the compiler.
        results: where what it makes goes; None for the device's memory.
        everywhere: where arguments go that are on no device on purpose; None for the device.
    """

    def __init__(
        self,
        function: Callable,
        donated: int | tuple[int, ...],
        compiling: Compiling,
        platform: str,
        name: str = "",
        store: ProgramStore | None = None,
        identity: str = "",
        device: jax.Device | None = None,
        options: Mapping[str, str | int] | None = None,
        results: jax.sharding.Sharding | None = None,
        everywhere: jax.sharding.Sharding | None = None,
    ) -> None:
        self._everywhere = everywhere
        self._traced_for = for_cuda if platform == "gpu" else contextlib.nullcontext
        self._compiling, self._name, self._store = compiling, name, store
        self._does = DOING.get(function.__name__, "small changes")
        self._device = device
        self._identity = f"{identity} donated={donated} options={options} results={results}"
        self._lock = threading.Lock()  # one thread compiles it; others that need it wait
        self._run: Callable | None = None
        where = {} if results is None else {"out_shardings": results}
        self.lower = jax.jit(
            function, donate_argnums=donated, compiler_options=options, **where
        ).lower

    @property
    def compiled(self) -> bool:
        """Whether it is compiled, so that a call would not have to wait for the compiler."""
        return self._run is not None

    def __call__(self, *args: Any) -> Any:
        run = self._run
        if run is None:
            jax.block_until_ready(args)  # steps that still run must not count as compiling
            with self._compiling.next_program(self, self._does):
                run = self.compile_ahead(*signature_of(args))
        return run(*args)

    def compile_ahead(self, *shapes: Any) -> Callable:
        """Compiles it for arguments of these shapes. Any thread may do this, and the clock does not run.

        Tracing holds Python's lock, but the compiler itself does not.
        """
        with self._lock:
            run = self._run
            if run is None:
                shapes = jax.tree.map(self._placed, shapes)
                start = time.perf_counter()
                with own_settings(jax_default_device=self._device):
                    run, how = self._made(shapes)
                LOG.info("%s %s in %.1f s", how, self._name, time.perf_counter() - start)
                self._run = run
            return run

    def _placed(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if self._everywhere is None or shape.sharding is not None:
            return shape
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=self._everywhere)

    def _made(self, shapes: tuple) -> tuple[Callable, str]:
        """The program, and "loaded" or "compiled"."""
        store, file = self._store, None
        if store is not None:
            file = store.name_of(self._identity, shapes)
            if file is not None and (stored := store.load(file)) is not None:
                return stored, "loaded"
        with self._traced_for():
            lowered = self.lower(*shapes)
        if store is None or file is None:
            return compiled(lowered), "compiled"
        return store.compiled(file, lowered), "compiled"


class WarmUp(NamedTuple):
    """A program that is compiled before the first request needs it.

    Attributes:
        name: its name.
        run: compiles it if nobody has, and runs it with inert rows; for the engine's own thread.
        ahead: compiles it in any thread and runs nothing; None for a small program, which is compiled when it runs.
        rank: the order in which programs are best compiled ahead, the smallest first.
    """

    name: str
    run: Callable[[], object]
    ahead: Callable[[], object] | None = None
    rank: tuple[int, ...] = ()


def signature_of(tree: Any) -> Any:
    """What a program is compiled for instead of arrays: their shapes, dtypes, and devices chosen on purpose."""

    def shape(x: Any) -> Any:
        if not isinstance(x, jax.Array):  # numpy's int64 reaches a program as int32
            return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
        where = x.sharding if x.committed else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(shape, tree)


class Background:
    """Threads that compile programs beside the engine. The process waits for those being compiled.

    Args:
        threads: how many programs are compiled at the same time at most.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._begun: set[Hashable] = set()

    def compile(self, key: Hashable, prepare: Callable[[], Callable[[], object]]) -> None:
        """Has a program compiled, once.

        Args:
            key: names the program. prepare: runs in the caller's thread and returns a call that compiles the program
                in any thread.
        """
        if key in self._begun:
            return
        self._begun.add(key)
        if self._pool is None:
            self._pool = pool_of_threads(self._threads, "hybrid_jax-compile-background")
        self._pool.submit(_logged, prepare())

    def forget(self, key: Hashable) -> None:
        """A program of this name may be compiled again."""
        self._begun.discard(key)

    def close(self) -> None:
        """Stops: no further program is begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _logged(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:  # the larger program stays in use
        LOG.exception("could not compile a program ahead; a larger one serves in its place")

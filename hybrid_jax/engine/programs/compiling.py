"""Compiling as it happens: how long it takes, which any thread may ask, and a message to those who wait."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
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

# To see whether memory is short, XLA counts an array twice if a program takes and returns it. If the arena is more than
# about half of a GPU's memory, XLA then computes things again to save memory that is not needed. A decode step of 64
# rows gets 16 more launches for each seven layers, products among them.
GPU_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


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


class Compiling:
    """Which program is being compiled, and how long all compiling has taken.

    One thread compiles. Others may call `seconds`.

    Attributes:
        listener: called with (what, number, total) before a program is compiled and with ("", 0, 0) after it, or None.
            What says what the program does. The total is of the programs that a turn or a warm-up needs, and does not
            change until it ends; the number is how many of these are done, and one.
        count_missing: tells how many programs are still to be compiled, the next one included, as far as is known.
    """

    def __init__(self) -> None:
        self.listener: Callable[[str, int, int], None] | None = None
        self.count_missing: Callable[[], int] = lambda: 1
        self._task, self._total = "", 0
        # Seconds so far, and when the program that is being compiled was begun. It is one tuple, so that another thread
        # reads both values of the same moment.
        self._clock: tuple[float, float | None] = (0.0, None)

    def seconds(self) -> float:
        """Seconds of compiling since the start, a program that is being compiled included."""
        total, since = self._clock
        return total if since is None else total + time.perf_counter() - since

    @contextlib.contextmanager
    def next_program(self, what: str = "a step") -> Iterator[None]:
        """Runs the clock, and tells the listener, while a program that does `what` is compiled inside."""
        if self.listener is not None:
            missing = max(1, self.count_missing())
            self._total = max(self._total, missing)
            self.listener(what, self._total - missing + 1, self._total)
        self._clock = (self._clock[0], time.perf_counter())
        try:
            yield
        finally:
            self._clock = (self.seconds(), None)
            if self.listener is not None:
                self.listener("", 0, 0)
            give_back_free_memory()  # memory that the compiler has freed

    def begin(self, task: str, count_missing: Callable[[], int]) -> None:
        """Begins a part of a task that may compile. The count starts over with a new task."""
        if task != self._task:
            self._task, self._total = task, 0
        self.count_missing = count_missing

    def end_turn(self) -> None:
        """Ends a turn: the count starts over."""
        self._task = ""


class Program:
    """A jitted function for arguments of one shape. It is compiled before its first call, under the clock, or loaded.

    Args:
        function: a function of arrays. donated: the arguments whose memory it takes. name: its name in the log.
        compiling: keeps the clock. platform: the platform that it is compiled for.
        store: where programs are kept, or None. identity: what this program is made from (`ProgramStore.name_of`).
        device: where arrays are that are on no device on purpose; None for jax's first.
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
    ) -> None:
        options = GPU_OPTIONS if platform == "gpu" else None
        self._traced_for = for_cuda if platform == "gpu" else contextlib.nullcontext
        self._compiling, self._name, self._store = compiling, name, store
        self._does = DOING.get(function.__name__, "small changes")
        self._device = device
        self._identity = f"{identity} donated={donated} options={options}"
        self._lock = threading.Lock()  # one thread compiles it; others that need it wait
        self._run: Callable | None = None
        self.lower = jax.jit(function, donate_argnums=donated, compiler_options=options).lower

    @property
    def compiled(self) -> bool:
        """Whether it is compiled, so that a call would not have to wait for the compiler."""
        return self._run is not None

    def __call__(self, *args: Any) -> Any:
        run = self._run
        if run is None:
            jax.block_until_ready(args)  # steps that still run must not count as compiling
            with self._compiling.next_program(self._does):
                run = self.compile_ahead(*shapes_of(args))
        return run(*args)

    def compile_ahead(self, *shapes: Any) -> Callable:
        """Compiles it for arguments of these shapes. Any thread may do this, and the clock does not run.

        Tracing holds Python's lock, but the compiler itself does not.
        """
        with self._lock:
            run = self._run
            if run is None:
                start = time.perf_counter()
                with own_settings(jax_default_device=self._device):
                    run, how = self._made(shapes)
                LOG.info("%s %s in %.1f s", how, self._name, time.perf_counter() - start)
                self._run = run
            return run

    def _made(self, shapes: tuple) -> tuple[Callable, str]:
        """The program, and "loaded" or "compiled"."""
        file = None if self._store is None else self._store.name_of(self._identity, shapes)
        if file is not None and (stored := self._store.load(file)) is not None:
            return stored, "loaded"
        with self._traced_for():
            lowered = self.lower(*shapes)
        if self._store is None or file is None:
            return compiled(lowered), "compiled"
        return self._store.compiled(file, lowered), "compiled"


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


def shapes_of(tree: Any) -> Any:
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

    def compile(self, key: Hashable, prepare: Callable[[], Callable[[], None]]) -> None:
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

    def close(self) -> None:
        """Stops: no further program is begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _logged(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # the larger program stays in use
        LOG.exception("could not compile a program ahead; a larger one serves in its place")

"""The compiled programs of one engine: which there are, which are missing, and when each is compiled."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from hybrid_jax.config import EngineConfig
from hybrid_jax.config.sampling_params import MAX_LOGPROBS
from hybrid_jax.engine import pack
from hybrid_jax.engine.programs import compile_cache
from hybrid_jax.engine.programs.compiling import (
    Background,
    Compiling,
    Needed,
    Program,
    WarmUp,
    signature_of,
)
from hybrid_jax.engine.programs.divided import over_devices
from hybrid_jax.engine.programs.loops import Loops, options_for
from hybrid_jax.engine.programs.serving import Serving, StepKey
from hybrid_jax.engine.programs.store import ProgramStore
from hybrid_jax.engine.steps.small import CHANGES, OF_MODEL, READ_STATE, READERS, TO_HOST
from hybrid_jax.engine.steps.step import PLAIN, StepKind, Variant
from hybrid_jax.mesh.shards import Shards
from hybrid_jax.schedule.plan import Plan, Row
from hybrid_jax.state import Model

MOST_COMPILERS = 4  # at the same time beside the engine, because each takes memory
# A step to warm up: the number of its variant, its kind, its bucket, its variant.
Step = tuple[int, StepKind, Any, Variant]


class Programs:
    """Makes programs, each when it is first asked for, and knows which are compiled.

    Args:
        engine: settings. model: what steps are specialised on. kinds: of steps.
        device: where they run.
        arguments: gives the arguments of a step whose rows do nothing, by its kind, bucket and variant.
        store: where compiled programs are kept between processes, or None.
        loops: where loops over steps run.
        to_host: where arrays in the host's memory go; None where that is the device's.
        shards: the devices that the model is divided over; None for one device.

    Attributes:
        made: those that were asked for, by key.
        num_traces: how often one was traced.
        compiling: how long compiling takes.
        serving: chooses the program of a dispatch.
    """

    def __init__(
        self,
        engine: EngineConfig,
        model: Model,
        kinds: Sequence[StepKind],
        *,
        device: jax.Device,
        arguments: Callable[[StepKind, Any, Variant], tuple],
        store: ProgramStore | None,
        loops: Loops,
        to_host: jax.sharding.Sharding | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.model, self._kinds, self._store, self._loops = model, kinds, store, loops
        self._to_host, self._shards = to_host, shards
        self._by_name = {kind.name: kind for kind in kinds}
        self._device, self._arguments = device, arguments
        self._coarse = engine.shapes == "coarse"
        self.made: dict[tuple, Program] = {}
        self.num_traces = 0
        self.compiling = Compiling()
        self.serving = Serving(engine, model, self.made)
        one_by_one = device.platform != "cpu" or self._coarse
        # Programs that are there at other times in other processes would have them run different ones.
        self._alone = shards is None or shards.everywhere.is_fully_addressable
        self._background = Background(1 if one_by_one else min(MOST_COMPILERS, os.cpu_count() or 1))

    # --- making them ------------------------------------------------------------------------------

    def get(self, name: str, *key: Any) -> Program:
        """A program by its name and shape, or for a step by its bucket and variant; compiled at its first call."""
        known = self.made.get((name, *key))
        if known is None:
            known = self.made[name, *key] = self._new(name, *key)
        return known

    def layout(self, name: str, shape: Any, *, adjusts: bool = False) -> pack.Layout:
        """The columns of the packed rows of a kind of step."""
        layout = self._by_name[name].layout(shape)
        extra = pack.adjust_fields(self.model.config.vocab_size) if adjusts else ()
        return pack.Layout(layout.fields + extra)

    def _new(self, name: str, shape: Any = None, variant: Variant = PLAIN) -> Program:
        """Makes the program of a step, or one of the small programs around the steps."""
        kind, title = self._by_name.get(name), name
        donated: int | tuple[int, ...] = ()
        static: dict[str, Any] = {"model": self.model}
        of_loops = self._loops if kind is not None and kind.steps else None
        if kind is not None:
            function, title = kind.run, f"{shape}{variant.suffix}"
            donated = (1, 2) if kind.takes_weights else (0, 1)
            static["layout"] = self.layout(name, shape, adjusts=variant.adjusts)
            static |= {"num_logprobs": variant.num_logprobs, **kind.static(shape)}
            if of_loops is not None and not of_loops.inside:
                static |= {"loops": False, "max_steps": 1}
        elif name in CHANGES:
            function, donated, static = CHANGES[name], 0, {}
        elif name in READ_STATE:
            function, static = READ_STATE[name], static if name in OF_MODEL else {}
        else:
            function = READERS[name]
            if name == "prompt_logprobs":
                static["num_logprobs"] = MAX_LOGPROBS

        def traced(*args):
            self.num_traces += 1
            return function(*args, **static)

        traced.__name__ = name
        on_devices: Callable = traced
        if self._shards is not None:
            takes_weights = name in READERS or (kind is not None and kind.takes_weights)
            form = {"is_step": kind is not None, "takes_weights": takes_weights}
            on_devices = over_devices(traced, name, self._shards, **form)
        return Program(
            on_devices,
            donated,
            self.compiling,
            self._device.platform,
            name=title,
            store=self._store,
            identity=f"{name} {shape} {static}",
            device=self._device,
            options=options_for(self._device.platform, of_loops, divided=self._shards is not None),
            results=self._to_host if name in TO_HOST else None,
            everywhere=None if self._shards is None else self._shards.everywhere,
        )

    def forget_loops(self) -> None:
        """Drops the programs that have a loop over steps: they are made anew, in the form that loops have now."""
        keys = {*self.made, *self.serving.since}
        for key in [key for key in keys if (kind := self._by_name.get(key[0])) and kind.steps]:
            self.made.pop(key, None)
            self.serving.since.pop(key, None)
            self._background.forget(key)

    # --- for a turn -------------------------------------------------------------------------------

    def choose(self, kind: StepKind, bucket: Any, variant: Variant, rows: Sequence[Row]) -> StepKey:
        """The program to use for rows that fit into a bucket; one that fits better is compiled in the background."""
        own = StepKey(kind.name, bucket, variant)
        key = self.serving.choose(kind, *own[1:], rows)
        if key != own and (better := self.serving.stood_in(kind, own, key, rows)):
            self._compile_ahead(better)
        return key

    def missing(self, plan: Plan, small: Iterable[tuple]) -> list[tuple]:
        """Keys of the programs that are needed and not compiled.

        Args:
            plan: its steps, and those that follow it for certain, come in the order in which they run.
            small: keys of the small programs that it needs, which come first.
        """
        needed, shape = list(small), None
        for kind in self._kinds:
            for rows in filter(None, kind.foreseen(plan)):
                key = self.serving.choose(kind, kind.bucket(rows, shape), kind.variant(rows), rows)
                shape = key.bucket
                needed.append(key)
        known = self.made
        return [k for k in dict.fromkeys(needed) if k not in known or not known[k].compiled]

    def counting(self, missing: Callable[[], list[tuple]]) -> AbstractContextManager[None]:
        """Counts the programs that a turn waits for inside; `missing` says which are left, as far as is known."""
        return self.compiling.counting(Needed(missing, self.made).count_with)

    def compile_beside(self, missing: Sequence[tuple]) -> None:
        """Has all but the first of the steps that a plan lacks compiled beside that one, which its dispatch compiles.

        So are the steps that other requests will need, if there are many. Not on an accelerator, where two compilers
        would disturb each other, nor with coarse shapes, where a larger program serves.
        """
        if self._device.platform != "cpu" or self._coarse:
            return
        steps = [key for key in missing if key[0] in self._by_name]
        for key in steps[1:]:
            self._compile_ahead(StepKey(*key))
        if not (steps and self.serving.thrifty):
            return
        self.get(*steps[0])  # now it is known, and can be chosen for others
        for kind in self._kinds:
            for bucket in sorted(kind.expected(self.serving.requests), reverse=True):
                self._compile_ahead(self.serving.choose(kind, bucket, PLAIN, []))

    def _compile_ahead(self, key: StepKey) -> None:
        if not self._alone:
            return
        kind = self._by_name[key.kind]
        self._background.compile(key, functools.partial(self._ahead, kind, *key[1:]))

    def _ahead(self, kind: StepKind, shape: Any, variant: Variant) -> Callable[[], object]:
        """A call that compiles a step in any thread."""
        args = self._arguments(kind, shape, variant)
        program = self.get(kind.name, shape, variant)
        return functools.partial(program.compile_ahead, *signature_of(args))

    # --- before and after -------------------------------------------------------------------------

    def steps_to_warm(self, *, logprobs: bool, adjusts: bool) -> list[Step]:
        """All steps that a warm-up compiles, plain ones before others."""
        steps = [
            (number, kind, shape, variant)
            for kind in self._kinds
            for shape in kind.buckets()
            for number, variant in enumerate(kind.variants(logprobs=logprobs, adjusts=adjusts))
        ]
        return sorted(steps, key=lambda step: step[0])

    def warm_ups(
        self,
        small: Iterable[tuple[str, Callable[[], object]]],
        steps: Iterable[Step],
        run: Callable[[StepKind, Any, Variant], object],
    ) -> list[WarmUp]:
        """What a warm-up does, in this order or another; turns may come between.

        Args:
            small: names of small programs, and calls that run them without an effect.
            steps: those of `steps_to_warm`. run: runs one of them with rows that do nothing.
        """
        found = [WarmUp(name, job) for name, job in small]
        for number, kind, shape, variant in steps:
            job = functools.partial(run, kind, shape, variant)
            ahead = self._ahead(kind, shape, variant)
            # Plain steps come first, and of these the ones that can serve in place of others.
            rank = (number, *(-part for part in kind.cost(shape)))
            found.append(WarmUp(f"{shape}{variant.suffix}", job, ahead, rank))
        numbers = itertools.count(1)  # in the order in which they run

        def counted(job: Callable[[], object]) -> None:
            count = next(numbers), len(found)
            with self.compiling.counting(lambda program: lambda: count):
                job()

        return [w._replace(run=functools.partial(counted, w.run)) for w in found]

    @property
    def kept(self) -> bool:
        """Whether the next process will have what is compiled now."""
        return self._store is not None or compile_cache.keeps_programs()

    def close(self) -> None:
        """Forgets them all; none is compiled in the background any more."""
        self._background.close()
        self.made.clear()

"""Several engines behind one `LLM`, each with a whole model on devices of its own."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from hybrid_jax.api.threads.call_loop import CallLoop
from hybrid_jax.api.threads.calls import Call, own_error
from hybrid_jax.api.threads.commands import Command
from hybrid_jax.api.threads.dispatcher import Dispatcher, none_left
from hybrid_jax.api.threads.engine_thread import EngineThread
from hybrid_jax.api.threads.front import Front
from hybrid_jax.api.threads.loop import Loop, settled
from hybrid_jax.api.threads.prefill_side import PrefillSide
from hybrid_jax.api.threads.questions import Answer, Question
from hybrid_jax.cluster.router import ReplicaCosts, Router
from hybrid_jax.cluster.watch import News, TreeWatcher
from hybrid_jax.config.mesh import MeshShape
from hybrid_jax.costs import CPU_FLOPS_PER_BYTE, GPU_FLOPS_PER_BYTE, frame_costs

if TYPE_CHECKING:
    from hybrid_jax.engine.engine import Engine

# How many times as long as a byte that a step reads a byte takes that comes from the host's memory: on a CPU it is
# written as well; PCIe 5 moves about 48 GB/s, where a Hopper card reads 4.3 TB/s.
CPU_LOADED, GPU_LOADED = 2.0, 90.0
WAIT_FOR_ONE = 0.05  # seconds between two looks at whether a replica is there again


class Replicas(Front):
    """A thread for each engine, and one that decides which of them gets a prompt.

    All threads end with `close`, with this object, or with the program.

    Args:
        loops: one for each replica, with the same model and settings.
        routers: as `routers_of` makes them.
        prefill: has prompts computed by the engines that the router never chooses; None if there are none.
        revive: as in `Dispatcher`.
    """

    def __init__(
        self,
        loops: Sequence[CallLoop],
        *,
        routers: Mapping[str, Router],
        prefill: PrefillSide | None = None,
        revive: Callable[[int], CallLoop] | None = None,
    ) -> None:
        [router] = (router for side, router in routers.items() if side != "prefill")
        self._dispatcher = dispatcher = Dispatcher(router, prefill, revive)
        self._where = loops[0].where
        self._prefill = set(range(len(loops))) - set(router.present)
        for replica, loop in enumerate(loops):
            dispatcher.add(replica, loop)
        if prefill is not None:
            prefill.threads = dispatcher.threads
        # Those that only compute prompts come first.
        self._prefill_tp = dispatcher.threads[0].facts.engine_config.tp
        super().__init__(dispatcher.threads[-1].facts)
        self._thread = threading.Thread(
            target=dispatcher.run, name="hybrid_jax-dispatcher", daemon=True
        )
        self._thread.start()
        # As in `EngineThread`: nothing here may wait, and the threads must end before jax closes its devices.
        weakref.finalize(self, _drop, dispatcher).atexit = False
        dispatcher.at_exit = functools.partial(_stop, dispatcher)
        atexit.register(dispatcher.at_exit)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller's thread is that of an engine, or the one that decides."""
        own = any(thread.is_own_thread for thread in self._dispatcher.threads)
        return own or threading.current_thread() is self._thread

    @property
    def where(self) -> str:
        """As `Front.where`."""
        return self._where

    @property
    def mesh(self) -> MeshShape:
        """How many are there now."""
        present = self._dispatcher.present
        prefill = len(self._prefill.intersection(present))
        return MeshShape(
            dp=len(present) - prefill,
            tp=self._facts.engine_config.tp,
            prefill=prefill,
            prefill_tp=self._prefill_tp,
        )

    def submit(self, calls: Sequence[Call]) -> None:
        """As `EngineThread.submit`."""
        self._check_caller()
        dispatcher = self._dispatcher

        def cancel(error: BaseException) -> None:
            for call in calls:
                call.fail(error)

        start = functools.partial(dispatcher.start, calls, time.perf_counter())
        dispatcher.give(Command(start, cancel))

    def leave(self, call: Call) -> None:
        """As `EngineThread.leave`."""
        if not call.over:
            self._dispatcher.give(Command(functools.partial(self._dispatcher.end, call)))

    def take_out(self, replica: int) -> None:
        """Takes a replica out for good. Its requests go on in the others, each from the tokens it has."""
        self._decided(functools.partial(self._dispatcher.take_out, replica))

    # --- questions and turns ----------------------------------------------------------------------

    def ask(self, question: Question[Answer], *args: Any) -> Answer:
        """As `EngineThread.ask`. What becomes of several answers is said by the question."""
        if not isinstance(question, Question):
            raise TypeError(f"ask: takes a question of api.questions, got {question!r}")
        if question.at_once:
            self.check()
            return question.of_all(self._now(question, args))
        while True:
            chosen: Iterable[int] | None = None
            if question.joined is None:
                chosen = self._heaviest(question.weight, args)
            ask = functools.partial(Loop.now, question=question, args=args)
            if answers := self._each(ask, chosen):
                return question.of_all(list(answers.values()))

    def _heaviest(self, weight: Question[int] | None, args: tuple[Any, ...]) -> list[int]:
        """The one replica that answers."""
        if weight is None:
            return [self._present()[0]]
        found = self._each(functools.partial(Loop.now, question=weight, args=args))
        return [max(found, key=lambda replica: found[replica])] if found else []

    def _now(self, question: Question[Answer], args: tuple[Any, ...]) -> list[Answer]:
        dispatcher, answers = self._dispatcher, []
        for replica in dispatcher.present:
            thread = dispatcher.threads[replica]
            try:
                answers.append(thread.ask(question, *args))
            except Exception:
                if self._is_there(replica, thread):
                    raise
        if not answers:
            self._present()
            return self._now(question, args)
        return answers

    def turn(self) -> None:
        """Has every engine take one turn, and waits for all."""
        self._each(Loop.turn)

    def settle(self) -> None:
        """As `EngineThread.settle`."""
        self._each(settled)

    def _each(
        self, call: Callable[[Loop], Answer], chosen: Iterable[int] | None = None
    ) -> dict[int, Answer]:
        """Has the threads of all replicas, or of those that are chosen, make a call between two turns.

        Returns:
            The answers by replica; none of those that left meanwhile.

        Raises:
            What the call raises. RuntimeError: no replica is left.
        """
        told: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        threads = self._dispatcher.threads
        asked = {n: threads[n] for n in self._present() if chosen is None or n in chosen}
        for replica, thread in asked.items():
            tell = lambda answer, error, replica=replica: told.put((replica, answer, error))
            thread.later(call, tell)
        found = sorted((told.get() for _ in asked), key=lambda entry: entry[0])
        for replica, _, error in found:
            if error is not None and self._is_there(replica, asked[replica]):
                raise own_error(error)
        return {replica: answer for replica, answer, error in found if error is None}

    def _is_there(self, replica: int, thread: EngineThread) -> bool:
        """Whether a replica that was asked is there still, and not another one that was started in its place."""
        return replica in self._present() and self._dispatcher.threads[replica] is thread

    def _present(self) -> tuple[int, ...]:
        """The replicas that are there, once all has been done that was asked for before.

        If there are none but some are being started again, it waits for the first.
        """
        dispatcher = self._dispatcher
        while True:
            found, coming = self._decided(lambda: (dispatcher.present, dispatcher.reviving))
            if found:
                return found
            if not coming:
                raise none_left(dispatcher.gone)
            time.sleep(WAIT_FOR_ONE)

    def _decided(self, call: Callable[[], Any]) -> Any:
        """Has the thread that decides make a call, and returns what it does."""
        self._check_caller()
        told: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        do = lambda: told.put((call(), None))
        self._dispatcher.give(Command(do, lambda error: told.put((None, error))))
        answer, error = told.get()
        if error is not None:
            raise own_error(error)
        return answer

    # --- the end ----------------------------------------------------------------------------------

    def close(self, *, wait: bool = True) -> None:
        """As `EngineThread.close`, of all replicas."""
        self.closed = True
        if os.getpid() != self._pid:
            return
        _drop(self._dispatcher)
        if wait and not self.is_own_thread:
            for thread in self._dispatcher.threads:
                thread.join()
            self._thread.join()


def routers_of(models: Sequence[ReplicaCosts], sides: Sequence[str]) -> dict[str, Router]:
    """A router for each side, which chooses none of the replicas of the other one.

    Args:
        models: of each replica; those of a side are alike.
        sides: of each: "prefill" if it only computes prompts for others, "decode" if it goes on from them, and "".
    """
    routers = {}
    for side in dict.fromkeys(sides):
        model = models[sides.index(side)]
        router = Router(len(sides), _costs_to_move(model) if side == "decode" else model)
        for replica, other in enumerate(sides):
            if other != side:
                router.leave(replica)
        routers[side] = router
    return routers


def routers_here(engines: Sequence[Engine]) -> dict[str, Router]:
    """As `routers_of`, and the engines' caches tell them what they have. No engine may run yet."""
    sides = ["" if engine.disk is None else engine.disk.side for engine in engines]
    routers = routers_of([costs_of(engine) for engine in engines], sides)
    for replica, engine in enumerate(engines):
        tell_cache(engine, functools.partial(routers[sides[replica]].tell, replica))
    return routers


def tell_cache(engine: Engine, tell: Callable[[News], object]) -> None:
    """Has somebody told what an engine's cache can resume from, now and whenever that changes."""
    geometry = engine.geometry
    engine.watch_cache(TreeWatcher(geometry.grain, needs_slots=geometry.has_state, tell=tell))


def _costs_to_move(model: ReplicaCosts) -> ReplicaCosts:
    """What a prompt costs a replica for which it is computed elsewhere: the time to write what the replica lacks."""
    moved = model.costs.kv_bytes * model.flops_per_loaded_byte[0]
    # A model without keys and values has a state to move, whatever the length: tokens only tell prompts apart.
    costs = replace(model.costs, flops_per_token=max(1.0, moved), flops_per_key=0, windows=())
    return replace(model, costs=costs)


def costs_of(engine: Engine) -> ReplicaCosts:
    """What requests cost a replica with such an engine."""
    on_cpu = engine.device.is_host
    per_byte = CPU_FLOPS_PER_BYTE if on_cpu else GPU_FLOPS_PER_BYTE
    return ReplicaCosts(
        costs=engine.scheduler.costs or frame_costs(engine.geometry),
        grain=engine.geometry.grain,
        max_rows=engine.engine_config.max_rows,
        steps=engine.engine_config.steps_per_dispatch,
        flops_per_byte=per_byte,
        flops_per_loaded_byte=(per_byte * (CPU_LOADED if on_cpu else GPU_LOADED),),
    )


def _drop(dispatcher: Dispatcher) -> None:
    """Has all threads end soon."""
    dispatcher.stop()
    for thread in dispatcher.threads:
        thread.close(wait=False)


def _stop(dispatcher: Dispatcher) -> None:
    """Has all threads end with the program. Those of the engines wait for that themselves."""
    dispatcher.stop()
    for thread in dispatcher.threads:
        thread.stop()

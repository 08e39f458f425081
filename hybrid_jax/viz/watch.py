"""Samples of an engine's numbers while it works."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from hybrid_jax.api.stats import Stats

if TYPE_CHECKING:
    from hybrid_jax.api.llm import LLM


class Watch:
    """Notes `llm.stats()` again and again, in a thread of its own, inside a `with` block.

    Args:
        llm: what is watched. every: seconds between two samples; a turn of the engine may make them longer.

    Attributes:
        seconds: when each sample was taken, since the first.
        samples: the numbers.

    Raises:
        ValueError: every is not above 0.

    Example:
        >>> from hybrid_jax import LLM, SamplingParams
        >>> llm = LLM()
        >>> with Watch(llm, every=0.01) as watch:
        ...     outputs = llm.generate("import ", SamplingParams(max_tokens=8))
        >>> len(watch.samples) == len(watch.seconds) >= 2
        True
    """

    def __init__(self, llm: LLM, *, every: float = 0.05) -> None:
        if not every > 0:
            raise ValueError(f"Watch: every must be above 0 seconds, got {every!r}")
        self._llm, self._every = llm, every
        self.seconds: list[float] = []
        self.samples: list[Stats] = []
        self._start = 0.0
        self._error: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hybrid_jax-watch", daemon=True)

    def _note(self) -> None:
        sample = self._llm.stats()
        self.seconds.append(time.perf_counter() - self._start)
        self.samples.append(sample)

    def _run(self) -> None:
        while not self._over.wait(self._every):
            try:
                self._note()
            except Exception as error:  # raised again where the block ends
                self._error = error
                return

    def __enter__(self) -> Watch:
        self._start = time.perf_counter()
        self._note()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        if kind is not None:
            return
        if self._error is not None:
            raise self._error
        self._note()

    @property
    def working_seconds(self) -> list[float]:
        """When each sample was taken, with the time left out in which the engine waited for the compiler."""
        compiling = self.column("compile_s")
        return [t - (c - compiling[0]) for t, c in zip(self.seconds, compiling, strict=True)]

    def column(self, name: str) -> list[float]:
        """One number of every sample.

        Raises:
            ValueError: there is no such number.
        """
        if name not in self.samples[0]:
            raise ValueError(
                f"Watch: {name!r} is none of the numbers of stats(): {', '.join(self.samples[0])}"
            )
        return [float(sample[name]) for sample in self.samples]

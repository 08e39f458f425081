"""An actor that holds an `LLM`, for programs of one's own."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, Unpack

import ray

from hybrid_jax.api.llm import LLM
from hybrid_jax.api.options import LLMOptions
from hybrid_jax.api.outputs import Delta, RequestOutput

AT_ONCE = 1000  # calls that run at the same time, and share the engine's rows


class _LLMActor:
    """An actor that holds an `LLM`. The arguments and the methods are those of `LLM`.

    Calls of several callers run at the same time, and the engine batches their prompts.

    Example:
        >>> import ray
        >>> from hybrid_jax.ray import LLMActor
        >>> actor = LLMActor.options(num_gpus=1).remote("model", max_rows=16)  # doctest: +SKIP
        >>> outputs = ray.get(actor.generate.remote(["Hello"]))  # doctest: +SKIP
        >>> for delta in actor.stream.options(num_returns="streaming").remote("Hello"):  # doctest: +SKIP
        ...     print(ray.get(delta).text)
    """

    def __init__(self, model: str | Path | None = None, **options: Unpack[LLMOptions]) -> None:
        given: dict[str, Any] = {"quiet": True, **options}
        self._llm = LLM(model, progress=False, **given)

    def generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        """As `LLM.generate`."""
        return self._llm.generate(*args, **kwargs)

    def chat(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        """As `LLM.chat`."""
        return self._llm.chat(*args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Generator[Delta, None, None]:
        """As `LLM.stream`. Call it with `.options(num_returns="streaming")`."""
        yield from self._llm.stream(*args, **kwargs)

    def score(self, *args: Any, **kwargs: Any) -> Any:
        """As `LLM.score`."""
        return self._llm.score(*args, **kwargs)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As `LLM.embed`."""
        return self._llm.embed(*args, **kwargs)

    def stats(self) -> dict[str, Any]:
        """As `LLM.stats`."""
        return dict(self._llm.stats())

    def describe(self) -> str:
        """As `LLM.describe`."""
        return self._llm.describe()


# Ray's types leave the argument out.
LLMActor = ray.remote(max_concurrency=AT_ONCE)(_LLMActor)  # type: ignore[call-overload]

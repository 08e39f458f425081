"""The calls of `LLM` that only read prompts: `score`, `logprobs` and `embed`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np

from hybrid_jax.api.arguments import checks_arguments
from hybrid_jax.api.engine_thread import EngineThread
from hybrid_jax.api.intake import Errors, Intake
from hybrid_jax.api.progress_bar import ProgressOption
from hybrid_jax.api.reading import (
    Positions,
    Score,
    all_logprobs,
    check_pooling,
    check_positions,
    hidden_of,
    read_pairs,
    score_of,
    vector_of,
)
from hybrid_jax.config import ModelConfig
from hybrid_jax.config.sampling_params import SamplingParams
from hybrid_jax.schedule.request import Pooling
from hybrid_jax.text.prompts import Prompts

# One token is drawn, and thrown away.
READING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


class Reader:
    """What `LLM` can do without generating. An `LLM` provides the attributes."""

    model_config: ModelConfig
    _intake: Intake
    _thread: EngineThread
    _run: Callable[..., list[Any]]

    @checks_arguments
    def score(
        self,
        prompts: Prompts,
        continuations: Prompts,
        *,
        progress: ProgressOption = None,
        errors: Errors = "raise",
    ) -> list[Score]:
        """How likely continuations are, each after its prompt. Nothing is generated.

        Prompts that begin alike are computed once, through the prefix cache.

        Args:
            prompts, continuations: as many of one as of the other, or one prompt and several continuations, or the
                reverse. Each is text or token ids. If both are text, the tokens are those of the two texts joined. A
                token that holds characters of both then counts as part of the continuation.
            progress, errors: as in `generate`.

        Raises:
            ValueError: a prompt or a continuation is empty or malformed, or there are not as many of both.
            FloatingPointError: as in `generate`.

        Example:
            >>> llm = LLM()
            >>> scores = llm.score("import nump", ["y as np", "q as zz"])
            >>> scores[0].logprob > scores[1].logprob
            True
        """
        read = read_pairs(
            prompts,
            continuations,
            self._intake.tokenizer,
            vocab_size=self.model_config.vocab_size,
            longest=self._thread.engine.longest_prompt,
        )
        accepted = self._intake.accepted(
            [pair if isinstance(pair, Exception) else pair.whole for pair in read],
            replace(READING, prompt_logprobs=0),
            logprobs_from=[1 if isinstance(pair, Exception) else pair.first for pair in read],
            errors=errors,
        )
        return self._run(accepted, progress, "scoring", score_of, errors)

    @checks_arguments
    def logprobs(
        self,
        prompts: Prompts,
        *,
        positions: Positions = "last",
        progress: ProgressOption = None,
        errors: Errors = "raise",
    ) -> list[np.ndarray]:
        """How likely each token of the vocabulary is to come next. Nothing is generated.

        Args:
            prompts: as in `generate`.
            positions: "last" for what comes after the whole prompt, which may use the prefix cache, or "all" for what
                comes after each token, for which all of the prompt is computed.
            progress, errors: as in `generate`.

        Returns:
            For each prompt the natural logarithms of the probabilities, from the model's own logits, without a
            temperature: float32[vocab_size], or with "all" float32[tokens, vocab_size].

        Raises:
            ValueError: something is wrong with a prompt, or positions is neither.
            FloatingPointError: as in `generate`.

        Example:
            >>> llm = LLM()
            >>> [after] = llm.logprobs("import os\\nimport sy")
            >>> after.shape == (llm.model_config.vocab_size,), llm.decode([after.argmax()])
            (True, 's')
        """
        check_positions(positions)
        pooling: Pooling = "last" if positions == "last" else "none"
        accepted = self._intake.accepted(prompts, READING, pooling=pooling, errors=errors)
        hidden = self._run(accepted, progress, "reading", hidden_of, errors)
        ask = self._thread.ask
        found = all_logprobs(
            hidden,
            self.model_config.vocab_size,
            lambda part: ask(lambda engine: engine.all_logprobs(part)),
            lambda: ask(lambda engine: engine.where_damaged()),
        )
        if errors == "raise":
            for error in found:
                if isinstance(error, Exception):
                    raise error
        return found

    @overload
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Literal["last", "mean"] = "last",
        normalize: bool = True,
        progress: ProgressOption = None,
        errors: Literal["raise"] = "raise",
    ) -> np.ndarray: ...

    @overload
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        progress: ProgressOption = None,
        errors: Errors = "raise",
    ) -> list[np.ndarray]: ...

    @checks_arguments
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        progress: ProgressOption = None,
        errors: Errors = "raise",
    ) -> np.ndarray | list[np.ndarray]:
        """Vectors for prompts, made of hidden states after the model's last norm: float32[prompts, width].

        Args:
            prompts: as in `generate`.
            pooling: "last" for the hidden state of the last token, which may use the prefix cache; "mean" for the
                mean over all tokens, or "none" for the hidden states of all tokens, for which all of the prompt is
                computed. With "none" the result is a list with float32[tokens, width] for each prompt.
            normalize: scale each vector to length 1.
            progress, errors: as in `generate`. With errors="return" the result is a list, of a vector float32[width] or
                an exception for each prompt.

        Raises:
            ValueError: something is wrong with a prompt, or there is no such pooling.
            FloatingPointError: as in `generate`.

        Example:
            >>> llm = LLM()
            >>> vectors = llm.embed(["import os", "import sys", "x = [1, 2]"], pooling="mean")
            >>> vectors.shape == (3, llm.model_config.width)
            True
            >>> bool(vectors[0] @ vectors[1] > vectors[0] @ vectors[2])
            True
        """
        check_pooling(pooling)
        accepted = self._intake.accepted(prompts, READING, pooling=pooling, errors=errors)
        read = functools.partial(vector_of, normalize=normalize)
        vectors = self._run(accepted, progress, "embedding", read, errors)
        if errors == "return" or pooling == "none":
            return vectors
        return np.stack(vectors) if vectors else np.zeros((0, self.model_config.width), np.float32)

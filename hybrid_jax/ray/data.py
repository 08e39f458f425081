"""A stage of Ray Data: a column of prompts in, columns of answers out."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from hybrid_jax.api.llm import LLM
from hybrid_jax.api.options import LLMOptions
from hybrid_jax.config.sampling_params import SamplingParams


class Generate:
    """Completes a column of prompts, for `map_batches` of a Ray data set.

    The prompts of a batch run together, so its size should be several times `max_rows`. A prompt that is refused has
    its reason in the column "error", and the others are completed.

    Args:
        model: as in `LLM`.
        prompt: name of the column with the prompts, as texts or as lists of token ids.
        sampling_params: for all prompts; None for the model's own.
        **options: of `LLM`.

    Example:
        >>> import numpy as np
        >>> from hybrid_jax import SamplingParams
        >>> from hybrid_jax.ray.data import Generate
        >>> stage = Generate(sampling_params=SamplingParams(temperature=0.0, max_tokens=4))
        >>> batch = stage({"prompt": np.array(["import ", ""], object), "id": np.array([1, 2])})
        >>> sorted(batch)
        ['error', 'finish_reason', 'generated_text', 'id', 'num_tokens', 'prompt']
        >>> batch["num_tokens"].tolist(), batch["error"].tolist()
        ([4, 0], ['', 'prompt 1: is empty; a prompt needs at least one token'])
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        prompt: str = "prompt",
        sampling_params: SamplingParams | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        given: dict[str, Any] = {"quiet": True, **options}
        self._llm = LLM(model, progress=False, **given)
        self._prompt, self._params = prompt, sampling_params

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A batch with the columns "generated_text", "finish_reason", "num_tokens" (new ones) and "error"."""
        if self._prompt not in batch:
            raise ValueError(
                f"Generate: the data has no column {self._prompt!r}, only {sorted(batch)}; name it with prompt=..."
            )
        prompts = [_prompt_of(value) for value in batch[self._prompt]]
        known = [prompt for prompt in prompts if not isinstance(prompt, Exception)]
        found = iter(self._llm.generate(known, self._params, errors="return", progress=False))
        outputs = [p if isinstance(p, Exception) else next(found) for p in prompts]
        texts, reasons, counts, errors = [], [], [], []
        for output in outputs:
            one = None if isinstance(output, Exception) else output.outputs[0]
            texts.append("" if one is None else one.text)
            reasons.append("" if one is None else one.finish_reason)
            counts.append(0 if one is None else len(one.token_ids))
            errors.append(str(output) if isinstance(output, Exception) else "")
        return {
            **batch,
            "generated_text": np.array(texts, object),
            "finish_reason": np.array(reasons, object),
            "num_tokens": np.array(counts, np.int64),
            "error": np.array(errors, object),
        }


def _prompt_of(value: Any) -> str | list[int] | Exception:
    """A prompt of a row, or why it is none."""
    if isinstance(value, str):
        return value
    try:
        return [operator.index(token) for token in value]
    except TypeError:
        return TypeError(f"Generate: a prompt must be a text or token ids, got {value!r}")

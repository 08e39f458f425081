"""The engine against transformers: chunked prefill, cached decode and prefix hits on the committed goldens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybrid_jax import LLM, SamplingParams
from tests.drawing import EVERYTHING, left_to_all
from tests.parity.goldens import GOLDENS, config_of, load_answers, one_of_each_family, tolerance

# Compiling an engine is what takes the time. Log-probabilities of prompts know no layers, and mean more programs.
CHOSEN = GOLDENS if EVERYTHING else one_of_each_family()
PROMPTED = CHOSEN if EVERYTHING else CHOSEN[:2]


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64) - logits.max()
    return logits - np.log(np.exp(logits).sum())


@pytest.mark.parametrize("golden", CHOSEN, ids=lambda golden: golden.name)
@left_to_all(
    "bamba",
    "falcon_mamba",
    "granite",
    "lfm2_attention",
    "mamba2",
    "mamba_",
    "nemotron",
    "qwen3_next",
    "qwen3_5_dense",
    "lfm2_moe",
    "jamba_experts_biases",
)
def test_the_engine_continues_as_transformers_does(golden):
    answers, limit = load_answers(golden), tolerance(config_of(golden))
    prompts = [{"prompt_token_ids": answer.prompt} for answer in answers]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=0)
    asking = replace(params, max_tokens=1, prompt_logprobs=2, n=2)
    with LLM(golden, max_rows=2, prefill_tokens=32, steps_per_dispatch=4) as llm:
        cold, hit = (llm.generate(prompts, params) for _ in range(2))
        prompted = llm.generate(prompts, asking) if golden in PROMPTED else []
        assert llm.stats()["prefill_rows"] >= len(prompts) + 2  # 70 tokens come in three chunks
    assert [output.num_cached_tokens for output in cold] == [0] * len(answers)
    assert hit[-1].num_cached_tokens == 64
    for output, again, answer in zip(cold, hit, answers, strict=True):
        assert list(output.outputs[0].token_ids) == answer.continuation
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        for index, token in enumerate(answer.continuation):
            want = log_probabilities(answer.logits[len(answer.prompt) - 1 + index])[token]
            for run in (output, again):
                got = run.outputs[0].logprobs[index][token].logprob
                assert abs(got - want) < limit, f"token {index} after {len(answer.prompt)}"
    for output, answer in zip(prompted, answers, strict=golden in PROMPTED):
        assert output.num_cached_tokens == 0
        first, *entries = output.prompt_logprobs
        assert first is None and len(entries) == len(answer.prompt) - 1
        for logits, token, entry in zip(answer.logits, answer.prompt[1:], entries, strict=False):
            want = log_probabilities(logits)
            assert abs(entry[token].logprob - want[token]) < limit
            assert entry[token].rank == (want > want[token]).sum() + 1
            assert set(np.argsort(want)[-2:].tolist()) <= set(entry)

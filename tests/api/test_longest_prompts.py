"""Calls that generate nothing take prompts of exactly the longest length."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hybrid_jax import LLM
from hybrid_jax.config import SpeculationConfig
from tests.llms import HEAD
from tests.schedule.simulated_engine import Engine

TEXT = [*(HEAD * 3).encode()]
KINDS = {
    # by page, ring and chunk: an edge, and one past it
    "65": {"max_model_len": 65, "prefill_tokens": 32},
    "exact": {"max_model_len": 64, "exact": True},
    "drafts": {"max_model_len": 65, "speculation": SpeculationConfig(method="ngram", num_tokens=3)},
    "cut": {"model": "tiny_cut", "max_model_len": 64},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=list(KINDS))
def test_calls_that_generate_nothing_take_the_longest_prompts(options):
    with LLM(max_rows=1, quiet=True, **options) as llm:
        longest = options["max_model_len"]
        assert llm.max_model_len == longest
        whole = TEXT[: longest + 1]
        [score] = llm.score([whole[:-21]], [whole[-21:-1]])
        # The numbers of one token less, which always fitted.
        [shorter] = llm.score([whole[:-21]], [whole[-21:-2]])
        assert score.token_ids == tuple(whole[-21:-1])
        assert np.allclose(score.token_logprobs[:-1], shorter.token_logprobs, atol=3e-4)
        for pooling in ("last", "mean", "none"):
            assert np.isfinite(llm.embed([whole[:-1]], pooling=pooling)[0]).all()
            with pytest.raises(ValueError, match=f"has {longest + 1} tokens, but the longest that"):
                llm.embed([whole], pooling=pooling)
        with pytest.raises(
            ValueError, match=f"prompt 0: has {longest + 1} tokens, but the longest"
        ):
            llm.score([whole[:-20]], [whole[-20:]])
        message = f"has {longest} tokens and needs room for one more, but the longest sequence is"
        with pytest.raises(ValueError, match=message):
            llm.generate([whole[:-1]])


def test_a_prompt_that_is_read_may_fill_model_and_pool():
    engine = Engine.make(max_model_len=128)
    request = engine.add([1] * 128, max_tokens=1, reads_only=True, stop_ids=())
    engine.run()
    assert len(request.output.token_ids) == 1
    with pytest.raises(
        ValueError, match=re.escape("prompt of 129 tokens and 1 to generate need 130")
    ):
        engine.add([1] * 129, max_tokens=1, reads_only=True)
    # 2 pages of 2 frames and a state of 3: 128 tokens.
    small = Engine.make(num_frames=8)
    assert small.scheduler.longest_prompt == 128
    small.add([1] * 128, max_tokens=1, reads_only=True)
    small.run()

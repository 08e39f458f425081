"""Runs models on one device and on several."""

from __future__ import annotations

import functools

from hybrid_jax import LLM, SamplingParams
from tests.mesh.models import DIVIDED, VOCAB
from tests.tiny_models import redrawn

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
SETTINGS = {"max_rows": 4, "prefill_tokens": 32}
PROMPTS = [[(7 * n + k * k) % VOCAB for k in range(40 + 31 * n)] for n in range(4)]


def answers(llm, params=GREEDY, prompts=PROMPTS):
    """Tokens of all prompts together, and how many of each prompt were cached."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return [out.outputs[0].token_ids for out in outputs], [out.num_cached_tokens for out in outputs]


def make(name, count=1, *, weights=0, **settings):
    """An LLM of one of `DIVIDED` on so many devices."""
    config, _ = DIVIDED[name]
    params = redrawn(config, seed=weights, dtype=settings.get("dtype", "float32"))
    if config.mtp:
        settings = {"speculation": "mtp"} | settings
    mesh = None if count == 1 else f"tp={count}"
    return LLM.from_params(config, params, quiet=True, mesh=mesh, **SETTINGS | settings)


def make_on(mesh, name, **settings):
    """An LLM of one of `DIVIDED` on a mesh, with or without replicas."""
    config, _ = DIVIDED[name]
    if config.mtp:
        settings = {"speculation": "mtp"} | settings
    params = redrawn(config, seed=0, dtype=settings.get("dtype", "float32"))
    return LLM.from_params(config, params, quiet=True, mesh=mesh, **SETTINGS | settings)


def tokens_of(outputs):
    """Tokens of all completions, by prompt."""
    return [[one.token_ids for one in out.outputs] for out in outputs]


@functools.cache
def of_one_device(name):
    """`answers` of one device, cold and then with hits."""
    with make(name) as llm:
        return answers(llm), answers(llm)

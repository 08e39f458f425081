"""The other side of `whole_models.py`: transformers on torch, eager, and compiled with a StaticCache."""

from __future__ import annotations

import inspect
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, StaticCache
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


class Peer:
    """A model whose forward calls are timed one by one; no tokenizer, no `generate` around them.

    Args:
        path: Hugging Face directory.
        dtype: "float32" or "bfloat16".
        compiled: run `torch.compile`d forwards on a StaticCache.
    """

    def __init__(self, path: Path, dtype: str, compiled: bool) -> None:
        given = {"dtype": getattr(torch, dtype)}
        try:
            model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", **given)
        except ValueError:  # a model without attention
            model = AutoModelForCausalLM.from_pretrained(path, **given)
        self.model = model.eval()
        self.compiled = compiled
        taken = inspect.signature(self.model.forward).parameters
        # Those of Mamba alone name it otherwise.
        self.cache_name = "cache_params" if "cache_params" in taken else "past_key_values"
        # Prompts and single tokens compile apart, each shape once.
        self.prompt_step = self.token_step = self.model.forward
        if compiled:
            torch._dynamo.config.cache_size_limit = 64
            self.prompt_step = torch.compile(self.model.forward, dynamic=False)
            self.token_step = torch.compile(self.model.forward, dynamic=False)

    @torch.inference_mode()
    def prefill(self, prompts: np.ndarray, room: int = 0):
        """Reads prompts int[B, T]; returns seconds, the cache with room for more tokens, and the next tokens."""
        start = time.perf_counter()
        inputs, cache = torch.as_tensor(prompts), None
        if self.compiled:
            cache = StaticCache(config=self.model.config, max_cache_len=prompts.shape[1] + room)
        out = self.prompt_step(
            input_ids=inputs, **{self.cache_name: cache}, use_cache=True, logits_to_keep=1
        )
        token = out.logits[:, -1:].argmax(-1)
        return time.perf_counter() - start, out[self.cache_name], token

    @torch.inference_mode()
    def decode(self, cache, token: torch.Tensor, steps: int) -> tuple[float, list[list[int]]]:
        """Seconds of `steps` greedy steps after `token` [B, 1], and the tokens, `token` first."""
        start, tokens = time.perf_counter(), [token]
        for _ in range(steps):
            out = self.token_step(input_ids=tokens[-1], **{self.cache_name: cache}, use_cache=True)
            tokens.append(out.logits[:, -1:].argmax(-1))
        elapsed = time.perf_counter() - start
        return elapsed, torch.cat(tokens, 1).tolist()

"""Another side of `whole_models.py`: llama.cpp through llama-cpp-python, on all cores.

The model is converted by llama.cpp's own converter, which its Python package does not contain: a folder of llama.cpp's
source must be at hand (`--llama-cpp`). The release of llama-cpp-python on PyPI as source has it in vendor/llama.cpp.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np

MOST_ROWS, MOST_TOKENS = 8, 4608  # of a row


def convert(path: Path, source: Path, dtype: str) -> Path:
    """The model of a Hugging Face directory as a file of llama.cpp beside its weights, made once."""
    target = path / f"model.{dtype}.gguf"
    if target.exists():
        return target
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    hparams = ModelBase.load_hparams(path, False)
    kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))

    class WithoutWords(kind):
        """Random models have neither a tokenizer nor a head for multi-token prediction."""

        model_arch, no_mtp = kind.model_arch, True

        def set_vocab(self) -> None:
            self._set_vocab_none()
            self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    part = target.with_suffix(".part")
    types = {"float32": gguf.LlamaFileType.ALL_F32, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16}
    WithoutWords(path, types[dtype], part).write()
    part.rename(target)
    return target


class Peer:
    """A model whose decode calls are timed one by one, under the names of `transformers_peer.Peer`.

    Args:
        path: Hugging Face directory. source: folder of llama.cpp's source. dtype: of weights, keys and values.
    """

    def __init__(self, path: Path, source: Path, dtype: str) -> None:
        self.lib = llama_cpp.llama_cpp
        self.lib.llama_log_set(SILENT, ctypes.c_void_p(0))
        self.lib.llama_backend_init()
        given = self.lib.llama_model_default_params()
        given.n_gpu_layers = 0
        self.model = self.lib.llama_model_load_from_file(
            str(convert(path, source, dtype)).encode(), given
        )
        if not self.model:
            raise SystemExit(f"llama.cpp does not load {path}")
        asked = self.lib.llama_context_default_params()
        asked.n_ctx = MOST_ROWS * MOST_TOKENS
        asked.n_batch = MOST_TOKENS
        asked.n_ubatch = 512
        asked.n_seq_max = MOST_ROWS
        asked.n_threads = asked.n_threads_batch = os.cpu_count()
        kept = {"float32": llama_cpp.GGML_TYPE_F32, "bfloat16": llama_cpp.GGML_TYPE_F16}
        asked.type_k = asked.type_v = kept[dtype]
        self.context = self.lib.llama_init_from_model(self.model, asked)
        if not self.context:
            raise SystemExit("llama.cpp makes no context")
        self.vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.batch = self.lib.llama_batch_init(MOST_TOKENS, 0, 1)

    def prefill(self, prompts: np.ndarray, room: int = 0):
        """Reads prompts int[B, T]; returns seconds, how many tokens each row has, and the next tokens [B, 1]."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        start, tokens = time.perf_counter(), []
        for row, prompt in enumerate(prompts):
            tokens += self._run([(int(t), at, row) for at, t in enumerate(prompt)], last_only=True)
        return time.perf_counter() - start, prompts.shape[1], np.array(tokens)[:, None]

    def decode(self, length: int, token: np.ndarray, steps: int) -> tuple[float, list[list[int]]]:
        """Seconds of `steps` greedy steps after `token` [B, 1], and the tokens, `token` first."""
        start, tokens = time.perf_counter(), [token[:, 0].tolist()]
        for step in range(steps):
            tokens.append(self._run([(t, length + step, row) for row, t in enumerate(tokens[-1])]))
        return time.perf_counter() - start, np.array(tokens).T.tolist()

    def _run(self, tokens: list[tuple[int, int, int]], *, last_only: bool = False) -> list[int]:
        """Decodes (token, position, row) in one call; the likeliest tokens after all, or after the last one."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for place, (token, position, row) in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
            batch.logits[place] = not last_only or place == len(tokens) - 1
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp does not decode")
        places = [len(tokens) - 1] if last_only else range(len(tokens))
        return [int(self._logits(place).argmax()) for place in places]

    def _logits(self, place: int) -> np.ndarray:
        return np.ctypeslib.as_array(
            self.lib.llama_get_logits_ith(self.context, place), (self.vocab,)
        )


@llama_cpp.llama_log_callback
def SILENT(level, text, data) -> None:
    """Takes llama.cpp's messages."""

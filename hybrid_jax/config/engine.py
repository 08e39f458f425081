"""How one engine runs a model: memory, sizes, and what the prefix cache does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hybrid_jax.config.arrays import FP8
from hybrid_jax.config.backend import BACKENDS, Kernels
from hybrid_jax.config.checks import flags, integers, must, one_of, positive, require
from hybrid_jax.config.formats import QUANTIZED, Quantize
from hybrid_jax.config.model import DTYPES
from hybrid_jax.config.other_names import refuses_other_names
from hybrid_jax.config.speculation import SpeculationConfig

CACHE_POLICIES = ("off", "lru", "sglang", "marconi", "marconi-code", "adaptive")
SHAPES = ("fine", "coarse")
KV_CACHE_DTYPES = ("auto", "fp8")
CHECKPOINTS = ("float32", "int8")
LOADS = ("faster", "always")
MAX_GRAIN = 64  # a tile of Triton's scan: the tokens after a chunk's last checkpoint lie in one


@refuses_other_names
@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How the prefix cache admits and evicts.

    Attributes:
        policy: "off" keeps nothing. The others differ in what is evicted first when memory runs out.
            "lru": the entry used longest ago. "sglang": the same, but only at the ends of paths. "marconi": the entry
            with the least recency + alpha * FLOPs spared per byte, with an alpha tuned on past requests
            (arXiv 2411.19379). "marconi-code": the same with the bytes of the published code. "alpha:X": the same
            with a fixed alpha. "adaptive": the entry with the least expected gain, as learned from past requests.
        history_tokens: tokens that stay known after their memory was given away, 4 bytes each, so that a prompt
            that shares a part of them is noticed.
        checkpoints: how recurrent states are kept in the cache. "float32" keeps them as they are. "int8" keeps a byte
            for each number, and scales, so that about a quarter of the memory is enough; prompts that hit then
            differ a little from those that do not.
        loads: which prefixes come back from the host's memory and from disk. "faster": those that take less time to
            load than to compute, by the speeds that the engine measures. "always": all, so that two runs load the same.

    Example:
        >>> CacheConfig().policy
        'adaptive'
    """

    policy: str = "adaptive"
    history_tokens: int = 1 << 22
    checkpoints: Literal["float32", "int8"] = "float32"
    loads: Literal["faster", "always"] = "faster"

    def __post_init__(self) -> None:
        known = self.policy in CACHE_POLICIES or fixed_alpha(self.policy) is not None
        names = ", ".join(CACHE_POLICIES)
        must(self, "policy", known, f"one of {names}, or alpha:X with a number X >= 0")
        integers(self, "history_tokens")
        must(self, "history_tokens", self.history_tokens >= 0, "at least 0")
        one_of(self, "checkpoints", CHECKPOINTS)
        one_of(self, "loads", LOADS)


def resolve_dtype(dtype: str, stored: str, *, on_cpu: bool) -> Literal["float32", "bfloat16"]:
    """The dtype to use: "auto" means float32 on a CPU, which has no fast bfloat16, and elsewhere the stored one.

    Raises:
        ValueError: it is none that an engine has.
    """
    if dtype not in ("auto", *DTYPES[:2]):
        raise ValueError(f"LLM: dtype must be auto, float32 or bfloat16, got {dtype!r}")
    wide = (on_cpu or stored == "float32") if dtype == "auto" else dtype == "float32"
    return "float32" if wide else "bfloat16"


def fixed_alpha(policy: object) -> float | None:
    """The X of "alpha:X", a number of at least 0; None for anything else."""
    kind, _, value = policy.partition(":") if isinstance(policy, str) else ("", "", "")
    try:
        alpha = float(value) if kind == "alpha" else -1.0
    except ValueError:
        return None
    return alpha if 0 <= alpha < math.inf else None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs a model. The defaults here are those of a CPU; `LLM` chooses others for a GPU
    (`sizing.defaults`).

    Attributes:
        memory: bytes for arena, rings, tables and logits together. None: on a CPU, what `max_rows` sequences of
            min(max_model_len, 4096) tokens and 8 cached checkpoints a row need, at most half of what is free beside
            the weights and a quarter of the RAM; elsewhere 95 % of what weights and a step's temporaries leave, or
            less, so that the compiler can time the largest product.
        host_memory: bytes of the host's memory that keep what the arena evicts; 0 for none.
        cache_dir: a folder on disk that keeps what the cache has taken, also for processes to come; None for none.
        disk_memory: bytes that the folder's files may have; None for 20 GiB, at most half of what is free.
        max_rows: sequences that decode together.
        max_model_len: longest sequence in tokens; None for the model's own.
        grain: tokens between positions where checkpoints may lie; a power of two, at most 64.
        page_tokens: tokens of one KV page, a power of two; None lets the geometry choose.
        prefill_tokens: most prompt tokens one prefill step handles, over all its rows.
        steps_per_dispatch: decode steps one dispatch runs on the device before the host looks.
        dtype: dtype of weights and activations, and of KV pages unless `kv_cache_dtype` says otherwise.
        kv_cache_dtype: "fp8" keeps keys and values as FP8 numbers (e4m3) with a float32 scale for each head of each
            token; "auto" keeps them in `dtype`.
        quantize: matrices of layers become codes while 16-bit files are read: "int8" with a scale for each column,
            "fp8" (e4m3) with one for each block of 128 x 128, "int4" with one for each 32 elements of a column. None
            keeps them as the files have them.
        cache: prefix cache policy.
        exact: bit-identical logits whatever the batch, chunking or cache (slower).
        seed: base of the sampling noise of requests that bring no seed.
        shapes: "fine": steps are compiled for many shapes, so that little is padded; "coarse": for few, where
            compiling takes long and padding costs little (`schedule.bucket`).
        kernels: "pallas" makes the steps of Pallas kernels (on a CPU interpreted, for tests), "xla" of what
            XLA compiles; "auto" is "pallas" on NVIDIA GPUs from Ampere on (`config.backend`). On a CPU "auto" is what
            XLA compiles with products of our own for few rows, where llvmlite is installed; "xla" does without these.
        speculation: how drafts of the next tokens are made and judged; None for plain decoding.
        tp: devices that the model is divided over (tensor parallelism). `memory` is then that of each.

    Example:
        >>> EngineConfig(max_rows=4, max_model_len=1024).steps_per_dispatch
        8
    """

    memory: int | None = None
    host_memory: int = 0
    cache_dir: str | None = None
    disk_memory: int | None = None
    max_rows: int = 8
    max_model_len: int | None = None
    grain: int = 32
    page_tokens: int | None = None
    prefill_tokens: int = 512
    steps_per_dispatch: int = 8
    dtype: str = "float32"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    quantize: Quantize | None = None
    cache: CacheConfig = CacheConfig()
    exact: bool = False
    seed: int = 0
    shapes: Literal["fine", "coarse"] = "fine"
    kernels: Kernels = "auto"
    speculation: SpeculationConfig | None = None
    tp: int = 1

    @property
    def kv_dtype(self) -> str:
        """Dtype of the numbers in KV pages."""
        return FP8 if self.kv_cache_dtype == "fp8" else self.dtype

    @property
    def window_tokens(self) -> int:
        """Most tokens of a row that decodes in one pass over the layers."""
        return self.grain if self.exact else self.decode_tokens

    @property
    def decode_tokens(self) -> int:
        """Most tokens that a row feeds in one decode step."""
        return 1 if self.speculation is None else self.speculation.window

    def __post_init__(self) -> None:
        numbers = "host_memory", "max_rows", "grain", "prefill_tokens", "steps_per_dispatch"
        integers(self, *numbers, "seed", "tp")
        optional = ("memory", "disk_memory", "max_model_len", "page_tokens")
        integers(self, *(name for name in optional if getattr(self, name) is not None))
        flags(self, "exact")
        positive(self, "max_rows", "steps_per_dispatch", "tp")
        if self.memory is not None:
            positive(self, "memory")
        must(self, "cache", isinstance(self.cache, CacheConfig), "a CacheConfig")
        must(self, "host_memory", self.host_memory >= 0, "at least 0")
        rounds = self.exact and self.cache.checkpoints == "int8"
        why = "exact=True does not go with checkpoints='int8', whose states are rounded; leave one out"
        require(not rounds, "EngineConfig", why)
        kept = not self.host_memory or self.cache.policy != "off"
        must(self, "host_memory", kept, "0 with cache='off', for it holds what the cache evicts")
        if self.cache_dir is None:
            must(self, "disk_memory", self.disk_memory is None, "left out without cache_dir")
        else:
            must(self, "cache_dir", self.cache_dir != "", "the path of a folder")
            cached = self.cache.policy != "off"
            must(
                self, "cache_dir", cached, "left out with cache='off', for it keeps what is cached"
            )
        if self.disk_memory is not None:
            positive(self, "disk_memory")
        if self.max_model_len is not None:
            what = "at least 2, a prompt's token and one more"
            must(self, "max_model_len", self.max_model_len >= 2, what)
        most = 2**63 - 1
        must(self, "seed", 0 <= self.seed <= most, f"an integer between 0 and {most}")
        grain, page = self.grain, self.page_tokens
        good = 8 <= grain <= MAX_GRAIN and grain.bit_count() == 1
        must(self, "grain", good, f"a power of two between 8 and {MAX_GRAIN}")
        if page is not None:
            good = page >= 16 and page.bit_count() == 1
            must(self, "page_tokens", good, "a power of two of at least 16")
        good = self.prefill_tokens >= grain and self.prefill_tokens % grain == 0
        must(self, "prefill_tokens", good, f"a multiple of grain {grain}")
        good = self.steps_per_dispatch <= grain
        must(self, "steps_per_dispatch", good, f"at most grain {grain}")
        if self.speculation is not None:
            what = "a SpeculationConfig or None"
            must(self, "speculation", isinstance(self.speculation, SpeculationConfig), what)
            tokens = self.speculation.num_tokens
            what = f"of fewer num_tokens than grain {grain}"
            must(self, "speculation", tokens < grain, what, str(tokens))
            branches = self.exact and self.speculation.tree is not None
            must(
                self,
                "speculation",
                not branches,
                "without a tree in exact mode",
                f"{self.speculation.tree}",
            )
            lossless = self.speculation.unjudged_above is None or not self.exact
            limit = str(self.speculation.unjudged_above)
            must(self, "speculation", lossless, "without unjudged_above in exact mode", limit)
        one_of(self, "kernels", ("auto", *BACKENDS))
        one_of(self, "shapes", SHAPES)
        one_of(self, "dtype", DTYPES[:2])
        one_of(self, "kv_cache_dtype", KV_CACHE_DTYPES)
        if self.quantize is not None:
            one_of(self, "quantize", tuple(QUANTIZED))

"""Static descriptions of models, caches and engines: frozen, hashable, standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("gated_silu", "relu2")
ROUTINGS = ("topk_softmax", "sigmoid")
MAX_GRAIN = 64  # the tile of `ssd_scan`: the tokens after a chunk's last checkpoint lie in one tile


def _require(condition: bool, where: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{where}: {what}")


def _one_of(value: object, allowed: tuple, where: str, name: str) -> None:
    _require(value in allowed, where, f"{name} must be one of {allowed}, got {value!r}")


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value > 0, type(config).__name__, f"{name} must be positive, got {value}")


def _integers(config: object, *names: str) -> None:
    """Integers only, not what compares like one: a float that reaches a shape fails far from here."""
    for name in names:
        value = getattr(config, name)
        good = isinstance(value, int) and not isinstance(value, bool)
        _require(good, type(config).__name__, f"{name} must be an integer, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings: as published for Llama 3, or a plain division.

    Attributes:
        kind: "linear" or "llama3".
        factor: how many times longer the context became.
        low_freq_factor, high_freq_factor: bounds of the blend, in wavelengths per original context.
        original_max_position: tokens of context the model was first trained with.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        where = "RopeScaling"
        _one_of(self.kind, ("linear", "llama3"), where, "kind")
        _require(self.factor > 0, where, f"factor must be positive, got {self.factor}")
        _require(
            0 < self.low_freq_factor < self.high_freq_factor,
            where,
            f"low_freq_factor must be positive and below high_freq_factor, got "
            f"{self.low_freq_factor} and {self.high_freq_factor}",
        )


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of the first `dim` channels of each head, half-split convention."""

    dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _require(self.dim > 0 and self.dim % 2 == 0, "Rope", f"dim must be even, got {self.dim}")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query softmax attention.

    Attributes:
        num_heads, num_kv_heads: query heads and the KV heads they share in equal blocks.
        head_dim: channels of one head.
        rope: rotary embedding, or None for no position encoding.
        scale: factor on q·k, or None for head_dim ** -0.5.
        qkv_bias, out_bias: biases on the projections.
        qk_norm: RMS norm over each head of q and k before the rotation.
        qk_norm_eps: its epsilon.
        window: a query sees itself and the `window - 1` tokens before it; None for all.
        soft_cap: logits become cap * tanh(logits / cap); None for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None = None
    scale: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "num_kv_heads")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "Attention",
            f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
            f"{self.num_kv_heads}",
        )
        _require(
            self.head_dim > 0 and self.head_dim % 2 == 0,
            "Attention",
            f"head_dim must be even, got {self.head_dim}",
        )
        if self.rope is not None:
            _require(
                self.rope.dim <= self.head_dim,
                "Attention",
                f"rope dim must be at most head_dim {self.head_dim}, got {self.rope.dim}",
            )
        if self.window is not None:
            _require(self.window > 0, "Attention", f"window must be positive, got {self.window}")

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Mamba-2 mixer (SSD, arXiv 2405.21060), one decay rate per head.

    Attributes:
        num_heads, head_dim: M and P; their product is the inner width.
        state_size: R, the width of B and C.
        num_groups: G, B and C are shared by M / G consecutive heads.
        conv_width: taps of the causal depthwise convolution.
        conv_bias, proj_bias: biases of the convolution and of in_proj / out_proj.
        dt_limits: (low, high) bounds on the step size after softplus.
        norm_groups: the gated RMS norm works on this many equal blocks of the inner width.
        norm_eps: its epsilon.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    dt_limits: tuple[float, float] = (0.0, math.inf)
    norm_groups: int = 1
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "head_dim", "state_size", "num_groups", "norm_groups")
        for name, divisor in (("num_heads", self.num_groups), ("inner_size", self.norm_groups)):
            value = getattr(self, name)
            _require(
                value % divisor == 0,
                "Mamba2",
                f"{name} must be a multiple of its groups, got {value} and {divisor}",
            )
        _require(
            self.conv_width >= 2, "Mamba2", f"conv_width must be at least 2, got {self.conv_width}"
        )
        low, high = self.dt_limits
        _require(0 <= low < high, "Mamba2", f"dt_limits must be ordered, got {self.dt_limits}")

    @property
    def inner_size(self) -> int:
        """M * P."""
        return self.num_heads * self.head_dim

    @property
    def record_size(self) -> int:
        """Channels of x and B together, what a ring record keeps: M * P + G * R."""
        return self.inner_size + self.num_groups * self.state_size

    @property
    def conv_size(self) -> int:
        """E, the convolved channels x, B, C: M * P + 2 * G * R."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def proj_size(self) -> int:
        """Outputs of in_proj: z, x, B, C, dt."""
        return self.inner_size + self.conv_size + self.num_heads


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Feed-forward block.

    Attributes:
        width: hidden width F.
        kind: "gated_silu" is down(silu(gate(x)) * up(x)), "relu2" is down(relu(up(x))²).
        bias: biases on every projection.
    """

    width: int
    kind: Literal["gated_silu", "relu2"] = "gated_silu"
    bias: bool = False

    def __post_init__(self) -> None:
        _positive(self, "width")
        _one_of(self.kind, ACTIVATIONS, "MLP", "kind")


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Dropless mixture of experts.

    Attributes:
        num_experts, top_k: experts, and how many each token visits.
        width: hidden width of one expert.
        kind: activation of the experts, as in `MLP`.
        routing: "topk_softmax" picks by raw logits, then softmax over the picked ones (Granite 4).
            "sigmoid" scores with a sigmoid, picks by score + correction bias within the best
            groups, and weighs by the raw score (Nemotron-H).
        num_groups, top_groups: expert groups and how many stay in the choice ("sigmoid" only).
        normalize: divide the picked weights by their sum ("sigmoid" only).
        scale: factor on the picked weights ("sigmoid" only).
        shared_width: hidden width of the shared expert; 0 for none.
        latent_width: the experts work on a projection of this width; 0 for the model's own width.
        bias: biases in experts and shared expert.
    """

    num_experts: int
    top_k: int
    width: int
    kind: Literal["gated_silu", "relu2"] = "gated_silu"
    routing: Literal["topk_softmax", "sigmoid"] = "topk_softmax"
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    scale: float = 1.0
    shared_width: int = 0
    latent_width: int = 0
    bias: bool = False

    def __post_init__(self) -> None:
        _positive(self, "num_experts", "width", "num_groups", "top_groups")
        _one_of(self.kind, ACTIVATIONS, "MoE", "kind")
        _one_of(self.routing, ROUTINGS, "MoE", "routing")
        _require(
            0 < self.top_k <= self.num_experts,
            "MoE",
            f"top_k must be between 1 and num_experts {self.num_experts}, got {self.top_k}",
        )
        _require(
            self.num_experts % self.num_groups == 0 and self.top_groups <= self.num_groups,
            "MoE",
            f"num_groups must divide num_experts and top_groups be at most num_groups, got "
            f"{self.num_experts}, {self.num_groups}, {self.top_groups}",
        )


Mixer = Attention | Mamba2
FeedForward = MLP | MoE


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One residual layer: h += sum of mixers(norm(h)), then h += mlp(norm(h)); one may be absent.

    Attributes:
        mixers: the sequence mixers, run in parallel on the same normed input; usually one, or none.
        mlp: the feed-forward block, or None.
        weights_of: index of an earlier layer whose weights this one shares, or None for its own.
    """

    mixers: tuple[Mixer, ...] = ()
    mlp: FeedForward | None = None
    weights_of: int | None = None

    def __post_init__(self) -> None:
        _require(bool(self.mixers) or self.mlp is not None, "LayerSpec", "needs a mixer or an mlp")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything about a model that is not a weight.

    Attributes:
        family: name in `hybrid_jax.models`, the checkpoint layout the model came in.
        vocab_size, width: V and D.
        layers: one spec per layer, in order.
        norm_eps: epsilon of the layer norms and the last norm.
        tie_embeddings: logits use the embedding matrix.
        max_position: longest sequence in tokens, prompt and output together.
        embedding_multiplier, residual_multiplier, logits_multiplier: factors on the embeddings,
            on what each block adds to the residual stream, and on the logits.
        residual_in_fp32: keep the residual stream in float32 whatever the dtype.
        dtype: the weights' dtype as stored.
        eos_token_ids: any of these ends a sequence.
        bos_token_id: what the tokenizer puts first, when it does.

    Example:
        >>> attention = Attention(num_heads=4, num_kv_heads=2, head_dim=64)
        >>> layer = LayerSpec(mixers=(attention,), mlp=MLP(width=512))
        >>> config = ModelConfig(family="llama", vocab_size=256, width=256, layers=(layer,) * 2)
        >>> len(config.mixers(Attention)), config.mamba2
        (2, None)
    """

    family: str
    vocab_size: int
    width: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_position: int = 4096
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    residual_in_fp32: bool = False
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        _require(bool(self.layers), "ModelConfig", "needs at least one layer")
        _positive(self, "vocab_size", "width", "max_position")
        _require(
            self.dtype in DTYPES,
            "ModelConfig",
            f"dtype must be one of {DTYPES}, got {self.dtype!r}",
        )
        for index, layer in enumerate(self.layers):
            source = layer.weights_of
            _require(
                source is None or 0 <= source < index,
                "ModelConfig",
                f"layer {index} shares weights of layer {source}, which does not come before it",
            )
            _require(
                source is None or self.layers[source].weights_of is None,
                "ModelConfig",
                f"layer {index} shares weights of layer {source}, which has none of its own",
            )
            _require(
                source is None or replace(layer, weights_of=None) == self.layers[source],
                "ModelConfig",
                f"layer {index} shares weights of layer {source}, so both must be alike, got {layer} "
                f"and {self.layers[source] if source is not None else None}",
            )
        for kind in (Attention, Mamba2):
            shapes = {
                _cache_shape(m)
                for layer in self.layers
                for m in layer.mixers
                if isinstance(m, kind)
            }
            if len(shapes) > 1:
                raise NotImplementedError(
                    f"ModelConfig: all {kind.__name__} mixers of a model must cache the same "
                    f"shape, got {sorted(shapes)}"
                )

    def mixers(self, kind: type) -> tuple:
        """All mixers of one kind, in layer order; their positions here are the cache indices."""
        return tuple(m for layer in self.layers for m in layer.mixers if isinstance(m, kind))

    @property
    def attention(self) -> Attention | None:
        """The first attention mixer; all of them cache the same shape."""
        return next(iter(self.mixers(Attention)), None)

    @property
    def mamba2(self) -> Mamba2 | None:
        """The first Mamba-2 mixer; all of them cache the same shape."""
        return next(iter(self.mixers(Mamba2)), None)


def _cache_shape(mixer: Mixer) -> tuple[int, ...]:
    if isinstance(mixer, Attention):
        return (mixer.num_kv_heads, mixer.head_dim)
    return (
        mixer.num_heads,
        mixer.head_dim,
        mixer.state_size,
        mixer.num_groups,
        mixer.conv_width,
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How the prefix cache admits and evicts.

    Attributes:
        policy: "off" keeps nothing, "lru" evicts the entry used longest ago.

    Example:
        >>> CacheConfig().policy
        'lru'
    """

    policy: Literal["off", "lru"] = "lru"

    def __post_init__(self) -> None:
        _require(
            self.policy in ("off", "lru"),
            "CacheConfig",
            f"policy must be 'off' or 'lru', got {self.policy!r}",
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs a model.

    Attributes:
        memory: bytes for arena, rings and tables together. None takes what `max_rows` sequences of
            min(max_model_len, 4096) tokens and 8 cached checkpoints a row need, at most a quarter of
            the machine's RAM on a CPU, or half of what is free on an accelerator.
        max_rows: sequences that decode together.
        max_model_len: longest sequence in tokens; None for the model's own.
        grain: tokens between positions where checkpoints may lie; a power of two, at most 64.
        page_tokens: tokens of one KV page, a power of two; None lets the geometry choose.
        prefill_tokens: most prompt tokens one prefill step handles, over all its rows.
        steps_per_dispatch: decode steps one dispatch runs on the device before the host looks.
        dtype: dtype of weights, activations and KV pages.
        cache: prefix cache policy.
        exact: bit-identical logits whatever the batch, chunking or cache (slower).
        seed: base of the sampling noise of requests that bring no seed.

    Example:
        >>> EngineConfig(max_rows=4, max_model_len=1024).steps_per_dispatch
        8
    """

    memory: int | None = None
    max_rows: int = 8
    max_model_len: int | None = None
    grain: int = 32
    page_tokens: int | None = None
    prefill_tokens: int = 512
    steps_per_dispatch: int = 8
    dtype: str = "float32"
    cache: CacheConfig = CacheConfig()
    exact: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        where = "EngineConfig"
        _integers(self, "max_rows", "grain", "prefill_tokens", "steps_per_dispatch", "seed")
        optional = ("memory", "max_model_len", "page_tokens")
        _integers(self, *(name for name in optional if getattr(self, name) is not None))
        _positive(self, "max_rows", "steps_per_dispatch")
        _positive(self, *(n for n in ("memory", "max_model_len") if getattr(self, n) is not None))
        _require(
            8 <= self.grain <= MAX_GRAIN and self.grain & (self.grain - 1) == 0,
            where,
            f"grain must be a power of two between 8 and {MAX_GRAIN}, got {self.grain}",
        )
        if self.page_tokens is not None:
            _require(
                self.page_tokens >= 16 and self.page_tokens & (self.page_tokens - 1) == 0,
                where,
                f"page_tokens must be a power of two of at least 16, got {self.page_tokens}",
            )
        _require(
            self.prefill_tokens >= self.grain and self.prefill_tokens % self.grain == 0,
            where,
            f"prefill_tokens must be a multiple of grain {self.grain}, got {self.prefill_tokens}",
        )
        _require(
            self.steps_per_dispatch <= self.grain,
            where,
            f"steps_per_dispatch must be at most grain {self.grain}, got {self.steps_per_dispatch}",
        )
        _require(
            self.dtype in DTYPES[:2],
            where,
            f"dtype must be one of {DTYPES[:2]}, got {self.dtype!r}",
        )

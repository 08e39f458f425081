"""What blocks compute: mixers and feed-forward blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeGuard

from hybrid_jax.config.checks import multiple, must, one_of, positive, require

ACTIVATIONS = ("gated_silu", "relu2")
GATED_NORMS = ("gate_first", "norm_first", "none")
ROUTINGS = ("topk_softmax", "softmax_topk", "sigmoid")
# What a mixer's keys and values, or its state, are made of: the layer's own input; the output of the model's cut
# (`config.cut`); or nothing, because it reads those of the first mixer of its group.
Source = Literal["own", "cut", "group"]
SOURCES = ("own", "cut", "group")


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
        one_of(self, "kind", ("linear", "llama3"))
        positive(self, "factor")
        low, high = self.low_freq_factor, self.high_freq_factor
        what = "positive and below high_freq_factor"
        must(self, "low_freq_factor", 0 < low < high, what, f"{low} and {high}")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of the first `dim` channels of each head, half-split convention."""

    dim: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        must(self, "dim", self.dim > 0 and self.dim % 2 == 0, "even")


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
        float32_norms: the weights of that norm are float32, whatever the model's dtype.
        gate: what attention gives is multiplied by the sigmoid of a further projection, before the last one.
        sliding_window: a query sees itself and the `sliding_window - 1` tokens before it; None for all.
        soft_cap: logits become cap * tanh(logits / cap); None for none.
        source: what its keys and values are made of.
        pages: it keeps them in pages (`keeps_pages`).
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
    float32_norms: bool = False
    gate: bool = False
    sliding_window: int | None = None
    soft_cap: float | None = None
    source: Source = "own"
    pages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive(self, "num_heads", "num_kv_heads")
        one_of(self, "source", SOURCES)
        multiple(self, "num_heads", "num_kv_heads")
        must(self, "head_dim", self.head_dim > 0 and self.head_dim % 2 == 0, "even")
        if self.rope is not None:
            require(
                self.rope.dim <= self.head_dim,
                "Attention",
                f"rope dim must be at most head_dim {self.head_dim}, got {self.rope.dim}",
            )
        if self.sliding_window is not None:
            positive(self, "sliding_window")

    @property
    def softmax_scale(self) -> float:
        """The factor on q·k."""
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
        gated_norm: the output is multiplied by silu(z) and then normed ("gate_first"), the other way round
            ("norm_first"), or only multiplied ("none").
        norm_groups: that RMS norm works on this many equal blocks of the inner width.
        norm_eps: its epsilon.
        norm_shards: a block of that norm goes over so many devices, one after the other, each of which has this layer.
        source: what x, B and dt are made of, and C. A mixer that reads the state of its group makes its C of the cut's
            output too, without a convolution.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    dt_limits: tuple[float, float] = (0.0, math.inf)
    gated_norm: Literal["gate_first", "norm_first", "none"] = "gate_first"
    norm_groups: int = 1
    norm_eps: float = 1e-5
    norm_shards: int = 1
    source: Source = "own"

    def __post_init__(self) -> None:
        positive(self, "num_heads", "head_dim", "state_size", "num_groups", "norm_groups")
        one_of(self, "source", SOURCES)
        multiple(self, "num_heads", "num_groups", "its groups")
        multiple(self, "inner_size", "norm_groups", "its groups")
        must(self, "conv_width", self.conv_width >= 2, "at least 2")
        one_of(self, "gated_norm", GATED_NORMS)
        low, high = self.dt_limits
        must(self, "dt_limits", 0 <= low < high, "ordered")

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
    def proj_sizes(self) -> tuple[int, ...]:
        """Outputs of in_proj: those of z, x, B, C, dt."""
        shared = self.num_groups * self.state_size
        return (self.inner_size, self.inner_size, shared, shared, self.num_heads)

    @property
    def proj_size(self) -> int:
        """All outputs of in_proj."""
        return sum(self.proj_sizes)


@dataclass(frozen=True, kw_only=True)
class Mamba1:
    """Mamba mixer (S6, arXiv 2312.00752), one decay rate per channel and state element.

    Attributes:
        inner_size: E, channels of the state.
        state_size: R, elements per channel.
        dt_rank: width that step sizes are projected from.
        conv_width: taps of the causal depthwise convolution.
        conv_bias, proj_bias: biases of the convolution and of in_proj / out_proj.
        norms: RMS norms of what step sizes are projected from, of B and of C: none, with weights (Jamba), or without
            (Falcon-Mamba).
        norm_eps: their epsilon.
        shards: so many devices have inner_size channels each, and sum what step sizes, B and C are made of.
    """

    inner_size: int
    state_size: int
    dt_rank: int
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    norms: Literal["none", "weighted", "weightless"] = "none"
    norm_eps: float = 1e-6
    shards: int = 1

    def __post_init__(self) -> None:
        positive(self, "inner_size", "state_size", "dt_rank")
        must(self, "conv_width", self.conv_width >= 2, "at least 2")
        one_of(self, "norms", ("none", "weighted", "weightless"))

    @property
    def conv_size(self) -> int:
        """Convolved channels."""
        return self.inner_size


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Gated delta net (arXiv 2412.06464): a state of value by key channels per head, which each token corrects.

    Attributes:
        num_key_heads, num_value_heads: G heads of q and k, and M heads of v and the state; equal blocks of value heads
            share a key head.
        key_dim, value_dim: R and P, channels of one head.
        conv_width: taps of the causal depthwise convolution over v, k, q.
        conv_bias: its bias.
        norm_eps: epsilon of the RMS norm over each head of the output, which comes before the gate.
        source: what v, k, the rates, and q are made of.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    conv_bias: bool = False
    norm_eps: float = 1e-6
    source: Literal["own", "cut"] = "own"

    def __post_init__(self) -> None:
        one_of(self, "source", ("own", "cut"))
        positive(self, "num_key_heads", "num_value_heads", "key_dim", "value_dim")
        multiple(self, "num_value_heads", "num_key_heads")
        must(self, "conv_width", self.conv_width >= 2, "at least 2")

    @property
    def key_size(self) -> int:
        """G * R, channels of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """M * P, channels of all values."""
        return self.num_value_heads * self.value_dim

    @property
    def record_size(self) -> int:
        """Channels of u and k together, what a ring record keeps: M * P + G * R."""
        return self.value_size + self.key_size

    @property
    def conv_size(self) -> int:
        """E, the convolved channels v, k, q: M * P + 2 * G * R."""
        return self.value_size + 2 * self.key_size

    @property
    def proj_size(self) -> int:
        """Outputs of in_proj: z, v, k, q, a, b."""
        return self.value_size + self.conv_size + 2 * self.num_value_heads


@dataclass(frozen=True, kw_only=True)
class ShortConv:
    """Gated short convolution (LFM2): C * conv(B * x), whose last inputs are all that it remembers.

    Attributes:
        size: E, channels of each of B, C and x.
        conv_width: W, taps of the causal depthwise convolution.
        bias: of both projections and of the convolution.
    """

    size: int
    conv_width: int = 3
    bias: bool = False

    def __post_init__(self) -> None:
        positive(self, "size")
        must(self, "conv_width", self.conv_width >= 2, "at least 2")


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Feed-forward block.

    Attributes:
        width: hidden width F.
        kind: "gated_silu" is down(silu(gate(x)) * up(x)), "relu2" is down(relu(up(x))²).
        bias: biases on every projection.
        feed_forward: it mixes no tokens (`is_feed_forward`).
    """

    width: int
    kind: Literal["gated_silu", "relu2"] = "gated_silu"
    bias: bool = False
    feed_forward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive(self, "width")
        one_of(self, "kind", ACTIVATIONS)


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Dropless mixture of experts.

    Attributes:
        num_experts, top_k: experts, and how many each token visits.
        width: hidden width of one expert.
        kind: activation of the experts, as in `MLP`.
        routing: "topk_softmax" picks by raw logits, then softmax over the picked ones (Granite 4).
            "softmax_topk" is a softmax over all experts, of which the largest count (Qwen).
            "sigmoid" scores with a sigmoid, picks by score + correction bias within the best
            groups, and weighs by the raw score (Nemotron-H).
        num_groups, top_groups: expert groups and how many stay in the choice ("sigmoid" only).
        normalize: divide the picked weights by their sum ("softmax_topk" and "sigmoid").
        sum_eps: added to that sum ("sigmoid" only).
        scale: factor on the picked weights ("sigmoid" only).
        shared_width: hidden width of the shared expert; 0 for none.
        shared_gate: the shared expert is multiplied by the sigmoid of a projection to one number.
        latent_width: the experts work on a projection of this width; 0 for the model's own width.
        bias: biases in experts and shared expert.
        shards: so many devices have num_experts / shards of the experts each.
        feed_forward: as in `MLP`.
    """

    num_experts: int
    top_k: int
    width: int
    kind: Literal["gated_silu", "relu2"] = "gated_silu"
    routing: Literal["topk_softmax", "softmax_topk", "sigmoid"] = "topk_softmax"
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    sum_eps: float = 1e-20
    scale: float = 1.0
    shared_width: int = 0
    shared_gate: bool = False
    latent_width: int = 0
    bias: bool = False
    shards: int = 1
    feed_forward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive(self, "num_experts", "width", "num_groups", "top_groups")
        one_of(self, "kind", ACTIVATIONS)
        one_of(self, "routing", ROUTINGS)
        good = 0 < self.top_k <= self.num_experts
        must(self, "top_k", good, f"between 1 and num_experts {self.num_experts}")
        require(
            self.num_experts % self.num_groups == 0 and self.top_groups <= self.num_groups,
            "MoE",
            f"num_groups must divide num_experts and top_groups be at most num_groups, got "
            f"{self.num_experts}, {self.num_groups}, {self.top_groups}",
        )


RecurrentMixer = Mamba1 | Mamba2 | GatedDelta | ShortConv
Mixer = Attention | RecurrentMixer
FeedForward = MLP | MoE


def source_of(part: Mixer | FeedForward) -> Source:
    """What a mixer's keys and values, or its state, are made of; kinds without a form after a cut do not say."""
    return getattr(part, "source", "own")


def is_feed_forward(part: object) -> bool:
    """Whether each token goes through it alone."""
    return getattr(part, "feed_forward", False)


def is_mixer(part: Mixer | FeedForward) -> TypeGuard[Mixer]:
    """Whether it mixes tokens."""
    return not is_feed_forward(part)


def keeps_pages(part: object) -> bool:
    """Whether a mixer keeps an entry of every token, in pages. All others keep a state."""
    return getattr(part, "pages", False)

"""What a model costs: weights, FLOPs of a prefill, bytes of what it leaves behind. Standard library only.

FLOPs are counted as 2 per multiply-add. Per token: twice the active weights of every block, convolution included, and
the recurrence (6 per element of a Mamba state: decay, update, readout; 8 for the gated delta rule, which
also reads a prediction). Attention adds 4 * N * H per visible key. Norms, activations and logits are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_jax.config import (
    MLP,
    Attention,
    GatedDelta,
    LayerSpec,
    Mamba1,
    Mamba2,
    ModelConfig,
    MoE,
    RecurrentMixer,
)
from hybrid_jax.geometry import ITEM_BYTES, Geometry, checkpoint_bytes

Block = Attention | RecurrentMixer | MLP | MoE


@dataclass(frozen=True, kw_only=True)
class Costs:
    """FLOPs of a prefill and bytes of what it leaves in a cache, as functions of positions alone.

    Attributes:
        flops_per_token: of everything that does not depend on how much context there is.
        flops_per_key: of attention, for every key that a query sees, all layers together.
        windows: (tokens, flops_per_key) of the attention layers whose queries see so many tokens at most.
        kv_bytes: K and V of one token, all layers.
        checkpoint_bytes: one recurrent state, all layers; 0 for a model without.

    Example:
        >>> costs = Costs(flops_per_token=10, flops_per_key=2, kv_bytes=64, checkpoint_bytes=1000)
        >>> costs.flops(3), costs.flops(3, start=2)
        (42.0, 16.0)
    """

    flops_per_token: float
    flops_per_key: float
    kv_bytes: int
    checkpoint_bytes: int
    windows: tuple[tuple[int, float], ...] = ()

    def flops(self, end: int, start: int = 0) -> float:
        """FLOPs to process tokens `start .. end` of a sequence, what stands before them being cached."""
        total = self.flops_per_token * (end - start)
        total += self.flops_per_key * (end * (end + 1) - start * (start + 1)) / 2
        for window, flops in self.windows:
            total += flops * (_windowed(end, window) - _windowed(start, window))
        return total

    def per_block(self, block: int) -> Costs:
        """The same costs where positions count blocks of so many tokens."""
        inside = (block - block * block) / 2  # keys of the tokens before a block's last
        return Costs(
            flops_per_token=block * self.flops_per_token + inside * self.flops_per_key,
            flops_per_key=block * block * self.flops_per_key,
            kv_bytes=block * self.kv_bytes,
            checkpoint_bytes=self.checkpoint_bytes,
            windows=tuple((max(1, w // block), block * block * f) for w, f in self.windows),
        )

    @property
    def tokens_per_checkpoint(self) -> float:
        """Tokens of KV that take as much memory as one checkpoint; infinite without KV."""
        return self.checkpoint_bytes / self.kv_bytes if self.kv_bytes else float("inf")


def frame_costs(geometry: Geometry) -> Costs:
    """Costs as far as a geometry tells: the bytes, and one FLOP a token."""
    page = geometry.frames_per_page * geometry.frame_bytes
    return Costs(
        flops_per_token=1.0,
        flops_per_key=0.0,
        kv_bytes=page // geometry.page_tokens if geometry.has_pages else 0,
        checkpoint_bytes=checkpoint_bytes(geometry),
    )


def model_costs(model: ModelConfig, geometry: Geometry, *, cut: int | None = None) -> Costs:
    """Costs of a model as an engine runs it: bytes are those of frames, their padding included.

    Args:
        cut: layers that prompt tokens go through; the later ones only write KV and state from what the cut leaves
            (SwiftKV, arXiv 2410.03960, and its like for recurrent layers). None for all.
    """
    taken = frame_costs(geometry)
    return block_costs(
        _blocks(model.layers[:cut]),
        width=model.width,
        kv_bytes=taken.kv_bytes,
        checkpoint_bytes=taken.checkpoint_bytes,
        written=[] if cut is None else _blocks(model.layers[cut:]),
    )


def _blocks(layers: Sequence[LayerSpec]) -> list[tuple[int, Block]]:
    blocks = [block for layer in layers for block in (*layer.mixers, layer.mlp)]
    return [(1, block) for block in blocks if block is not None]


def block_costs(
    blocks: list[tuple[int, Block]],
    *,
    width: int,
    kv_bytes: int,
    checkpoint_bytes: int,
    written: Sequence[tuple[int, Block]] = (),
) -> Costs:
    """Costs of a stack of blocks.

    Args:
        blocks: (how many, block) pairs.
        written: more of them, which only write their KV and state.
        width: D of the residual stream.
        kv_bytes, checkpoint_bytes: what the cache takes for a token and a state.
    """
    windows: dict[int, float] = {}
    per_token = per_key = 0.0
    for count, block in blocks:
        per_token += count * token_flops(block, width)
        if isinstance(block, Attention):
            flops = count * 4 * block.num_heads * block.head_dim
            if block.window is None:
                per_key += flops
            else:
                windows[block.window] = windows.get(block.window, 0.0) + flops
    per_token += sum(count * written_flops(block, width) for count, block in written)
    return Costs(
        flops_per_token=per_token,
        flops_per_key=per_key,
        windows=tuple(sorted(windows.items())),
        kv_bytes=kv_bytes,
        checkpoint_bytes=checkpoint_bytes,
    )


def prefill_flops(model: ModelConfig, num_tokens: int, start: int = 0) -> int:
    """FLOPs to run tokens `start .. start + num_tokens` of one sequence, without the logits."""
    costs = block_costs(_blocks(model.layers), width=model.width, kv_bytes=0, checkpoint_bytes=0)
    return int(costs.flops(start + num_tokens, start))


def _windowed(position: int, window: int) -> int:
    """Sum over the first `position` queries of the keys a sliding window lets each see."""
    ramp = min(position, window)
    return ramp * (ramp + 1) // 2 + (position - ramp) * window


def token_flops(block: Block, width: int) -> int:
    """FLOPs of one block for one token, but for what attention does with keys."""
    if isinstance(block, MLP | MoE):
        return 2 * _active_weights(block, width)
    flops = 2 * mixer_weights(block, width)
    if isinstance(block, Mamba1):
        flops += 6 * block.inner_size * block.state_size
    elif isinstance(block, Mamba2):
        flops += 6 * block.inner_size * block.state_size
    elif isinstance(block, GatedDelta):
        flops += 8 * block.num_value_heads * block.key_dim * block.value_dim
    return flops


def written_flops(block: Block, width: int) -> int:
    """FLOPs of one block for a token that only leaves K and V, or goes into the state: nothing is read."""
    if isinstance(block, MLP | MoE):
        return 0
    if isinstance(block, Attention):
        return 4 * width * block.num_kv_heads * block.head_dim
    if isinstance(block, Mamba1):  # x, then dt and B of it
        inner, rank = block.inner_size, block.dt_rank
        projected, columns = width * inner + inner * (2 * rank + block.state_size), inner
    elif isinstance(block, GatedDelta):  # k, v, beta and the decay
        columns = block.conv_size - block.num_key_heads * block.key_dim
        projected = width * (columns + 2 * block.num_value_heads)
    else:  # x, B and dt
        columns = block.record_size
        projected = width * (columns + block.num_heads)
    state, _ = state_elements(block)
    update = 6 if isinstance(block, GatedDelta) else 4  # of 8 and 6 an element, without the readout
    return 2 * projected + 2 * block.conv_width * columns + update * state


def state_elements(mixer: RecurrentMixer) -> tuple[int, int]:
    """Elements of one layer's recurrent state, and of its convolution columns."""
    columns = (mixer.conv_width - 1) * mixer.conv_size
    if isinstance(mixer, GatedDelta):
        return mixer.num_value_heads * mixer.key_dim * mixer.value_dim, columns
    return mixer.inner_size * mixer.state_size, columns


# --- weights --------------------------------------------------------------------------------------


def weight_count(model: ModelConfig) -> int:
    """Parameters of the model; shared layers and tied embeddings count once."""
    total = model.vocab_size * model.width * (1 if model.tie_embeddings else 2) + model.width
    for layer in model.layers:
        if layer.weights_of is not None:
            continue
        total += sum(mixer_weights(mixer, model.width) for mixer in layer.mixers)
        total += model.width * (bool(layer.mixers) + (layer.mlp is not None))
        total += _mlp_weights(layer.mlp, model.width) if layer.mlp is not None else 0
    return total


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of the weights in memory: decay, D, dt_bias and a router's correction bias stay float32."""
    kept = 0
    for layer in model.layers:
        if layer.weights_of is None:
            kept += sum(3 * mixer.num_heads for mixer in layer.mixers if isinstance(mixer, Mamba2))
            if isinstance(layer.mlp, MoE) and layer.mlp.routing == "sigmoid":
                kept += layer.mlp.num_experts
    return (weight_count(model) - kept) * ITEM_BYTES[dtype] + kept * ITEM_BYTES["float32"]


def mixer_weights(mixer: Attention | RecurrentMixer, width: int) -> int:
    """Parameters of one mixer, its norms before the residual stream left out."""
    if isinstance(mixer, Attention):
        q, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        count = width * (2 * q + 2 * kv)
        count += (q + 2 * kv) * mixer.qkv_bias + width * mixer.out_bias
        return count + 2 * mixer.head_dim * mixer.qk_norm
    convolution = mixer.conv_size * (mixer.conv_width + mixer.conv_bias)
    if isinstance(mixer, Mamba1):
        inner, rank = mixer.inner_size, mixer.dt_rank
        count = 3 * width * inner + inner * (rank + 2 * mixer.state_size) + (rank + 1) * inner
        return count + convolution + inner * (mixer.state_size + 1)
    if isinstance(mixer, GatedDelta):
        value = mixer.num_value_heads * mixer.value_dim
        count = width * (mixer.conv_size + value + 2 * mixer.num_value_heads) + value * width
        return count + convolution + 2 * mixer.num_value_heads + mixer.value_dim
    count = width * (mixer.proj_size + mixer.inner_size) + convolution
    count += 3 * mixer.num_heads + mixer.inner_size
    return count + (mixer.proj_size + width) * mixer.proj_bias


def _mlp_weights(mlp: MLP | MoE, width: int) -> int:
    if isinstance(mlp, MLP):
        return _expert_weights(width, mlp.width, mlp)
    inner = mlp.latent_width or width
    count = mlp.num_experts * _expert_weights(inner, mlp.width, mlp)
    count += mlp.num_experts * (width + (mlp.routing == "sigmoid"))
    if mlp.shared_width:
        count += _expert_weights(width, mlp.shared_width, mlp)
    if mlp.latent_width:
        count += 2 * width * inner + (width + inner) * mlp.bias
    return count


def _active_weights(mlp: MLP | MoE, width: int) -> int:
    """Weights that one token meets."""
    if isinstance(mlp, MLP):
        return _mlp_weights(mlp, width)
    idle = mlp.num_experts - mlp.top_k
    return _mlp_weights(mlp, width) - idle * _expert_weights(
        mlp.latent_width or width, mlp.width, mlp
    )


def _expert_weights(outer: int, width: int, mlp: MLP | MoE) -> int:
    """One feed-forward block from `outer` channels to `width` and back."""
    matrices = 3 if mlp.kind == "gated_silu" else 2
    return matrices * outer * width + ((matrices - 1) * width + outer) * mlp.bias

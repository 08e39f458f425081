"""What a model costs: weights, FLOPs of a prefill, bytes of what it leaves behind. Standard library only.

FLOPs are counted as 2 per multiply-add. Per token: twice the active weights of every block, convolution included, and
the recurrence (6 per element of a Mamba state: decay, update, readout; 8 for the gated delta rule, which
also reads a prediction). Attention adds 4 * N * H per visible key. Norms, activations and logits are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybrid_jax.config import MLP, Attention, EngineConfig, ModelConfig, MoE, RecurrentMixer
from hybrid_jax.geometry import ITEM_BYTES, Geometry, checkpoint_bytes
from hybrid_jax.kinds.kind import all_weights
from hybrid_jax.kinds.table import kind_of, model_weights, recurrent_kind

# FLOPs that a device does while it reads a byte: two cores measured, and a Hopper card in bfloat16 by its data sheet.
CPU_FLOPS_PER_BYTE, GPU_FLOPS_PER_BYTE = 16.0, 93.0

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
        """FLOPs to process tokens `start .. end` of a sequence whose earlier tokens are cached."""
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


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What decode steps cost, next to each other: bytes that are read, and FLOPs as the bytes read in the same time.

    Attributes:
        weight_bytes: read once in each step.
        row_bytes: read and written for each row, whatever its tokens. kv_bytes: read for each token of a row's context.
        token_flops: of each token that a step feeds, logits included.
        flops_per_byte: FLOPs that a device does while it reads one byte.
        drafting: what it costs to draft; None if that costs next to nothing.

    Example:
        >>> costs = StepCosts(
        ...     weight_bytes=1000, row_bytes=0, kv_bytes=0, token_flops=500, flops_per_byte=10
        ... )
        >>> costs.ratio(rows=1, tokens=5, context=0)
        1.19
    """

    weight_bytes: int
    row_bytes: int
    kv_bytes: int
    token_flops: float
    flops_per_byte: float
    drafting: DraftingCosts | None = None

    def ratio(self, *, rows: int, tokens: int, context: float) -> float:
        """What a step that feeds so many tokens of each row costs, as a multiple of one that feeds one token.

        What is fed beside a row's own token has to be drafted first.
        """

        whole = self.cost(rows=rows, tokens=tokens, context=context)
        if tokens > 1:
            whole += self.drafting_cost(rows=rows)
        return round(whole / self.cost(rows=rows, tokens=1, context=context), 3)

    def cost(self, *, rows: int, tokens: int, context: float) -> float:
        """What a step costs without drafting, in bytes that are read in the same time."""
        read = self.weight_bytes + rows * (self.row_bytes + context * self.kv_bytes)
        return read + rows * tokens * self.token_flops / self.flops_per_byte

    def drafting_cost(self, *, rows: int) -> float:
        """What it costs to draft a window of each row, in bytes that are read in the same time."""
        if (drafting := self.drafting) is None:
            return 0.0
        flops = rows * drafting.tokens * drafting.token_flops
        return drafting.passes * (drafting.weight_bytes + flops / self.flops_per_byte)


@dataclass(frozen=True, kw_only=True)
class DraftingCosts:
    """What it costs to draft one window with layers.

    Attributes:
        passes: through these layers, one after the other. tokens: of each row in every pass.
        weight_bytes: read in each pass, those for logits included. token_flops: of each token, logits included.
    """

    passes: int
    tokens: int
    weight_bytes: int
    token_flops: float


def frame_costs(geometry: Geometry) -> Costs:
    """Costs that a geometry alone gives: the bytes of frames, and one FLOP a token."""
    page = geometry.frames_per_page * geometry.frame_bytes
    return Costs(
        flops_per_token=1.0,
        flops_per_key=0.0,
        kv_bytes=page // geometry.page_tokens if geometry.has_pages else 0,
        checkpoint_bytes=checkpoint_bytes(geometry),
    )


def model_costs(model: ModelConfig, geometry: Geometry) -> Costs:
    """Costs of a model as an engine runs it: bytes are those of frames, their padding included."""
    taken = frame_costs(geometry)
    sizes = {"kv_bytes": taken.kv_bytes, "checkpoint_bytes": taken.checkpoint_bytes}
    found = block_costs([(1, *block) for block in model.blocks], **sizes)
    return replace(found, flops_per_token=found.flops_per_token + _entry_flops(model))


def _entry_flops(model: ModelConfig) -> int:
    """FLOPs of a token where it enters a head for multi-token prediction."""
    return 2 * 2 * model.width**2 if model.mtp else 0


def block_costs(
    blocks: Sequence[tuple[int, Block, int]], *, kv_bytes: int, checkpoint_bytes: int
) -> Costs:
    """Costs of a stack of blocks.

    Args:
        blocks: how many, which, and the width of their residual stream.
        kv_bytes, checkpoint_bytes: what the cache takes for a token and a state.
    """
    windows: dict[int, float] = {}
    per_token = per_key = 0.0
    for count, block, width in blocks:
        kind = kind_of(block)
        per_token += count * (2 * kind.active_weights(block, width) + kind.recurrence_flops(block))
        flops = count * kind.key_flops(block)
        seen = kind.keys_seen(block)
        if seen is None:
            per_key += flops
        else:
            windows[seen] = windows.get(seen, 0.0) + flops
    return Costs(
        flops_per_token=per_token,
        flops_per_key=per_key,
        windows=tuple(sorted(windows.items())),
        kv_bytes=kv_bytes,
        checkpoint_bytes=checkpoint_bytes,
    )


def step_costs(
    model: ModelConfig, engine: EngineConfig, costs: Costs, *, weight_bytes: int, on_cpu: bool
) -> StepCosts:
    """Costs of a model's decode steps on a kind of device; `costs` are the model's."""
    return StepCosts(
        weight_bytes=weight_bytes,
        row_bytes=2 * costs.checkpoint_bytes,
        kv_bytes=costs.kv_bytes,
        token_flops=costs.flops_per_token + _logits_flops(model),
        flops_per_byte=CPU_FLOPS_PER_BYTE if on_cpu else GPU_FLOPS_PER_BYTE,
        drafting=_drafting_costs(model, engine),
    )


def _drafting_costs(model: ModelConfig, engine: EngineConfig) -> DraftingCosts | None:
    speculation = engine.speculation
    if speculation is None or not (model.mtp or model.draft):
        return None
    drafts = model.draft or replace(model, layers=model.mtp, mtp=())
    weights = 2 * model.width**2 if model.mtp else 0
    blocks = drafts.blocks
    weights += sum(kind_of(block).active_weights(block, width) for block, width in blocks)
    weights += drafts.width * drafts.vocab_size
    chain = speculation.tree is None
    return DraftingCosts(
        passes=max(speculation.depths),
        tokens=1 if chain else speculation.window,
        weight_bytes=weights * ITEM_BYTES[engine.dtype],
        token_flops=2 * weights
        + sum(kind_of(block).recurrence_flops(block) for block, _ in blocks),
    )


def _logits_flops(model: ModelConfig) -> int:
    return 2 * model.width * model.vocab_size


def prefill_flops(model: ModelConfig, num_tokens: int, start: int = 0) -> int:
    """FLOPs to run tokens `start .. start + num_tokens` of one sequence, without the logits."""
    blocks = [(1, *block) for block in model.blocks]
    costs = block_costs(blocks, kv_bytes=0, checkpoint_bytes=0)
    return int(costs.flops(start + num_tokens, start))


def _windowed(position: int, window: int) -> int:
    """Sum over the first `position` queries of the keys a sliding window lets each see."""
    ramp = min(position, window)
    return ramp * (ramp + 1) // 2 + (position - ramp) * window


def state_elements(mixer: RecurrentMixer) -> tuple[int, int]:
    """Elements of one layer's recurrent state, and of its convolution columns."""
    layout = recurrent_kind(mixer).layout(mixer)
    return layout.state_words, layout.columns * layout.channels


# --- weights --------------------------------------------------------------------------------------


def weight_count(model: ModelConfig) -> int:
    """Parameters of the model; shared layers and tied embeddings count once."""
    return sum(weight.size for weight in all_weights(model_weights(model)))


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of the weights in memory, some of which stay float32 (`Weight.float32`)."""
    return sum(
        weight.size * ITEM_BYTES["float32" if weight.float32 else dtype]
        for weight in all_weights(model_weights(model))
    )

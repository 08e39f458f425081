"""What a model costs: weights, FLOPs of a prefill, bytes of what it leaves behind. Standard library only.

FLOPs are counted as 2 per multiply-add. Per token: twice the active weights of every part, convolution included, and
the recurrence (6 per element of a Mamba state: decay, update, readout; 8 for the gated delta rule, which
also reads a prediction). Attention adds 4 * N * H per visible key. Norms, activations and logits are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hybrid_jax.config import (
    MLP,
    Attention,
    EngineConfig,
    Layer,
    ModelConfig,
    MoE,
    RecurrentMixer,
    source_of,
)
from hybrid_jax.config.arrays import ITEM_BYTES
from hybrid_jax.config.formats import Format
from hybrid_jax.geometry import Geometry, cached_checkpoint_bytes
from hybrid_jax.kinds.kind import RecurrentKind, Weights, all_weights
from hybrid_jax.kinds.mlp import experts_of
from hybrid_jax.kinds.table import kind_of, model_weights, recurrent_kind, uses, written_columns

# FLOPs that a device does while it reads a byte: two cores, as measured; and a Hopper card in bfloat16, if products of
# few rows reach two fifths of its peak, 400 TFLOP/s beside 4.3 TB/s.
CPU_FLOPS_PER_BYTE, GPU_FLOPS_PER_BYTE = 16.0, 93.0
SAVED_AT = 4096  # tokens of the prompt by whose FLOPs it is said what a cut saves
# What a step reads and writes of a row's state and ring, in states: the checkpoint once, half a ring on average, and a
# fold now and then.
STATE_READS = 1.3

ModelPart = Attention | RecurrentMixer | MLP | MoE


@dataclass(frozen=True, kw_only=True)
class Costs:
    """FLOPs of a prefill and bytes of what it leaves in a cache, as functions of positions alone.

    Attributes:
        flops_per_token: of everything that does not depend on how much context there is.
        flops_per_key: of attention, for every key that a query sees, all layers together.
        windows: (tokens, flops_per_key) of the attention layers whose queries see so many tokens at most.
        kv_bytes: K and V of one token, all layers but those in `windowed_bytes`.
        checkpoint_bytes: one recurrent state, all layers; 0 for a model without.
        windowed_bytes: (tokens, bytes of each) of layers with a window. A resume point keeps the K and V of so many
            tokens above it.

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
    windowed_bytes: tuple[tuple[int, int], ...] = ()

    def flops(self, end: int, start: int = 0) -> float:
        """FLOPs to process tokens `start .. end` of a sequence whose earlier tokens are cached."""
        total = self.flops_per_token * (end - start)
        total += self.flops_per_key * (end * (end + 1) - start * (start + 1)) / 2
        for window, flops in self.windows:
            total += flops * (_windowed(end, window) - _windowed(start, window))
        return total

    def windowed(self, length: int) -> int:
        """Bytes that a resume point keeps of `length` tokens above it, in layers with a window."""
        return int(_seen_bytes(self.windowed_bytes, length))

    def prefix_bytes(self, length: int) -> int:
        """Bytes of a cached prefix with one resume point, at its end."""
        return length * self.kv_bytes + self.checkpoint_bytes + self.windowed(length)

    def per_block(self, block: int) -> Costs:
        """The same costs where positions count blocks of so many tokens."""
        inside = (block - block * block) / 2  # keys of the tokens before a block's last
        return Costs(
            flops_per_token=block * self.flops_per_token + inside * self.flops_per_key,
            flops_per_key=block * block * self.flops_per_key,
            kv_bytes=block * self.kv_bytes,
            checkpoint_bytes=self.checkpoint_bytes,
            windows=tuple((max(1, w // block), block * block * f) for w, f in self.windows),
            windowed_bytes=tuple((-(-w // block), block * size) for w, size in self.windowed_bytes),
        )


class Mixture(NamedTuple):
    """Experts that a step reads only if a token visits them.

    Attributes:
        num_experts: of each layer. top_k: of these, how many a token visits.
        expert_bytes: of one expert in each of such layers, together.
    """

    num_experts: int
    top_k: int
    expert_bytes: int

    def read(self, tokens: int) -> float:
        """Bytes that so many tokens read, if each visits any experts alike."""
        missed = (1 - self.top_k / self.num_experts) ** tokens
        return self.num_experts * self.expert_bytes * (1 - missed)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What decode steps cost, next to each other: bytes that are read, and FLOPs as the bytes read in the same time.

    Attributes:
        weight_bytes: read once in each step. mixtures: read as far as tokens visit them.
        row_bytes: read and written for each row, whatever its tokens. kv_bytes: read for each token of a row's context.
        windowed_bytes: (tokens, bytes of each) that are read for the last so many tokens of a row's context.
        token_flops: of each token that a step feeds, logits included.
        flops_per_byte: FLOPs that a device does while it reads one byte.
        overlaps: it reads while it computes, so the longer of both counts, not the sum.
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
    overlaps: bool = False
    mixtures: tuple[Mixture, ...] = ()
    windowed_bytes: tuple[tuple[int, int], ...] = ()
    drafting: DraftingCosts | None = None

    def ratio(self, *, rows: int, tokens: int, context: float) -> float:
        """What a step that feeds so many tokens of each row costs, as a multiple of one that feeds one token.

        What is fed beside a row's own token has to be drafted first.
        """
        whole = self.cost(rows=rows, tokens=tokens, context=context)
        if tokens > 1:
            whole += self.drafting_cost(rows=rows, context=context)
        return round(whole / self.cost(rows=rows, tokens=1, context=context), 3)

    def cost(self, *, rows: int, tokens: int, context: float) -> float:
        """What a step costs without drafting, in bytes that are read in the same time."""
        windowed = _seen_bytes(self.windowed_bytes, context)
        read = self.weight_bytes + rows * (self.row_bytes + context * self.kv_bytes + windowed)
        read += sum(mixture.read(rows * tokens) for mixture in self.mixtures)
        computed = rows * tokens * self.token_flops / self.flops_per_byte
        return max(read, computed) if self.overlaps else read + computed

    def drafting_cost(self, *, rows: int, context: float) -> float:
        """What it costs to draft a window of each row, in bytes that are read in the same time."""
        if (drafting := self.drafting) is None:
            return 0.0
        one = drafting.step.cost(rows=rows, tokens=drafting.tokens, context=context)
        return drafting.passes * one


class DraftingCosts(NamedTuple):
    """What it costs to draft one window with layers.

    Attributes:
        passes: through these layers, one after the other. tokens: of each row in every pass.
        step: costs of one pass.
    """

    passes: int
    tokens: int
    step: StepCosts


def frame_costs(geometry: Geometry) -> Costs:
    """Costs that a geometry alone gives: the bytes of frames, and one FLOP a token.

    A cache keeps what a window reads above its checkpoints. Without recurrent layers a prompt may resume anywhere, and
    the cache keeps all of a prompt.
    """
    groups = geometry.windowed if geometry.has_state else ()
    page_tokens = geometry.page_tokens or 1
    per_token = lambda frames: frames * geometry.frame_bytes // page_tokens
    return Costs(
        flops_per_token=1.0,
        flops_per_key=0.0,
        kv_bytes=per_token(geometry.frames_per_page - sum(group.num_frames for group in groups)),
        checkpoint_bytes=cached_checkpoint_bytes(geometry),
        windowed_bytes=tuple(
            (page_tokens * geometry.window_pages(group), per_token(group.num_frames))
            for group in groups
        ),
    )


def model_costs(model: ModelConfig, geometry: Geometry, *, whole: bool = False) -> Costs:
    """Costs of a model as an engine runs it: bytes are those of frames, their padding included.

    Args:
        whole: its tokens go through all layers, as those do that are generated. A prompt's end at the cut, if there is
            one; its last token's further way is not counted.
    """
    taken = frame_costs(geometry)
    found = token_costs(
        model, whole=whole, kv_bytes=taken.kv_bytes, checkpoint_bytes=taken.checkpoint_bytes
    )
    return replace(found, windowed_bytes=taken.windowed_bytes)


def token_costs(
    model: ModelConfig, *, whole: bool, kv_bytes: int = 0, checkpoint_bytes: int = 0
) -> Costs:
    """Costs of a model's tokens, with the given bytes of what the cache takes; `whole` as for `model_costs`."""
    layers = model.layers if whole else model.layers[: model.cut]
    parts = [(1, *use) for use in uses(model, layers)]
    found = part_costs(parts, kv_bytes=kv_bytes, checkpoint_bytes=checkpoint_bytes)
    beside = _entry_flops(model) + written_flops(model, whole=whole)
    return replace(found, flops_per_token=found.flops_per_token + beside)


def written_flops(model: ModelConfig, *, whole: bool = False) -> int:
    """FLOPs of a token for all that layers after a cut write; if it goes through them too (`whole`), of the projection
    of the cut's output alone, because their parts count the rest."""
    if whole:
        columns = [part.stop for part in written_columns(model).values()]
        return 2 * model.width * max(columns, default=0)
    mixers = [mixer for index in model.later for mixer in model.layers[index].mixers]
    flops = 0
    for mixer in mixers:
        if source_of(mixer) == "cut":
            parts = kind_of(mixer).parts(mixer)
            # What a state is read with is made for few of a prompt's tokens.
            made = sum(size for name, size in parts.written.items() if name != parts.readout)
            flops += 2 * model.width * made + kind_of(mixer).write_flops(mixer, model.width)
    return flops


def _entry_flops(model: ModelConfig) -> int:
    """FLOPs of a token where it enters a head for multi-token prediction."""
    return 2 * 2 * model.width**2 if model.mtp else 0


def part_costs(
    parts: Sequence[tuple[int, ModelPart, Weights]], *, kv_bytes: int, checkpoint_bytes: int
) -> Costs:
    """Costs of a stack of parts.

    Args:
        parts: how many, which, and the weights that their tokens are multiplied with.
        kv_bytes, checkpoint_bytes: what the cache takes for a token and a state.
    """
    windows: dict[int, float] = {}
    per_token = per_key = 0.0
    for count, part, tree in parts:
        kind = kind_of(part)
        per_token += count * (2 * kind.active_weights(part, tree) + kind.recurrence_flops(part))
        flops = count * kind.key_flops(part)
        entry = kind.entry(part)
        if entry is None or entry.window is None:
            per_key += flops
        else:
            windows[entry.window] = windows.get(entry.window, 0.0) + flops
    return Costs(
        flops_per_token=per_token,
        flops_per_key=per_key,
        windows=tuple(sorted(windows.items())),
        kv_bytes=kv_bytes,
        checkpoint_bytes=checkpoint_bytes,
    )


def step_costs(
    model: ModelConfig, engine: EngineConfig, costs: Costs, *, on_cpu: bool
) -> StepCosts:
    """Costs of a model's decode steps on a kind of device; `costs` are those of tokens that go through all layers."""
    model = _unshared(model)
    return _costs_of_pass(model, _read_in_step(model), engine, costs, on_cpu)


def _unshared(model: ModelConfig) -> ModelConfig:
    """The model with weights of its own for each block: a step reads shared ones at each use."""

    def own(layers: Sequence[Layer]) -> tuple[Layer, ...]:
        blocks = [[replace(block, weights=None) for block in layer.blocks] for layer in layers]
        return tuple(Layer(blocks=tuple(each)) for each in blocks)

    draft = model.draft and _unshared(model.draft)
    matrices = (*model.matrices, *_formats_of_shared(model))
    layers, mtp = own(model.layers), own(model.mtp)
    return replace(model, layers=layers, mtp=mtp, draft=draft, matrices=matrices)


def _formats_of_shared(model: ModelConfig) -> Iterator[tuple[str, Format]]:
    """How blocks keep their matrices that use the weights of others."""
    for index, layer in enumerate(model.layers if model.matrices else ()):
        for names, block in zip(layer.names, layer.blocks, strict=True):
            if block.weights is not None:
                of, number = block.weights
                shared = f"layers.{of}.{model.layers[of].names[number].parts}."
                own = f"layers.{index}.{names.parts}."
                for place, format in model.matrices:
                    if place.startswith(shared):
                        yield own + place.removeprefix(shared), format


def _read_in_step(model: ModelConfig) -> Weights:
    """What a step without drafting reads. It takes single rows of embeddings, unless these are the head too."""
    weights = model_weights(model)
    parts = ["layers", "cut", "norm", "embed" if model.tie_embeddings else "head", "mtp"]
    read = {name: weights[name] for name in parts if name in weights}
    if "draft" in weights:
        read["draft"] = weights["draft"]["layers"]
    return read


def _costs_of_pass(
    model: ModelConfig, read: Weights, engine: EngineConfig, costs: Costs, on_cpu: bool
) -> StepCosts:
    """Costs of a pass through layers, of which it reads these weights."""
    mixtures = _mixtures(model, engine)
    idle = sum(mixture.num_experts * mixture.expert_bytes for mixture in mixtures)
    times = _times_read(model, _token_size)
    return StepCosts(
        weight_bytes=_bytes(read, engine.dtype) - idle,
        row_bytes=int(STATE_READS * costs.checkpoint_bytes * _times_read(model, _state_size)),
        kv_bytes=int(costs.kv_bytes * times),
        windowed_bytes=tuple((w, int(size * times)) for w, size in costs.windowed_bytes),
        token_flops=costs.flops_per_token + 2 * model.width * model.vocab_size,
        flops_per_byte=CPU_FLOPS_PER_BYTE if on_cpu else GPU_FLOPS_PER_BYTE,
        overlaps=not on_cpu,
        mixtures=mixtures,
        drafting=_drafting_costs(model, engine, on_cpu),
    )


def _times_read(model: ModelConfig, size: Callable[[Any], int]) -> float:
    """How many times what is cached is read in a step: a layer after a cut reads what it shares by itself.

    Args:
        size: of what a mixer caches; 0 for a mixer of another kind.
    """
    mixers = [mixer for layer in model.all_layers for mixer in layer.mixers]
    cached = sum(size(mixer) for mixer in mixers if source_of(mixer) != "group")
    return sum(map(size, mixers)) / cached if cached else 1.0


def _token_size(mixer: Any) -> int:
    return kind_of(mixer).token_elements(mixer)


def _state_size(mixer: Any) -> int:
    return state_elements(mixer)[0] if isinstance(kind_of(mixer), RecurrentKind) else 0


def _drafting_costs(model: ModelConfig, engine: EngineConfig, on_cpu: bool) -> DraftingCosts | None:
    """Of the layers that draft alone; the logits of all tokens of a pass are made together."""
    speculation = engine.speculation
    drafts = model.before_cut if model.exit_head else model.drafting
    if speculation is None or drafts is None:
        return None
    read = _read_in_step(drafts)
    if model.mtp:  # with layers and a last norm of its own
        read |= model_weights(model)["mtp"]
    item = ITEM_BYTES[engine.dtype]
    states = sum(state_elements(mixer)[0] for mixer in drafts.recurrent)
    costs = part_costs(
        [(1, *use) for use in uses(drafts, drafts.layers)],
        kv_bytes=item * sum(kind_of(part).token_elements(part) for part, _ in drafts.parts),
        checkpoint_bytes=ITEM_BYTES["float32"] * states,
    )
    entered = costs.flops_per_token + _entry_flops(model)
    costs, alone = replace(costs, flops_per_token=entered), replace(engine, speculation=None)
    step = _costs_of_pass(drafts, read, alone, costs, on_cpu)
    tokens = 1 if speculation.tree is None else speculation.window
    return DraftingCosts(max(speculation.depths), tokens, step)


def _mixtures(model: ModelConfig, engine: EngineConfig) -> tuple[Mixture, ...]:
    found: dict[tuple[int, int], int] = {}
    for part, tree in uses(model, model.layers):
        if isinstance(part, MoE) and part.num_experts > part.top_k:
            key = part.num_experts, part.top_k
            size = sum(weight.num_bytes(engine.dtype) for weight in experts_of(tree))
            found[key] = found.get(key, 0) + size // part.num_experts
    return tuple(Mixture(*key, expert_bytes=size) for key, size in found.items())


def _size(weights: Weights) -> int:
    return sum(weight.size for weight in all_weights(weights))


def prefill_flops(
    model: ModelConfig, num_tokens: int, start: int = 0, *, whole: bool = False
) -> int:
    """FLOPs to run tokens `start .. start + num_tokens` of one sequence, without the logits.

    Args:
        whole: as in `model_costs`.
    """
    return int(token_costs(model, whole=whole).flops(start + num_tokens, start))


def share_saved(model: ModelConfig) -> float:
    """The share of the FLOPs of a prompt of `SAVED_AT` tokens that the cut saves; 0 without one."""
    return 1 - prefill_flops(model, SAVED_AT) / prefill_flops(model.without_cut, SAVED_AT)


def _seen_bytes(windows: tuple[tuple[int, int], ...], tokens: float) -> float:
    """Bytes of the last `tokens` tokens in layers with a window; `windows` has (tokens, bytes of each)."""
    return sum(min(window, tokens) * size for window, size in windows)


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
    return _bytes(model_weights(model), dtype)


def _bytes(weights: Weights, dtype: str) -> int:
    return sum(weight.num_bytes(dtype) for weight in all_weights(weights))

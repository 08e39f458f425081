"""An estimate of what the layers of one step hold beside weights and state. No jax.

Logits are not included, since `memory` covers them (`geometry.logits_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hybrid_jax.config import (
    MAX_GRAIN,
    PALLAS,
    Backend,
    EngineConfig,
    Layer,
    ModelConfig,
    RecurrentMixer,
)
from hybrid_jax.config.arrays import ITEM_BYTES
from hybrid_jax.costs import state_elements, weight_count
from hybrid_jax.geometry import PROMPT_POSITIONS, make_geometry
from hybrid_jax.kinds.kind import Kind, StepSize, all_weights
from hybrid_jax.kinds.table import kind_of, model_weights, recurrent_kind, uses, written_columns

# Tokens of a row's keys and values that attention works on at a time, unless a page is longer.
TILE_TOKENS = 128
# For steps of kernels. XLA puts the arrays of a chunk into one piece of memory, with gaps between them.
GAPS = 1.12
# What a checkpoint takes while it becomes int8, in checkpoints, as compiled for an H200 and for a CPU.
NARROWING, NARROWING_ON_CPU = 1.3, 2.0
SMALL_BYTES, ROW_BYTES = 24_000, 4_500  # index arrays and counters: of a step, and of each row


def temporary_bytes(
    model: ModelConfig, engine: EngineConfig, *, backend: Backend, widens: bool = False
) -> int:
    """Bytes that the largest step holds, or a checkpoint that becomes int8; an estimate.

    Args:
        model, engine: what runs.
        backend: what steps are made of.
        widens: as in `Device`.
    """
    steps = _step_bytes(model, engine, backend=backend, widens=widens)
    return max(steps, narrowing_bytes(model, engine, backend=backend))


def narrowing_bytes(model: ModelConfig, engine: EngineConfig, *, backend: Backend) -> int:
    """Bytes that a checkpoint takes while it becomes int8, those that it becomes included."""
    geometry = make_geometry(model, engine)
    if geometry.narrow is None:
        return 0
    wide, *_, narrow = (count * geometry.frame_bytes for count in geometry.checkpoint_frames)
    return int((NARROWING if backend.launches else NARROWING_ON_CPU) * wide) + narrow


def _step_bytes(model: ModelConfig, engine: EngineConfig, *, backend: Backend, widens: bool) -> int:
    made = _product_bytes(model, engine)
    if backend.launches:
        window = engine.window_tokens
        count = partial(kernel_step_bytes, model, engine, backend=backend)
        decode = count(rows=engine.max_rows, tokens=window)
        if engine.exact:
            return made + decode
        return made + max(decode, count(rows=1, tokens=engine.prefill_tokens))
    return made + _xla_bytes(model, engine, widens=widens)


def _product_bytes(model: ModelConfig, engine: EngineConfig) -> int:
    """What the largest product holds beside what goes in and comes out, where matrices are kept as codes.

    A head takes the tokens after which others are drawn, and positions of a prompt whose log-probabilities are asked
    for.
    """
    all_tokens = max(engine.max_rows * engine.window_tokens, engine.prefill_tokens)
    drawn = max(engine.max_rows * engine.decode_tokens, PROMPT_POSITIONS)
    held = max(
        weight.format.tile_bytes(weight.shape, engine.dtype)
        + weight.format.token_bytes(weight.shape, engine.dtype)
        * (drawn if name in ("head", "exit") else all_tokens)
        for name, part in model_weights(replace(model, draft=None)).items()
        for weight in all_weights(part)
    )
    return held if model.draft is None else max(held, _product_bytes(model.draft, engine))


def kernel_step_bytes(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    rows: int,
    tokens: int,
    backend: Backend = PALLAS,
) -> int:
    """Bytes that the layers hold in a step made of kernels, with `rows` rows of `tokens` new tokens each.

    tests/aot compares it with XLA's count for an H200. The residual stream is held all the time. Of one part at a time
    there are its input, what it projects to, and its output.
    """
    item = ITEM_BYTES[engine.dtype]
    stream = model.width * ITEM_BYTES["float32" if model.residual_in_fp32 else engine.dtype]
    stream += item * _beside(model)
    keys = engine.max_model_len or model.max_position

    def most(count: Callable[[Kind], Callable[[Any, StepSize], int]]) -> int:
        found = []
        for part, width in model.parts:
            kind = kind_of(part)
            step = StepSize(
                width=width, item=item, rows=rows, tokens=tokens, keys=keys, chip=backend.chip
            )
            found.append(count(kind)(part, step))
            if kind.operation in backend.without:
                found.append(ITEM_BYTES["float32"] * (3 * width + kind.xla_elements(part, width)))
        return max(found)

    if model.cut is not None:
        # The cut's normed output; in a window, one product of it makes what all layers after the cut write.
        stream += item * (model.width + (_written(model) if tokens <= MAX_GRAIN else 0))
    if model.state_group > 1 and tokens > MAX_GRAIN:
        # Until the last layer of a group has read it.
        stream += max(_shared(mixer, item) for mixer in model.recurrent)
    small = SMALL_BYTES + _copied_bytes(model, engine, rows, backend)
    if tokens == 1:
        held = most(lambda kind: kind.row_bytes)
        return small + rows * (ROW_BYTES + stream + held)
    held = most(lambda kind: kind.window_bytes if engine.exact else kind.chunk_bytes)
    return small + int(GAPS * rows * tokens * (stream + held))


def _copied_bytes(model: ModelConfig, engine: EngineConfig, rows: int, backend: Backend) -> int:
    """What XLA copies for the operations that it does in a step of kernels: an expert, and keys and values of rows."""
    tile = max(TILE_TOKENS, make_geometry(model, engine).page_tokens)
    copied = [
        kind_of(part).xla_step_elements(part, width)
        + 2 * rows * tile * kind_of(part).token_elements(part)
        for part, width in model.parts
        if kind_of(part).operation in backend.without
    ]
    return ITEM_BYTES["float32"] * max(copied, default=0)


# --- steps that XLA makes, on a CPU ---------------------------------------------------------------


def _xla_bytes(model: ModelConfig, engine: EngineConfig, *, widens: bool) -> int:
    """One layer works at a time. It holds float32 arrays over the tokens of the step, and the states of the rows twice.

    Attention also copies the keys and values that it works on, twice for each row.
    A mixture copies the expert that it visits. Widened weights exist of all layers at once, but only of one expert of a
    mixture.
    """
    columns = max(
        3 * width + kind_of(part).xla_elements(part, width) for part, width in model.parts
    )
    states = [state_elements(mixer)[0] for mixer in model.recurrent]
    window = engine.window_tokens
    tile = max(TILE_TOKENS, make_geometry(model, engine).page_tokens)
    copied = tile * max(kind_of(part).token_elements(part) for part, _ in model.parts)

    def of_row(tokens: int) -> int:
        return max(kind_of(part).xla_row_elements(part, tokens) for part, _ in model.parts)

    columns += _beside(model)
    decode = window * (columns + _written(model)) + 2 * copied + of_row(window)
    decode *= engine.max_rows
    rows = min(engine.max_rows, engine.prefill_tokens // engine.grain)
    prefill = engine.prefill_tokens * columns + rows * (2 * copied + of_row(engine.prefill_tokens))
    prefill += min(engine.prefill_tokens, engine.max_rows * MAX_GRAIN) * _written(model)
    count = max(decode, prefill)
    count += 2 * engine.max_rows * max(states, default=0)
    count += max(kind_of(part).xla_step_elements(part, width) for part, width in model.parts)
    if widens and engine.dtype == "bfloat16":
        count += weight_count(_with_one_expert(model))
    return count * ITEM_BYTES["float32"]


def _shared(mixer: RecurrentMixer, item: int) -> int:
    """Bytes of a token that further layers of a group read."""
    layout = recurrent_kind(mixer).layout(mixer)
    sizes = [ITEM_BYTES[dtype] * size for _, size, dtype in layout.records if dtype is not None]
    return item * layout.channels + sum(sizes)


def _beside(model: ModelConfig) -> int:
    """Elements of a token that blocks hold beside the stream and what their parts make: embeddings that are joined to
    the stream, what is put aside, and the products that are added to those of a matrix."""
    blocks = [block for layer in model.all_layers for block in layer.blocks]
    joined, aside = "joined" in {b.reads for b in blocks}, None in {b.adds for b in blocks}
    changes = [pair for _, own in uses(model, model.layers) for pair in own["changes"].values()]
    made = max((pair["a"].shape[1] + pair["b"].shape[1] for pair in changes), default=0)
    return (joined + aside) * model.width + made


def _written(model: ModelConfig) -> int:
    """Columns of what layers after a cut write."""
    return max((part.stop for part in written_columns(model).values()), default=0)


def _with_one_expert(model: ModelConfig) -> ModelConfig:
    """The model with a single expert in each mixture."""

    def alone(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        return tuple(
            layer.with_parts(kind_of(part).with_one_expert(part) for part in layer.parts)
            for layer in layers
        )

    draft = None if model.draft is None else _with_one_expert(model.draft)
    return replace(model, layers=alone(model.layers), mtp=alone(model.mtp), draft=draft)

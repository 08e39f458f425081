"""What the layers of one step hold beside weights and state, by formula. No jax.

Logits are not in it: `memory` covers them (`geometry.logits_bytes`).
"""

from __future__ import annotations

from dataclasses import replace

from hybrid_jax.config import MLP, Attention, EngineConfig, Mamba2, ModelConfig, MoE
from hybrid_jax.config.engine import MAX_GRAIN
from hybrid_jax.costs import state_elements, weight_count
from hybrid_jax.geometry import ITEM_BYTES, make_geometry
from hybrid_jax.layers.parts import ATTENTION_PROGRAMS, LEAST_SPLIT, NUM_SMS, num_parts, row_parts

Block = Attention | Mamba2 | MLP | MoE
# Of a row's keys and values attention works on so many tokens at a time, or on a page if that is longer.
TILE_TOKENS = 128
# Up to so many queries a row and KV head, attention is bound by reading and has tiles of its own.
QUERIES_BY_READING = 64
# On kernels. XLA puts the arrays of a chunk into one piece of memory, with gaps between them.
GAPS = 1.12
SMALL_BYTES, ROW_BYTES = 24_000, 4_500  # index arrays and counters, of a step and of each row


def temporary_bytes(
    model: ModelConfig, engine: EngineConfig, *, kernels: bool, widens: bool = False
) -> int:
    """An estimate for the largest step.

    Args:
        model, engine: what runs.
        kernels: steps are made of Pallas kernels.
        widens: as in `Device`.
    """
    if kernels:
        window = engine.grain if engine.exact else 1
        decode = kernel_step_bytes(model, engine, rows=engine.max_rows, tokens=window)
        if engine.exact:
            return decode
        chunk = kernel_step_bytes(model, engine, rows=1, tokens=engine.prefill_tokens)
        return max(decode, chunk)
    return _xla_bytes(model, engine, widens=widens)


def kernel_step_bytes(model: ModelConfig, engine: EngineConfig, *, rows: int, tokens: int) -> int:
    """What the layers hold in a step of `rows` rows of `tokens` new tokens each that is made of kernels.

    tests/aot holds it to XLA's count for an H200. The residual stream is there all the time, and of one block at a time
    its input, what it projects to, and its output.
    """
    item = ITEM_BYTES[engine.dtype]
    stream = model.width * ITEM_BYTES["float32" if model.residual_in_fp32 else engine.dtype]
    blocks = [b for layer in model.layers for b in (*layer.mixers, layer.mlp) if b is not None]
    keys = engine.max_model_len or model.max_position
    if tokens == 1:
        held = max(_columns_of_a_row(block, model.width, item, rows, keys) for block in blocks)
        return SMALL_BYTES + rows * (ROW_BYTES + stream + held)
    held = max(
        _columns_of_a_window(block, model.width, item, tokens)
        if engine.exact and isinstance(block, Mamba2)
        else _columns_of_a_chunk(block, model.width, item, rows, tokens, keys)
        for block in blocks
    )
    return SMALL_BYTES + int(GAPS * rows * tokens * (stream + held))


def _columns_of_a_row(block: Block, width: int, item: int, rows: int, keys: int) -> int:
    """Bytes that one block holds of a row with one new token and up to so many keys, in a step of so many rows."""

    def product(columns: int) -> int:
        return columns * _product_bytes(rows, width, columns, item)

    if isinstance(block, Attention):
        q, kv = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
        # Of what is projected nothing is left when the splits are there.
        return q * item + max(product(q + 2 * kv), _split_bytes(block, rows, 1, keys, item))
    if isinstance(block, Mamba2):
        return product(block.proj_size) + 2 * block.inner_size * item
    if isinstance(block, MLP):
        return _hidden(block.kind, block.width, product(block.width) // block.width, item)
    return _visits(block, width, item)


def _columns_of_a_chunk(
    block: Block, width: int, item: int, rows: int, tokens: int, keys: int
) -> int:
    """Bytes that one block holds of a token, in a step of so many tokens a row."""

    def product(columns: int) -> int:
        return columns * _product_bytes(rows * tokens, width, columns, item)

    if isinstance(block, Attention):
        q, kv = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
        joined = _split_bytes(block, rows, tokens, keys, item)
        return (2 * q + 2 * kv) * item + max(product(q + 2 * kv), joined)
    if isinstance(block, Mamba2):
        beside = (block.conv_size + block.inner_size) * item + 4 * block.num_heads
        return product(block.proj_size) + beside
    if isinstance(block, MLP):
        return _hidden(block.kind, block.width, product(block.width) // block.width, item)
    return _visits(block, width, item)


def _columns_of_a_window(block: Mamba2, width: int, item: int, tokens: int) -> int:
    """Bytes that a recurrent block holds of a token of exact mode's windows: what it projects to, its output before and
    after the norm, what goes in and out, and C with its scores."""
    beside = block.num_groups * (block.state_size * item + 4 * tokens)
    return (block.proj_size + 2 * block.inner_size + 2 * width) * item + beside


def _product_bytes(tokens: int, width: int, columns: int, item: int) -> int:
    """Bytes of an element of a projection of so many tokens, which may come in float32 parts."""
    parts = row_parts(width, columns) if tokens == 1 else num_parts(tokens, width, columns)
    return 4 * parts if parts > 1 else item


def _split_bytes(block: Attention, rows: int, tokens: int, keys: int, item: int) -> int:
    """Bytes a token of what the splits of the context leave to be joined (`paged_attention.kernel.make_plan`)."""
    queries = tokens * block.num_heads // block.num_kv_heads
    few = queries <= QUERIES_BY_READING
    tile = 32 if item == 4 else QUERIES_BY_READING if few else 128
    programs = rows * block.num_kv_heads * -(-queries // tile)
    most = NUM_SMS * (ATTENTION_PROGRAMS if few or item == 4 else 1)
    splits = min(-(-keys // LEAST_SPLIT), most // programs)
    return 0 if splits <= 1 else 4 * splits * block.num_heads * (block.head_dim + 2)


def _visits(block: MoE, width: int, item: int) -> int:
    """Bytes a token of a mixture: what its experts make of it, in float32, and what goes in."""
    inner = block.latent_width or width
    shared = _hidden(block.kind, block.shared_width, item, item)
    return 4 * block.top_k * inner + max(shared, 2 * inner * item) + width * item


def _hidden(kind: str, width: int, product: int, item: int) -> int:
    """Bytes a token of a feed-forward block: what it projects to, and a gated one's product."""
    return 2 * width * product + width * item if kind == "gated_silu" else width * product


# --- steps that XLA makes, on a CPU ---------------------------------------------------------------


def _xla_bytes(model: ModelConfig, engine: EngineConfig, *, widens: bool) -> int:
    """One layer works at a time, in float32 arrays over the tokens of the step, and the states of the rows twice. In a
    decode step or an exact one, attention also copies the keys and values that it works on, of each row, twice. Widened
    weights exist of all layers at once, but of one expert only.
    """
    columns = 3 * model.width + max(
        _xla_columns(block, model.width)
        for layer in model.layers
        for block in (*layer.mixers, layer.mlp)
        if block is not None
    )
    mixers = [mixer for layer in model.layers for mixer in layer.mixers]
    states = [state_elements(mixer)[0] for mixer in mixers if isinstance(mixer, Mamba2)]
    window = engine.grain if engine.exact else 1
    tile = max(TILE_TOKENS, make_geometry(model, engine).page_tokens)
    copied = [2 * m.num_kv_heads * m.head_dim * tile for m in mixers if isinstance(m, Attention)]
    decode = engine.max_rows * (window * columns + 2 * max(copied, default=0))
    count = max(decode, engine.prefill_tokens * columns)
    count += 2 * engine.max_rows * max(states, default=0)
    if widens and engine.dtype == "bfloat16":
        count += weight_count(_with_one_expert(model))
    return count * ITEM_BYTES["float32"]


def _xla_columns(block: Block, width: int) -> int:
    """Elements a token that one block holds at a time."""
    if isinstance(block, Attention):
        return 3 * (block.num_heads + 2 * block.num_kv_heads) * block.head_dim
    if isinstance(block, Mamba2):
        # the projection and what becomes of it, and decay matrices of a tile
        return 5 * block.proj_size + 3 * MAX_GRAIN * block.num_heads
    if isinstance(block, MLP):
        return (3 if block.kind == "gated_silu" else 2) * block.width
    hidden = (3 if block.kind == "gated_silu" else 2) * block.width
    inner = block.latent_width or width
    return block.top_k * (hidden + 2 * inner) + 3 * block.shared_width


def _with_one_expert(model: ModelConfig) -> ModelConfig:
    """The model with a single expert in each mixture."""
    one = {"num_experts": 1, "top_k": 1, "num_groups": 1, "top_groups": 1}
    layers = (
        replace(layer, mlp=replace(layer.mlp, **one)) if isinstance(layer.mlp, MoE) else layer
        for layer in model.layers
    )
    return replace(model, layers=tuple(layers))

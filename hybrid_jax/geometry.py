"""Shapes and bytes of everything an engine keeps: standard library only.

One `Geometry` per (model, engine settings). The arena, the rings, the budgets and the cache's
arithmetic are all derived from it, so no shape is stated twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid_jax.config import Attention, EngineConfig, Mamba2, ModelConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint32": 4, "int32": 4, "uint16": 2}
FRAME_TARGET_BYTES = 256 * 1024
NUM_FRAMES_LIMIT = 1 << 24  # a handle keeps 24 bits of frame id
PROMPT_POSITIONS = 32  # of prompts whose logits exist at once, for their log-probabilities
# Arrays as large as the logits that XLA holds at once, by its own count; tests/engine/test_sizing.py holds them.
LOGITS_OF_A_ROW = 10  # 7 where nothing is reported or adjusted, 9.6 where both are
LOGITS_OF_A_POSITION = 2
KERNEL_LOGITS_MARGIN = 1.05  # for log-probabilities; tests/aot


@dataclass(frozen=True)
class ArraySpec:
    """Shape, dtype and axis names of one device array."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Where a model's state lies in equal frames.

    Attributes:
        frame_words: uint32 words of one frame.
        page_tokens: tokens of one KV page; 0 without attention.
        num_attention, num_mamba2: mixers of each kind.
        layers_per_page: attention layers that share one frame of a page.
        frames_per_page: frames of one page, over all layer groups.
        token_words: words of one token's K and V in one layer.
        heads_per_frame: recurrent heads in one frame; 0 without recurrent layers.
        frames_per_layer: frames of one recurrent layer's state.
        conv_frames: frames of all layers' convolution columns.
        conv_words: words of one layer's convolution columns.
        grain: tokens between resume points.
        dtype: dtype of KV pages, ring records and convolution columns.
    """

    frame_words: int
    page_tokens: int
    num_attention: int
    num_mamba2: int
    layers_per_page: int
    frames_per_page: int
    token_words: int
    heads_per_frame: int
    frames_per_layer: int
    conv_frames: int
    conv_words: int
    grain: int
    dtype: str

    @property
    def frame_bytes(self) -> int:
        return 4 * self.frame_words

    @property
    def state_frames(self) -> int:
        """Frames of one checkpoint; 0 for a model without recurrent layers."""
        return self.num_mamba2 * self.frames_per_layer + self.conv_frames

    @property
    def has_pages(self) -> bool:
        return self.num_attention > 0

    @property
    def has_state(self) -> bool:
        return self.num_mamba2 > 0

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens) if self.has_pages else 0

    def row_frames(self, num_tokens: int) -> int:
        """Frames of one sequence that shares nothing: its pages, and a checkpoint once it is past a grain."""
        state = self.state_frames if num_tokens > self.grain else 0
        return self.num_pages(num_tokens) * self.frames_per_page + state

    def longest_row(self, num_frames: int) -> int:
        """Most tokens of one sequence in so many frames; huge without pages."""
        if not self.has_pages:
            return 1 << 40 if num_frames >= self.state_frames else self.grain
        with_state = (num_frames - self.state_frames) // self.frames_per_page
        without = num_frames // self.frames_per_page * self.page_tokens
        return max(with_state * self.page_tokens, min(without, self.grain))

    def align(self, position: int) -> int:
        """The last grain boundary at or before `position`."""
        return position - position % self.grain


def token_words(attention: Attention, dtype: str) -> int:
    """Words of one token's K and V in one attention layer."""
    return 2 * attention.num_kv_heads * attention.head_dim * ITEM_BYTES[dtype] // 4


def head_words(mamba: Mamba2) -> int:
    """Words of one recurrent head's float32 state."""
    return mamba.head_dim * mamba.state_size


def conv_words(mamba: Mamba2, dtype: str) -> int:
    """Words of one layer's convolution columns, the last W - 1 inputs."""
    return -(-(mamba.conv_width - 1) * mamba.conv_size * ITEM_BYTES[dtype] // 4)


def make_geometry(
    model: ModelConfig, engine: EngineConfig, *, min_page_tokens: int = 64
) -> Geometry:
    """Chooses frame size and page size so that pages and checkpoints both fill their frames.

    Args:
        model: the model; its mixers of one kind share one cached shape.
        engine: grain, page size (or None) and dtype.
        min_page_tokens: smallest page considered when the engine leaves it open (64 suits a CPU,
            where shorter ones make the loop over pages too long).

    Raises:
        ValueError: the grain is shorter than the convolution's history.
    """
    attention, mamba = model.attention, model.mamba2
    num_attention, num_mamba2 = len(model.mixers(Attention)), len(model.mixers(Mamba2))
    if mamba is not None and engine.grain < mamba.conv_width - 1:
        raise ValueError(
            f"Geometry: grain must be at least conv_width - 1, got {engine.grain} and "
            f"conv_width {mamba.conv_width}; raise grain"
        )
    if engine.page_tokens is not None:
        page_sizes = [engine.page_tokens]
    else:
        page_sizes = [t for t in (16, 32, 64, 128) if t >= min_page_tokens]
    if attention is None:
        page_sizes, splits = [0], [0]
    else:
        splits = [d for d in range(1, num_attention + 1) if num_attention % d == 0]
    options = []
    for page_tokens in page_sizes:
        for layers in splits:
            page = layers * page_tokens * (token_words(attention, engine.dtype) if attention else 0)
            for words in _frame_options(page, mamba):
                options.append((_cost(words, page, mamba), words, page_tokens, layers))
    _, words, page_tokens, layers = min(options)
    heads = words // head_words(mamba) if mamba else 0
    heads = min(heads, mamba.num_heads) if mamba else 0
    all_conv = num_mamba2 * conv_words(mamba, engine.dtype) if mamba else 0
    return Geometry(
        frame_words=words,
        page_tokens=page_tokens,
        num_attention=num_attention,
        num_mamba2=num_mamba2,
        layers_per_page=layers,
        frames_per_page=num_attention // layers if layers else 0,
        token_words=token_words(attention, engine.dtype) if attention else 0,
        heads_per_frame=heads,
        frames_per_layer=-(-mamba.num_heads // heads) if mamba else 0,
        conv_frames=-(-all_conv // words),
        conv_words=conv_words(mamba, engine.dtype) if mamba else 0,
        grain=engine.grain,
        dtype=engine.dtype,
    )


def _frame_options(page_words: int, mamba: Mamba2 | None) -> list[int]:
    """Frame sizes worth trying: the page itself, and whole blocks of heads that hold a page."""
    if mamba is None:
        return [page_words]
    head = head_words(mamba)
    sizes = {_round_up(max(page_words, head), 16)}
    for frames in range(1, mamba.num_heads + 1):
        words = _round_up(-(-mamba.num_heads // frames) * head, 16)
        if words >= page_words:
            sizes.add(words)
    return sorted(sizes)


def _cost(words: int, page_words: int, mamba: Mamba2 | None) -> float:
    """Wasted share of pages and checkpoints, plus a pull towards the usual frame size."""
    waste = (words - page_words) / words if page_words else 0.0
    if mamba is not None:
        heads = min(words // head_words(mamba), mamba.num_heads)
        frames = -(-mamba.num_heads // heads)
        waste += 1 - mamba.num_heads * head_words(mamba) / (frames * words)
    distance = abs(math.log2(4 * words / FRAME_TARGET_BYTES))
    return waste + 0.02 * distance


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def checkpoint_padding(model: ModelConfig, geometry: Geometry) -> float:
    """Share of a checkpoint's frames that holds nothing."""
    if not geometry.has_state:
        return 0.0
    used = geometry.num_mamba2 * (
        model.mamba2.num_heads * head_words(model.mamba2) + geometry.conv_words
    )
    return 1 - used / (geometry.state_frames * geometry.frame_words)


def page_padding(geometry: Geometry) -> float:
    """Share of a KV page's frames that holds nothing."""
    if not geometry.has_pages:
        return 0.0
    used = geometry.layers_per_page * geometry.page_tokens * geometry.token_words
    return 1 - used / geometry.frame_words


def ring_specs(
    model: ModelConfig, geometry: Geometry, *, num_rows: int, window: int, aligned: bool = False
) -> dict[str, ArraySpec]:
    """Specs of the Mamba-2 ring: records since the checkpoint, and the convolution's raw window.

    Args:
        model, geometry: the model and its geometry.
        num_rows: batch rows, the sink row included.
        window: most tokens a window step appends (1 for plain decode).
        aligned: windows stand on the grain, so the ring needs no room behind its last record.
    """
    bits = "uint16" if geometry.dtype != "float32" else "uint32"
    num_layers, slots = geometry.num_mamba2, geometry.grain + (0 if aligned else window - 1)
    if model.mamba2 is None:
        conv_columns = conv_size = record = heads = 0
    else:
        conv_columns, conv_size = model.mamba2.conv_width - 1, model.mamba2.conv_size
        record, heads = model.mamba2.record_size, model.mamba2.num_heads
    return {
        "conv": ArraySpec(
            (num_layers, num_rows, conv_columns + window, conv_size), bits, ("L", "B", "W-1+T", "E")
        ),
        "xB": ArraySpec(
            (num_layers, num_rows, slots, record), bits, ("L", "B", "grain+T-1", "M*P+G*R")
        ),
        "dt": ArraySpec(
            (num_layers, num_rows, slots, heads), "float32", ("L", "B", "grain+T-1", "M")
        ),
    }


def adjust_specs(model: ModelConfig, *, num_rows: int) -> dict[str, ArraySpec]:
    """Specs of what changes logits before they are sampled from; `num_rows`: the sink row included."""
    shape, axes = (num_rows, model.vocab_size), ("B", "V")
    return {"counts": ArraySpec(shape, "int32", axes), "bias": ArraySpec(shape, "float32", axes)}


# --- bytes ----------------------------------------------------------------------------------------


def kv_bytes_per_token(geometry: Geometry) -> int:
    """Bytes of K and V of one token over all attention layers, padding of the page left out."""
    return 4 * geometry.num_attention * geometry.token_words


def checkpoint_bytes(geometry: Geometry) -> int:
    """Bytes of one checkpoint, its padding included."""
    return geometry.state_frames * geometry.frame_bytes


def logits_bytes(model: ModelConfig, *, max_rows: int, dtype: str | None = None) -> int:
    """Bytes of all arrays over the vocabulary in the largest step, for decoding rows or a prompt's positions.

    Args:
        dtype: of the weights where the step is made of Pallas kernels: it holds the product in that dtype and in
            float32. None for a step that XLA makes.
    """
    row = LOGITS_OF_A_ROW * ITEM_BYTES["float32"]
    if dtype is not None:
        row = KERNEL_LOGITS_MARGIN * (ITEM_BYTES[dtype] + ITEM_BYTES["float32"])
    position = LOGITS_OF_A_POSITION * ITEM_BYTES["float32"]
    return int(max(row * max_rows, position * PROMPT_POSITIONS) * model.vocab_size)

"""What the host asks of every kind of part before any array exists: weights, cached data, costs, temporaries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from hybrid_jax.config import source_of
from hybrid_jax.config.arrays import ArraySpec
from hybrid_jax.config.formats import DENSE, Format, Specs, arrays_of
from hybrid_jax.products.parts import num_parts
from pallas_kernels.plan import Chip
from pallas_kernels.row_product import plan as row_product

Draw = Literal["embedding", "matrix", "conv", "output", "ones", "zeros", "step_bias", "log_decay"]
OnDevices = Literal["parts", "runs", "first"]
MATRICES: tuple[Draw, ...] = ("embedding", "matrix", "output")
FLOAT32_BYTES = 4
FILLED_TO = 8  # a multiple of this is what kernels take
READOUT_FLOPS = 2  # of a state, for each of its elements


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One array of a part's weights.

    Attributes:
        shape: the shape that the layers expect.
        draw: how random weights are drawn. "embedding", "matrix", "conv" and "output" (onto the residual stream) are
            normal; "step_bias" and "log_decay" are for step sizes and decay rates (arXiv 2405.21060).
        float32: it is kept in float32, whatever dtype the other weights have.
        fused: columns of each linear map, where several lie side by side.
        plain: a small matrix that is always one array.
        format: how a matrix is kept.
        stays: how many of its last columns stay as they are where a model is quantised: those of decays and step
            sizes, in which small errors add up over tokens.
        on_devices: how devices that divide a model divide it. "parts": as the sizes of their parts say. "first": one
            alone has it, because it is added to what they sum. "runs": in equal runs, the last of which may be filled
            up with zeros: tokens of the vocabulary, hidden units.
    """

    shape: tuple[int, ...]
    draw: Draw
    float32: bool = False
    fused: tuple[int, ...] = ()
    plain: bool = False
    format: Format = DENSE
    stays: int = 0
    on_devices: OnDevices = "parts"

    @property
    def is_matrix(self) -> bool:
        """Whether it may be kept in other formats."""
        return self.is_multiplied and not self.plain

    @property
    def is_multiplied(self) -> bool:
        """Whether products are made with it."""
        return self.draw in MATRICES

    def specs(self, dtype: str) -> Specs:
        """The arrays that stand for it in a model of this dtype: one, or several by name."""
        if self.is_matrix:
            return self.format.specs(self.shape, dtype)
        return ArraySpec(self.shape, "float32" if self.float32 else dtype)

    def num_bytes(self, dtype: str) -> int:
        """Bytes of these arrays."""
        return sum(array.num_bytes for array in arrays_of(self.specs(dtype)))

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


Weights = dict[str, Any]  # of `Weight`, or of dictionaries and lists of these
Names = Any  # of the tensors that weights are made from: a tree like theirs, with a name or several at each leaf


def map_weights(make: Callable[[Weight], Any], tree: Any) -> Any:
    """A tree with what `make` returns in place of each weight, from the first to the last."""
    if isinstance(tree, Weight):
        return make(tree)
    if isinstance(tree, list):
        return [map_weights(make, part) for part in tree]
    return {name: map_weights(make, part) for name, part in tree.items()}


def all_weights(tree: Weights) -> list[Weight]:
    """The leaves of a tree of weights."""
    return [weight for _, weight in placed(tree)]


def placed(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree of weights, or of one like it, each with its place, such as "layers.0.mlp.up"."""
    if not isinstance(tree, dict | list):
        yield place, tree
        return
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for name, part in parts:
        yield from placed(part, f"{place}.{name}" if place else str(name))


def divided(spec: Any, name: str, count: int) -> int:
    """A field of a part for one of `count` devices that divide it.

    Raises:
        ValueError: they cannot.
    """
    size = getattr(spec, name)
    if size % count:
        raise ValueError(
            f"{name} of {type(spec).__name__} layers must be a multiple of the devices that divide it, got {size} and "
            f"{count}"
        )
    return size // count


def filled(spec: Any, name: str, count: int) -> int:
    """A field of a part for one of `count` devices, whose parts may be filled up with zeros: hidden units."""
    size = getattr(spec, name)
    each = -(-size // count)
    return each if each * count == size else -(-each // FILLED_TO) * FILLED_TO


def shared(spec: Any, name: str, count: int) -> int:
    """As `divided`, for a field of which several devices may have the same one, such as a key head of many heads."""
    size = getattr(spec, name)
    if size % count and count % size:
        raise ValueError(
            f"{name} of {type(spec).__name__} layers must be a multiple of the devices that divide it, or divide them, "
            f"got {size} and {count}"
        )
    return max(size // count, 1)


class Parts(NamedTuple):
    """The parts of a mixer's projection by name, with their columns, in order.

    Attributes:
        own: of the layer's own input, which the mixer's own weights make.
        written: of the cut's output.
        readout: the name of the part of `written` that a state is only read with; None if there is none.
    """

    own: dict[str, int]
    written: dict[str, int]
    readout: str | None = None


def without_state(tree: Weights) -> Weights:
    """The weights of a mixer that reads the state of its group and makes none itself."""
    made_with = ("dt_bias", "conv", "conv_bias", "A_log")
    return {name: weight for name, weight in tree.items() if name not in made_with}


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """What one recurrent mixer caches of a sequence.

    Attributes:
        units, unit_words: how many equal parts its float32 state has, such as heads, and the elements of one part. A
            frame holds a part whole. Both are 0 for a layer that caches columns alone.
        columns, channels: how many of the last inputs of its convolution the next token needs, and the elements of one
            input. fused: elements of each part of an input, where several lie side by side.
        records: (name, elements, dtype) for each field that it keeps of every token since the checkpoint. The dtype
            None stands for the engine's dtype, kept as bits.
        carries: in place of records it keeps the state itself, after each row's last token.
        scales: float32 scales of a unit where checkpoints are kept as int8. The unit's elements then lie as
            [unit_words / scales, scales], and those of a column share one. 0 for a state that loses too much that way:
            it stays float32 there.
        spec: the mixer's, once it is part of a geometry: layers of another kind or spec are another group, even if they
            cache the same shapes.
    """

    units: int
    unit_words: int
    columns: int
    channels: int
    records: tuple[tuple[str, int, str | None], ...]
    carries: bool = False
    scales: int = 0
    fused: tuple[int, ...] = ()
    spec: Any = None

    @property
    def state_words(self) -> int:
        """Float32 words of one layer's state."""
        return self.units * self.unit_words


@dataclass(frozen=True, kw_only=True)
class PageEntry:
    """What one mixer keeps of every token, in pages.

    Attributes:
        elements: of the dtype of the pages: keys and values of all heads, or one latent vector that stands for both.
        scaled: consecutive elements that share a float32 scale where pages are FP8, such as those of a head.
        window: how many tokens a query sees at most, with itself; None for all.
        runs: of equal size, each of which devices divide by heads: keys and values.
    """

    elements: int
    scaled: int
    window: int | None = None
    runs: int = 1


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """The sizes of a step made of kernels that decide its temporaries.

    Attributes:
        width: D of the residual stream. item: bytes of an activation.
        rows, tokens: rows, and new tokens of each row. keys: the most tokens that a row may have.
        chip: the GPU.
    """

    width: int
    item: int
    rows: int
    tokens: int
    keys: int
    chip: Chip

    def product(self, columns: int, inner: int | None = None) -> int:
        """Bytes per token of a projection to `columns` columns, which may come in float32 parts: from D channels, or
        from `inner`."""
        total, inner = self.rows * self.tokens, inner or self.width
        if total == 1:
            parts = row_product.num_parts(inner, columns, self.chip.num_sms)
        else:
            parts = num_parts(total, inner, columns, self.chip.num_sms)
        return columns * (FLOAT32_BYTES * parts if parts > 1 else self.item)


class Kind:
    """A kind of part: a mixer or an MLP. `spec` is of its class in `hybrid_jax.config`; `width` is D."""

    name: str  # in files that list what a model is made of
    operation = ""  # in `Backend.without`: what XLA may do although kernels do the rest
    projection: tuple[
        str, str
    ]  # of a mixer with a form after a cut: its matrix and its biases, among its weights

    def weights(self, spec: Any, width: int) -> Weights:
        """The arrays of a part, without the norm in front of it."""
        raise NotImplementedError

    def weights_between(self, spec: Any, read: int, made: int) -> Weights:
        """`weights` of a part that reads `read` channels and makes `made`."""
        if read == made:
            return self.weights(spec, made)
        wide = iter(all_weights(self.weights(spec, read)))

        # What is as wide as the outputs is so in its last axis.
        def narrowed(weight: Weight) -> Weight:
            return replace(weight, shape=(*next(wide).shape[:-1], weight.shape[-1]))

        return map_weights(narrowed, self.weights(spec, made))

    def parts(self, spec: Any) -> Parts:
        """The parts of a mixer's projection, where it has a form after a cut."""
        raise NotImplementedError

    def shard(self, spec: Any, count: int) -> Any:
        """The part as each of `count` devices runs it, which sum what they make (tensor parallelism).

        All devices run the same: the i-th has the i-th block of heads, channels or experts.

        Raises:
            ValueError: the part cannot be divided so; names the numbers. NotImplementedError: no part of its kind can.
        """
        raise NotImplementedError(
            f"LLM: {type(spec).__name__} layers are not divided over devices yet; leave mesh out"
        )

    def active_weights(self, spec: Any, tree: Weights) -> int:
        """How many weights one token is multiplied with, of a tree like `weights`, in which there may be more."""
        return sum(weight.size for weight in all_weights(tree))

    def recurrence_flops(self, spec: Any) -> int:
        """FLOPs of one token beside those of the weights."""
        return 0

    def write_flops(self, spec: Any, width: int) -> int:
        """FLOPs of one token that a mixer after a cut only writes, beside those of its columns of the projection."""
        return 0

    def entry(self, spec: Any) -> PageEntry | None:
        """What a mixer keeps of every token, in pages; None if it has none."""
        return None

    def token_elements(self, spec: Any) -> int:
        """Elements that a page holds of each token."""
        entry = self.entry(spec)
        return 0 if entry is None else entry.elements

    def key_flops(self, spec: Any) -> int:
        """FLOPs of one token for every key that it sees."""
        return 0

    def with_one_expert(self, spec: Any) -> Any:
        """The part without all experts but one; the same part if it has none."""
        return spec

    def why_unsupported(self, spec: Any, dtype: str, chip: Chip) -> str | None:
        """Why no kernel does the part's own operation on a GPU, so that XLA does it; None if one does, or if there is
        no such operation.

        Args:
            dtype: of activations.
        """
        return None

    def row_bytes(self, spec: Any, step: StepSize) -> int:
        """Bytes that the part holds for a row with one new token."""
        raise NotImplementedError

    def chunk_bytes(self, spec: Any, step: StepSize) -> int:
        """Bytes that the part holds for each token of prompt chunks."""
        raise NotImplementedError

    def window_bytes(self, spec: Any, step: StepSize) -> int:
        """Bytes that the part holds for each token of exact mode's windows."""
        return self.chunk_bytes(spec, step)

    def xla_elements(self, spec: Any, width: int) -> int:
        """Elements that the part holds for each token in a step that XLA makes."""
        raise NotImplementedError

    def xla_row_elements(self, spec: Any, tokens: int) -> int:
        """Elements that the part holds besides for each row of so many new tokens."""
        return 0

    def xla_step_elements(self, spec: Any, width: int) -> int:
        """Elements that the part holds besides in a step, however many tokens that has."""
        return 0


class RecurrentKind(Kind):
    """A kind of mixer with a state."""

    projection = "in_proj", "in_bias"
    state_flops: int  # for each element of the state and each token: decay, update, readout
    write_state_flops: int  # the same where nothing is read

    def layout(self, spec: Any) -> StateLayout:
        """What one layer caches."""
        raise NotImplementedError

    def triton_unsupported(self, spec: Any, dtype: str) -> str | None:
        """Why no Triton kernel can scan prompts on a Hopper card, wherever one can be called; None if one can.

        Args:
            dtype: of activations.
        """
        return f"there is none for {type(spec).__name__}"

    def projected(self, spec: Any) -> tuple[int, int]:
        """Columns of all that in_proj and the cut's projection give, and rows of out_proj."""
        spec = replace(spec, source="own") if hasattr(spec, "source") else spec
        tree = self.weights(spec, 1)
        return tree["in_proj"].shape[1], tree["out_proj"].shape[0]

    def row_bytes(self, spec: Any, step: StepSize) -> int:
        """By default the projection, and what is read of the state before and after the gate."""
        columns, inner = self.projected(spec)
        return step.product(columns) + 2 * inner * step.item

    def chunk_bytes(self, spec: Any, step: StepSize) -> int:
        """By default the projection, what is convolved and what is read, and the float32 fields of records."""
        (columns, inner), layout = self.projected(spec), self.layout(spec)
        wide = sum(size for _, size, dtype in layout.records if dtype == "float32")
        beside = (layout.channels + inner) * step.item + FLOAT32_BYTES * wide
        return step.product(columns) + beside

    def xla_elements(self, spec: Any, width: int) -> int:
        """By default the projection and the arrays made from it."""
        return 5 * self.projected(spec)[0]

    def recurrence_flops(self, spec: Any) -> int:
        each = READOUT_FLOPS if source_of(spec) == "group" else self.state_flops
        return each * self.layout(spec).state_words

    def write_flops(self, spec: Any, width: int) -> int:
        conv = 2 * self.weights(spec, width)["conv"].size
        return conv + self.write_state_flops * self.layout(spec).state_words

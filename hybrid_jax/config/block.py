"""What a model's residual stream goes through: blocks, each with its norms and the way in which its result is added."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hybrid_jax.config.checks import one_of, positive, require
from hybrid_jax.config.layers import FeedForward, Mixer, is_feed_forward, is_mixer

BlockPlace = tuple[int, int]  # of a block: its layer, and its number among the layer's blocks
NORMS = ("before", "after", "both", "none")
READS = ("stream", "joined", "aside", "both")


@dataclass(frozen=True, kw_only=True)
class Residual:
    """How a block's result joins the stream: keep * x + gain * result.

    Attributes:
        keep, gain: the two factors.
        of: what x is: the "stream", or what the norm in front of the block gives ("normed").
    """

    keep: float = 1.0
    gain: float = 1.0
    of: Literal["stream", "normed"] = "stream"

    def __post_init__(self) -> None:
        one_of(self, "of", ("stream", "normed"))

    @property
    def is_sum(self) -> bool:
        """Whether the stream is kept as it is, so that the sum may be made together with the next norm."""
        return self.keep == 1.0 and self.of == "stream"


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """What a block adds to some of its matrices: products of two narrow ones (arXiv 2106.09685, without a factor).

    Attributes:
        matrices: their names among the weights of its parts.
        rank: inner size of the products.
    """

    matrices: tuple[str, ...]
    rank: int

    def __post_init__(self) -> None:
        require(bool(self.matrices), "LowRank", "needs the name of a matrix")
        positive(self, "rank")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One step of the residual stream: what it reads, what it computes of that, and where the result goes.

    Attributes:
        parts: mixers and feed-forward blocks that all take the same input; their results are summed. Usually one.
        norm: where it has norms: "before" the parts, "after" them, "both", or "none".
        reads: the "stream"; the stream "joined" with the token's embedding, of twice the width; the result that was put
            "aside" last; or "both", the sum of the stream and that result.
        adds: how the result joins the stream; None if it is put aside for later blocks.
        weights: the earlier block whose weights it uses; None for weights of its own.
        change: what it adds to some of these matrices, of its own also where the weights are another's.
    """

    parts: tuple[Mixer | FeedForward, ...]
    norm: Literal["before", "after", "both", "none"] = "before"
    reads: Literal["stream", "joined", "aside", "both"] = "stream"
    adds: Residual | None = Residual()
    weights: BlockPlace | None = None
    change: LowRank | None = None

    def __post_init__(self) -> None:
        require(bool(self.parts), "Block", "needs a mixer or a feed-forward block")
        one_of(self, "norm", NORMS)
        one_of(self, "reads", READS)
        if self.adds is not None and self.adds.of == "normed":
            good = self.has_norm_before and self.reads == "stream"
            what = "a residual of the normed input needs a norm before, of the stream, got"
            require(good, "Block", f"{what} norm={self.norm!r}, reads={self.reads!r}")

    @property
    def has_norm_before(self) -> bool:
        """Whether its input is normed."""
        return self.norm in ("before", "both")

    @property
    def has_norm_after(self) -> bool:
        """Whether its result is normed."""
        return self.norm in ("after", "both")

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Those of its parts that mix tokens."""
        return tuple(filter(is_mixer, self.parts))

    def width_in(self, width: int) -> int:
        """The width of what its parts take, in a model of this width."""
        return 2 * width if self.reads == "joined" else width

    @property
    def is_plain(self) -> bool:
        """Whether it is of the usual form, with weights of its own: a norm, the parts, a sum."""
        adds = self.adds
        own = self.weights is None and self.change is None
        usual = self.norm == "before" and self.reads == "stream"
        return own and usual and adds is not None and adds.is_sum


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The blocks that files count as one layer."""

    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        require(bool(self.blocks), "Layer", "needs a block")

    @property
    def parts(self) -> tuple[Mixer | FeedForward, ...]:
        """The parts of all its blocks."""
        return tuple(part for block in self.blocks for part in block.parts)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of all its blocks."""
        return tuple(mixer for block in self.blocks for mixer in block.mixers)

    def with_parts(self, parts: Iterable[Mixer | FeedForward]) -> Layer:
        """The same layer with other parts, in the order of `parts`."""
        left = iter(parts)
        blocks = [
            replace(block, parts=tuple(next(left) for _ in block.parts)) for block in self.blocks
        ]
        return Layer(blocks=tuple(blocks))

    def with_mixers(self, mixers: Iterable[Mixer]) -> Layer:
        """The same layer with other mixers, in the order of `mixers`."""
        left = iter(mixers)
        return self.with_parts(part if is_feed_forward(part) else next(left) for part in self.parts)

    def again(self, index: int) -> Layer:
        """The same layer with the weights of layer `index`, an earlier one like it."""
        blocks = [
            replace(block, weights=(index, number)) for number, block in enumerate(self.blocks)
        ]
        return Layer(blocks=tuple(blocks))

    def with_gain(self, gain: float) -> Layer:
        """The same layer, all of whose blocks that add their result add `gain` times that."""
        blocks = [
            block if block.adds is None else replace(block, adds=replace(block.adds, gain=gain))
            for block in self.blocks
        ]
        return Layer(blocks=tuple(blocks))

    @property
    def is_plain(self) -> bool:
        """Whether all its blocks are of the usual form, and its mixers stand in one of them, alone."""
        with_mixers = [block for block in self.blocks if block.mixers]
        alone = all(block.mixers == block.parts for block in with_mixers)
        return alone and len(with_mixers) <= 1 and all(block.is_plain for block in self.blocks)

    @property
    def names(self) -> tuple[BlockNames, ...]:
        """The names of each block's weights in those of the layer."""
        return tuple(_names(self.blocks))


@dataclass(frozen=True)
class BlockNames:
    """What a block's weights are called in those of its layer.

    Attributes:
        norm, after: of the norm before its parts, and after them.
        parts: of the weights of its parts: a list, or those of a feed-forward block that is alone.
        changes: of what is added to some of these, in the same form.
    """

    norm: str
    after: str
    parts: str
    changes: str


def _names(blocks: Iterable[Block]) -> Iterator[BlockNames]:
    seen = {"mixers": 0, "mlp": 0}
    for block in blocks:
        parts = "mlp" if is_alone(block) else "mixers"
        prefix = "mlp_" if parts == "mlp" else ""
        seen[parts] += 1
        number = "" if seen[parts] == 1 else f"_{seen[parts]}"
        yield BlockNames(
            norm=f"{prefix}norm{number}",
            after=f"{prefix}after_norm{number}",
            parts=f"{parts}{number}",
            changes=f"{parts}_changes{number}",
        )


def is_alone(block: Block) -> bool:
    """Whether a feed-forward block is all that a block has."""
    return len(block.parts) == 1 and is_feed_forward(block.parts[0])


def residual_layer(
    *, mixers: tuple[Mixer, ...] = (), mlp: FeedForward | None = None, gain: float = 1.0
) -> Layer:
    """A layer of the usual form: h += gain * sum of mixers(norm(h)), then h += gain * mlp(norm(h)); one may be absent.

    Raises:
        ValueError: both are absent.
    """
    adds = Residual(gain=gain)
    blocks = [Block(parts=mixers, adds=adds)] if mixers else []
    blocks += [Block(parts=(mlp,), adds=adds)] if mlp is not None else []
    require(bool(blocks), "residual_layer", "needs a mixer or an mlp")
    return Layer(blocks=tuple(blocks))

"""Everything about a model except its weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hybrid_jax.config.block import Block, BlockPlace, Layer
from hybrid_jax.config.checks import must, one_of, positive, require
from hybrid_jax.config.cut import have_cut, without_cuts
from hybrid_jax.config.formats import Format
from hybrid_jax.config.layers import (
    Attention,
    FeedForward,
    Mixer,
    RecurrentMixer,
    keeps_pages,
    source_of,
)

Place = tuple[int, int]  # of a mixer: its layer, and its number among the layer's mixers
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything about a model that is not a weight.

    Attributes:
        family: name in `hybrid_jax.models`, the checkpoint layout the model came in.
        vocab_size, width: V and D.
        layers: in order.
        norm_kind: of the norms around blocks and the last one: "rms" has a gain; "layer" also takes the mean away, and
            has a gain and a bias.
        norm_eps: their epsilon.
        tie_embeddings: logits use the embedding matrix.
        max_position: longest sequence in tokens, prompt and output together.
        embedding_multiplier, logits_multiplier: factors on the embeddings and on the logits.
        residual_in_fp32: keep the residual stream in float32 whatever the dtype.
        float32_norms: the weights of the layers' norms and of the last one are float32, whatever the dtype.
        dtype: the weights' dtype as stored.
        matrices: how matrices among them are kept, by their places among the parameters, such as "layers.0.mlp.up";
            those that are not named are kept as they are.
        mtp: layers of the head that predicts a token further (multi-token prediction); none unless it was asked for.
        draft: a second model of the same vocabulary, which drafts for this one; None unless it was asked for.
        cut: how many layers the tokens of prompts go through; None for all. `config.cut.with_cut` makes such a config.
        exit_head: there is a head on the output of the cut, which drafts; False unless it was asked for.
        shards: this is what each of so many devices runs, which sum what their blocks make. All of them have the whole
            residual stream.
        eos_token_ids: any of these ends a sequence.
        bos_token_id: what the tokenizer puts first, when it does.

    Example:
        >>> from hybrid_jax.config import MLP, Attention, residual_layer
        >>> attention = Attention(num_heads=4, num_kv_heads=2, head_dim=64)
        >>> layer = residual_layer(mixers=(attention,), mlp=MLP(width=512))
        >>> config = ModelConfig(family="llama", vocab_size=256, width=256, layers=(layer,) * 2)
        >>> len(config.mixers(Attention)), config.recurrent
        (2, ())
    """

    family: str
    vocab_size: int
    width: int
    layers: tuple[Layer, ...]
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_position: int = 4096
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    residual_in_fp32: bool = False
    float32_norms: bool = False
    dtype: str = "float32"
    matrices: tuple[tuple[str, Format], ...] = ()
    mtp: tuple[Layer, ...] = ()
    draft: ModelConfig | None = None
    cut: int | None = None
    exit_head: bool = False
    shards: int = 1
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        require(bool(self.layers), "ModelConfig", "needs at least one layer")
        positive(self, "vocab_size", "width", "max_position")
        one_of(self, "dtype", DTYPES)
        one_of(self, "norm_kind", ("rms", "layer"))
        if self.draft is not None:
            self._check_draft(self.draft)
        self._check_cut()
        for layers in (self.layers, self.mtp):
            _check_blocks(layers)
        blocks = [block for layer in self.layers for block in layer.blocks]
        of_normed = any(block.adds and block.adds.of == "normed" for block in blocks)
        why = "False where a residual is of the normed input, which is of the model's dtype"
        must(self, "residual_in_fp32", not (self.residual_in_fp32 and of_normed), why)
        joined = any(block.reads == "joined" for layer in self.mtp for block in layer.blocks)
        must(self, "mtp", not joined, "layers that read the stream alone", "one with the embedding")

    def _check_cut(self) -> None:
        if self.cut is None:
            sources = [source_of(mixer) for layer in self.layers for mixer in layer.mixers]
            alone = set(sources) <= {"own"}
            must(self, "cut", alone, "given if layers write from it; use config.cut.with_cut")
            must(self, "exit_head", not self.exit_head, "False without a cut")
            return
        must(self, "norm_kind", self.norm_kind == "rms", "'rms' if there is a cut")
        good = have_cut(self.layers, self.cut, self.kv_group, self.state_group)
        what = f"those that config.cut.with_cut makes for cut {self.cut}"
        must(self, "layers", good, what, "others")
        why = "the tokens of prompts have no last hidden states, from which it drafts"
        must(self, "mtp", not self.mtp, f"empty if there is a cut, because {why}", "a head")

    def _check_draft(self, draft: ModelConfig) -> None:
        must(self, "mtp", not self.mtp, "empty if there is a draft model", "both")
        same = draft.vocab_size == self.vocab_size
        what = f"a model with the same vocabulary, of {self.vocab_size} tokens"
        must(self, "draft", same, what, f"one of {draft.vocab_size} tokens")
        must(self, "draft", draft.cut is None, "a model without a cut", f"one with cut {draft.cut}")
        alone = not draft.mtp and draft.draft is None
        must(self, "draft", alone, "a model without a drafter of its own", "one that has one")

    @property
    def shard_vocab(self) -> int:
        """Tokens whose embeddings and logits each device has; the last one may have fewer."""
        return -(-self.vocab_size // self.shards)

    @functools.cached_property
    def drafting(self) -> ModelConfig | None:
        """The layers that draft as a model of their own: those of its head, or the second model; None without them."""
        if not self.mtp:
            return self.draft
        prefix = "mtp."
        own = tuple((p.removeprefix(prefix), f) for p, f in self.matrices if p.startswith(prefix))
        return replace(self, layers=self.mtp, mtp=(), matrices=own)

    @functools.cached_property
    def before_cut(self) -> ModelConfig:
        """The layers before the cut as a model of their own."""
        return replace(self._uncut(self.layers[: self.cut]), draft=None)

    @functools.cached_property
    def without_cut(self) -> ModelConfig:
        """The model as it was before it had a cut."""
        return self._uncut(without_cuts(self.layers))

    def _uncut(self, layers: Sequence[Layer]) -> ModelConfig:
        return replace(
            self,
            layers=tuple(layers),
            cut=None,
            exit_head=False,
        )

    @property
    def kv_group(self) -> int:
        """How many attention layers after the cut share keys and values."""
        return self._group_size(paged=True)

    @property
    def state_group(self) -> int:
        """How many recurrent layers after the cut share a state."""
        return self._group_size(paged=False)

    def _group_size(self, *, paged: bool) -> int:
        later = [mixer for index in self.later for mixer in self.layers[index].mixers]
        sources = [source_of(mixer) for mixer in later if keeps_pages(mixer) is paged]
        return len(sources) // sources.count("cut") if "cut" in sources else 1

    @property
    def later(self) -> range:
        """The layers after the cut; none without one."""
        return range(len(self.layers) if self.cut is None else self.cut, len(self.layers))

    @functools.cached_property
    def groups_after_cut(self) -> tuple[tuple[Place, ...], ...]:
        """The mixers after the cut in groups that share keys and values or a state, each group's first one in front.

        A mixer is its layer and its number among the layer's mixers.
        """
        groups: list[list[Place]] = []
        last: dict[bool, list[Place]] = {}
        for index in self.later:
            for number, mixer in enumerate(self.layers[index].mixers):
                kind = keeps_pages(mixer)
                if source_of(mixer) == "cut":
                    last[kind] = []
                    groups.append(last[kind])
                last[kind].append((index, number))
        return tuple(tuple(group) for group in groups)

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The model's own layers, then those that draft: all that caches something."""
        return (*self.layers, *(self.drafting.layers if self.drafting else ()))

    def mixers(self, kind: type) -> tuple:
        """All mixers of one kind in `all_layers` that cache something of their own.

        Their positions here are those of their places in a `Geometry`.
        """
        return tuple(
            mixer
            for layer in self.all_layers
            for mixer in layer.mixers
            if isinstance(mixer, kind) and source_of(mixer) != "group"
        )

    @property
    def parts(self) -> list[tuple[Mixer | FeedForward, int]]:
        """The parts of all blocks of `all_layers`, each with the width of its block's input."""
        own = [
            (part, block.width_in(self.width))
            for layer in self.layers
            for block in layer.blocks
            for part in block.parts
        ]
        return own + (self.drafting.parts if self.drafting else [])

    @property
    def attention(self) -> Attention | None:
        """The first attention mixer, or None."""
        return next(iter(self.mixers(Attention)), None)

    @functools.cached_property
    def recurrent(self) -> tuple[RecurrentMixer, ...]:
        """All mixers of `all_layers` that keep a state of their own."""
        return tuple(mixer for mixer in self.mixers(object) if not keeps_pages(mixer))

    @functools.cached_property
    def paged(self) -> tuple[Mixer, ...]:
        """All mixers of `all_layers` that keep pages of their own."""
        return tuple(mixer for mixer in self.mixers(object) if keeps_pages(mixer))


def _check_blocks(layers: Sequence[Layer]) -> None:
    """Blocks that share weights name an earlier block, which computes the same with weights of its own.

    What is read from aside has been put there.
    """
    seen: dict[BlockPlace, Block] = {}
    for index, layer in enumerate(layers):
        for number, block in enumerate(layer.blocks):
            where = f"ModelConfig: block {number} of layer {index}"
            if block.reads in ("aside", "both") and all(b.adds is not None for b in seen.values()):
                raise ValueError(f"{where} reads {block.reads!r}, and none before it puts aside")
            if block.weights is not None:
                source, what = seen.get(block.weights), None
                if source is None:
                    what = "which is no (layer, block) before it"
                elif source.weights is not None:
                    what = "which has none of its own"
                elif (block.parts, block.norm, block.reads) != (
                    source.parts,
                    source.norm,
                    source.reads,
                ):
                    what = f"so both must compute the same, got {block} and {source}"
                if what is not None:
                    raise ValueError(f"{where} shares weights of {block.weights}, {what}")
            seen[index, number] = block

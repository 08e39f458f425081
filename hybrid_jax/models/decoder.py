"""The layer stack over whole sequences: no cache, no pages; training and tests use it as the definition.

Parameters of a model: {"embed": [V, D], "layers": [layer, ...], "norm": [D], "head": [D, V] unless tied}.
A layer has the weights of its blocks side by side, by the names in `Layer.names`: "norm" [D] and "mixers" [mixer, ...]
of a block with mixers, "mlp_norm" [D] and "mlp" of a feed-forward block alone. A further block of the same form has a
number at the end of its names. A block that shares weights has none. What a block adds to matrices, "mixers_changes" or
"mlp_changes", is "a" [I, R] and "b" [R, O] for each of them.

After a cut, layers have no weights for what they write: keys, values, states. All of that comes from one projection of
the output of the layer at the cut: "cut" has its "norm" [D], "write" [D, columns] and, if there are biases,
"write_bias".

A head on the cut, "exit", has a "norm" [D] and a "head" [D, V].

A head for multi-token prediction, "mtp": norms of embeddings and of hidden states "embed_norm", "hidden_norm" [D],
"in_proj" [2 D, D] of both, the embedding first, and its own "layers" and "norm".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.struct import PyTreeNode, field

from hybrid_jax.config import (
    MAX_GRAIN,
    MLP,
    XLA,
    Attention,
    Backend,
    Block,
    GatedDelta,
    Mamba1,
    Mamba2,
    Mixer,
    ModelConfig,
    MoE,
    ShortConv,
    is_mixer,
    keeps_pages,
    source_of,
)
from hybrid_jax.config.block import BlockPlace
from hybrid_jax.kinds.table import kind_of, written_columns
from hybrid_jax.layers import attention, gated_delta, mamba1, mamba2, short_conv
from hybrid_jax.layers.cut import CutInput, MixerInput
from hybrid_jax.layers.mlp import mlp, moe
from hybrid_jax.layers.shards import joined_over, summed_over, this_shard
from hybrid_jax.products.matrix import as_matrix, product, product_transposed
from pallas_kernels.operands import summed
from pallas_kernels.rmsnorm import residual_rmsnorm
from pallas_kernels.rmsnorm.xla import layer_norm, residual_sum, rms_norm

# From a mixer's weights, its normed inputs [B, T, D], its spec, and its layer with its number among the layer's mixers,
# the mixer's update [B, T, D], or parts of it.
Mix = Callable[[dict, MixerInput, Mixer, tuple[int, int]], jax.Array]


class Stream(PyTreeNode):
    """The residual stream between two blocks.

    Attributes:
        h: [B, T, D]. update: what the last block adds to it, in parts or not; None if that is in it.
        u: [B, T, D] after a cut, its output, normed. written: [B, T, columns] what that is projected to for all later
            layers; None for many tokens, of which each mixer makes its own columns.
        aside: [B, T, D] what a block has put aside last (`Block.adds`).
        embedded: [B, T, D] the embeddings, where blocks read them too (`Block.reads`).
        gain: what `update` is multiplied with.
    """

    h: jax.Array
    update: jax.Array | None = None
    u: jax.Array | None = None
    written: jax.Array | None = None
    aside: jax.Array | None = None
    embedded: jax.Array | None = None
    gain: float = field(pytree_node=False, default=1.0)


class Written(NamedTuple):
    """What mixers after a cut write from.

    Attributes:
        weights: of the cut. columns: of its projection, by layer and by number among the layer's mixers.
        u, written: as in `Stream`.
    """

    weights: dict
    columns: dict[tuple[int, int], slice]
    u: jax.Array
    written: jax.Array | None

    def beside(self, own: jax.Array, index: int, number: int) -> CutInput:
        """The input of a mixer beside its own one, by its layer and its number among the layer's mixers."""
        columns = self.columns[index, number]
        if self.written is not None:
            return CutInput(own, self.written, columns)
        return CutInput(own, project_part(self.weights, self.u, columns))


def project_part(weights: dict, u: jax.Array, columns: slice) -> jax.Array:
    """Some columns [B, T, w] of what the output of a cut u [B, T, D] is projected to, by the cut's weights."""
    bias = weights.get("write_bias")
    write = as_matrix(weights["write"]).columns(columns)
    return product(u, write, None if bias is None else bias[columns])


class BlockParams(NamedTuple):
    """The weights of a block.

    Attributes:
        norm, after: of the norms before and after its parts; None where it has none.
        parts: of each of its parts.
    """

    norm: Any
    after: Any
    parts: list[dict]


def block_params(params: dict, config: ModelConfig, index: int) -> list[BlockParams]:
    """The weights of the blocks of a layer, also of those that share the weights of other blocks."""
    own, layer, found = params["layers"][index], config.layers[index], []
    for number, (names, block) in enumerate(zip(layer.names, layer.blocks, strict=True)):
        made = _unchanged(params, config, block.weights or (index, number))
        if block.change is not None:
            pairs = zip(made.parts, _as_list(own[names.changes]), strict=True)
            made = made._replace(parts=[_changed(part, changes) for part, changes in pairs])
        found.append(made)
    return found


def _unchanged(params: dict, config: ModelConfig, place: BlockPlace) -> BlockParams:
    """The weights of a block that has its own, without what it adds to them."""
    own, names = params["layers"][place[0]], config.layers[place[0]].names[place[1]]
    return BlockParams(own.get(names.norm), own.get(names.after), _as_list(own[names.parts]))


def _as_list(parts: Any) -> list[dict]:
    """The weights of a block's parts, of which there may be one alone."""
    return parts if isinstance(parts, list) else [parts]


def _changed(weights: dict, changes: dict) -> dict:
    """The weights of a part with what is added to some of its matrices."""
    found = {name: as_matrix(weights[name]).changed(**change) for name, change in changes.items()}
    return weights | found


def mixer_params(params: dict, config: ModelConfig, index: int) -> list[dict]:
    """The weights of the mixers of a layer, in the order of `Layer.mixers`."""
    parts = [part for block in block_params(params, config, index) for part in block.parts]
    pairs = zip(config.layers[index].parts, parts, strict=True)
    return [own for part, own in pairs if is_mixer(part)]


def normed(x: jax.Array, weight: Any, config: ModelConfig) -> jax.Array:
    """The norm of `config.norm_kind` over the last axis of x [..., D], as `rms_norm` rounds it.

    Args:
        weight: [D]; with `config.norm_kind` "layer", "gain" and "bias" [D].
    """
    if config.norm_kind == "rms":
        return rms_norm(x, weight, config.norm_eps)
    return layer_norm(x, weight["gain"], weight["bias"], config.norm_eps)


def activation_dtype(params: dict) -> jnp.dtype:
    """The dtype in which blocks compute: that of the embeddings. Some weights are kept wider."""
    return as_matrix(params["embed"]).dtype


def _mlp(params: dict, given: jax.Array, valid: jax.Array, spec: MLP) -> jax.Array:
    return mlp(params, given, spec.kind, out="parts")


# By the class of the spec. Each mixer takes whole sequences from a zero state, which is the definition that engines are
# tested against: weights, normed inputs [B, T, D], positions int32[B, T], lengths int32[B], spec. A feed-forward block
# takes weights, normed inputs, valid bool[B, T] and spec.
MIXERS: dict[type, Callable[..., jax.Array]] = {
    Attention: attention.whole,
    Mamba2: mamba2.whole,
    GatedDelta: gated_delta.whole,
    ShortConv: short_conv.whole,
    Mamba1: mamba1.whole,
}
# The two halves of mixers that may share in groups: what the first one of a group writes, and what each of them reads.
WRITES: dict[type, Callable[..., Any]] = {
    Attention: attention.write,
    Mamba2: mamba2.write,
}
READS: dict[type, Callable[..., jax.Array]] = {
    Attention: attention.read,
    Mamba2: mamba2.read_whole,
}
FEED_FORWARD: dict[type, Callable[..., jax.Array]] = {MLP: _mlp, MoE: moe}


def enter(params: dict, tokens: jax.Array, valid: jax.Array, config: ModelConfig) -> Stream:
    """The stream in front of the first layer; arguments as for `walk`."""
    h = _embeddings(params, jnp.where(valid, tokens, 0), config)
    if config.residual_in_fp32:
        h = h.astype(jnp.float32)
    if config.embedding_multiplier != 1.0:
        h = h * config.embedding_multiplier
    h = jnp.where(valid[..., None], h, 0)
    joined = any(block.reads == "joined" for layer in config.layers for block in layer.blocks)
    return Stream(h, embedded=h if joined else None)


def _embeddings(params: dict, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """The embeddings of tokens int32[B, T]; each device has those of some tokens."""
    if config.shards == 1:
        return as_matrix(params["embed"]).rows(tokens)
    own = tokens - config.shard_vocab * this_shard()
    is_own = (own >= 0) & (own < config.shard_vocab)
    h = as_matrix(params["embed"]).rows(jnp.where(is_own, own, 0))
    return summed_over(jnp.where(is_own[..., None], h, 0), config.shards)


def through(
    params: dict,
    stream: Stream,
    valid: jax.Array,
    layers: range,
    config: ModelConfig,
    mix: Mix,
    backend: Backend = XLA,
) -> Stream:
    """The stream after some layers; arguments as for `walk`."""
    columns = written_columns(config)
    for index in layers:
        if index == config.cut:
            stream = cross(params, stream, valid, config, backend)
        layer, mixed, real = config.layers[index], 0, valid
        for block, own in zip(layer.blocks, block_params(params, config, index), strict=True):
            # Once a layer is enough to take out what is not real.
            stream, given = _enter_block(stream, block, own, real, params, config, backend)
            real = None
            results = []
            for part, weights in zip(block.parts, own.parts, strict=True):
                if not is_mixer(part):
                    with jax.named_scope("mlp"):
                        results.append(FEED_FORWARD[type(part)](weights, given, valid, part))
                    continue
                where, taken = (index, mixed), given
                if stream.u is not None:
                    after = Written(params["cut"], columns, stream.u, stream.written)
                    taken = after.beside(given, *where)
                with jax.named_scope(type(part).__name__.lower()):
                    results.append(mix(weights, taken, part, where))
                mixed += 1
            result = _sum(results, given, config.shards)
            stream = _leave_block(stream, block, own, given, result, valid, config)
    return stream


def _enter_block(
    stream: Stream,
    block: Block,
    own: BlockParams,
    valid: jax.Array | None,
    params: dict,
    config: ModelConfig,
    backend: Backend,
) -> tuple[Stream, jax.Array]:
    """The stream with the last block's update in it, where that is needed, and what the block's parts take."""
    dtype = activation_dtype(params)
    if block.reads == "aside":
        assert stream.aside is not None, "a block before has put its result aside"
        x = stream.aside
    elif block.reads == "stream" and block.has_norm_before and config.norm_kind == "rms":
        return _with_norm(stream, own.norm, valid, dtype, config, backend)
    else:
        stream = _settled(stream, valid, dtype)
        x = stream.h
        if block.reads == "both":
            assert stream.aside is not None, "a block before has put its result aside"
            x = x + stream.aside.astype(x.dtype)
        if block.reads == "joined":
            assert stream.embedded is not None, "the walk begins with embeddings"
            x = jnp.concatenate([x, stream.embedded], axis=-1)
    return stream, (x if own.norm is None else normed(x, own.norm, config)).astype(dtype)


def _sum(results: list[jax.Array], given: jax.Array, shards: int) -> jax.Array:
    """What the parts of a block make together; of a single part as it is, in parts or not.

    The one place where what a block makes is summed over devices.
    """
    if len(results) == 1 and shards == 1:
        return results[0]
    first, *others = (summed(result, given.ndim, given.dtype) for result in results)
    return summed_over(sum(others, first), shards)


def _leave_block(
    stream: Stream,
    block: Block,
    own: BlockParams,
    given: jax.Array,
    result: jax.Array,
    valid: jax.Array,
    config: ModelConfig,
) -> Stream:
    """The stream with a block's result."""
    if own.after is not None:
        result = summed(result, given.ndim, given.dtype)
        result = normed(result, own.after, config).astype(given.dtype)
    if block.adds is None:
        return stream.replace(aside=summed(result, given.ndim, given.dtype))
    stream = _settled(stream, valid, given.dtype)
    if block.adds.is_sum:
        return stream.replace(update=result, gain=block.adds.gain)
    kept = (stream.h if block.adds.of == "stream" else given) * block.adds.keep
    h = residual_sum(kept.astype(stream.h.dtype), result, given.dtype, block.adds.gain)
    return stream.replace(h=jnp.where(valid[..., None], h, 0))


def _with_norm(
    stream: Stream,
    weight: jax.Array,
    valid: jax.Array | None,
    dtype: jnp.dtype,
    config: ModelConfig,
    backend: Backend,
) -> tuple[Stream, jax.Array]:
    """The stream with the last update in it, if there is one, and its norm: one kernel where there are kernels."""
    if stream.update is None:
        return stream, rms_norm(stream.h, weight, config.norm_eps).astype(dtype)
    h, given = residual_rmsnorm(
        stream.h,
        stream.update,
        weight,
        eps=config.norm_eps,
        multiplier=stream.gain,
        valid=valid,
        dtype=dtype,
        implementation=backend.kernels,
    )
    return stream.replace(h=h, update=None), given


def _settled(stream: Stream, valid: jax.Array | None, dtype: jnp.dtype) -> Stream:
    """The stream with the last update in it, and zeros where tokens are not `valid`."""
    if stream.update is None:
        return stream
    h = residual_sum(stream.h, stream.update, dtype, stream.gain)
    h = h if valid is None else jnp.where(valid[..., None], h, 0)
    return stream.replace(h=h, update=None)


def at_cut(
    params: dict, stream: Stream, valid: jax.Array, config: ModelConfig, backend: Backend = XLA
) -> tuple[jax.Array, jax.Array]:
    """The residual stream at the cut, and u, its normed form that later layers write from, both [B, T, D]."""
    norm, dtype = params["cut"]["norm"], activation_dtype(params)
    with jax.named_scope("cut"):
        stream, u = _with_norm(stream, norm, valid, dtype, config, backend)
    return stream.h, u


def cross(
    params: dict, stream: Stream, valid: jax.Array, config: ModelConfig, backend: Backend = XLA
) -> Stream:
    """The stream at the cut, with what later layers write from; arguments as for `walk`.

    For the few tokens of a window, one product makes what all layers write. For a chunk that would take much memory.
    """
    h, u = at_cut(params, stream, valid, config, backend)
    written = None
    if u.shape[1] <= MAX_GRAIN:
        with jax.named_scope("cut"):
            written = project_part(params["cut"], u, slice(None))
    return Stream(h, u=u, written=written)


def write_after_cut(
    params: dict,
    normed: jax.Array,
    ends: Sequence[jax.Array],
    config: ModelConfig,
    mix: Mix,
    backend: Backend = XLA,
) -> None:
    """Has the layers after the cut write all that they keep of some tokens, and do nothing else with them.

    Args:
        normed: u [B, T, D] of the tokens, from `at_cut`.
        ends: each int32[B], how many tokens come before a point whose last convolution columns are kept. Only of these
            tokens are the columns made that states are read with.
        The others as for `walk`; `mix` gets inputs of which none is the layer's own, and returns nothing that counts.
    """
    weights = params["cut"]
    for (index, number), columns in written_columns(config).items():
        mixer = config.layers[index].mixers[number]
        if source_of(mixer) == "group":
            continue
        # A product for each mixer: the columns of all of them together would take much memory in a long chunk.
        written = _written(weights, normed, columns, ends, mixer)
        own = mixer_params(params, config, index)[number]
        with jax.named_scope(type(mixer).__name__.lower()):
            mix(own, CutInput(None, written), mixer, (index, number))


def _written(
    weights: dict,
    normed: jax.Array,
    columns: slice,
    ends: Sequence[jax.Array],
    mixer: Any,
) -> jax.Array:
    """A mixer's columns [B, T, w] for `write_after_cut`; those that a state is read with are 0 where none are kept."""

    def made(tokens: jax.Array, part: slice) -> jax.Array:
        return project_part(weights, tokens, part)

    parts = kind_of(mixer).parts(mixer)
    if parts.readout is None:
        return made(normed, columns)
    names, start = list(parts.written), columns.start
    before = start + sum(parts.written[name] for name in names[: names.index(parts.readout)])
    beyond = before + parts.written[parts.readout]
    history = min(mixer.conv_width - 1, normed.shape[1])
    readout = jnp.zeros((*normed.shape[:2], beyond - before), normed.dtype)
    for end in ends:
        first = jnp.clip(end - history, 0)
        rows = range(normed.shape[0])
        size = (1, history, normed.shape[2])
        taken = [jax.lax.dynamic_slice(normed, (row, first[row], 0), size) for row in rows]
        few = made(jnp.concatenate(taken), slice(before, beyond))
        for row in rows:
            place = (row, first[row], 0)
            readout = jax.lax.dynamic_update_slice(readout, few[row : row + 1], place)
    first_part, last = made(normed, slice(start, before)), made(normed, slice(beyond, columns.stop))
    return jnp.concatenate([first_part, readout, last], axis=-1)


def leave(params: dict, stream: Stream, valid: jax.Array, config: ModelConfig) -> jax.Array:
    """The last hidden state [B, T, D] before the last norm, from the stream after the last layer."""
    return jnp.where(valid[..., None], _settled(stream, None, activation_dtype(params)).h, 0)


def walk(
    params: dict,
    tokens: jax.Array,
    valid: jax.Array,
    config: ModelConfig,
    mix: Mix,
    backend: Backend = XLA,
) -> jax.Array:
    """From token ids to the last hidden state [B, T, D] before the last norm; the caller keeps what a mixer remembers.

    Args:
        tokens: int32[B, T]. valid: bool[B, T] tokens that are real; hidden states of the others are 0.
        mix: called for every mixer in order.
        backend: what the layers are made of.
    """
    stream, layers = enter(params, tokens, valid, config), range(len(config.layers))
    stream = through(params, stream, valid, layers, config, mix, backend)
    return leave(params, stream, valid, config)


def logits(params: dict, h: jax.Array, config: ModelConfig) -> jax.Array:
    """h [..., D] before the last norm to float32 logits [..., V]."""
    return head_logits(params, normed_hidden(params, h, config), config)


def normed_hidden(params: dict, h: jax.Array, config: ModelConfig) -> jax.Array:
    """Hidden states h [..., D] before the last norm to [..., D] after it."""
    return normed(h, params["norm"], config).astype(activation_dtype(params))


def exit_logits(params: dict, h: jax.Array, config: ModelConfig) -> jax.Array:
    """h [..., D] at the cut to float32 logits [..., V] of its head, `ExitStack`."""
    own = params["exit"]
    h = rms_norm(h, own["norm"], config.norm_eps).astype(activation_dtype(params))
    return _all_logits(product(h, own["head"]), config)


def head_logits(params: dict, h: jax.Array, config: ModelConfig) -> jax.Array:
    """`logits` of what is normed already."""
    if config.tie_embeddings:
        out = product_transposed(h, params["embed"])
    else:
        out = product(h, params["head"])
    out = _all_logits(out, config)
    return out if config.logits_multiplier == 1.0 else out * config.logits_multiplier


def _all_logits(out: jax.Array, config: ModelConfig) -> jax.Array:
    """float32[..., V] of the logits of which each device has made some."""
    if config.shards > 1:
        out = joined_over(out)[..., : config.vocab_size]
    return out.astype(jnp.float32)


def forward(
    params: dict,
    tokens: jax.Array,
    config: ModelConfig,
    *,
    lengths: jax.Array | None = None,
    kv_dtype: str | None = None,
) -> jax.Array:
    """Whole sequences from nothing.

    Args:
        params: the model's weights.
        tokens: int32[B, T] token ids.
        config: the model.
        lengths: int32[B] valid tokens per row, or None for T.
        kv_dtype: dtype of the pages that keys and values are read from; None for that of activations.

    Returns:
        float32[B, T, V] logits; those of padding mean nothing.
    """
    if lengths is None:
        lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    valid, mix = whole_sequences(tokens, lengths, kv_dtype)
    return logits(params, walk(params, tokens, valid, config, mix), config)


def whole_sequences(
    tokens: jax.Array, lengths: jax.Array, kv_dtype: str | None = None
) -> tuple[jax.Array, Mix]:
    """For whole sequences from nothing: which of the tokens int32[B, T] are real, bool[B, T], and how layers mix them.

    Args:
        lengths: int32[B] valid tokens per row. kv_dtype: as of `forward`.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    written: dict[type, Any] = {}  # by the last group of a kind

    def mix(weights: dict, given: MixerInput, spec: Mixer, where: tuple[int, int]) -> jax.Array:
        kind, span = type(spec), (positions, lengths, spec)
        kept = {"kv_dtype": kv_dtype} if keeps_pages(spec) else {}
        if source_of(spec) == "own" or kind not in WRITES:
            return MIXERS[kind](weights, given, *span, **kept)
        if source_of(spec) == "cut":
            written[kind] = WRITES[kind](weights, given, *span, **kept)
        return READS[kind](weights, given, written[kind], *span)

    return positions < lengths[:, None], mix

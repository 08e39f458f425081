"""What a cut at each place of a model would cost and save, before any training: by this a cut is chosen."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from hybrid_jax.config import ModelConfig, with_inner_cut
from hybrid_jax.costs import SAVED_AT, share_saved
from hybrid_jax.models import decoder
from hybrid_jax.models.cut import cut_params
from hybrid_jax.process.own_settings import own_settings
from hybrid_jax.train.data import read_corpus, reading, segments, sources_of, tokenized
from hybrid_jax.train.distances import measure
from hybrid_jax.weights import load_config, load_model
from hybrid_jax.weights.cut import own_tensors

AT_A_TIME = 2  # rows


@functools.partial(jax.jit, static_argnames="config")
def similarities(
    params: dict, tokens: jax.Array, counts: jax.Array, config: ModelConfig
) -> jax.Array:
    """How alike the inputs of the layers are: float32[L, L], means over tokens of the cosine of two layers' inputs.

    Args:
        params: of a model without a cut. tokens: int32[B, T]. counts: bool[B, T] tokens that count.
    """
    valid, mix = decoder.whole_sequences(
        tokens, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    )
    stream, inputs = decoder.enter(params, tokens, valid, config), []
    for index in range(len(config.layers)):
        h = decoder.leave(params, stream, valid, config).astype(jnp.float32)
        inputs.append(h / jnp.linalg.norm(h, axis=-1, keepdims=True))
        stream = decoder.through(params, stream, valid, range(index, index + 1), config, mix)
    h = jnp.where(counts[..., None], jnp.stack(inputs), 0)
    return jnp.einsum("ibtd,jbtd->ij", h, h, precision="highest") / counts.sum().astype(jnp.float32)


def sim_scores(alike: np.ndarray) -> list[float | None]:
    """SimScore (SwiftKV, arXiv 2410.03960, eq. 1) of each layer's input: how alike it is to those of later layers.

    Args:
        alike: [L, L], as `similarities` returns it.

    Returns:
        The mean over all later layers; None for the last layer.

    Example:
        >>> sim_scores(np.array([[1.0, 0.5, 0.3], [0.5, 1.0, 0.9], [0.3, 0.9, 1.0]]))
        [0.4, 0.9, None]
    """
    later = [alike[index, index + 1 :] for index in range(len(alike))]
    return [round(float(row.mean()), 6) if len(row) else None for row in later]


@own_settings()
def cut_table(
    model: Path,
    *,
    cuts: Sequence[int] | None,
    kv_group: int,
    state_group: int,
    sources: str | Path | Sequence[str | Path] | None,
    rows: int,
    context: int,
) -> dict:
    """Does what `hybrid_jax.train.cut_table` says; the arguments are as there."""
    base = replace(load_config(model), dtype="float32")
    groups = {"kv_group": kv_group, "state_group": state_group}
    configs, refused = {}, {}
    for cut in range(1, len(base.layers)) if cuts is None else cuts:
        try:
            configs[cut] = with_inner_cut(base, cut, **groups)
        except ValueError as error:
            refused[cut] = error
    if not configs or (cuts is not None and refused):
        raise next(iter(refused.values()))
    suffixes, tokenizer = reading(model, sources)
    corpus = read_corpus(sources_of(sources), suffixes)
    corpus = corpus if tokenizer is None else tokenized(corpus, tokenizer)
    _, params = load_model(model, dtype="float32")
    tokens, lengths = segments(corpus.held_out, context, rows, full=True)
    scores = sim_scores(_alike(params, tokens, lengths, base))
    found = []
    for cut, config in configs.items():
        weights = cut_params(params, config)
        given = (own_tensors(weights, config), weights, params, config, base, (tokens, lengths))
        far = measure(*given, at_a_time=AT_A_TIME)
        saved = round(share_saved(config), 6)
        score = scores[cut] if cut < len(scores) else None
        found.append({"cut": cut, "flops_saved": saved, "sim_score": score, **far})
    return {
        "model": model.name,
        "layers": len(base.layers),
        "tokens": int(lengths.sum()),
        "flops_saved_at": SAVED_AT,
        **groups,
        "cuts": found,
        "refused": {str(cut): str(error) for cut, error in refused.items()},
    }


def _alike(
    params: dict, tokens: np.ndarray, lengths: np.ndarray, config: ModelConfig
) -> np.ndarray:
    """`similarities` of all rows."""
    counts = np.arange(tokens.shape[1] - 1) < lengths[:, None]
    parts = [slice(first, first + AT_A_TIME) for first in range(0, len(tokens), AT_A_TIME)]
    found = [np.asarray(similarities(params, tokens[p, :-1], counts[p], config)) for p in parts]
    return np.average(found, axis=0, weights=[counts[part].sum() for part in parts])

"""The weights of a model with a cut, made of those of the model without: where a distillation starts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hybrid_jax.config import Attention, Mixer, ModelConfig, source_of
from hybrid_jax.config.cut import without_cut
from hybrid_jax.config.model import Place
from hybrid_jax.kinds.kind import without_state
from hybrid_jax.kinds.table import kind_of, model_weights

# Parts of a mixer's projection, by name: [D + 1, columns], the last row being the biases or zeros.
PartWeights = dict[str, jax.Array]


def cut_params(params: dict, config: ModelConfig) -> dict:
    """The weights of a model with a cut that come nearest to the model without, before any training.

    The gains of later layers' norms are folded into what the cut's output is multiplied with, so its own norm begins
    with ones: if the later layers' inputs were the output of the cut, the two models would be the same. Keys and
    values of a group begin as the means over the group. A mixer that reads the state of its group has no convolution,
    so its C, or its q, begins as if the taps were all at its own token.

    Args:
        params: of the model without a cut. config: of the model with it.

    Returns:
        Weights as in `models.decoder`; those that both models have are the same arrays.
    """
    if config.cut is None:
        return params
    layers = list(params["layers"])
    written: dict[Place, jax.Array] = {}
    for group in config.groups_after_cut:
        written |= _write_weights(params, config, group)
    for index in config.later:
        if specs := config.layers[index].mixers:  # they stand in one block, under one norm
            mixers = [
                _reader(own, spec) for own, spec in zip(layers[index]["mixers"], specs, strict=True)
            ]
            layers[index] = layers[index] | {"mixers": mixers}
    joined = jnp.concatenate([written[where] for where in sorted(written)], axis=1)
    cut = {"norm": jnp.ones_like(params["norm"]), "write": joined[:-1]}
    if "write_bias" in model_weights(config)["cut"]:
        cut["write_bias"] = joined[-1]
    return params | {"layers": layers, "cut": cut}


def exit_params(params: dict, config: ModelConfig) -> dict:
    """A head on the cut before any training: the norm and the head after the last layer."""
    head = params["embed"].T if config.tie_embeddings else params["head"]
    return {"norm": params["norm"], "head": head * config.logits_multiplier}


def _write_weights(
    params: dict, config: ModelConfig, group: tuple[Place, ...]
) -> dict[Place, jax.Array]:
    """What the cut's output is multiplied with for each mixer of a group, [D + 1, columns]."""
    weights = [params["layers"][index]["mixers"][number] for index, number in group]
    specs = [config.layers[index].mixers[number] for index, number in group]
    folded = [
        _folded(_parts(own, spec), params["layers"][index]["norm"])
        for own, spec, (index, _) in zip(weights, specs, group, strict=True)
    ]
    made = {}
    for number, (where, spec) in enumerate(zip(group, specs, strict=True)):
        names = kind_of(spec).parts(spec).written
        if isinstance(spec, Attention):
            parts = [sum(own[name] for own in folded) / len(group) for name in names]
        elif number == 0:
            parts = [folded[0][name] for name in names]
        else:
            taps = weights[number]["conv"].sum(0)[-sum(names.values()) :]
            parts = [folded[number][name] * taps for name in names]
        made[where] = jnp.concatenate(parts, axis=1) if parts else jnp.zeros((config.width + 1, 0))
    dtype = weights[0][kind_of(specs[0]).projection[0]].dtype
    return {where: part.astype(dtype) for where, part in made.items()}


def _parts(weights: dict, mixer: Mixer) -> PartWeights:
    """The parts of the projection of a mixer without a cut."""
    matrix_name, bias_name = kind_of(mixer).projection
    matrix, bias = weights[matrix_name], weights.get(bias_name)
    bias = jnp.zeros(matrix.shape[1], matrix.dtype) if bias is None else bias
    whole, found, start = jnp.concatenate([matrix, bias[None]]), {}, 0
    for name, size in kind_of(mixer).parts(without_cut(mixer)).own.items():
        found[name] = whole[:, start : start + size]
        start += size
    return found


def _folded(parts: PartWeights, gain: jax.Array) -> PartWeights:
    """The parts for an input that is not multiplied with the gain of the norm."""
    gain = jnp.append(gain, 1).astype(gain.dtype)[:, None]
    return {name: gain * part for name, part in parts.items()}


def _reader(weights: dict, mixer: Mixer) -> dict:
    """The weights that a mixer after a cut keeps."""
    parts, own = _parts(weights, mixer), kind_of(mixer).parts(mixer).own
    matrix, bias = kind_of(mixer).projection
    joined = jnp.concatenate([parts[name] for name in own], axis=1)
    kept = weights | {matrix: joined[:-1]} | ({bias: joined[-1]} if bias in weights else {})
    if source_of(mixer) != "group":
        return kept
    kept.pop("k_norm", None)
    return without_state(kept)

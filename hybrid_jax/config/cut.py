"""Models with a cut (SwiftKV, arXiv 2410.03960): all later layers write from the output of the layer at the cut.

So a prompt's tokens need only the layers before the cut. Later attention layers make K and V of that output, and later
recurrent layers make their states of it. Layers after the cut may also share in groups: all read what the first one
of the group writes (AcrossKV, and the same for states).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hybrid_jax.config.block import Layer
from hybrid_jax.config.layers import (
    Attention,
    GatedDelta,
    Mamba2,
    Mixer,
    Source,
    keeps_pages,
    source_of,
)

if TYPE_CHECKING:
    from hybrid_jax.config.model import ModelConfig

WITH_CUT = (Attention, Mamba2, GatedDelta)


def with_cut(
    config: ModelConfig,
    cut: int,
    *,
    kv_group: int = 1,
    state_group: int = 1,
) -> ModelConfig:
    """A model's config with a cut after its first `cut` layers; the same config if there are no later layers.

    Args:
        kv_group: attention layers after the cut that share keys and values.
        state_group: recurrent layers after the cut that share a state.

    Raises:
        ValueError: the model has a cut, or no layer there; a layer after the cut has no such form; groups that do not
            divide, or of layers that differ, or of gated delta nets.

    Example:
        >>> from hybrid_jax.config import Attention, ModelConfig, residual_layer
        >>> layer = residual_layer(mixers=(Attention(num_heads=4, num_kv_heads=2, head_dim=64),))
        >>> config = ModelConfig(family="llama", vocab_size=256, width=256, layers=(layer,) * 4)
        >>> [layer.mixers[0].source for layer in with_cut(config, 2, kv_group=2).layers]
        ['own', 'own', 'cut', 'group']
    """
    if config.cut is not None:
        raise ValueError(f"with_cut: the model has a cut after layer {config.cut} already")
    if cut == len(config.layers):
        return config
    layers = layers_with_cut(config.layers, cut, kv_group, state_group)
    return replace(config, layers=layers, cut=cut)


def with_inner_cut(config: ModelConfig, cut: int, **form: Any) -> ModelConfig:
    """As `with_cut`, for callers to whom the model itself would be no answer.

    Raises:
        ValueError: as `with_cut`; or the cut is after the last layer.
    """
    if cut == len(config.layers):
        raise ValueError(f"with_cut: cut must be below the number of layers, {cut}, got {cut}")
    return with_cut(config, cut, **form)


def with_asked_cut(
    config: ModelConfig, cut: int | None, *, kv_group: int = 1, state_group: int = 1
) -> ModelConfig:
    """As `with_inner_cut`; the same config if no cut is asked for.

    Raises:
        ValueError: as `with_inner_cut`; or groups without a cut.
    """
    if cut is not None:
        return with_inner_cut(config, cut, kv_group=kv_group, state_group=state_group)
    if max(kv_group, state_group) > 1:
        raise ValueError("with_cut: kv_group and state_group need a cut, as in cut=4")
    return config


def layers_with_cut(
    layers: Sequence[Layer], cut: int, kv_group: int, state_group: int
) -> tuple[Layer, ...]:
    """The layers of a model with a cut, from those of the model without.

    Raises:
        ValueError: as `with_cut`.
    """
    if not 0 < cut < len(layers):
        raise ValueError(
            f"with_cut: cut must be at least 1 and below the number of layers, {len(layers)}, got {cut}"
        )
    later = [mixer for layer in layers[cut:] for mixer in layer.mixers]
    for index, layer in enumerate(layers[cut:], cut):
        if not layer.is_plain:
            raise ValueError(
                f"with_cut: layer {index} (the first is 0) shares weights, or is not of the usual form, so no cut may "
                f"come before it; got cut {cut} and {layer}"
            )
        for mixer in layer.mixers:
            if not isinstance(mixer, WITH_CUT):
                known = ", ".join(kind.__name__ for kind in WITH_CUT)
                raise ValueError(
                    f"with_cut: layer {index} (the first is 0) is {type(mixer).__name__}, which has no form after a "
                    f"cut, only {known} have; got cut {cut}"
                )
    attention = _Groups(later, True, kv_group, "kv_group")
    recurrent = _Groups(later, False, state_group, "state_group")

    def renewed(mixer: Any) -> Mixer:
        groups = attention if keeps_pages(mixer) else recurrent
        return replace(mixer, source=groups.next_source())

    changed = [layer.with_mixers(map(renewed, layer.mixers)) for layer in layers[cut:]]
    return (*layers[:cut], *changed)


def regrouped(config: ModelConfig, *, kv_group: int = 1, state_group: int = 1) -> ModelConfig:
    """The same model with the same cut, and other groups of layers that share.

    Raises:
        ValueError: the model has no cut, or as `with_cut`.
    """
    if config.cut is None:
        raise ValueError("regrouped: the model has no cut, so no layers share")
    plain = without_cuts(config.layers)
    layers = layers_with_cut(plain, config.cut, kv_group, state_group)
    return replace(config, layers=layers)


def without_cut(mixer: Any) -> Any:
    """A mixer as it is in the model without a cut."""
    return mixer if source_of(mixer) == "own" else replace(mixer, source="own")


def have_cut(layers: Sequence[Layer], cut: int, kv_group: int, state_group: int) -> bool:
    """Whether the layers are those of a model with this cut.

    Raises:
        ValueError: as `with_cut`.
    """
    plain = without_cuts(layers)
    return tuple(layers) == layers_with_cut(plain, cut, kv_group, state_group)


def without_cuts(layers: Sequence[Layer]) -> list[Layer]:
    """The layers as they are in the model without a cut."""
    return [layer.with_mixers(map(without_cut, layer.mixers)) for layer in layers]


class _Groups:
    """The mixers after a cut that share in groups of `size`, in order."""

    def __init__(self, later: Sequence[Mixer], paged: bool, size: int, name: str) -> None:
        own = [mixer for mixer in later if keeps_pages(mixer) is paged]
        what = "attention" if paged else "recurrent"
        if size < 1 or len(own) % size or size > max(len(own), 1):
            raise ValueError(
                f"with_cut: {name} must divide the number of {what} layers after the cut, {len(own)}, got {size}"
            )
        if size > 1 and any(isinstance(mixer, GatedDelta) for mixer in own):
            raise ValueError(
                f"with_cut: gated delta nets cannot share states, so {name} must be 1, got {size}"
            )
        for first in range(0, len(own), size):
            if any(mixer != own[first] for mixer in own[first : first + size]):
                raise ValueError(
                    f"with_cut: layers that share must be alike; with {name} {size} these would share: "
                    f"{own[first : first + size]}"
                )
        self._size, self._seen = size, 0

    def next_source(self) -> Source:
        """That of the next mixer."""
        first = self._seen % self._size == 0
        self._seen += 1
        return "cut" if first else "group"

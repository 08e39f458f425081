"""Which matrices of a model become codes when it is quantised, and in which format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybrid_jax.byte_sizes import format_size
from hybrid_jax.config import ModelConfig
from hybrid_jax.config.formats import CODES, DENSE, QUANTIZED, Format, Joined, Scaled, arrays_of
from hybrid_jax.kinds.kind import Weight, placed
from hybrid_jax.kinds.table import model_weights


def quantized(config: ModelConfig, name: str) -> ModelConfig:
    """A model whose layers keep matrices as codes.

    Embeddings, the head, what drafts, and what a cut writes stay as they are. So do matrices of which a part of a
    layer says so (`Weight.plain`, `Weight.stays`): routers, decays, step sizes.

    Args:
        name: one of `config.formats.QUANTIZED`.

    Raises:
        ValueError: the model has codes already, or the name is unknown.
    """
    if name not in QUANTIZED:
        raise ValueError(f"LLM: quantize must be one of {', '.join(QUANTIZED)}, got {name!r}")
    if config.matrices:
        place, own = config.matrices[0]
        raise ValueError(
            f"LLM: quantize={name!r} is for weights of 16 or 32 bits, and {place} of this model is {own.about}; "
            "leave quantize out"
        )
    found: list[tuple[str, Format]] = []
    layers = model_weights(replace(config, draft=None, mtp=()))["layers"]
    for place, weight in placed(layers, "layers"):
        if (format := _format(weight, QUANTIZED[name])) is not None:
            found.append((place, format))
    return replace(config, matrices=tuple(found))


def bytes_by_format(config: ModelConfig, dtype: str) -> dict[str, int]:
    """Bytes of the codes and scales of a model in `dtype`, by what formats say of themselves; none without codes."""
    found: Counter[str] = Counter()
    for _, weight in placed(model_weights(config)):
        *lead, columns = weight.shape
        parts: Sequence[tuple[int, Format]] = ((columns, weight.format),)
        if isinstance(weight.format, Joined):
            parts = weight.format.parts
        for count, format in parts:
            if format != DENSE:
                specs = arrays_of(format.specs((*lead, count), dtype))
                found[format.about] += sum(spec.num_bytes for spec in specs)
    return dict(found.most_common())


def said_of_formats(found: Mapping[str, int]) -> str:
    """The same in words."""
    return "; ".join(f"{about}: {format_size(size)}" for about, size in found.items())


def _format(weight: Weight, format: Scaled) -> Format | None:
    """How a matrix is kept; None for as it is."""
    *_, inner, columns = weight.shape if len(weight.shape) > 1 else (0, 0)
    if not weight.is_matrix or weight.stays >= columns or inner % CODES[format.code][1]:
        return None
    if not weight.stays:
        return format
    return Joined(parts=((columns - weight.stays, format), (weight.stays, DENSE)))
